"""Spectra of generators: what the scaled Toeplitz-like products need of A and G, and of B and H."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_struct.functional.structured.cost_model import transform_length
from lightning_struct.functional.structured.similarity import Similarity


class GeneratorSpectra(NamedTuple):
    """The part of M that belongs to A and G, or the one of B and H; or both stacked, if M is square.

    Stacked, there are half as many small operations, and on a CPU each call of a transform is planned anew. All but the
    similarity is in the dtype of M. With A = c D Z_f D⁻¹ and D = diag(a), for the side of A and G:

    Args:
        subdiagonal: (k, m - 1), those of the k = 1 or 2 operators.
        similarity: those of these operators.
        scale: (k, m), a.
        corner: (k, 1, 1), f.
        generators: (k, r, m), gᵢ/a.
        spectra: (k, r, F), the transforms of [gᵢ/a, 0, f gᵢ/a].
    """

    subdiagonal: Tensor
    similarity: Similarity
    scale: Tensor
    corner: Tensor
    generators: Tensor
    spectra: Tensor

    @staticmethod
    def of(G: Tensor, subdiagonal: Tensor, corner: Tensor) -> GeneratorSpectra:
        """The spectra of G (k, m, r), subdiagonal (k, m - 1) and corner (k,)."""
        similarity = Similarity.of(subdiagonal, corner)
        scale, corner = similarity.scale.to(G.dtype), similarity.corner.to(G.dtype)[:, None, None]
        g = G.mT / scale[:, None]
        return GeneratorSpectra(subdiagonal, similarity, scale, corner, g, torch.fft.rfft(extended(g, corner * g)))

    def gradients(self, of_spectra: Tensor, of_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of G, subdiagonal and corner, given those of the spectra and the direct gradient of the scale a."""
        m = self.scale.shape[1]
        of_extended = torch.fft.irfft(of_spectra, n=transformed_length(of_spectra))
        at_start, at_end = of_extended[..., :m], of_extended[..., -m:]
        of_G = (at_start + self.corner * at_end) / self.scale[:, None]
        of_scale = of_scale - (of_G * self.generators).sum(1)
        of_corner = (self.generators * at_end).sum((1, 2))
        return of_G.mT, *self.similarity.gradient(self.subdiagonal, of_scale, of_corner)


def by_side(parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """(G, subdiagonal, corner) of both sides stacked, if M is square, else of one side and of the other.

    Args:
        parameters: G, H, subdiagonal and corner of A, subdiagonal and corner of B.
    """
    G, H, a_subdiagonal, a_corner, b_subdiagonal, b_corner = parameters
    left, right = (G, a_subdiagonal, a_corner), (H, b_subdiagonal, b_corner)
    if G.shape == H.shape:
        return [tuple(torch.stack(pair) for pair in zip(left, right, strict=True))]
    return [tuple(tensor[None] for tensor in side) for side in (left, right)]


def middle_scale(sides: list[GeneratorSpectra]) -> Tensor:
    """ρ, (p,): the powers of the c of A times the c of B."""
    trend = torch.cat([side.similarity.trend for side in sides]).sum()
    p = min(side.scale.shape[1] for side in sides)
    return torch.exp(trend * torch.arange(p, dtype=trend.dtype, device=trend.device)).to(sides[0].scale.dtype)


def extended(head: Tensor, tail: Tensor) -> Tensor:
    """(..., L) for (..., m) and (..., m), with zeros between: L is a length of at least 2m that transforms quickly."""
    between = transform_length(2 * head.shape[-1]) - 2 * head.shape[-1]
    return torch.cat([head, tail] if not between else [head, head.new_zeros(*head.shape[:-1], between), tail], -1)


def transformed_length(spectra: Tensor) -> int:
    """The length of the vectors with these spectra, which is even."""
    return 2 * (spectra.shape[-1] - 1)
