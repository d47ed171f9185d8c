"""Products with matrices of low displacement rank by 2 + 2r real Fourier transforms, the operators having no zeros.

M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ, A (m, m) and B (n, n) being subdiagonal with a corner and p = min(m, n). With no zero below
the diagonal, A = c D Z_f D⁻¹, where D = diag(a) holds the cumulative products of its subdiagonal, divided by c each. So

    M = D_a · [ Σᵢ K(Z_f, gᵢ/a) diag(ρ) K(Z_w, hᵢ/b)ᵀ ] · D_b

is a diagonally scaled Toeplitz-like matrix; ρ are the powers of the c of A times the c of B. Multiplying by K(Z_f, g)
is the circular convolution with [g, 0, f g], of a length of at least 2m, cut to its first m numbers: the corner costs
nothing. Its transpose is the correlation with the same vector.

The paper needs log₂ n levels of transforms (Theorem 1); this is one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.structured import cost_model
from lightning_struct.functional.structured.arguments import by_rows

# Numbers that one batch of transforms works on at most: of more, rows are taken in parts.
_CHUNK = 1 << 22


def detrended_path(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """log|s₁ ⋯ s_k| less its trend, (..., n - 1), for log|s| (..., n - 1), s a subdiagonal; and the trend, (...)."""
    trend = logarithms.detach().sum(-1) / max(1, logarithms.shape[-1])
    return (logarithms - trend[..., None]).cumsum(-1), trend


@dataclass(frozen=True)
class ScaledToeplitzSpectra:
    """All of x Mᵀ that does not depend on x: a ``PreparedMatrix``.

    Args:
        left: the spectra of [gᵢ/a, 0, f gᵢ/a], (r, F).
        right: the conjugates of those of [hᵢ/b, 0, w hᵢ/b], (r, F').
        out_scale: a, (m,).
        in_scale: b, (n,).
        middle: ρ, (p,).
    """

    left: Tensor
    right: Tensor
    out_scale: Tensor
    in_scale: Tensor
    middle: Tensor

    @staticmethod
    def of(*parameters: Tensor) -> ScaledToeplitzSpectra:
        """The spectra of the matrix of :func:`scaled_toeplitz_matmul`, given its arguments but x."""
        sides = [_side(*side) for side in _by_side(parameters)]
        a, b, left, right = sides[0][0][0], sides[-1][0][-1], sides[0][1][0], sides[-1][1][-1]
        trend = torch.cat([side[2] for side in sides]).sum()
        powers = torch.arange(min(len(a), len(b)), dtype=trend.dtype, device=trend.device)
        return ScaledToeplitzSpectra(left, right.conj().resolve_conj(), a, b, torch.exp(trend * powers).to(a.dtype))

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (..., m) for x (..., n), in the dtype of x; computed in that of M."""
        return by_rows(self.multiply, x, self.in_scale.dtype).to(x.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """x Mᵀ, (B, m) for x (B, n) in the dtype of M."""
        size = max(1, _CHUNK // (self.left.shape[0] * _transformed_length(self.left)))
        if torch.compiler.is_compiling() or len(rows) <= size:  # a graph of any number of rows has no chunks
            return self._multiply_chunk(rows)
        return torch.cat([self._multiply_chunk(chunk) for chunk in rows.split(size)])

    def _multiply_chunk(self, x: Tensor) -> Tensor:
        (m,), (p,) = self.out_scale.shape, self.middle.shape
        in_length, out_length = _transformed_length(self.right), _transformed_length(self.left)
        of_inputs = torch.fft.rfft(x * self.in_scale, n=in_length)
        between = torch.fft.irfft(of_inputs * self.right[:, None], n=in_length)
        spectra = torch.fft.rfft(between[..., :p] * self.middle, n=out_length) * self.left[:, None]
        total = spectra[0] if len(spectra) == 1 else spectra.sum(0)
        return torch.fft.irfft(total, n=out_length)[..., :m] * self.out_scale


def scaled_toeplitz_matmul(
    x: Tensor, G: Tensor, H: Tensor, a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor
) -> Tensor:
    """x Mᵀ, differentiable in all tensors, as often as wanted.

    Args:
        x: (B, n), float32 or float64 as all others, B >= 1.
        G: (m, r), its columns are gᵢ.
        H: (n, r).
        a_subdiagonal: (m - 1,), without a zero.
        a_corner: ().
        b_subdiagonal: (n - 1,), without a zero.
        b_corner: ().

    Returns:
        (B, m).
    """
    return ScaledToeplitzSpectra.of(G, H, a_subdiagonal, a_corner, b_subdiagonal, b_corner).multiply(x)


def _by_side(parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """(G, subdiagonal, corner) of both sides stacked, if M is square, else of one side and of the other.

    Stacked, there are half as many small operations, and on a CPU each call of a transform is planned anew.
    """
    G, H, a_subdiagonal, a_corner, b_subdiagonal, b_corner = parameters
    left, right = (G, a_subdiagonal, a_corner), (H, b_subdiagonal, b_corner)
    if G.shape == H.shape:
        return [tuple(torch.stack(pair) for pair in zip(left, right, strict=True))]
    return [tuple(tensor[None] for tensor in side) for side in (left, right)]


def _side(G: Tensor, subdiagonal: Tensor, corner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a, the spectra of [gᵢ/a, 0, f gᵢ/a], and log c, the mean of log|s|, of k = 1 or 2 operators A.

    Any c gives the same A: it is taken as a constant. D and f are computed in float64.

    Args:
        G: (k, m, r).
        subdiagonal: s, (k, m - 1).
        corner: (k,).

    Returns:
        (k, m), (k, r, F) and (k,).
    """
    path, trend = detrended_path(subdiagonal.double().abs().log())
    scale = F.pad(path.exp() * subdiagonal.detach().sign().cumprod(-1), (1, 0), value=1.0)
    f = (corner.double() * scale[:, -1] * torch.exp(-trend)).to(G.dtype)[:, None, None]
    scale = scale.to(G.dtype)
    g = G.mT / scale[:, None]
    length = cost_model.transform_length(2 * g.shape[-1])
    # The end of the vector is where a circular convolution finds the numbers before its start.
    return scale, torch.fft.rfft(F.pad(g, (0, length - g.shape[-1])) + F.pad(f * g, (length - g.shape[-1], 0))), trend


def _transformed_length(spectra: Tensor) -> int:
    """The length of the vectors with these spectra, which is even."""
    return 2 * (spectra.shape[-1] - 1)
