"""Fourier transforms in other ways than torch's: in real arithmetic, and of half the length, in two steps.

**In real arithmetic**, by matrix products, for formats that have no complex numbers, as ONNX. A transform of length N =
N₁N₂ is as many of length N₁, a multiplication, and as many of length N₂, each by a small matrix of cosines and sines.
These matrices are computed where the graph runs: they take no place in a file.

**Of half the length**, for scaled Toeplitz-like products. On CPUs torch plans each Fourier transform anew, which takes
longer than transforming one long vector, up to ten times as long on some processors. A transform of length N = N₁N₂ as
many of length N₁ and many of length N₂, with a multiplication between, needs short plans only. The spectrum comes in
another order, which does not matter. With N₁ = 1 a transform is left whole: many rows share a plan. Convolutions are
computed modulo z^N - i, where others transform 2N numbers: the two halves of a real vector are the real and the
imaginary part of one of length N, and nothing that is needed wraps around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_struct.functional.structured.cost_model import rows_of_half_length, two_steps_are_faster

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
class TwoStepTransform:
    """The Fourier transform modulo z^N - i.

    Args:
        twist: (N₁, 1, 1, N₂), the powers of the N-th root of i, which make z^N - 1 of it; transposed in memory.
        twiddles: (N₁, 1, 1, N₂), between the two steps; transposed in memory.
        inverse_twiddles: their conjugates, in memory: torch would make them at each use.
    """

    twist: Tensor
    twiddles: Tensor
    inverse_twiddles: Tensor

    @staticmethod
    def of(length: int, like: Tensor, whole: bool = False) -> TwoStepTransform:
        """The transform of length N, in the dtype and on the device of ``like``, in two steps or ``whole``."""
        first = 1 if whole else next(k for k in range(math.isqrt(length), 0, -1) if length % k == 0)
        j = torch.arange(length, dtype=torch.float64)
        products = torch.arange(first, dtype=torch.float64)[:, None] * torch.arange(length // first)
        angles = (j * (0.5 * math.pi / length), products.flatten() * (-2 * math.pi / length))
        twist, twiddles = (
            torch.polar(torch.ones_like(j), angle).to(like.device, like.dtype.to_complex()).view(first, 1, 1, -1)
            for angle in angles
        )
        inverse_twiddles = twiddles.conj().resolve_conj()
        return TwoStepTransform(_transposed_in_memory(twist), _transposed_in_memory(twiddles), inverse_twiddles)

    @property
    def steps(self) -> tuple[int, int]:
        """N₁ and N₂."""
        return self.twist.shape[0], self.twist.shape[3]

    def forward(self, c: Tensor) -> Tensor:
        """The spectrum of a vector that was multiplied by the twist, both (N₁, r, B, N₂)."""
        if self.twist.shape[0] == 1:
            return torch.fft.fft(c)
        return torch.fft.fft(torch.fft.fft(c, dim=0).mul_(self.twiddles))

    def inverse(self, hat: Tensor) -> Tensor:
        """The vector of a spectrum, still multiplied by the twist."""
        if self.twist.shape[0] == 1:
            return torch.fft.ifft(hat)
        return torch.fft.ifft(torch.fft.ifft(hat).mul_(self.inverse_twiddles), dim=0)


@dataclass(frozen=True)
class HalfLengthProduct:
    """x Mᵀ for the M of :func:`~.scaled_toeplitz.scaled_toeplitz_matmul`, square of size N.

    Args:
        transform: of length N.
        g_hat: the spectra of g, (N₁, r, 1, N₂).
        h_hat: the conjugates of those of h, (N₁, r, 1, N₂).
        entry: (N₁, 1, 1, N₂), the weights of x and the twist.
        middle: (N₁, 1, 1, N₂), ρ and the inverse twist; transposed in memory.
        exit: (N₁, 1, 1, N₂), the inverse twist and the weights of the convolutions; transposed in memory.
    """

    transform: TwoStepTransform
    g_hat: Tensor
    h_hat: Tensor
    entry: Tensor
    middle: Tensor
    exit: Tensor

    @staticmethod
    def of(
        g: Tensor, h: Tensor, a: Tensor, f: Tensor, b: Tensor, w: Tensor, middle: Tensor, whole: bool
    ) -> HalfLengthProduct:
        """The product with a square M of size N, whose generators g and h (r, N) are divided by a and b already."""
        transform = TwoStepTransform.of(g.shape[1], g, whole)
        first, second = transform.steps
        inverse_twist = transform.twist.conj().resolve_conj()

        def arranged(rows: Tensor) -> Tensor:
            return rows.reshape(-1, first, second).transpose(0, 1)[:, :, None]

        return HalfLengthProduct(
            transform,
            transform.forward(arranged(g) * transform.twist),
            transform.forward(arranged(h) * transform.twist).conj().resolve_conj(),
            (arranged(torch.complex(b, w * b)) * transform.twist).contiguous(),
            _transposed_in_memory(arranged(middle) * inverse_twist),
            _transposed_in_memory(arranged(torch.complex(a, -f * a)) * inverse_twist),
        )

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (B, N) for x (B, N)."""
        first, second = self.transform.steps
        c = x.reshape(1, -1, first, second).movedim(2, 0) * self.entry
        t = self.transform.inverse(self.transform.forward(c) * self.h_hat).mul_(self.middle)
        t.imag.zero_()  # in place, and so are the multiplications: fresh memory takes as long as a product
        hats = self.transform.forward(t.mul_(self.transform.twist)).mul_(self.g_hat)
        z = self.transform.inverse(hats if hats.shape[1] == 1 else hats.sum(1, keepdim=True))
        return z.mul_(self.exit).real.movedim(0, 2).reshape(x.shape)


@dataclass(frozen=True)
class HalfLengthProducts:
    """x Mᵀ by transforms in two steps for few rows, and by whole ones for more.

    Args:
        in_two_steps, whole: the same product.
    """

    in_two_steps: HalfLengthProduct
    whole: HalfLengthProduct

    @staticmethod
    def of(g: Tensor, h: Tensor, a: Tensor, f: Tensor, b: Tensor, w: Tensor, middle: Tensor) -> HalfLengthProducts:
        """Both, of the arguments of :meth:`HalfLengthProduct.of`."""
        return HalfLengthProducts(*(HalfLengthProduct.of(g, h, a, f, b, w, middle, whole) for whole in (False, True)))

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (B, N) for x (B, N)."""
        rows, rank = x.shape[0], self.whole.g_hat.shape[1]
        if two_steps_are_faster(rows, rank):
            return self.in_two_steps.matmul(x)
        at_once = rows_of_half_length(rank)
        if rows <= at_once:
            return self.whole.matmul(x)
        return torch.cat([self.whole.matmul(part) for part in x.split(at_once)])


def _transposed_in_memory(tensor: Tensor) -> Tensor:
    """The same (N₁, 1, 1, N₂), in memory as a transform along N₁ leaves its result: unlike layouts multiply slowly."""
    return tensor.transpose(0, 3).contiguous().transpose(0, 3)
