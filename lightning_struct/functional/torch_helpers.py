"""Calls of a module with other weights, in eval mode, or with denormal numbers flushed to zero."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...]) -> Any:
    """``torch.func.functional_call``, which leaves the module as it was.

    The call works on copies of the buffers that are not given. And every layer has its own tensors again afterwards:
    torch's leaves others in a layer that is registered in two places (seen from 2.6 to 2.15). What ``torch.compile``
    has compiled runs as it is in Python: compiled graphs have no second derivatives.

    Args:
        module: what is called.
        tensors: name -> what stands for the parameter or buffer of that name.
        args: of the call.
    """
    own = [(layer, dict(layer._parameters), dict(layer._buffers)) for layer in module.modules()]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in tensors}
    try:
        with torch.compiler.set_stance("force_eager"):
            return functional_call(module, {**buffers, **tensors}, args)
    finally:
        for layer, parameters, buffers_of_layer in own:
            layer._parameters.update(parameters)
            layer._buffers.update(buffers_of_layer)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """A context in which a module and all below it are in eval mode; afterwards each is in the mode that it was in."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Context in which numbers below the normal range become zero, in this thread and in those that it starts.

    The arithmetic of a CPU takes up to ten times as long on such numbers. torch does not tell its mode, but Python's
    own floats are computed in it: it is put back in the end.
    """
    flushed = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
