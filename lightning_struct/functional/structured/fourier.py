"""Fourier transforms in other ways than torch's: in real arithmetic, and of half the length.

**In real arithmetic**, by matrix products, for formats that have no complex numbers, as ONNX. A transform of length N =
N₁N₂ is as many of length N₁, a multiplication, and as many of length N₂, each by a small matrix of cosines and sines.
These matrices are computed where the graph runs: they take no place in a file.

**Of half the length**, for scaled Toeplitz-like products with few rows: on CPUs torch plans each Fourier transform
anew, which takes longer than transforming one long vector. Convolutions are computed modulo z^N - i, where others
transform 2N numbers: the two halves of a real vector are the real and the imaginary part of one of length N, and
nothing that is needed wraps around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""The real and the imaginary part."""


def real_rfft(x: Tensor) -> Pair:
    """The transform of real x (..., N): (..., N // 2 + 1), as that of ``torch.fft.rfft``."""
    half = x.shape[-1] // 2 + 1
    real, imaginary = _transform(x, None)
    return real[..., :half], imaginary[..., :half]


def real_irfft(spectrum: Pair, length: int) -> Tensor:
    """The real (..., N) whose transform is given, as that of ``torch.fft.irfft``."""
    real, imaginary = spectrum
    mirrored = slice(1, length - real.shape[-1] + 1)
    real = torch.cat([real, real[..., mirrored].flip(-1)], -1)
    conjugate = torch.cat([-imaginary, imaginary[..., mirrored].flip(-1)], -1)
    return _transform(real, conjugate)[0] / length


def multiplied(a: Pair, b: Pair) -> Pair:
    """The product of complex numbers, entry by entry."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def as_pair(z: Tensor) -> Pair:
    """The parts of a complex tensor."""
    real, imaginary = torch.view_as_real(z).unbind(-1)
    return real, imaginary


def _transform(real: Tensor, imaginary: Tensor | None) -> Pair:
    length = real.shape[-1]
    first = next(k for k in range(math.isqrt(length), 0, -1) if length % k == 0)
    second = length // first
    # Number n = N₂n₁ + n₂ of x at (n₁, n₂), and number k = k₁ + N₁k₂ of its transform at (k₁, k₂).
    cosines, sines = _roots(first, first, first, real)
    rows = real.unflatten(-1, (first, second))
    if imaginary is None:
        parts = cosines @ rows, sines @ rows
    else:
        others = imaginary.unflatten(-1, (first, second))
        parts = cosines @ rows - sines @ others, sines @ rows + cosines @ others
    parts = multiplied(parts, _roots(first, second, length, real))
    cosines, sines = _roots(second, second, second, real)
    transformed = parts[0] @ cosines - parts[1] @ sines, parts[0] @ sines + parts[1] @ cosines
    return transformed[0].mT.flatten(-2), transformed[1].mT.flatten(-2)


def _roots(rows: int, columns: int, order: int, like: Tensor) -> Pair:
    """exp(-2πi jk / order) for j < rows and k < columns."""
    j, k = (torch.arange(size, device=like.device) for size in (rows, columns))
    angles = (j[:, None] * k % order).to(like.dtype) * (-2 * math.pi / order)
    return angles.cos(), angles.sin()


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
