"""Buffers that a forward writes, updated once per step, and the buffers that none writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn


class BufferUpdates:
    """The one forward per step that updates the buffers of a module, where its forward writes into any.

    It is the last one with the old weights: those before it, on copies of the buffers, read what a first forward would.
    Statistics of batch normalisation are written, a mask or a table of positions is not. The first forward with the
    same layers in training tells, by the values: a write through ``.data`` leaves no other trace. A forward that begins
    to write later is seen by ``watched``.

    Args:
        module: the network.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._in_training: list[nn.Module] = []
        self._writes: bool | None = None  # with these layers in training; None: not known yet

    def are_needed(self) -> bool:
        """Whether a forward writes into buffers, or may do so."""
        modules = list(self._module.modules())
        if not any(layer.training and next(layer.buffers(recurse=False), None) is not None for layer in modules):
            return False
        in_training = [layer for layer in modules if layer.training]
        if in_training != self._in_training:
            self._in_training, self._writes = in_training, None
        return self._writes is not False

    def run(self, args: Sequence[Any]) -> None:
        """Update the buffers.

        Args:
            args: of the module.
        """
        buffers = list(self._module.buffers())
        before = [b.clone() for b in buffers] if self._writes is None else []
        state = _state(self._module)
        self._module(*args)
        if self._writes is None:
            same = _is_same(state, _state(self._module))
            self._writes = not (same and all(map(_equal, buffers, before)))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, the first evaluation of a module whose forward wrote nothing so far tells whether it does now."""
        if self._writes is not False:
            yield
            return
        states: list[tuple[list[Tensor], list[int]]] = []

        def before(module: nn.Module, args: Any) -> None:
            states.append(_state(module))

        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            if len(states) == 1 and not _is_same(states[0], _state(module)):
                self._writes = True

        handles = [self._module.register_forward_pre_hook(before), self._module.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def versions(tensors: Iterable[Any]) -> list[int]:
    """How often each tensor was written to; tensors of inference mode do not count."""
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]


def _state(module: nn.Module) -> tuple[list[Tensor], list[int]]:
    buffers = list(module.buffers())
    return buffers, versions(buffers)


def _is_same(before: tuple[list[Tensor], list[int]], after: tuple[list[Tensor], list[int]]) -> bool:
    """Whether the same tensors are there, and none was written to."""
    (old, old_versions), (new, new_versions) = before, after
    return len(old) == len(new) and all(map(is_, old, new)) and old_versions == new_versions


def _equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.layout is not torch.strided or torch.equal(tensor, other)
