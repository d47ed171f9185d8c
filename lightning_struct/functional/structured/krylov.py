"""Krylov matrices K(A, v) = [v, Av, A²v, ...], and products of two of them (Thomas et al., Proposition 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_struct.functional.structured.cost_model import factors_are_faster
from lightning_struct.functional.structured.operators import DisplacementOperator, as_operator


def krylov_matrix(op: DisplacementOperator | Tensor, v: Tensor, columns: int | None = None) -> Tensor:
    """K(A, v), whose column j is Aʲv (Thomas et al., Proposition 3), by one product with A for each column.

    Args:
        op: A of size n, or its matrix (n, n).
        v: (..., n).
        columns: p, at least 1; n by default.

    Returns:
        (..., n, p), in the dtype to which A and v are promoted.

    Raises:
        ValueError: v is not (..., n), or columns < 1.

    Example:
        >>> krylov_matrix(torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 1.0]), columns=4)
        tensor([[1., 1., 1., 1.],
                [1., 2., 4., 8.]])
    """
    op = as_operator(op)
    return krylov_rows(op, v, op.size if columns is None else columns).movedim(0, -1)


def krylov_rows(operator: DisplacementOperator, v: Tensor, count: int) -> Tensor:
    """v, Av, ..., A^(count - 1)v one after the other: (count, ..., n) for v (..., n)."""
    if count < 1:
        raise ValueError(f"a Krylov matrix has at least one column, got {count}")
    if v.ndim == 0 or v.shape[-1] != operator.size:
        raise ValueError(f"v must be (..., {operator.size}) for an operator of that size, got {tuple(v.shape)}")
    rows = [v]
    for _ in range(count - 1):
        rows.append(operator.matvec(rows[-1]))  # Proposition 3: column i of K(A, v) is Aⁱv
    return torch.stack(rows)


def shift_krylov_rows(G: Tensor, f: float | Tensor, count: int) -> Tensor:
    """The columns of all K(Z_f, gᵢ), ``count`` <= m of each, as rows, in few operations: (r count, m) for G (m, r)."""
    m, r = G.shape
    # Row j is [gᵢ, f gᵢ], of length 2m, turned by j places to the right: among copies of it, one after the other, each
    # row begins 2m - 1 places after the row before it.
    copies = torch.cat([G, f * G]).mT.repeat(1, count)
    return copies[:, : count * (2 * m - 1)].view(r, count, 2 * m - 1)[..., :m].reshape(r * count, m)


def subdiagonal_krylov_rows(circle: Tensor, G: Tensor, count: int) -> Tensor:
    """The columns of all K(A, gᵢ), ``count`` of each, as rows, by doubling their number.

    Args:
        circle: (m,), the corner of A and its subdiagonal.
        G: (m, r).
        count: of the columns, at most m.

    Returns:
        (count r, m).
    """
    rows, power = G.mT[None], circle  # A to the power of the rows so far turns by as many places, and weighs them
    made = max(count, 2)  # so that the derivative of one column by A is zero, and not that of what has no part in it
    while (known := rows.shape[0]) < made:
        rows = torch.cat([rows, power * rows[: made - known].roll(known, -1)])
        power = power * power.roll(known)
    return rows[:count].flatten(0, 1)


def krylov_product(left: Tensor, right: Tensor, x: Tensor) -> Tensor:
    """x Mᵀ for M = Σ_j left_jᵀ right_j, equation (2) with the columns of its Krylov matrices as rows.

    The order of the products is the one that takes fewer multiplications.

    Args:
        left: (k, m).
        right: (k, n).
        x: (..., n).

    Returns:
        (..., m).
    """
    (k, m), n = left.shape, right.shape[1]
    if factors_are_faster(k, m, n, x.shape[:-1].numel()):
        return (x @ right.mT) @ left
    return x @ (right.mT @ left)
