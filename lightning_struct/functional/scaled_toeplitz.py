"""Products with matrices of low displacement rank by 2 + 2r real Fourier transforms, the operators having no zeros.

M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ, A (m, m) and B (n, n) being subdiagonal with a corner and p = min(m, n). With no zero below the
diagonal, A = c D Z_f D⁻¹, where D = diag(a) holds the cumulative products of its subdiagonal, divided by c each. So

    M = D_a · [ Σᵢ K(Z_f, gᵢ/a) diag(ρ) K(Z_w, hᵢ/b)ᵀ ] · D_b

is a diagonally scaled Toeplitz-like matrix; ρ are the powers of the c of A times the c of B. Multiplying by K(Z_f, g) is the
circular convolution with [g, 0, f g], of a length of at least 2m, cut to its first m numbers: the corner costs nothing. Its
transpose is the correlation with the same vector. So the transpose of M is of the same form with the two sides exchanged,
which is what derivatives rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.few_rows import FewRowsProduct

# Odd factors of the lengths of transforms: the others are powers of two. Measured: larger primes are up to twice as slow.
_ODD_FACTORS = (1, 3, 5, 7, 9, 15, 25, 49, 125)
# Numbers that one batch of transforms works on at most, in training: more leave the cache, and are fresh memory at each step.
_CHUNK = 1 << 18
# Transforms of at least this length take longer to plan than to compute, on a CPU; and rows times rank up to which two steps
# with short plans are faster. Measured.
_LONG_PLAN, _FEW_ROWS = 512, 16


@cache
def transform_length(least: int) -> int:
    """The smallest length of at least ``least`` (and 2) that transforms quickly: an even number with small factors."""
    return min(odd << max(1, (-(-least // odd) - 1).bit_length()) for odd in _ODD_FACTORS)


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
    return _ScaledToeplitz.apply(x, G, H, a_subdiagonal, a_corner, b_subdiagonal, b_corner)[0]


class Similarity(NamedTuple):
    """A = c D Z_f D⁻¹, in float64. A is the same for any c: so it is taken as a constant, and the derivatives by D and f are
    those by A.

    Args:
        scale: (n,), the diagonal of D: 1 and s₁ ⋯ s_k / c^k.
        corner: (), f.
        trend: (), log c, the mean of log|s|.
    """

    scale: Tensor
    corner: Tensor
    trend: Tensor

    @staticmethod
    def of(subdiagonal: Tensor, corner: Tensor) -> Similarity:
        """Of a subdiagonal s (n - 1,) without a zero."""
        s, corner = subdiagonal.double(), corner.double()
        if not s.shape[0]:
            return Similarity(s.new_ones(1), corner.clone(), s.new_zeros(()))
        logarithms = s.abs().log()
        trend = logarithms.detach().mean()
        scale = F.pad((logarithms - trend).cumsum(0).exp() * s.detach().sign().cumprod(0), (1, 0), value=1.0)
        return Similarity(scale, corner * scale[-1] * torch.exp(-trend), trend)

    def tangent(self, subdiagonal: Tensor, of_subdiagonal: Tensor, of_corner: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives of D and f along tangents of s and the corner."""
        relative = F.pad((of_subdiagonal / subdiagonal.double()).cumsum(0), (1, 0))
        return self.scale * relative, of_corner * self.scale[-1] * torch.exp(-self.trend) + self.corner * relative[-1]

    def gradient(self, subdiagonal: Tensor, of_scale: Tensor, of_corner: Tensor) -> tuple[Tensor, Tensor]:
        """Those of s and the corner from those of D and f."""
        # Each s_i is a factor of all entries from the i-th on, and of f.
        from_the_end = (of_scale * self.scale)[1:].flip(0).cumsum(0).flip(0) + of_corner * self.corner
        return from_the_end / subdiagonal, of_corner * self.scale[-1] * torch.exp(-self.trend)


def _powers(a: Similarity, b: Similarity) -> Tensor:
    """ρ, (p,)."""
    places = torch.arange(min(a.scale.shape[0], b.scale.shape[0]), dtype=torch.float64, device=a.scale.device)
    return torch.exp((a.trend + b.trend) * places)


@dataclass(frozen=True)
class ScaledToeplitzSpectra:
    """What of x Mᵀ does not depend on x: for parameters that do not change.

    Args:
        left: the spectra of [gᵢ/a, 0, f gᵢ/a], (r, F).
        right: the conjugates of those of [hᵢ/b, 0, w hᵢ/b], (r, F').
        out_scale: a, (m,).
        in_scale: b, (n,).
        middle: ρ, (p,).
        few_rows: the same for few rows, on a CPU and where it can be had: M is square, of a size that transforms quickly.
    """

    left: Tensor
    right: Tensor
    out_scale: Tensor
    in_scale: Tensor
    middle: Tensor
    few_rows: FewRowsProduct | None

    @staticmethod
    def of(
        G: Tensor, H: Tensor, a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor
    ) -> ScaledToeplitzSpectra:
        """Of the matrix of :func:`scaled_toeplitz_matmul`."""
        a_side, b_side = Similarity.of(a_subdiagonal, a_corner), Similarity.of(b_subdiagonal, b_corner)
        a, f, b, w, middle = _in_dtype(G.dtype, a_side, b_side)
        g, h = G.mT / a, H.mT / b
        left, right = _spectra(_extended(g, f), _extended(h, w))
        size = a.shape[0]
        planned_anew = size == b.shape[0] == transform_length(2 * size) // 2 and 2 * size >= _LONG_PLAN
        few_rows = FewRowsProduct.of(g, h, a, f, b, w, middle) if planned_anew and G.device.type == "cpu" else None
        return ScaledToeplitzSpectra(left, right.conj().resolve_conj(), a, b, middle, few_rows)

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (..., m) of (..., n), in the dtype of x; computed in that of M."""
        return by_rows(self._multiply, x, self.in_scale.dtype).to(x.dtype)

    def _multiply(self, rows: Tensor) -> Tensor:
        # One that is exported or compiled must not depend on the number of rows.
        few_rows = None if torch.compiler.is_compiling() else self.few_rows
        if few_rows is not None and rows.shape[0] * self.left.shape[0] <= _FEW_ROWS:
            return few_rows.matmul(rows)
        return self.multiply_many(rows)

    def multiply_many(self, rows: Tensor) -> Tensor:
        """(B, m) of (B, n), as autograd, vmap and exporting can follow."""
        (n,), (m,), (p,) = self.in_scale.shape, self.out_scale.shape, self.middle.shape
        in_length, out_length = transform_length(2 * n), transform_length(2 * m)
        hats = torch.fft.rfft(rows * self.in_scale, n=in_length) * self.right[:, None]
        between = torch.fft.irfft(hats, n=in_length)[..., :p] * self.middle
        hats = torch.fft.rfft(between, n=out_length) * self.left[:, None]
        return torch.fft.irfft(_sum_of_ranks(hats), n=out_length)[..., :m] * self.out_scale


def by_rows(multiply: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., m) of x (..., n) by a function that makes (B, m) of (B, n) in that dtype, B >= 1: older torch refuses to
    transform nothing.
    """
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    product = multiply(rows) if rows.shape[0] else multiply(F.pad(rows, (0, 0, 0, 1)))[:0]
    return product.reshape(*x.shape[:-1], product.shape[-1])


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to which all are promoted, at least float32: there are no transforms of bfloat16 on a CPU."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _in_dtype(dtype: torch.dtype, a: Similarity, b: Similarity) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """a, f, b, w and ρ."""
    parts = (a.scale, a.corner, b.scale, b.corner, _powers(a, b))
    return tuple(part.to(dtype) for part in parts)  # type: ignore[return-value]


def _length_of(g: Tensor) -> int:
    return transform_length(2 * g.shape[-1])


def _sum_of_ranks(hats: Tensor) -> Tensor:
    return hats[0] if hats.shape[0] == 1 else hats.sum(0)


def _extended(g: Tensor, corner: Tensor) -> Tensor:
    """[g, 0, f g], (r, L) of (r, m) and ()."""
    between = transform_length(2 * g.shape[-1]) - 2 * g.shape[-1]
    parts = [g, g.new_zeros(g.shape[0], between), corner * g] if between else [g, corner * g]
    return torch.cat(parts, -1)


def _spectra(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Of (r, L) and (r, L'); by one transform where both lengths are the same, as on a CPU each one is planned anew."""
    if left.shape != right.shape:
        return torch.fft.rfft(left), torch.fft.rfft(right)
    both = torch.fft.rfft(torch.cat([left, right]))
    return both[: left.shape[0]], both[left.shape[0] :]


def _from_spectra(left: Tensor, right: Tensor, length: int, right_length: int) -> tuple[Tensor, Tensor]:
    """Back, likewise."""
    if length != right_length:
        return torch.fft.irfft(left, n=length), torch.fft.irfft(right, n=right_length)
    both = torch.fft.irfft(torch.cat([left, right]), n=length)
    return both[: left.shape[0]], both[left.shape[0] :]


def _product(*inputs: Tensor) -> Tensor:
    """:func:`scaled_toeplitz_matmul` by operations that are differentiable themselves."""
    return ScaledToeplitzSpectra.of(*inputs[1:]).multiply_many(inputs[0])


def _tangent(inputs: tuple[Tensor, ...], tangents: list[Tensor]) -> Tensor:
    """The derivative of the product along tangents of all inputs; differentiable itself."""
    (x, G, H, *operators), (dx, dG, dH, *of_operators) = inputs, tangents
    a_side, b_side = Similarity.of(*operators[:2]), Similarity.of(*operators[2:])
    a, f, b, w, middle = _in_dtype(x.dtype, a_side, b_side)
    da, df, db, dw = (
        tangent.to(x.dtype)
        for tangent in (
            *a_side.tangent(operators[0], *of_operators[:2]),
            *b_side.tangent(operators[2], *of_operators[2:]),
        )
    )
    in_length, out_length = transform_length(2 * b.shape[0]), transform_length(2 * a.shape[0])

    def with_tangent(G: Tensor, dG: Tensor, a: Tensor, da: Tensor, f: Tensor, df: Tensor) -> tuple[Tensor, Tensor]:
        g = G.mT / a
        dg = (dG.mT - g * da) / a
        moved = _extended(dg, f) + F.pad(df * g, (_length_of(g) - g.shape[1], 0))
        return torch.fft.rfft(_extended(g, f))[:, None], torch.fft.rfft(moved)[:, None]

    left, dleft = with_tangent(G, dG, a, da, f, df)
    right, dright = (hat.conj() for hat in with_tangent(H, dH, b, db, w, dw))
    hat, dhat = torch.fft.rfft(x * b, n=in_length), torch.fft.rfft(dx * b + x * db, n=in_length)
    hats, dhats = (
        torch.fft.rfft(torch.fft.irfft(product, n=in_length)[..., : middle.shape[0]] * middle, n=out_length)
        for product in (hat * right, dhat * right + hat * dright)
    )
    y, dy = (
        torch.fft.irfft(product.sum(0), n=out_length)[..., : a.shape[0]]
        for product in (hats * left, dhats * left + hats * dleft)
    )
    return dy * a + y * da


@dataclass(frozen=True)
class _Chunk:
    """Of the product with some rows of x, what a backward pass uses again.

    Args:
        rows: which ones.
        hat: the spectra of x b, (B, F').
        hats: the spectra of ρ C(hᵢ)ᵀ (x b), (r, B, F), by parts of the ranks.
        product: x Mᵀ / a, (B, m).
    """

    rows: slice
    hat: Tensor
    hats: list[Tensor]
    product: Tensor


def _chunks(x: Tensor, b: Tensor, right: Tensor, middle: Tensor, left: Tensor, m: int) -> Iterator[_Chunk]:
    """The product by the spectra of :class:`ScaledToeplitzSpectra`, in as little fresh memory as can be."""
    (count, n), p = x.shape, middle.shape[0]
    in_length, out_length = transform_length(2 * n), transform_length(2 * m)
    size, rank_size = _chunk_sizes(count, max(in_length, out_length))
    filled_up = x.new_zeros(size, in_length)
    for rows in _slices(count, size):
        entry = filled_up[: rows.stop - rows.start]
        torch.mul(x[rows], b, out=entry[:, :n])
        hat = torch.fft.rfft(entry)
        hats, terms = [], []
        for ranks in _slices(right.shape[0], rank_size):
            between = torch.fft.irfft(hat * right[ranks, None], n=in_length)
            if in_length != out_length:
                between, whole = between.new_empty(*between.shape[:2], out_length), between
                between[..., :p] = whole[..., :p]
            between[..., :p].mul_(middle)
            between[..., p:].zero_()
            hats.append(torch.fft.rfft(between))
            terms.append(_sum_of_ranks(hats[-1] * left[ranks, None]))
        yield _Chunk(rows, hat, hats, torch.fft.irfft(reduce(torch.add, terms), n=out_length)[:, :m])


def _chunk_sizes(count: int, length: int) -> tuple[int, int]:
    """Rows, and ranks, that are taken at once."""
    rows = max(1, min(count, _CHUNK // length))
    return rows, max(1, _CHUNK // (rows * length))


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _gradients(extended: Tensor, g: Tensor, scale: Tensor, corner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of G and f, and what is to be subtracted from that of a, from that (r, L) of [gᵢ, 0, f gᵢ]; g is G / a."""
    m = scale.shape[0]
    at_start, at_end = extended[:, :m], extended[:, -m:]
    of_g = (at_start + corner * at_end) / scale
    return of_g.mT, (of_g * g).sum(0), (g * at_end).sum()


class _ScaledToeplitz(torch.autograd.Function):
    """:func:`scaled_toeplitz_matmul` and, after the product, what the backward pass uses again."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        x, G, H, *operators = inputs
        sides = Similarity.of(*operators[:2]), Similarity.of(*operators[2:])
        a, f, b, w, middle = parts = _in_dtype(x.dtype, *sides)
        g, h = G.mT / a, H.mT / b
        left, right = _spectra(_extended(g, f), _extended(h, w))
        right.conj_physical_()
        y, kept = x.new_empty(x.shape[0], a.shape[0]), []
        for chunk in _chunks(x, b, right, middle, left, a.shape[0]):
            torch.mul(chunk.product, a, out=y[chunk.rows])
            kept += [chunk.product.contiguous(), chunk.hat.conj_physical_()]
            kept += [hats.conj_physical_() for hats in chunk.hats]
        return y, *sides[0], *sides[1], *parts, g, h, left, right, *kept

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], int]:
        return torch.func.vmap(lambda *inputs: (_product(*inputs),), in_dims)(*inputs), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.kept = len(output) - 1
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if u is None:
            return (None,) * 7
        inputs, kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        if torch.is_grad_enabled():  # to be differentiated again: what was kept has no graph
            return torch.func.vjp(_product, *inputs)[1](u)
        x, a_subdiagonal, b_subdiagonal = inputs[0], inputs[3], inputs[5]
        a_side, b_side = Similarity(*kept[:3]), Similarity(*kept[3:6])
        a, f, b, w, middle, g, h, left, right, *of_chunks = kept[6:]
        dx, of_left, of_right = torch.empty_like(x), torch.zeros_like(left), torch.zeros_like(right)
        da, db = torch.zeros_like(a), torch.zeros_like(b)
        rest = iter(of_chunks)
        # The transpose of M is of the same form.
        for back in _chunks(u, a, torch.conj_physical(left), middle, torch.conj_physical(right), x.shape[1]):
            rows, ranks = back.rows, 0
            product, hat = next(rest), next(rest)
            torch.mul(back.product, b, out=dx[rows])
            da += (u[rows] * product).sum(0)
            db += (x[rows] * back.product).sum(0)
            for back_hats, hats in zip(back.hats, rest, strict=False):
                part = slice(ranks, ranks := ranks + len(hats))
                of_left[part] += (hats * back.hat).sum(1)
                of_right[part] += (back_hats * hat).sum(1)
        of_g, of_h = _from_spectra(of_left, of_right.conj_physical_(), _length_of(g), _length_of(h))
        dG, a_part, df = _gradients(of_g, g, a, f)
        dH, b_part, dw = _gradients(of_h, h, b, w)
        of_a, of_b = a_side.gradient(a_subdiagonal, da - a_part, df), b_side.gradient(b_subdiagonal, db - b_part, dw)
        return dx, dG, dH, *(gradient.to(x.dtype) for gradient in (*of_a, *of_b))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        moved = [
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(ctx.saved_tensors[:7], tangents, strict=True)
        ]
        return _tangent(ctx.saved_tensors[:7], moved), *(None,) * ctx.kept
