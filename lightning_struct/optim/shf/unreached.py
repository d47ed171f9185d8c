"""Trained parameters that no gradient reaches, although their layers are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.randomness import isolated_host_generators
from lightning_struct.functional.torch_tools import call_with


def called_without_gradients(
    module: nn.Module, weights: Mapping[str, Tensor], gradient: Mapping[str, Tensor], args: tuple[Any, ...]
) -> list[str]:
    """The parameters with a gradient of zero whose layers are called with gradients turned off, and never else.

    So it is within re-entrant activation checkpointing, whose backward pass reaches the inputs that are asked for and
    no weights. The module is called once more where a gradient is zero, and else not.

    Args:
        module: the network.
        weights: name -> the trained weights, detached.
        gradient: name -> the gradient of a batch in them.
        args: of the module.
    """
    suspects = [name for name, part in gradient.items() if not part.any()]
    if not suspects:
        return []
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in suspects}
    modes: dict[nn.Module, set[bool]] = {layer: set() for layer in owners.values()}

    def note(layer: nn.Module, args: Any) -> None:
        modes[layer].add(torch.is_grad_enabled())

    handles = [layer.register_forward_pre_hook(note) for layer in modes]
    try:
        with torch.enable_grad(), isolated_host_generators():
            call_with(module, {name: w.detach().requires_grad_() for name, w in weights.items()}, args)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, layer in owners.items() if modes[layer] == {False}]


def without_gradients_message(names: Sequence[str]) -> str:
    """What to tell of them."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (
        f"SHF does not train {', '.join(names[:4])}{more}: no gradient comes back to these parameters, whose layers "
        "are called with gradients turned off. For activation checkpointing take checkpoint(..., use_reentrant=False); "
        "freeze layers that are not to be trained by requires_grad_(False)"
    )
