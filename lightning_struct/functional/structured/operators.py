"""Displacement operators of structured matrices, and their Krylov matrices: n x n matrices that are never formed.

The learned operators of Thomas et al. (section 3, Figure 2) are subdiagonal or tridiagonal, with corners; those of the
classical structures are shifts and diagonal matrices (Table 5). Operators multiply (..., n), a batch of vectors in
the last dimension, in any floating-point dtype, real or complex; transposes are not conjugated.

Shapes and dtypes are checked when an operator is made. Whether the entries are finite is not: asking that of a device
would make every forward pass wait for it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_struct.functional.checks import Size, check_dense, checked, is_real, positive_size
from lightning_struct.functional.structured.cost_model import factors_are_faster


class DisplacementOperator(ABC):
    """An n x n matrix A: an operator A or B of equation (1) of Thomas et al."""

    @property
    @abstractmethod
    def entries(self) -> Tensor:
        """A tensor whose dtype and device are those of A."""

    @property
    def size(self) -> int:
        """n."""
        return self.entries.shape[0]

    @property
    @abstractmethod
    def T(self) -> DisplacementOperator:
        """Aᵀ."""

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """A v for each vector v: (..., n) for (..., n)."""

    def rmatvec(self, v: Tensor) -> Tensor:
        """Aᵀ v for each vector v: (..., n) for (..., n)."""
        return self.T.matvec(v)

    def to_dense(self) -> Tensor:
        """A, (n, n)."""
        entries = self.entries
        return self.rmatvec(torch.eye(self.size, dtype=entries.dtype, device=entries.device))

    def _require_vectors(self, v: Tensor) -> None:
        _require_tensor("v", v)
        if v.ndim == 0 or v.shape[-1] != self.size:
            raise ValueError(f"an operator of size {self.size} multiplies (..., {self.size}), not {tuple(v.shape)}")


@dataclass(frozen=True, eq=False)
class BelowDiagonal(DisplacementOperator):
    """An operator with entries below the diagonal and a corner; or, transposed, above the diagonal."""

    is_transposed: bool = field(default=False, init=False, repr=False)

    @property
    def T(self) -> DisplacementOperator:
        transposed = copy.copy(self)
        object.__setattr__(transposed, "is_transposed", not self.is_transposed)
        return transposed

    @property
    @abstractmethod
    def _below(self) -> tuple[Tensor | float, Tensor | float]:
        """The entries below the diagonal, or one number for all; and the corner."""

    def matvec(self, v: Tensor) -> Tensor:
        self._require_vectors(v)
        below, corner = self._below
        if self.is_transposed:
            return torch.cat([below * v[..., 1:], corner * v[..., :1]], -1)
        return torch.cat([corner * v[..., -1:], below * v[..., :-1]], -1)


@dataclass(frozen=True, eq=False)
class SubdiagonalOperator(BelowDiagonal):
    """The subdiagonal operator of LDR-SD: A[i + 1, i] = ``subdiagonal[i]``, A[0, n - 1] = ``corner``, all else is zero.

    A of size 1 is the matrix [corner]. Thomas et al., section 3 and Figure 2 (center).

    Args:
        subdiagonal: (n - 1,).
        corner: (), or a number.

    Raises:
        TypeError: another argument than a number for the corner is no floating-point tensor.
        ValueError: an argument has another shape.

    Example:
        >>> SubdiagonalOperator(torch.tensor([2.0, 3.0]), 4.0).to_dense()
        tensor([[0., 0., 4.],
                [2., 0., 0.],
                [0., 3., 0.]])
    """

    subdiagonal: Tensor
    corner: Tensor

    def __post_init__(self) -> None:
        _require_tensor("subdiagonal", self.subdiagonal, 1)
        if is_real(self.corner):
            object.__setattr__(self, "corner", self.subdiagonal.new_tensor(self.corner))
        _require_tensor("corner", self.corner, 0)

    @property
    def size(self) -> int:
        return self.subdiagonal.shape[0] + 1

    @property
    def entries(self) -> Tensor:
        return self.subdiagonal

    @property
    def _below(self) -> tuple[Tensor, Tensor]:
        return self.subdiagonal, self.corner


@checked
@dataclass(frozen=True, eq=False)
class TridiagonalOperator(DisplacementOperator):
    """The tridiagonal operator of LDR-TD: three diagonals and two corners.

    Entries that fall on the same place, if n is 1 or 2, add up. Thomas et al., section 3 and Figure 2 (right).

    Args:
        subdiagonal: (n - 1,), A[i + 1, i].
        diagonal: (n,), A[i, i].
        superdiagonal: (n - 1,), A[i, i + 1].
        corners: (2,), A[0, n - 1] and A[n - 1, 0].

    Raises:
        TypeError: an argument is no floating-point tensor.
        ValueError: an argument has another shape.

    Example:
        >>> below, middle, above = torch.full((2,), 1.0), torch.full((3,), 2.0), torch.full((2,), 3.0)
        >>> TridiagonalOperator(below, middle, above, torch.tensor([4.0, 5.0])).to_dense()
        tensor([[2., 3., 4.],
                [1., 2., 3.],
                [5., 1., 2.]])
    """

    subdiagonal: Tensor
    diagonal: Tensor
    superdiagonal: Tensor
    corners: Tensor

    def __post_init__(self) -> None:
        _require_tensor("diagonal", self.diagonal, 1)
        n = self.diagonal.shape[0]
        if n == 0:
            raise ValueError("diagonal is empty: an operator has at least one row")
        for name, length in (("subdiagonal", n - 1), ("superdiagonal", n - 1), ("corners", 2)):
            tensor = getattr(self, name)
            _require_tensor(name, tensor, 1)
            if tensor.shape[0] != length:
                raise ValueError(f"{name} must be ({length},) beside a diagonal of {n}, got {tuple(tensor.shape)}")

    @property
    def entries(self) -> Tensor:
        return self.diagonal

    @property
    def T(self) -> TridiagonalOperator:
        return TridiagonalOperator(self.superdiagonal, self.diagonal, self.subdiagonal, self.corners.flip(0))

    def matvec(self, v: Tensor) -> Tensor:
        self._require_vectors(v)
        from_left = torch.cat([self.corners[:1] * v[..., -1:], self.subdiagonal * v[..., :-1]], -1)
        from_right = torch.cat([self.superdiagonal * v[..., 1:], self.corners[1:] * v[..., :1]], -1)
        return from_left + self.diagonal * v + from_right


@checked
@dataclass(frozen=True, eq=False)
class ShiftOperator(BelowDiagonal):
    """The shift Z_f: ones below the diagonal and f in the corner, so that Z_1 rotates a vector downwards.

    Thomas et al., section 2 and Figure 2 (left).

    Args:
        n: at least 1.
        f: a number or a tensor (). ``to_dense`` has its dtype and device; the default ones if it is a number.

    Raises:
        TypeError: f is a tensor of integers.
        ValueError: n < 1, or f is a tensor of another shape.

    Example:
        >>> ShiftOperator(3, -1.0).matvec(torch.tensor([1.0, 2.0, 3.0]))
        tensor([-3.,  1.,  2.])
    """

    n: Size
    f: float | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.f, Tensor):
            _require_tensor("f", self.f, 0)

    @property
    def size(self) -> int:
        return self.n

    @property
    def entries(self) -> Tensor:
        return self.f if isinstance(self.f, Tensor) else torch.empty(0)

    @property
    def _below(self) -> tuple[float, Tensor | float]:
        return 1.0, self.f


@dataclass(frozen=True, eq=False)
class _Matrix(DisplacementOperator):
    """An operator that is given as its matrix (n, n)."""

    matrix: Tensor

    @property
    def entries(self) -> Tensor:
        return self.matrix

    @property
    def T(self) -> _Matrix:
        return _Matrix(self.matrix.mT)

    def matvec(self, v: Tensor) -> Tensor:
        self._require_vectors(v)
        dtype = torch.promote_types(v.dtype, self.matrix.dtype)  # as elementwise products do by themselves
        return v.to(dtype) @ self.matrix.mT.to(dtype)


def as_operator(operator: DisplacementOperator | Tensor) -> DisplacementOperator:
    """The operator itself, or that of a matrix (n, n).

    Raises:
        TypeError: the matrix is no floating-point tensor.
        ValueError: it is not square, or empty.
    """
    if isinstance(operator, DisplacementOperator):
        return operator
    _require_tensor("the matrix of an operator", operator, 2)
    if operator.shape[0] != operator.shape[1] or operator.shape[0] == 0:
        raise ValueError(f"the matrix of an operator must be square and not empty, got {tuple(operator.shape)}")
    return _Matrix(operator)


def _require_tensor(name: str, tensor: Tensor, ndim: int | None = None) -> None:
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        got = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)[:80]
        raise TypeError(f"{name} must be a floating-point tensor, got {got}")
    check_dense(name, tensor)
    if ndim not in (None, tensor.ndim):
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim != 1)}, got shape {tuple(tensor.shape)}")


@checked
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
    return krylov_rows(op, v, op.size if columns is None else positive_size("columns", columns)).movedim(0, -1)


def krylov_rows(operator: DisplacementOperator, v: Tensor, count: int) -> Tensor:
    """v, Av, ..., A^(count - 1)v one after the other: (count, ..., n) for v (..., n)."""
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
