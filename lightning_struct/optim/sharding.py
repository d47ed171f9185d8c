"""Optimizers that need whole weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


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
