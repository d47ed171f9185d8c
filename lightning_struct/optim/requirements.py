"""Requirements of the optimizers on what they are given: the module, and whole weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def check_module(module: Any, optimizer: str, reason: str) -> None:
    """Raise unless this is a module.

    Args:
        module: what was given.
        optimizer: name of the optimizer.
        reason: what it does with the module, as a relative clause.

    Raises:
        TypeError: see above; the message says what to give instead.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{optimizer} takes the module, {reason}, not its parameters: {optimizer}(model, ...), got "
            f"{type(module).__name__}. In Lightning return {optimizer}(self, ...) from configure_optimizers, also with "
            "LightningCLI or hydra, which hand parameters to the optimizers that they configure themselves"
        )


def refuse_distributed_tensors(named: Mapping[str, nn.Parameter], reason: str) -> None:
    """Raise where parameters are spread over processes, as by FSDP2 (``fully_shard``) and tensor parallelism.

    Args:
        named: name -> parameter.
        reason: what needs them whole, with its verb.

    Raises:
        ValueError: one is; it is named.
    """
    for name, parameter in named.items():
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{name} is a {type(parameter.data).__name__}, spread over processes (FSDP2, tensor parallelism): "
                f"{reason} whole weights and inputs. Use DDP"
            )
