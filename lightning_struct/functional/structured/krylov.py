"""Krylov matrices K(A, v) = [v, Av, A²v, ...], and products of two of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_struct.functional.operators import DisplacementOperator, as_operator


def krylov_matrix(operator: DisplacementOperator | Tensor, v: Tensor, columns: int | None = None) -> Tensor:
    """K(A, v), whose column j is Aʲv (Thomas et al., Proposition 3), by one product with A for each column.

    Args:
        operator: A of size n, or its matrix (n, n).
        v: (..., n).
        columns: p, at least 1; n by default.

    Returns:
        (..., n, p).

    Raises:
        ValueError: v is not (..., n), or columns < 1.
    """
    operator = as_operator(operator)
    return krylov_rows(operator, v, operator.size if columns is None else columns).movedim(0, -1)


def krylov_rows(operator: DisplacementOperator, v: Tensor, count: int) -> Tensor:
    """v, Av, ..., A^(count - 1)v one after the other: (count, ..., n) of v (..., n)."""
    if count < 1:
        raise ValueError(f"a Krylov matrix has at least one column, got {count}")
    if v.ndim == 0 or v.shape[-1] != operator.size:
        raise ValueError(f"v must be (..., {operator.size}) for an operator of that size, got {tuple(v.shape)}")
    rows = [v]
    for _ in range(count - 1):
        rows.append(operator.matvec(rows[-1]))
    return torch.stack(rows)


def krylov_product(left: Tensor, right: Tensor, x: Tensor) -> Tensor:
    """x Mᵀ of M = Σ_j left_jᵀ right_j, in the order that takes fewer multiplications.

    Args:
        left: (k, m).
        right: (k, n).
        x: (..., n).

    Returns:
        (..., m).
    """
    (k, m), n = left.shape, right.shape[1]
    batch = x.shape[:-1].numel()
    if batch * k * (m + n) <= m * n * (k + batch):
        return (x @ right.mT) @ left
    return x @ (right.mT @ left)


def require_generators(G: Tensor, H: Tensor, m: int | None = None, n: int | None = None) -> None:
    """Refuse other shapes than G (m, r) and H (n, r), r >= 1; sizes that are not given may be any from 1 on.

    Raises:
        ValueError: a shape is another, or r differs.
    """
    for name, generator, size in (("G", G, m), ("H", H, n)):
        if generator.ndim != 2 or 0 in generator.shape or size not in (None, generator.shape[0]):
            expected = (
                "(size, r), neither of them 0" if size is None else f"({size}, r) beside an operator of that size"
            )
            raise ValueError(f"{name} must be {expected}, got {tuple(generator.shape)}")
    if G.shape[1] != H.shape[1]:
        raise ValueError(f"G and H must have the same number of columns, got {G.shape[1]} and {H.shape[1]}")


def require_real(**tensors: Tensor) -> None:
    """Refuse other dtypes than real floating-point numbers.

    Raises:
        TypeError: a tensor has another; it is named by its keyword.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must hold real floating-point numbers, not {tensor.dtype}: use {name}.float().")


def require_vectors(x: Tensor, n: int) -> None:
    """Refuse other shapes than (..., n).

    Raises:
        ValueError: x has another last dimension, or none.
    """
    if x.ndim == 0 or x.shape[-1] != n:
        raise ValueError(f"x must be (..., {n}) for a matrix of {n} columns, got {tuple(x.shape)}")
