"""Vectors of the solvers: a tensor or a dict of tensors, seen as a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Vector: TypeAlias = Tensor | Mapping[str, Tensor]


def leaves(vector: Any, like: Vector | None = None) -> list[Tensor]:
    """The tensors of a vector, in the order of ``like`` where one is given.

    Raises:
        TypeError: neither a tensor nor a mapping.
        ValueError: other names than those of ``like``.
    """
    if isinstance(vector, Tensor):
        return [vector]
    if not isinstance(vector, Mapping):
        raise TypeError(f"a vector must be a tensor or a dict of tensors, got {type(vector).__name__}")
    if not isinstance(like, Mapping):
        return list(vector.values())
    if vector.keys() != like.keys():
        raise ValueError(f"a vector has the keys {sorted(vector)}, expected {sorted(like)}")
    return [vector[name] for name in like]


def structured(like: Vector, tensors: list[Tensor]) -> Any:
    """The inverse of :func:`leaves`."""
    if isinstance(like, Tensor):
        return tensors[0]
    return dict(zip(like, tensors, strict=True))


def dot(left: list[Tensor], right: list[Tensor]) -> float:
    """The inner product, each product of the vectors' own dtype and their sum in float64."""
    return sum((a * b).sum(dtype=torch.float64).item() for a, b in zip(left, right, strict=True))


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """‖·‖² as a float64 scalar tensor, on the device of the vector."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return torch.stack(norms).square().sum()


def norm(tensors: list[Tensor]) -> float:
    """‖·‖, summed in float64."""
    return math.sqrt(squared_norm(tensors).item())
