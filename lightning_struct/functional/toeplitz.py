"""Toeplitz-like matrices, whose displacement by two cyclic shifts has low rank (Thomas et al., section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_struct.functional.scaled_toeplitz import (
    ScaledToeplitzSpectra,
    by_rows,
    check_generators,
    computing_dtype,
    scaled_toeplitz_matmul,
    transform_length,
    with_corner,
    with_zeros,
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
    check_generators(G, H, x)
    dtype = computing_dtype(G, H, x)
    parts = _parts(G.to(dtype), H.to(dtype), f, g)
    product = by_rows(lambda rows: scaled_toeplitz_matmul(rows, *parts), x, dtype)
    return product.to(torch.promote_types(G.dtype, x.dtype))


def prepare_toeplitz_like(
    G: Tensor, H: Tensor, f: float | Tensor = 1.0, g: float | Tensor = -1.0
) -> ScaledToeplitzSpectra:
    """What of :func:`toeplitz_like_matmul` does not depend on x: ``.matmul(x)`` is the rest, for weights that do not change."""
    check_generators(G, H)
    dtype = computing_dtype(G, H)
    return ScaledToeplitzSpectra.of(*_parts(G.to(dtype), H.to(dtype), f, g))


def _parts(G: Tensor, H: Tensor, f: float | Tensor, g: float | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, n = G.shape[0], H.shape[0]
    p = min(m, n)
    length = transform_length(max(m, n) + p - 1)
    f, g = (torch.as_tensor(corner, dtype=G.dtype, device=G.device) for corner in (f, g))
    in_weights, out_weights = (with_corner(G.new_ones(size), corner, p, length) for size, corner in ((n, g), (m, f)))
    return G.mT, H.mT, in_weights, out_weights, with_zeros(G.new_ones(p), length)
