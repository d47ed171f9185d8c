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

from lightning_struct.functional.checks import NotNegative, check_dense, checked
from lightning_struct.functional.structured import arguments
from lightning_struct.functional.structured.operators import (
    BelowDiagonal,
    DisplacementOperator,
    ShiftOperator,
    SubdiagonalOperator,
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
    a, b_transposed = as_operator(a), as_operator(b).T
    arguments.require_generators(G, H, a.size, b_transposed.size)
    if method == "auto" and _is_real(a, b_transposed, G, H):
        if isinstance(a, TridiagonalOperator) and isinstance(b_transposed, TridiagonalOperator):
            return tridiagonal_to_dense(a, b_transposed, G, H)
        if isinstance(a, BelowDiagonal) and isinstance(b_transposed, BelowDiagonal):
            G, H = _reversed(G, 0, a), _reversed(H, 0, b_transposed)
            M = subdiagonal_to_dense(*_entries(a, G), *_entries(b_transposed, G), G, H)
            return _reversed(_reversed(M, 1, b_transposed), 0, a)
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
            or not.

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
    a, b_transposed = as_operator(a), as_operator(b).T
    arguments.require_generators(G, H, a.size, b_transposed.size)
    arguments.require_vectors(x, b_transposed.size)
    if method != "krylov" and _is_real(a, b_transposed, G, H, x):
        if method == "auto" and isinstance(a, TridiagonalOperator) and isinstance(b_transposed, TridiagonalOperator):
            return tridiagonal_matmul(a, b_transposed, G, H, x)
        if isinstance(a, BelowDiagonal) and isinstance(b_transposed, BelowDiagonal):
            G, H, x = _reversed(G, 0, a), _reversed(H, 0, b_transposed), _reversed(x, -1, b_transposed)
            if method == "auto" and isinstance(a, ShiftOperator) and isinstance(b_transposed, ShiftOperator):
                product = toeplitz_like_matmul(G, H, x, a.f, b_transposed.f)
            else:
                product = subdiagonal_matmul(*_entries(a, G), *_entries(b_transposed, G), G, H, x, method)
            return _reversed(product, -1, a)
    if method not in ("auto", "krylov"):
        raise ValueError(f'method must be "auto" or "krylov" for these operators, got {method!r}')
    columns_of_a, columns_of_b = _krylov_rows(a, b_transposed, G, H)
    if x.is_complex():
        dtype = columns_of_a.dtype.to_complex()
        columns_of_a, columns_of_b = columns_of_a.to(dtype), columns_of_b.to(dtype)
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
def displacement_rank(M: Tensor, a: Operator, b: Operator, rtol: NotNegative | None = None) -> int:
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
    check_dense("M", M, has_numbers=True)
    if not (M.is_floating_point() or M.is_complex()) or M.dtype.itemsize < 4:
        raise TypeError(f"M must be a matrix in float32, float64 or complex numbers, got {M.dtype}")
    if not M.isfinite().all():
        raise ValueError("M is not finite: it has no rank")
    displacement = sylvester_displacement(M, a, b)
    rtol = max(M.shape) * torch.finfo(M.dtype).eps if rtol is None else rtol
    dense = [op.rmatvec(torch.eye(op.size, dtype=M.dtype, device=M.device)) for op in map(as_operator, (a, b))]
    scale = sum(torch.linalg.matrix_norm(matrix, 2) for matrix in dense) * torch.linalg.matrix_norm(M, 2)
    return int((torch.linalg.svdvals(displacement) > rtol * scale).sum())


def _krylov_rows(a: DisplacementOperator, b: DisplacementOperator, G: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of all K(A, g_i) and of all K(Bᵀ, h_i) in the same order, as rows: (pr, m) and (pr, n)."""
    count, dtype = min(a.size, b.size), arguments.computing_dtype(G, H)
    G, H = G.to(dtype), H.to(dtype)
    left, right = krylov_rows(a, G.mT, count).flatten(0, 1), krylov_rows(b, H.mT, count).flatten(0, 1)
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype), right.to(dtype)


def _rounded(product: Tensor, *tensors: Tensor) -> Tensor:
    """The product, in half precision if all tensors are."""
    dtype = arguments.promoted_dtype(*tensors)
    return product.to(dtype) if dtype.itemsize == 2 else product


def _reversed(tensor: Tensor, dim: int, operator: BelowDiagonal) -> Tensor:
    """J T along a dimension of T if the operator is transposed, J being the reversal of the order; else T.

    J turns the transpose of a subdiagonal operator into a subdiagonal one, whose entries :func:`_entries` gives.
    """
    return tensor.flip(dim) if operator.is_transposed else tensor


def _entries(operator: BelowDiagonal, like: Tensor) -> tuple[Tensor, Tensor]:
    """The subdiagonal and the corner; of J A J if A is transposed."""
    if isinstance(operator, SubdiagonalOperator):
        return _reversed(operator.subdiagonal, 0, operator), operator.corner
    assert isinstance(operator, ShiftOperator)
    return like.new_ones(operator.n - 1), torch.as_tensor(operator.f, dtype=like.dtype, device=like.device)


def _is_real(a: DisplacementOperator, b: DisplacementOperator, *tensors: Tensor) -> bool:
    return not any(tensor.is_complex() for tensor in (a.entries, b.entries, *tensors))
