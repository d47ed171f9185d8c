"""Layers whose derivative is cheap in both directions, for a Jacobian that is multiplied often.

J v is the derivative of u -> Jᵀu: a backward pass through a backward pass. Torch's second derivatives of some layers
take far more than a product needs: those of recurrent layers run through each operation of each step in time, those of
normalisations through tens of small operations, and those of convolutions compute what nobody asked for. Within
:func:`derivative_rules` these layers compute what they compute else, and their derivatives by the rules of
:mod:`~lightning_struct.functional.jacobian.recurrent_rule`,
:mod:`~lightning_struct.functional.jacobian.convolution_rule` and
:mod:`~lightning_struct.functional.jacobian.normalisation_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_struct.functional.jacobian.convolution_rule import call_convolution
from lightning_struct.functional.jacobian.normalisation_rule import call_batch_norm, call_group_norm, call_layer_norm
from lightning_struct.functional.jacobian.recurrent_rule import call_recurrent

_CALLS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.RNN: call_recurrent,
    nn.LSTM: call_recurrent,
    nn.GRU: call_recurrent,
    nn.Conv1d: call_convolution,
    nn.Conv2d: call_convolution,
    nn.Conv3d: call_convolution,
    nn.LayerNorm: call_layer_norm,
    nn.GroupNorm: call_group_norm,
    nn.BatchNorm1d: call_batch_norm,
    nn.BatchNorm2d: call_batch_norm,
    nn.BatchNorm3d: call_batch_norm,
}


@contextmanager
def derivative_rules(module: nn.Module | None) -> Iterator[None]:
    """Within it layers of the module are differentiated by rules, where there is one.

    A graph that is made within it has one backward pass, and a second one by the cotangents of the first, which gives
    products with the Jacobian. It has no second derivative in the weights or inputs: those are constants of it. Layers
    of torch's classes have rules, and of classes derived from them with the same ``forward``; calls for which there is
    no rule, such as those under autocast, are those of torch.
    """
    rules = {} if module is None else {layer: call for layer in module.modules() if (call := _call_of(layer))}
    for layer, call in rules.items():
        layer.forward = partial(call, layer)
    try:
        yield
    finally:
        for layer in rules:
            del layer.forward


def _call_of(layer: nn.Module) -> Callable[..., Any] | None:
    """What stands for the ``forward`` of a layer; None where it has no rule."""
    if "forward" in vars(layer):
        return None
    return next(
        (call for kind, call in _CALLS.items() if isinstance(layer, kind) and type(layer).forward is kind.forward), None
    )
