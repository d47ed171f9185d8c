"""Structured layers whose weights no longer change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.structured.prepared import PreparedMatrix


class FrozenLinear(nn.Module):
    """The map y = M x + b of a structured layer with nothing left to train: made by :meth:`StructuredLinear.freeze`.

    All its tensors are buffers, the complex ones as pairs of reals. ``torch.export.export`` takes it.

    Args:
        in_features, out_features: sizes.
        matrix: M, prepared for products.
        bias: (out_features,) or None.
        class_name: the class of the layer that it was, for ``repr``.

    Example:
        >>> from lightning_struct.nn import Circulant
        >>> frozen = Circulant(8, 8).freeze()
        >>> frozen
        FrozenLinear(in_features=8, out_features=8, was=Circulant)
        >>> len(list(frozen.parameters())), frozen(torch.randn(3, 8)).shape
        (0, torch.Size([3, 8]))
    """

    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, matrix: PreparedMatrix, bias: Tensor | None, class_name: str
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.class_name = class_name
        self._matrix = matrix
        for name, tensor in _tensors_of(matrix):
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            self.register_buffer(name, tensor.detach().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """(..., out_features) for x (..., in_features)."""
        y = _with_buffers_of(self, self._matrix).matmul(x)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, was={self.class_name}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # Version 0.1.0 had other names for the same tensors in the same order.
        old_names = [name for name in state_dict if name.startswith(f"{prefix}form_")]
        for old, (new, _) in zip(old_names, _tensors_of(self._matrix), strict=False):
            state_dict[prefix + new] = state_dict.pop(old)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _parts_of(matrix: Any) -> dict[str, Any]:
    """The fields of a prepared matrix or of a dataclass in it, or the items of a tuple in it."""
    if isinstance(matrix, tuple):
        return {str(index): item for index, item in enumerate(matrix)}
    return {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}


def _has_parts(value: Any) -> bool:
    return isinstance(value, tuple) or dataclasses.is_dataclass(value)


def _tensors_of(matrix: Any, prefix: str = "matrix") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a prepared matrix, and of what is in it, with a name for each."""
    for part, value in _parts_of(matrix).items():
        if isinstance(value, Tensor):
            yield f"{prefix}_{part}", value
        elif _has_parts(value):
            yield from _tensors_of(value, f"{prefix}_{part}")


def _with_buffers_of(module: nn.Module, matrix: Any, prefix: str = "matrix") -> Any:
    """``matrix`` with the buffers of ``module`` in place of its tensors."""
    parts = {}
    for part, value in _parts_of(matrix).items():
        name = f"{prefix}_{part}"
        if isinstance(value, Tensor):
            buffer = getattr(module, name)
            parts[part] = torch.view_as_complex(buffer) if value.is_complex() else buffer
        else:
            parts[part] = _with_buffers_of(module, value, name) if _has_parts(value) else value
    return tuple(parts.values()) if isinstance(matrix, tuple) else type(matrix)(**parts)
