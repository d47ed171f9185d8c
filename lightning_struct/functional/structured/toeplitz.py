"""Toeplitz-like matrices, whose displacement by two cyclic shifts has low rank (Thomas et al., section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_struct.functional.structured.krylov import require_generators, require_real, require_vectors
from lightning_struct.functional.structured.scaled_toeplitz import (
    ScaledToeplitzSpectra,
    by_rows,
    computing_dtype,
    scaled_toeplitz_matmul,
)


def toeplitz_like_matmul(G: Tensor, H: Tensor, x: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0) -> Tensor:
    """x Mᵀ with M = Σᵢ K(Z_f, gᵢ) K(Z_g, hᵢ)ᵀ, of p = min(m, n) Krylov vectors each.

    This is the paper's equation (2) with A = Z_f and B = Z_gᵀ: its matrices are Toeplitz-like, Toeplitz matrices among
    them (r = 2). In 2 + 2r real Fourier transforms, O(r n log n), for each row of x. Differentiable in all tensors,
    as often as wanted.

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
    """
    require_generators(G, H)
    require_vectors(x, H.shape[0])
    require_real(G=G, H=H, x=x)
    dtype = computing_dtype(G, H, x)
    parts = _parts(G.to(dtype), H.to(dtype), f, g)
    product = by_rows(lambda rows: scaled_toeplitz_matmul(rows, *parts), x, dtype)
    return product.to(torch.promote_types(G.dtype, x.dtype))


def prepare_toeplitz_like(
    G: Tensor, H: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0
) -> ScaledToeplitzSpectra:
    """What of :func:`toeplitz_like_matmul` does not depend on x: ``.matmul(x)`` is the rest, for weights that do not change."""
    require_generators(G, H)
    require_real(G=G, H=H)
    dtype = computing_dtype(G, H)
    return ScaledToeplitzSpectra.of(*_parts(G.to(dtype), H.to(dtype), f, g))


def _parts(G: Tensor, H: Tensor, f: float | Tensor, g: float | Tensor) -> tuple[Tensor, ...]:
    """The arguments of :func:`scaled_toeplitz_matmul` but x: a shift is subdiagonal with ones."""
    f, g = (torch.as_tensor(corner, dtype=G.dtype, device=G.device) for corner in (f, g))
    return G, H, G.new_ones(G.shape[0] - 1), f, H.new_ones(H.shape[0] - 1), g
