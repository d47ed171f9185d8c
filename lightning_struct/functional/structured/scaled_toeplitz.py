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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.structured.two_step_transform import FewRowsProduct

# Odd factors of the lengths of transforms: the others are powers of two. Measured: larger primes are up to twice as slow.
_ODD_FACTORS = (1, 3, 5, 7, 9, 15, 25, 49, 125)
# Numbers that one batch of transforms works on at most: of more, ranks and then rows are taken one part after the other.
_CHUNK = 1 << 19
# Transforms of at least this length take longer to plan than to compute, on a CPU; and rows times rank up to which two steps
# with short plans are faster. Measured.
_LONG_PLAN, _FEW_ROWS = 512, 16


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
    inputs = (x, G, H, a_subdiagonal, a_corner, b_subdiagonal, b_corner)
    return _product(*inputs) if torch.compiler.is_compiling() else _ScaledToeplitz.apply(*inputs)[0]


class Similarity(NamedTuple):
    """A = c D Z_f D⁻¹, in float64. A is the same for any c: so it is taken as a constant, and the derivatives by D and f are
    those by A.

    Args:
        scale: (..., n), the diagonal of D: 1 and s₁ ⋯ s_k / c^k.
        corner: (...), f.
        last: (...), the derivative of f by the corner of A.
        trend: (...), log c, the mean of log|s|.
    """

    scale: Tensor
    corner: Tensor
    last: Tensor
    trend: Tensor

    @staticmethod
    def of(subdiagonal: Tensor, corner: Tensor) -> Similarity:
        """Of a subdiagonal s (..., n - 1) without a zero and a corner (...)."""
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
        """The derivatives of D and f along tangents of s and the corner."""
        relative = F.pad((of_subdiagonal / subdiagonal.double()).cumsum(-1), (1, 0))
        return self.scale * relative, of_corner * self.last + self.corner * relative[..., -1]

    def gradient(self, subdiagonal: Tensor, of_scale: Tensor, of_corner: Tensor) -> tuple[Tensor, Tensor]:
        """Those of s and the corner from those of D and f."""
        # Each s_i is a factor of all entries from the i-th on, and of f.
        from_the_end = (of_scale * self.scale)[..., 1:].flip(-1).cumsum(-1).flip(-1) + (of_corner * self.corner)[
            ..., None
        ]
        return from_the_end / subdiagonal, of_corner * self.last


class _Side(NamedTuple):
    """What of M belongs to A and G, or to B and H, in the dtype of M; or to both, one behind the other, if M is square.

    That halves the number of small operations, and on a CPU each call of a transform is planned anew.

    Args:
        subdiagonal: (k, m - 1), of the k = 1 or 2 operators.
        similarity: of these.
        scale: (k, m), a.
        corner: (k, 1, 1), f.
        g: (k, r, m), gᵢ/a.
        hats: (k, r, F), the spectra of [g, 0, f g].
    """

    subdiagonal: Tensor
    similarity: Similarity
    scale: Tensor
    corner: Tensor
    g: Tensor
    hats: Tensor

    @staticmethod
    def of(G: Tensor, subdiagonal: Tensor, corner: Tensor) -> _Side:
        """Of (k, m, r), (k, m - 1) and (k,)."""
        similarity = Similarity.of(subdiagonal, corner)
        scale, corner = similarity.scale.to(G.dtype), similarity.corner.to(G.dtype)[:, None, None]
        g = G.mT / scale[:, None]
        return _Side(subdiagonal, similarity, scale, corner, g, torch.fft.rfft(_extended(g, corner * g)))

    def gradients(self, of_hats: Tensor, of_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of G, of the subdiagonal and of the corner, from those of the spectra and what a takes part in beside."""
        m = self.scale.shape[1]
        extended = torch.fft.irfft(of_hats, n=_length(of_hats))
        at_start, at_end = extended[..., :m], extended[..., -m:]
        of_G = (at_start + self.corner * at_end) / self.scale[:, None]
        of_scale = of_scale - (of_G * self.g).sum(1)
        return of_G.mT, *self.similarity.gradient(self.subdiagonal, of_scale, (self.g * at_end).sum((1, 2)))


def _pairs(parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """(G, subdiagonal, corner) of both sides stacked, if M is square, else of one side and of the other."""
    G, H, a_subdiagonal, a_corner, b_subdiagonal, b_corner = parameters
    left, right = (G, a_subdiagonal, a_corner), (H, b_subdiagonal, b_corner)
    if G.shape == H.shape:
        return [tuple(torch.stack(pair) for pair in zip(left, right, strict=True))]
    return [tuple(tensor[None] for tensor in side) for side in (left, right)]


def _extended(head: Tensor, tail: Tensor) -> Tensor:
    """(..., L) of (..., m) and (..., m), with zeros between."""
    between = transform_length(2 * head.shape[-1]) - 2 * head.shape[-1]
    return torch.cat([head, tail] if not between else [head, head.new_zeros(*head.shape[:-1], between), tail], -1)


def _powers(sides: list[_Side]) -> Tensor:
    """ρ, (p,)."""
    trend = sides[0].similarity.trend[0] + sides[-1].similarity.trend[-1]
    p = min(side.scale.shape[1] for side in sides)
    return torch.exp(trend * torch.arange(p, dtype=trend.dtype, device=trend.device)).to(sides[0].scale.dtype)


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
        sides = [_Side.of(*pair) for pair in _pairs((G, H, a_subdiagonal, a_corner, b_subdiagonal, b_corner))]
        (a, f, g, left), (b, w, h, right) = ([tensor[k] for tensor in sides[k][2:]] for k in (0, -1))
        middle, size = _powers(sides), a.shape[0]
        planned_anew = size == b.shape[0] == transform_length(2 * size) // 2 and 2 * size >= _LONG_PLAN
        few_rows = FewRowsProduct.of(g, h, a, f, b, w, middle) if planned_anew and G.device.type == "cpu" else None
        return ScaledToeplitzSpectra(left, right.conj().resolve_conj(), a, b, middle, few_rows)

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (..., m) of (..., n), in the dtype of x; computed in that of M."""
        return by_rows(self._multiply, x, self.in_scale.dtype).to(x.dtype)

    def _multiply(self, rows: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # what is exported or compiled must not depend on the number of rows
            return self.multiply_plainly(rows)
        if self.few_rows is not None and rows.shape[0] * self.left.shape[0] <= _FEW_ROWS:
            return self.few_rows.matmul(rows)
        return _ManyRows.apply(rows, self.in_scale, self.right, self.middle, self.left, self.out_scale)

    def multiply_plainly(self, rows: Tensor) -> Tensor:
        """(B, m) of (B, n), by operations that are differentiable themselves."""
        return _multiply_plainly(rows, self.in_scale, self.right, self.middle, self.left, self.out_scale)


def by_rows(multiply: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., m) of x (..., n) by a function that makes (B, m) of (B, n) in that dtype, B >= 1: older torch refuses to
    transform nothing.
    """
    rows = (x if x.ndim == 2 else x.reshape(-1, x.shape[-1])).to(dtype)
    product = multiply(rows) if rows.shape[0] else multiply(F.pad(rows, (0, 0, 0, 1)))[:0]
    return product if x.ndim == 2 else product.reshape(*x.shape[:-1], product.shape[-1])


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to which all are promoted, at least float32: there are no transforms of bfloat16 on a CPU."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _sum_of_ranks(hats: Tensor) -> Tensor:
    return hats[0] if hats.shape[0] == 1 else hats.sum(0)


def _product(*inputs: Tensor) -> Tensor:
    """:func:`scaled_toeplitz_matmul` by operations that are differentiable themselves."""
    return ScaledToeplitzSpectra.of(*inputs[1:]).multiply_plainly(inputs[0])


def _tangent(inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    """The derivative of the product along tangents of all inputs; differentiable itself."""
    x, dx = inputs[0], tangents[0]
    sides, moved = [], []
    for pair, along in zip(_pairs(inputs[1:]), _pairs(tangents[1:]), strict=True):
        side = _Side.of(*pair)
        dscale, dcorner = (t.to(x.dtype) for t in side.similarity.tangent(pair[1], *along[1:]))
        dg = (along[0].mT - side.g * dscale[:, None]) / side.scale[:, None]
        hats = torch.fft.rfft(_extended(dg, side.corner * dg + dcorner[:, None, None] * side.g))
        sides.append(side)
        moved.append((dscale, hats))
    a, b, middle = sides[0].scale[0], sides[-1].scale[-1], _powers(sides)
    (da, dleft), (db, dright) = ([tensor[k] for tensor in moved[k]] for k in (0, -1))
    left, dleft = sides[0].hats[0, :, None], dleft[:, None]
    right, dright = sides[-1].hats[-1, :, None].conj(), dright[:, None].conj()
    in_length, out_length = _length(right), _length(left)
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


def _gradients(inputs: Sequence[Tensor], u: Tensor) -> tuple[Tensor, ...]:
    """Those of all inputs from the gradient u of the product; differentiable themselves."""
    x = inputs[0]
    sides = [_Side.of(*pair) for pair in _pairs(inputs[1:])]
    a, b, middle = sides[0].scale[0], sides[-1].scale[-1], _powers(sides)
    left, right = sides[0].hats[0, :, None], sides[-1].hats[-1, :, None]
    in_length, out_length = _length(right), _length(left)
    hat, back_hat = torch.fft.rfft(x * b, n=in_length), torch.fft.rfft(u * a, n=out_length)
    hats, back_hats = (
        torch.fft.rfft(torch.fft.irfft(hat_ * to.conj(), n=length)[..., : middle.shape[0]] * middle, n=next_length)
        for hat_, to, length, next_length in (
            (hat, right, in_length, out_length),
            (back_hat, left, out_length, in_length),
        )
    )
    product = torch.fft.irfft((hats * left).sum(0), n=out_length)[..., : a.shape[0]]
    back = torch.fft.irfft((back_hats * right).sum(0), n=in_length)[..., : b.shape[0]]
    of_hats = (hats.conj() * back_hat).sum(1), (back_hats.conj() * hat).sum(1)
    of_scales = (u * product).sum(0), (x * back).sum(0)
    if len(sides) == 1:
        return back * b, *_of_parameters(sides, [torch.stack(of_hats)], [torch.stack(of_scales)])
    return back * b, *_of_parameters(sides, [of[None] for of in of_hats], [of[None] for of in of_scales])


def _of_parameters(sides: list[_Side], of_hats: Sequence[Tensor], of_scales: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of G, H and the operators from those of the spectra and of the scales of each side."""
    gradients = [
        [gradient.to(side.scale.dtype) for gradient in side.gradients(hats, scale)]
        for side, hats, scale in zip(sides, of_hats, of_scales, strict=True)
    ]
    (dG, *of_A), (dH, *of_B) = ([gradient[k] for gradient in gradients[k]] for k in (0, -1))
    return dG, dH, *of_A, *of_B


def _length(hats: Tensor) -> int:
    """That of the transforms, which is even."""
    return 2 * (hats.shape[-1] - 1)


def _chunk_sizes(count: int, left: Tensor, right: Tensor) -> tuple[int, int]:
    """Rows of x, and ranks, that are taken at once."""
    length = max(_length(left), _length(right))
    rows = max(1, min(count, _CHUNK // length))
    return rows, max(1, _CHUNK // (rows * length))


def _multiply_plainly(
    x: Tensor, in_scale: Tensor, right: Tensor, middle: Tensor, left: Tensor, out_scale: Tensor
) -> Tensor:
    """The product by the parts of :class:`ScaledToeplitzSpectra`."""
    (m,), (p,), in_length, out_length = out_scale.shape, middle.shape, _length(right), _length(left)
    between = torch.fft.irfft(torch.fft.rfft(x * in_scale, n=in_length) * right[:, None], n=in_length)
    hats = torch.fft.rfft(between[..., :p] * middle, n=out_length) * left[:, None]
    return torch.fft.irfft(_sum_of_ranks(hats), n=out_length)[..., :m] * out_scale


def _multiply(
    x: Tensor,
    in_scale: Tensor,
    right: Tensor,
    middle: Tensor,
    left: Tensor,
    m: int,
    ranks: int,
    kept: list[Tensor] | None = None,
) -> Tensor:
    """The same but for the last scale, in as little fresh memory as can be.

    Args:
        ranks: how many are taken at once.
        kept: a list to which the spectra of what is transformed are appended: those of the scaled x, (B, F'), and those of
            ρ C(hᵢ)ᵀ x, (ranks, B, F), for so many ranks after the other.
    """
    n, p, in_length, out_length = x.shape[1], middle.shape[0], _length(right), _length(left)
    entry = x.new_empty(x.shape[0], in_length)
    torch.mul(x, in_scale, out=entry.narrow(1, 0, n))
    entry.narrow(1, n, in_length - n).zero_()
    hat = torch.fft.rfft(entry)
    if kept is not None:
        kept.append(hat)
    total: Tensor | None = None
    for to, fro in zip(right[:, None].split(ranks), left[:, None].split(ranks), strict=True):
        between = torch.fft.irfft(hat * to, n=in_length)
        if in_length == out_length:
            between.narrow(-1, 0, p).mul_(middle)
            between.narrow(-1, p, out_length - p).zero_()
        else:
            between = F.pad(between.narrow(-1, 0, p) * middle, (0, out_length - p))
        hats = torch.fft.rfft(between)
        if kept is not None:
            kept.append(hats)
            hats = hats * fro
        else:
            hats.mul_(fro)
        total = _sum_of_ranks(hats) if total is None else total.add_(_sum_of_ranks(hats))
    assert total is not None
    return torch.fft.irfft(total, n=out_length).narrow(1, 0, m)


@cache
def _keep_freed_memory() -> None:
    """Let glibc's malloc keep what a step has freed for the next one, as it does once a tensor of 16 to 32 MiB was freed.

    Before that it returns a few MiB to the system several times in a step, only to ask for them again: touching fresh memory
    was a quarter of the time of a step (n = 4096, 64 rows). Elsewhere this does nothing. Once in a process.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


class _ManyRows(torch.autograd.Function):
    """:func:`_multiply_plainly` by :func:`_multiply`, differentiable in x alone."""

    @staticmethod
    def forward(x: Tensor, in_scale: Tensor, right: Tensor, middle: Tensor, left: Tensor, out_scale: Tensor) -> Tensor:
        _keep_freed_memory()
        y = x.new_empty(x.shape[0], out_scale.shape[0])
        size, ranks = _chunk_sizes(len(x), left, right)
        for rows, y_rows in zip(x.split(size), y.split(size), strict=True):
            torch.mul(_multiply(rows, in_scale, right, middle, left, y.shape[1], ranks), out_scale, out=y_rows)
        return y

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        return torch.func.vmap(_multiply_plainly, in_dims)(*inputs), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        in_scale, right, middle, left, out_scale = ctx.saved_tensors
        # The transpose of M is of the same form.
        dx = _ManyRows.apply(u, out_scale, torch.conj_physical(left), middle, torch.conj_physical(right), in_scale)
        return dx, *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return _ManyRows.apply(dx, *ctx.saved_tensors)


class _ScaledToeplitz(torch.autograd.Function):
    """:func:`scaled_toeplitz_matmul` and, after the product, what the backward pass uses again."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Any, ...]:
        _keep_freed_memory()
        x, *parameters = inputs
        sides = [_Side.of(*pair) for pair in _pairs(parameters)]
        left, right, middle = sides[0].hats[0], torch.conj_physical(sides[-1].hats[-1]), _powers(sides)
        a, b = sides[0].scale[0], sides[-1].scale[-1]
        y, kept = x.new_empty(x.shape[0], a.shape[0]), []
        size, ranks = _chunk_sizes(len(x), left, right)
        for rows, y_rows in zip(x.split(size), y.split(size), strict=True):
            spectra: list[Tensor] = []
            product = _multiply(rows, b, right, middle, left, a.shape[0], ranks, spectra)
            torch.mul(product, a, out=y_rows)
            kept += [product, *(spectrum.conj_physical_() for spectrum in spectra)]
        return y, (sides, middle), *kept

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (torch.func.vmap(_product, in_dims)(*inputs), None), (0, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Any, ...]) -> None:
        # What is as small as the parameters is kept aside: each tensor that is saved takes microseconds.
        _, ctx.small, *large = output
        ctx.outputs = len(output)
        ctx.mark_non_differentiable(*large)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *large)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if u is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        inputs, rest = saved[:7], iter(saved[7:])
        # To be differentiated again, for which what was kept has no graph; or under vmap, where nothing is kept.
        if torch.is_grad_enabled() or ctx.small is None:
            return _gradients(inputs, u)
        x, (sides, middle) = inputs[0], ctx.small
        a, b = sides[0].scale[0], sides[-1].scale[-1]
        of_hats, of_scales = (
            [torch.zeros_like(tensor) for tensor in tensors]
            for tensors in ([side.hats for side in sides], [side.scale for side in sides])
        )
        (of_left, da), (of_right, db) = ((of_hats[k][k], of_scales[k][k]) for k in (0, -1))
        dx = torch.empty_like(x)
        # The transpose of M is of the same form.
        left, right = torch.conj_physical(sides[0].hats[0]), sides[-1].hats[-1]
        size, ranks = _chunk_sizes(len(x), left, right)
        for x_rows, u_rows, dx_rows in zip(x.split(size), u.split(size), dx.split(size), strict=True):
            product, hat = next(rest), next(rest)
            spectra: list[Tensor] = []
            back = _multiply(u_rows, a, left, middle, right, x.shape[1], ranks, spectra)
            back_hat, *back_hats = spectra
            torch.mul(back, b, out=dx_rows)
            da += (u_rows * product).sum(0)
            db += (x_rows * back).sum(0)
            for part, to_left, to_right in zip(back_hats, of_left.split(ranks), of_right.split(ranks), strict=True):
                to_left += (next(rest) * back_hat).sum(1)
                to_right += (part * hat).sum(1)
        of_right.conj_physical_()
        return dx, *_of_parameters(sides, of_hats, of_scales)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        moved = [
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(ctx.saved_tensors[:7], tangents, strict=True)
        ]
        return _tangent(ctx.saved_tensors[:7], moved), *(None,) * (ctx.outputs - 1)
