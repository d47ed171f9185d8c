"""Matrices of low displacement rank: as products of Krylov matrices, their Sylvester displacement, its rank.

The matrix that Thomas et al. learn is their equation (2),

    M = Σ_i K(A, g_i) K(Bᵀ, h_i)ᵀ = Σ_{j<p} Aʲ G Hᵀ Bʲ,

A of size m, B of size n, G (m, r), H (n, r). Rectangular matrices are M (m, n) with p = min(m, n): if A and B have
no corners (Aᵐ = 0, Bⁿ = 0), all terms beyond are zero. The displacement rank of M is at most 2r with respect to (A⁻¹,
B) (Proposition 3).

Which structure that is depends on the directions. With both operators downwards, (A, B) = (Z_1, Z_-1), equation (2)
literally spans the Hankel-like matrices, since A⁻¹ = Z_1ᵀ: Table 5 names the operators of the displacement AM - MB, not
those of equation (2). The Toeplitz-like matrices are equation (2) with A = Z_1 and B = Z_-1ᵀ.
"""

import torch
from torch import Tensor

from lightning_struct.functional.checks import checked
from lightning_struct.functional.structured import arguments
from lightning_struct.functional.structured.operators import (
    DiagonalOperator,
    DisplacementOperator,
    ShiftOperator,
    SubdiagonalOperator,
    TransposedOperator,
    TridiagonalOperator,
    as_operator,
    krylov_matrix,
    krylov_product,
    krylov_rows,
)
from lightning_struct.functional.structured.subdiagonal import subdiagonal_matmul, subdiagonal_to_dense
from lightning_struct.functional.structured.transforms import toeplitz_like_matmul
from lightning_struct.functional.structured.tridiagonal import tridiagonal_matmul, tridiagonal_to_dense

__all__ = ["displacement_rank", "krylov_matrix", "ldr_matmul", "ldr_to_dense", "sylvester_displacement"]

Operator = DisplacementOperator | Tensor


@checked
def ldr_to_dense(a: Operator, b: Operator, G: Tensor, H: Tensor, method: str = "auto") -> Tensor:
    """M = Σ_i K(A, g_i) K(Bᵀ, h_i)ᵀ, equation (2) of Thomas et al.

    Args:
        a: A of size m, or its matrix (m, m).
        b: B of size n, or its matrix (n, n).
        G: (m, r).
        H: (n, r).
        method: ``"krylov"`` multiplies the two Krylov matrices, by the definition; ``"auto"`` takes the fastest way
            that there is for these operators.

    Returns:
        (m, n).

    Raises:
        ValueError: G or H has another shape, or there is no such method.

    Example:
        >>> from lightning_struct.functional import ShiftOperator
        >>> A, B = ShiftOperator(3, 1.0), ShiftOperator(3, -1.0).T
        >>> G, H = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [0.0], [0.0]])
        >>> ldr_to_dense(A, B, G, H)    # a circulant matrix
        tensor([[1., 3., 2.],
                [2., 1., 3.],
                [3., 2., 1.]])
    """
    arguments.require_one_of("method", method, ("auto", "krylov"))
    a, b_transposed = _resolved(as_operator(a)), _resolved(as_operator(b).T)
    arguments.require_generators(G, H, a.size, b_transposed.size)
    if method == "auto" and _is_real(a, b_transposed, G, H):
        if isinstance(a, TridiagonalOperator) and isinstance(b_transposed, TridiagonalOperator):
            return tridiagonal_to_dense(a, b_transposed, G, H)
        if isinstance(a, DiagonalOperator) and isinstance(b_transposed, DiagonalOperator):
            return _rounded(_between_diagonals(a, b_transposed, G, H), G, H)
        if (pair := _below_the_diagonal(a, b_transposed)) is not None:
            (left, rows), (right, columns) = pair
            G, H = _reversed(G, 0, rows), _reversed(H, 0, columns)
            M = subdiagonal_to_dense(*_entries(left, G), *_entries(right, G), G, H)
            return _reversed(_reversed(M, 1, columns), 0, rows)
    columns_of_a, columns_of_b = _krylov_rows(a, b_transposed, G, H)
    return _rounded(columns_of_a.mT @ columns_of_b, G, H)  # equation (2)


@checked
def ldr_matmul(a: Operator, b: Operator, G: Tensor, H: Tensor, x: Tensor, method: str = "auto") -> Tensor:
    """x Mᵀ for M = Σ_i K(A, g_i) K(Bᵀ, h_i)ᵀ, equation (2) of Thomas et al.

    Args:
        a: A of size m, or its matrix (m, m).
        b: B of size n, or its matrix (n, n).
        G: (m, r).
        H: (n, r).
        x: (..., n).
        method: ``"krylov"`` multiplies by the two Krylov matrices, for any operators. ``"auto"`` takes the fastest way
            that there is for them; for subdiagonal operators it looks at their entries, for which it waits for the
            device. Any other is one of :func:`subdiagonal_matmul` if A and B are subdiagonal or shifts, transposed
            or not, and of :func:`tridiagonal_matmul` if they are tridiagonal.

    Returns:
        (..., m).

    Raises:
        ValueError: G, H or x has another shape, or the operators have no such method.

    Example:
        >>> from lightning_struct.functional import ShiftOperator
        >>> A, B = ShiftOperator(3, 1.0), ShiftOperator(3, -1.0).T
        >>> G, H = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [0.0], [0.0]])
        >>> ldr_matmul(A, B, G, H, torch.tensor([1.0, 0.0, 0.0]), method="krylov")
        tensor([1., 2., 3.])
    """
    a, b_transposed = _resolved(as_operator(a)), _resolved(as_operator(b).T)
    arguments.require_generators(G, H, a.size, b_transposed.size)
    arguments.require_vectors(x, b_transposed.size)
    if method != "krylov" and _is_real(a, b_transposed, G, H, x):
        if isinstance(a, TridiagonalOperator) and isinstance(b_transposed, TridiagonalOperator):
            return tridiagonal_matmul(a, b_transposed, G, H, x, method)
        if (pair := _below_the_diagonal(a, b_transposed)) is not None:
            (left, rows), (right, columns) = pair
            G, H, x = _reversed(G, 0, rows), _reversed(H, 0, columns), _reversed(x, -1, columns)
            if method == "auto" and isinstance(left, ShiftOperator) and isinstance(right, ShiftOperator):
                product = toeplitz_like_matmul(G, H, x, left.f, right.f)
            else:
                product = subdiagonal_matmul(*_entries(left, G), *_entries(right, G), G, H, x, method)
            return _reversed(product, -1, rows)
        if method == "auto" and isinstance(a, DiagonalOperator) and isinstance(b_transposed, DiagonalOperator):
            M = _between_diagonals(a, b_transposed, G, H)
            return _rounded(x.to(M.dtype) @ M.mT, G, H, x)
    if method not in ("auto", "krylov"):
        raise ValueError(f'method must be "auto" or "krylov" for these operators, got {method!r}')
    columns_of_a, columns_of_b = _krylov_rows(a, b_transposed, G, H)
    return _rounded(krylov_product(columns_of_a, columns_of_b, x.to(columns_of_a.dtype)), G, H, x)  # equation (2)


@checked
def sylvester_displacement(M: Tensor, a: Operator, b: Operator) -> Tensor:
    """AM - MB, the Sylvester displacement: equation (1) of Thomas et al.

    Args:
        M: (m, n).
        a: A of size m, or its matrix (m, m).
        b: B of size n, or its matrix (n, n).

    Returns:
        (m, n).

    Raises:
        ValueError: M has another shape.

    Example:
        >>> from lightning_struct.functional import ShiftOperator
        >>> toeplitz = torch.tensor([[1.0, 4.0, 5.0], [2.0, 1.0, 4.0], [3.0, 2.0, 1.0]])
        >>> sylvester_displacement(toeplitz, ShiftOperator(3, 1.0), ShiftOperator(3, -1.0))
        tensor([[-1., -3.,  2.],
                [ 0.,  0.,  7.],
                [ 0.,  0.,  7.]])
    """
    a, b = as_operator(a), as_operator(b)
    if M.shape != (a.size, b.size):
        raise ValueError(f"M must be ({a.size}, {b.size}) between operators of these sizes, got {tuple(M.shape)}")
    return a.matvec(M.mT).mT - b.rmatvec(M)  # equation (1): AM - MB


@checked
def displacement_rank(M: Tensor, a: Operator, b: Operator, rtol: float | None = None) -> int:
    """The numerical rank of AM - MB, the displacement rank of M (Thomas et al., section 2).

    Args:
        M: (m, n).
        a: A of size m, or its matrix (m, m).
        b: B of size n, or its matrix (n, n).
        rtol: singular values above rtol (‖A‖ + ‖B‖) ‖M‖ count, in spectral norms: relative to the matrices that are
            subtracted, so that a displacement of rounding errors has rank 0. By default, max(m, n) times the machine
            precision of M.

    Raises:
        TypeError: M holds integers.
        ValueError: M has another shape, or is not finite.

    Example:
        >>> from lightning_struct.functional import ShiftOperator
        >>> toeplitz = torch.tensor([[1.0, 4.0, 5.0], [2.0, 1.0, 4.0], [3.0, 2.0, 1.0]])
        >>> displacement_rank(toeplitz, ShiftOperator(3, 1.0), ShiftOperator(3, -1.0))
        2
    """
    if not (M.is_floating_point() or M.is_complex()):
        raise TypeError(f"M must be a floating-point matrix, got {M.dtype}")
    if not M.isfinite().all():
        raise ValueError("M is not finite: it has no rank")
    displacement = sylvester_displacement(M, a, b)
    rtol = max(M.shape) * torch.finfo(M.dtype).eps if rtol is None else rtol
    dense = [op.rmatvec(torch.eye(op.size, dtype=M.dtype, device=M.device)) for op in map(as_operator, (a, b))]
    scale = sum(torch.linalg.matrix_norm(matrix, 2) for matrix in dense) * torch.linalg.matrix_norm(M, 2)
    return int((torch.linalg.svdvals(displacement) > rtol * scale).sum())


def _krylov_rows(a: DisplacementOperator, b: DisplacementOperator, G: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of all K(A, g_i) and of all K(Bᵀ, h_i) in the same order, as rows: (pr, m) and (pr, n)."""
    count, (G, H) = min(a.size, b.size), _at_least_float32(G, H)
    left, right = krylov_rows(a, G.mT, count).flatten(0, 1), krylov_rows(b, H.mT, count).flatten(0, 1)
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype), right.to(dtype)


def _between_diagonals(a: DiagonalOperator, b: DiagonalOperator, G: Tensor, H: Tensor) -> Tensor:
    """M of equation (2) for A = diag(a) and Bᵀ = diag(b): M_ij = (G Hᵀ)_ij Σ_{k<p} (a_i b_j)ᵏ."""
    G, H = _at_least_float32(G, H)
    return G @ H.mT * _geometric_sums(a.d.to(G.dtype)[:, None] * b.d.to(G.dtype), min(a.size, b.size))


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype to which they promote, but in float32 if that is half precision."""
    dtype = arguments.computing_dtype(*tensors)
    return [tensor.to(dtype) for tensor in tensors]


def _rounded(product: Tensor, *tensors: Tensor) -> Tensor:
    """The product, in half precision if all tensors are."""
    dtype = arguments.promoted_dtype(*tensors)
    return product.to(dtype) if dtype.itemsize == 2 else product


_Subdiagonal = SubdiagonalOperator | ShiftOperator


def _below_the_diagonal(*given: DisplacementOperator) -> list[tuple[_Subdiagonal, bool]] | None:
    """Subdiagonal A' and B' with A = J_1 A' J_1 and Bᵀ = J_2 B' J_2, and whether J_1 and J_2 reverse the order.

    J_i is the identity or the reversal of the order, which turns the transpose of a subdiagonal operator into a
    subdiagonal one: M is that of A', B', J_1 G and J_2 H with its rows and columns reversed. None if A or Bᵀ is not
    subdiagonal in any direction.
    """
    found: list[tuple[_Subdiagonal, bool]] = []
    for operator in given:
        is_reversed = isinstance(operator, TransposedOperator)
        below = operator.operator if isinstance(operator, TransposedOperator) else operator
        if not isinstance(below, _Subdiagonal):
            return None
        if is_reversed and isinstance(below, SubdiagonalOperator):
            below = SubdiagonalOperator(below.subdiagonal.flip(0), below.corner)
        found.append((below, is_reversed))
    return found


def _reversed(tensor: Tensor, dim: int, is_reversed: bool) -> Tensor:
    return tensor.flip(dim) if is_reversed else tensor


def _entries(operator: _Subdiagonal, like: Tensor) -> tuple[Tensor, Tensor]:
    """The subdiagonal and the corner."""
    if isinstance(operator, SubdiagonalOperator):
        return operator.subdiagonal, operator.corner
    return like.new_ones(operator.n - 1), torch.as_tensor(operator.f, dtype=like.dtype, device=like.device)


def _resolved(operator: DisplacementOperator) -> DisplacementOperator:
    """The same operator; a :class:`TransposedOperator` only if there is no other way to write it."""
    if isinstance(operator, TransposedOperator) and not isinstance(operator.operator, _Subdiagonal):
        return operator.operator.T
    return operator


def _is_real(a: DisplacementOperator, b: DisplacementOperator, *tensors: Tensor) -> bool:
    return not any(tensor.is_complex() for tensor in (a.entries, b.entries, *tensors))


def _geometric_sums(z: Tensor, count: int) -> Tensor:
    """1 + z + ... + z^(count - 1), elementwise; by doubling, since (1 - z^count)/(1 - z) has no digits near z = 1."""
    total, power = torch.ones_like(z), z
    for bit in bin(count)[3:]:
        total, power = total + total * power, power * power
        if bit == "1":
            total, power = total + power, power * z
    return total
