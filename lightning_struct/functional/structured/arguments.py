"""Checks and dtypes of the arguments that products with structured matrices share."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F


def require_generators(G: Tensor, H: Tensor, m: int | None = None, n: int | None = None) -> None:
    """Refuse other shapes than G (m, r) and H (n, r), r >= 1; sizes that are not given may be any from 1 on.

    Raises:
        ValueError: a shape is another, or r differs.
    """
    for name, generator, size in (("G", G, m), ("H", H, n)):
        if generator.ndim != 2 or 0 in generator.shape or size not in (None, generator.shape[0]):
            expected = "(size, r) with size >= 1" if size is None else f"({size}, r) beside an operator of that size"
            raise ValueError(f"{name} must be {expected} and r >= 1, got {tuple(generator.shape)}")
    if G.shape[1] != H.shape[1]:
        raise ValueError(f"G and H must have the same number of columns, got {G.shape[1]} and {H.shape[1]}")


def require_one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse other values than the known ones.

    Raises:
        ValueError: the value is another; it is called by ``name``.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, but is {value!r}")


def require_vectors(x: Tensor, n: int) -> None:
    """Refuse other shapes than (..., n).

    Raises:
        ValueError: x has another last dimension, or none.
    """
    if x.ndim == 0 or x.shape[-1] != n:
        raise ValueError(f"x must be (..., {n}) for a matrix of {n} columns, got {tuple(x.shape)}")


def promoted_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to which all are promoted."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to which all are promoted, at least float32: there are no transforms of bfloat16 on a CPU."""
    dtype = tensors[0].dtype
    if dtype in (torch.float32, torch.float64) and all(tensor.dtype == dtype for tensor in tensors):
        return dtype  # the usual case, decided in less time than by promoting in turn
    return torch.promote_types(promoted_dtype(*tensors), torch.float32)


def by_rows(multiply: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """Products (..., m) of x (..., n) by a function that makes (B, m) of (B, n) in that dtype.

    The function is called with B >= 1 rows: older torch refuses to transform none.
    """
    rows = (x if x.ndim == 2 else x.reshape(-1, x.shape[-1])).to(dtype)
    product = multiply(rows) if rows.shape[0] else multiply(F.pad(rows, (0, 0, 0, 1)))[:0]
    return product if x.ndim == 2 else product.reshape(*x.shape[:-1], product.shape[-1])
