"""Vectors of the solvers: a tensor or a dict of tensors, seen as a list of tensors."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_struct.functional.checks import check_dense
from lightning_struct.functional.torch_tools import norms_of_each

Vector: TypeAlias = Tensor | Mapping[str, Tensor]


def leaves(vector: Any, like: Vector | None = None, name: str = "a vector") -> list[Tensor]:
    """The tensors of a vector, detached, in the order of ``like`` if one is given; errors call it by ``name``.

    Raises:
        TypeError: neither a tensor nor a mapping; without ``like``, other numbers than float32 and float64.
        ValueError: other names or shapes than those of ``like``.
    """
    if like is not None:
        return [t.detach() for t in matching_tensors(vector, like, name)]
    _check_type(vector, name)
    tensors = [vector] if isinstance(vector, Tensor) else list(vector.values())
    for tensor in tensors:
        check_dense(name, tensor, has_numbers=True)
    if others := {t.dtype for t in tensors} - {torch.float32, torch.float64}:
        raise TypeError(f"{name} must hold float32 or float64 numbers, got {', '.join(sorted(map(str, others)))}")
    return [t.detach() for t in tensors]


def matching_tensors(vector: Vector, like: Vector, name: str) -> list[Tensor]:
    """The tensors of a vector, in the order of ``like``, as they are; errors call it by ``name``.

    Raises:
        TypeError: neither a tensor nor a mapping.
        ValueError: other names or shapes than those of ``like``.
    """
    _check_type(vector, name)
    if isinstance(vector, Tensor) and isinstance(like, Tensor):
        pairs = [(vector, like)]
    elif isinstance(vector, Mapping) and isinstance(like, Mapping) and vector.keys() == like.keys():
        pairs = [(vector[key], like[key]) for key in like]
    else:
        raise ValueError(f"{name} is {_kind(vector)}, expected {_kind(like)}")
    # Without this a product of shape (m, 1) would be subtracted from a right-hand side (m,) by broadcasting.
    if any(t.shape != expected.shape for t, expected in pairs):
        shapes, expected_shapes = ([tuple(t.shape) for t in side] for side in zip(*pairs, strict=True))
        raise ValueError(f"{name} has the shapes {shapes}, expected {expected_shapes}")
    for t, expected in pairs:
        check_dense(name, t, has_numbers=not expected.is_meta)
    return [t for t, _ in pairs]


def _check_type(vector: Vector, name: str) -> None:
    if not isinstance(vector, Tensor | Mapping):
        raise TypeError(f"{name} must be a tensor or a dict of tensors, got {type(vector).__name__}")
    if isinstance(vector, Mapping) and not vector:
        raise ValueError(f"{name} is a dict without tensors")


def _kind(vector: Vector) -> str:
    return "a tensor" if isinstance(vector, Tensor) else f"a dict with the keys {sorted(vector)}"


def structured(like: Vector, tensors: list[Tensor]) -> Any:
    """The inverse of :func:`leaves`."""
    if isinstance(like, Tensor):
        return tensors[0]
    return dict(zip(like, tensors, strict=True))


def dot(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """The inner product, a float64 scalar tensor on the device of the vectors, for which the host does not wait.

    Where float32 loses it, it is taken in float64: on the CPU, which knows the number at once, only there; on other
    devices always.
    """
    if left[0].is_cpu:
        value = _sum_of_inner(left, right)
        if float32_holds(value.item()):
            return value
    doubles = [t.double() for t in left]
    return _sum_of_inner(doubles, doubles if left is right else [t.double() for t in right])


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """‖·‖² as :func:`inner` has it, which float32 may lose."""
    return _sum_of_inner(tensors, tensors)


def norm(tensors: list[Tensor]) -> Tensor:
    """‖·‖; see :func:`dot`."""
    if tensors[0].is_cpu:
        return root(dot(tensors, tensors))
    norms = norms_of_each(tensors, torch.float64)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def root(square: Tensor) -> Tensor:
    """The square root of a float64 scalar tensor; on the CPU it is rounded correctly, as torch's is not."""
    return square.new_tensor(math.sqrt(square.item())) if square.is_cpu and square >= 0.0 else square.sqrt()


def subtract_scaled_(vector: Tensor, other: Tensor, factor: Tensor) -> None:
    """vector <- other - factor · vector, for a factor (), for which the host does not wait."""
    if factor.is_cpu:
        torch.sub(other, vector, alpha=factor.item(), out=vector)
    else:
        torch.addcmul(other, vector, factor.to(vector.dtype), value=-1.0, out=vector)


def float32_holds(product: float) -> bool:
    """Whether an inner product that was computed in float32 can be relied upon: below it loses digits, and in the end
    all, without a sign of it; above it overflows."""
    return _SMALLEST_IN_FLOAT32 <= abs(product) < math.inf


def _sum_of_inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    products = [inner(a, b) for a, b in zip(left, right, strict=True)]
    return products[0] if len(products) == 1 else torch.stack(products).sum()


def inner(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of two tensors of one shape, a float64 scalar tensor.

    On a CPU blocks of 1024 products are summed in the tensors' own dtype and the blocks in float64: as good as float64
    throughout for the recurrences of a solver, and a hundred times quicker than a reduction with
    ``dtype=torch.float64``. On a GPU, whose time goes by the number of operations, it is float64 throughout.
    Under autocast too.
    """
    if torch.is_autocast_enabled(left.device.type):
        with torch.autocast(left.device.type, enabled=False):
            return inner(left, right)
    if not left.is_cpu:
        double = left.reshape(-1).double()
        return torch.dot(double, double if right is left else right.reshape(-1).double())
    left, right = left.reshape(-1), right.reshape(-1)
    count = left.numel()
    whole = count // _BLOCK * _BLOCK
    if whole == 0:
        return torch.dot(left, right).to(torch.float64)
    blocks = torch.linalg.vecdot(left[:whole].view(-1, _BLOCK), right[:whole].view(-1, _BLOCK)).sum(dtype=torch.float64)
    return blocks if whole == count else blocks + torch.dot(left[whole:], right[whole:])


_BLOCK = 1024
# Products of float32 numbers below 1e-38 are rounded to zero; a sum of a million of them does not matter here.
_SMALLEST_IN_FLOAT32 = 1e-24
