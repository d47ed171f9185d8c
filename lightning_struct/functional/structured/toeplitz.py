"""Toeplitz-like matrices, whose displacement by two cyclic shifts has low rank (Thomas et al., section 2, Table 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_struct.functional.structured.arguments import (
    by_rows,
    computing_dtype,
    require_generators,
    require_real,
    require_vectors,
)
from lightning_struct.functional.structured.krylov import shift_krylov_rows
from lightning_struct.functional.structured.scaled_toeplitz import scaled_toeplitz_matmul
from lightning_struct.functional.structured.scaled_toeplitz_spectra import ScaledToeplitzSpectra


def toeplitz_like_matmul(G: Tensor, H: Tensor, x: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0) -> Tensor:
    """x Mᵀ for M = Σᵢ K(Z_f, gᵢ) K(Z_g, hᵢ)ᵀ, with p = min(m, n) columns in each Krylov matrix.

    This is equation (2) of Thomas et al. with A = Z_f and B = Z_gᵀ: its matrices are Toeplitz-like (section 2, Table
    5), Toeplitz matrices among them (r = 2). In 2 + 2r real Fourier transforms, O(r n log n), for each row of x.
    Differentiable in all tensors, as often as wanted.

    Args:
        G: (m, r).
        H: (n, r).
        x: (..., n).
        f: the corner of Z_f, in its first row and last column; the other entries, below the diagonal, are 1.
        g: that of Z_g.

    Returns:
        (..., m), in the dtype to which G and x are promoted. Half precision is computed in float32.

    Raises:
        ValueError, TypeError: the shapes or dtypes do not fit.

    Example:
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> toeplitz_like_matmul(G, H, torch.tensor([1.0, 2.0, 3.0])).round(decimals=4)    # M is the identity
        tensor([1., 2., 3.])
    """
    require_generators(G, H)
    require_vectors(x, H.shape[0])
    require_real(G=G, H=H, x=x)
    dtype = computing_dtype(G, H, x)
    parts = _parts(G.to(dtype), H.to(dtype), f, g)
    product = by_rows(lambda rows: scaled_toeplitz_matmul(rows, *parts), x, dtype)
    return product.to(torch.promote_types(G.dtype, x.dtype))


def toeplitz_like_to_dense(G: Tensor, H: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0) -> Tensor:
    """The matrix M (m, n) of :func:`toeplitz_like_matmul` as a product of its Krylov matrices, in O(r m n min(m, n)).

    That takes few operations, each of which is large: it is meant for matrices with a short side.

    Args:
        G, H, f, g: as there.

    Returns:
        (m, n), in the dtype of G. Half precision is computed in float32.

    Raises:
        ValueError, TypeError: the shapes or dtypes do not fit.
    """
    require_generators(G, H)
    require_real(G=G, H=H)
    dtype, p = computing_dtype(G, H), min(G.shape[0], H.shape[0])
    return (shift_krylov_rows(G.to(dtype), f, p).mT @ shift_krylov_rows(H.to(dtype), g, p)).to(G.dtype)


def prepare_toeplitz_like(
    G: Tensor, H: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0
) -> ScaledToeplitzSpectra:
    """The matrix of :func:`toeplitz_like_matmul`, prepared for products ``.matmul(x)`` with weights that do not change.

    Raises:
        ValueError, TypeError: the shapes or dtypes do not fit.
    """
    require_generators(G, H)
    require_real(G=G, H=H)
    dtype = computing_dtype(G, H)
    return ScaledToeplitzSpectra.of(*_parts(G.to(dtype), H.to(dtype), f, g))


def _parts(G: Tensor, H: Tensor, f: float | Tensor, g: float | Tensor) -> tuple[Tensor, ...]:
    """The arguments of :func:`scaled_toeplitz_matmul` but x: a shift is a subdiagonal operator of ones."""
    for name, corner in (("f", f), ("g", g)):
        if isinstance(corner, complex) or (isinstance(corner, Tensor) and (corner.is_complex() or corner.ndim)):
            got = f"{tuple(corner.shape)} of {corner.dtype}" if isinstance(corner, Tensor) else corner
            raise ValueError(f"{name} must be a real number, or a tensor () of one, got {got}")
    f, g = (torch.as_tensor(corner, dtype=G.dtype, device=G.device) for corner in (f, g))
    return G, H, G.new_ones(G.shape[0] - 1), f, H.new_ones(H.shape[0] - 1), g
