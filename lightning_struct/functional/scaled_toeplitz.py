"""Products with diagonally scaled Toeplitz-like matrices, in 2 + 2r real Fourier transforms.

The matrices are

    M = D_a · [ Σᵢ K(Z_f, gᵢ/a) diag(ρ) K(Z_w, hᵢ/b)ᵀ ] · D_b

with p = min(m, n) columns in the Krylov matrices. Multiplying by K(Z_f, g) is the circular convolution with [g, 0, f g], of a
length of at least 2m, cut to its first m numbers: the corner costs nothing. Its transpose is the correlation with the same
vector. So the transpose of M is of the same form with the two sides exchanged, which is what derivatives rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

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


def transform_length(least: int) -> int:
    """The smallest length of at least ``least`` (and 2) that transforms quickly: an even number with small factors."""
    return min(odd << max(1, (-(-least // odd) - 1).bit_length()) for odd in _ODD_FACTORS)


def scaled_toeplitz_matmul(
    x: Tensor,
    G: Tensor,
    H: Tensor,
    a_scale: Tensor,
    a_corner: Tensor,
    b_scale: Tensor,
    b_corner: Tensor,
    middle: Tensor,
) -> Tensor:
    """x Mᵀ, differentiable in all but ``middle``, as often as wanted.

    Args:
        x: (B, n), float32 or float64, B >= 1.
        G: (m, r), in the dtype of x, as all others are unless they are float64. Its columns are gᵢ.
        H: (n, r).
        a_scale: a, (m,), without a zero.
        a_corner: f, ().
        b_scale: b, (n,), without a zero.
        b_corner: w, ().
        middle: ρ, (p,). Taken as a constant: no derivative is computed.

    Returns:
        (B, m), in the dtype of x.
    """
    return _ScaledToeplitz.apply(x, G, H, a_scale, a_corner, b_scale, b_corner, middle)[0]


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
        G: Tensor, H: Tensor, a_scale: Tensor, a_corner: Tensor, b_scale: Tensor, b_corner: Tensor, middle: Tensor
    ) -> ScaledToeplitzSpectra:
        """Of the matrix of :func:`scaled_toeplitz_matmul`, all in the dtype of G."""
        a, f, b, w, middle = (t.to(G.dtype) for t in (a_scale, a_corner, b_scale, b_corner, middle))
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
    """The derivative of the product along tangents of all inputs but ``middle``; differentiable itself."""
    x, G, H, a, f, b, w, middle = (tensor.to(inputs[0].dtype) for tensor in inputs)
    dx, dG, dH, da, df, db, dw = (tensor.to(x.dtype) for tensor in tangents)
    in_length, out_length = transform_length(2 * b.shape[0]), transform_length(2 * a.shape[0])

    def with_tangent(G: Tensor, dG: Tensor, a: Tensor, da: Tensor, f: Tensor, df: Tensor) -> tuple[Tensor, Tensor]:
        g = G.mT / a
        dg = (dG.mT - g * da) / a
        moved = _extended(dg, f) + F.pad(df * g, (transform_length(2 * g.shape[1]) - g.shape[1], 0))
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
    """Those of G, a and f, from that (r, L) of [gᵢ, 0, f gᵢ]; g is G / a."""
    m = scale.shape[0]
    at_start, at_end = extended[:, :m], extended[:, -m:]
    of_g = (at_start + corner * at_end) / scale
    return of_g.mT, -(of_g * g).sum(0), (g * at_end).sum()


class _ScaledToeplitz(torch.autograd.Function):
    """:func:`scaled_toeplitz_matmul` and, after the product, what the backward pass uses again."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        x, G, H = inputs[:3]
        a, f, b, w, middle = (tensor.to(x.dtype) for tensor in inputs[3:])
        left, right = _spectra(_extended(G.mT / a, f), _extended(H.mT / b, w))
        right.conj_physical_()
        y, kept = x.new_empty(x.shape[0], a.shape[0]), [left, right]
        for chunk in _chunks(x, b, right, middle, left, a.shape[0]):
            torch.mul(chunk.product, a, out=y[chunk.rows])
            kept += [chunk.product.contiguous(), chunk.hat.conj_physical_()]
            kept += [hats.conj_physical_() for hats in chunk.hats]
        return y, *kept

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], int]:
        return torch.func.vmap(lambda *inputs: (_product(*inputs),), in_dims)(*inputs), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.kept = len(output) - 1
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if u is None:
            return (None,) * 8
        inputs, kept = ctx.saved_tensors[:8], ctx.saved_tensors[8:]
        if torch.is_grad_enabled():  # to be differentiated again: what was kept has no graph
            return *torch.func.vjp(lambda *others: _product(*others, inputs[7]), *inputs[:7])[1](u), None
        x, G, H = inputs[:3]
        a, f, b, w, middle = (tensor.to(x.dtype) for tensor in inputs[3:])
        left, right, *of_chunks = kept
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
        g, h = G.mT / a, H.mT / b
        of_g, of_h = _from_spectra(of_left, of_right.conj_physical_(), _length_of(g), _length_of(h))
        dG, a_part, df = _gradients(of_g, g, a, f)
        dH, b_part, dw = _gradients(of_h, h, b, w)
        gradients = (dx, dG, dH, da + a_part, df, db + b_part, dw)
        return *(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, inputs, strict=False)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:8]
        moved = [
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(inputs[:7], tangents, strict=False)
        ]
        return _tangent(inputs, moved), *(None,) * ctx.kept
