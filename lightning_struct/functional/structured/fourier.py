"""Products by Fourier transforms of half the length, for scaled Toeplitz-like products with few rows.

On CPUs torch plans each Fourier transform anew, which takes longer than transforming one long vector. Convolutions are
computed modulo z^N - i, where others transform 2N numbers: the two halves of a real vector are the real and the
imaginary part of one of length N, and nothing that is needed wraps around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HalfLengthProduct:
    """x Mᵀ for a square M of :func:`~.scaled_toeplitz.scaled_toeplitz_matmul`, by transforms modulo z^N - i.

    Args:
        twist: (N,), the powers of the N-th root of i, which make z^N - 1 of z^N - i.
        g_hat: the spectra of g, (r, 1, N).
        h_hat: the conjugates of those of h, (r, 1, N).
        entry: (N,), the weights of x and the twist.
        middle: (N,), ρ and the inverse twist.
        exit: (N,), the inverse twist and the weights of the convolutions.
    """

    twist: Tensor
    g_hat: Tensor
    h_hat: Tensor
    entry: Tensor
    middle: Tensor
    exit: Tensor

    @staticmethod
    def of(g: Tensor, h: Tensor, a: Tensor, f: Tensor, b: Tensor, w: Tensor, middle: Tensor) -> HalfLengthProduct:
        """The product with a square M of size N, whose generators g and h (r, N) are divided by a and b already."""
        angles = torch.arange(g.shape[1], dtype=torch.float64, device=g.device) * (0.5 * math.pi / g.shape[1])
        twist = torch.polar(torch.ones_like(angles), angles).to(g.dtype.to_complex())
        g_hat, h_hat = (torch.fft.fft(rows * twist)[:, None] for rows in (g, h))
        exit_ = torch.complex(a, -f * a) * twist.conj()
        entry = torch.complex(b, w * b) * twist
        return HalfLengthProduct(twist, g_hat, torch.conj_physical(h_hat), entry, middle * twist.conj(), exit_)

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (B, N) for x (B, N)."""
        t = torch.fft.ifft(torch.fft.fft(x * self.entry) * self.h_hat).mul_(self.middle)
        t.imag.zero_()  # in place, and so are the multiplications: fresh memory takes as long as a product
        hats = torch.fft.fft(t.mul_(self.twist)).mul_(self.g_hat)
        return torch.fft.ifft(hats[0] if len(hats) == 1 else hats.sum(0)).mul_(self.exit).real
