"""Subdiagonal operators as scaled shifts: A = c D Z_f D⁻¹."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Similarity(NamedTuple):
    """A = c D Z_f D⁻¹, in float64, for a subdiagonal A with a corner and without a zero below the diagonal.

    Any c gives the same A. So c is taken as a constant, and the derivatives by D and f are those by A.

    Args:
        scale: (..., n), the diagonal of D: 1 and s₁ ⋯ s_k / c^k.
        corner: (...), f.
        corner_derivative: (...), the derivative of f by the corner of A.
        trend: (...), log c, the mean of log|s|.
    """

    scale: Tensor
    corner: Tensor
    corner_derivative: Tensor
    trend: Tensor

    @staticmethod
    def of(subdiagonal: Tensor, corner: Tensor) -> Similarity:
        """The similarity of A with subdiagonal s (..., n - 1) and corner (...)."""
        s, corner = subdiagonal.double(), corner.double()
        if not s.shape[-1]:
            one = torch.ones_like(corner)
            return Similarity(one[..., None], corner.clone(), one, torch.zeros_like(corner))
        logarithms = s.abs().log()
        trend = logarithms.detach().mean(-1)
        magnitudes = (logarithms - trend[..., None]).cumsum(-1).exp()
        scale = F.pad(magnitudes * s.detach().sign().cumprod(-1), (1, 0), value=1.0)
        last = scale[..., -1] * torch.exp(-trend)
        return Similarity(scale, corner * last, last, trend)

    def tangent(self, subdiagonal: Tensor, of_subdiagonal: Tensor, of_corner: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives of D and f along tangents of s and the corner of A."""
        relative = F.pad((of_subdiagonal / subdiagonal.double()).cumsum(-1), (1, 0))
        return self.scale * relative, of_corner * self.corner_derivative + self.corner * relative[..., -1]

    def gradient(self, subdiagonal: Tensor, of_scale: Tensor, of_corner: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of s and the corner of A, given those of D and f."""
        # Each s_i is a factor of all entries from the i-th on, and of f.
        from_the_end = (of_scale * self.scale)[..., 1:].flip(-1).cumsum(-1).flip(-1)
        of_both = from_the_end + (of_corner * self.corner)[..., None]
        return of_both / subdiagonal, of_corner * self.corner_derivative
