"""Products with diagonally scaled Toeplitz-like matrices, in 2 + 2r real Fourier transforms.

The matrices are

    M = fold(D_out) · Σᵢ C(gᵢ) · diag(ρ) · C(hᵢ)ᵀ · fold(D_in)ᵀ,

C(v) t being the linear convolution of v and t. With ``in_weights`` = [q, w q] the folded C(hᵢ)ᵀ is K(Z_w, hᵢ)ᵀ diag(q),
and with ``out_weights`` = [d, f d] the folded C(gᵢ) is diag(d) K(Z_f, gᵢ): the corners w and f cost nothing. M is
multilinear in x, g, h and the two weights, and its transpose is of the same form with the two sides exchanged; that is what
derivatives and double derivatives rest on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.few_rows import FewRowsProduct

# Odd factors of the lengths of transforms: the others are powers of two. Measured: larger primes are up to twice as slow.
_ODD_FACTORS = (1, 3, 5, 7, 9, 15, 25, 49, 125)
# Numbers that one batch of transforms works on at most, where ranks can be taken one after the other: more leave the cache.
_CHUNK = 1 << 19
# Transforms of at least this length take longer to plan than to compute, on a CPU; and rows times rank up to which two steps
# with short plans are faster. Measured.
_LONG_PLAN, _FEW_ROWS = 512, 16


def transform_length(least: int) -> int:
    """The smallest length of at least ``least`` (and 2) that transforms quickly: an even number with small factors."""
    return min(odd << max(1, (-(-least // odd) - 1).bit_length()) for odd in _ODD_FACTORS)


def scaled_toeplitz_matmul(
    x: Tensor, g: Tensor, h: Tensor, in_weights: Tensor, out_weights: Tensor, middle: Tensor
) -> Tensor:
    """x Mᵀ, differentiable in all but ``middle``, as often as wanted.

    Args:
        x: (B, n), float32 or float64, as are all others.
        g: (r, m).
        h: (r, n).
        in_weights: (L,): that of x and, from n on, of x once more; 0 from n + p - 1 on.
        out_weights: (L,): that of the first m outputs of the convolution and, from m on, of those that are added to them.
        middle: (L,): ρ, of which p = min(m, n) numbers are not 0. Taken as a constant: no derivative is computed.

    L is at least max(m, n) + p - 1, and even: see :func:`transform_length`.

    Returns:
        (B, m).
    """
    return _ScaledToeplitz.apply(x, g, h, in_weights, out_weights, middle)[0]


def with_corner(scale: Tensor, corner: Tensor, p: int, length: int) -> Tensor:
    """The weights (L,) that make a convolution diag(scale) K(Z_corner, v)[:, :p]: ``scale`` is (n,), ``corner`` ()."""
    return torch.cat([scale, corner * scale[: p - 1], scale.new_zeros(length - scale.shape[0] - p + 1)])


def with_zeros(vector: Tensor, length: int) -> Tensor:
    """(p,) followed by zeros up to L."""
    return torch.nn.functional.pad(vector, (0, length - vector.shape[0]))


def spectra(generators: Tensor, length: int) -> Tensor:
    """The real Fourier transforms (r, L/2 + 1) of (r, n), zeros being added up to L."""
    return torch.fft.rfft(generators, n=length)


def generator_spectra(g: Tensor, h: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Those of g, and the conjugates of those of h; by one transform if M is square, as on a CPU each one is planned anew."""
    if g.shape[-1] == h.shape[-1]:
        g_hat, h_hat = spectra(torch.cat([g, h]), length).split(g.shape[0])
    else:
        g_hat, h_hat = spectra(g, length), spectra(h, length)
    return g_hat, conjugate(h_hat)


def conjugate(hat: Tensor) -> Tensor:
    """In memory: torch would do it anew at each use."""
    return hat.conj().resolve_conj()


def multiply_by_spectra(
    x: Tensor,
    g_hat: Tensor,
    h_hat: Tensor,
    in_weights: Tensor,
    out_weights: Tensor,
    middle: Tensor,
    m: int,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x Mᵀ by the spectra ``g_hat`` of g and ``h_hat`` of the conjugates of h, (r, L/2 + 1).

    Args:
        in_place: whether to write into memory of its own: a third less of it is touched, but autograd, vmap and exporting
            cannot follow.

    Returns:
        The product (B, m), the spectrum of the weighted x (B, L/2 + 1), those of the r vectors in the middle
        (r, B, L/2 + 1), and the convolutions (B, L) before they are folded.
    """
    x_hat = torch.fft.rfft(_unfold(x, in_weights, in_place), n=in_weights.shape[-1])
    middle_hat = _through(x_hat, h_hat, middle, in_place)
    convolved = _combine(middle_hat, g_hat, in_weights.shape[-1])
    return _fold(convolved, out_weights, m, in_place), x_hat, middle_hat, convolved


@dataclass(frozen=True)
class ScaledToeplitzSpectra:
    """What of x Mᵀ does not depend on x: for parameters that do not change.

    Args:
        g_hat: the spectra of g, (r, L/2 + 1).
        h_hat: the conjugates of the spectra of h, (r, L/2 + 1).
        in_weights, out_weights, middle: as in :func:`scaled_toeplitz_matmul`.
        out_features: m.
        few_rows: the same for few rows, on a CPU and where it can be had: M is square, of a size that transforms quickly.
    """

    g_hat: Tensor
    h_hat: Tensor
    in_weights: Tensor
    out_weights: Tensor
    middle: Tensor
    out_features: int
    few_rows: FewRowsProduct | None

    @staticmethod
    def of(g: Tensor, h: Tensor, in_weights: Tensor, out_weights: Tensor, middle: Tensor) -> ScaledToeplitzSpectra:
        """Of the matrix of :func:`scaled_toeplitz_matmul`."""
        length = middle.shape[-1]
        g_hat, h_hat = generator_spectra(g, h, length)
        square = g.shape[-1] == h.shape[-1] == length // 2
        planned_anew = square and length >= _LONG_PLAN and g.device.type == "cpu"
        few_rows = FewRowsProduct.of(g, h, in_weights, out_weights, middle) if planned_anew else None
        return ScaledToeplitzSpectra(g_hat, h_hat, in_weights, out_weights, middle, g.shape[-1], few_rows)

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (..., m) of (..., n), in the dtype of x; computed in that of M."""
        return by_rows(self._multiply, x, self.in_weights.dtype).to(x.dtype)

    def _multiply(self, rows: Tensor) -> Tensor:
        # One that is exported or compiled must not depend on the number of rows.
        few_rows = None if torch.compiler.is_compiling() else self.few_rows
        if few_rows is not None and rows.shape[0] * self.g_hat.shape[0] <= _FEW_ROWS:
            return few_rows.matmul(rows)
        return multiply_by_spectra(
            rows, self.g_hat, self.h_hat, self.in_weights, self.out_weights, self.middle, self.out_features
        )[0]


def check_generators(G: Tensor, H: Tensor, x: Tensor | None = None) -> None:
    """Raise what is wrong with the shapes and dtypes of G (m, r), H (n, r) and x (..., n), by name.

    Raises:
        ValueError: G or H is no matrix or has no row or column, their ranks differ, or x does not have n columns.
        TypeError: one of them does not hold real floating-point numbers.
    """
    if G.ndim != 2 or H.ndim != 2 or G.shape[1] != H.shape[1] or 0 in (*G.shape, *H.shape):
        raise ValueError(
            f"G and H must be of shapes (m, r) and (n, r), of one rank r >= 1, not {tuple(G.shape)} and {tuple(H.shape)}."
        )
    if x is not None and (x.ndim == 0 or x.shape[-1] != H.shape[0]):
        raise ValueError(f"x must be of shape (..., {H.shape[0]}), as H has {H.shape[0]} rows, not {tuple(x.shape)}.")
    for name, tensor in (("G", G), ("H", H), ("x", x)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{name} must hold real floating-point numbers, not {tensor.dtype}: use {name}.float().")


def by_rows(multiply: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., m) of x (..., n) by a function that makes (B, m) of (B, n) in that dtype, B >= 1: older torch refuses to
    transform nothing.
    """
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    product = multiply(rows) if rows.shape[0] else multiply(torch.nn.functional.pad(rows, (0, 0, 0, 1)))[:0]
    return product.reshape(*x.shape[:-1], product.shape[-1])


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to which all are promoted, at least float32: there are no transforms of bfloat16 on a CPU."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _unfold(x: Tensor, weights: Tensor, in_place: bool) -> Tensor:
    """[x w₁, x w₂] (..., up to L), w₁ being the first n weights and w₂ the next."""
    n = x.shape[-1]
    again = min(n, weights.shape[-1] - n)
    if not in_place:
        return torch.cat([x * weights[:n], x[..., :again] * weights[n : n + again]], dim=-1)
    unfolded = x.new_empty(*x.shape[:-1], n + again)
    torch.mul(x, weights[:n], out=unfolded[..., :n])
    torch.mul(x[..., :again], weights[n : n + again], out=unfolded[..., n:])
    return unfolded


def _fold(z: Tensor, weights: Tensor, size: int, in_place: bool) -> Tensor:
    """The transpose of :func:`_unfold`: (..., size) of (..., L)."""
    again = min(size, weights.shape[-1] - size)
    folded = z[..., :size] * weights[:size]
    head, tail, tail_weights = folded[..., :again], z[..., size : size + again], weights[size : size + again]
    if in_place:
        head.addcmul_(tail, tail_weights)
    else:
        head += tail * tail_weights
    return folded


def _chunks(rank: int, numbers: int) -> list[slice]:
    size = max(1, _CHUNK // max(1, numbers))
    return [slice(start, start + size) for start in range(0, rank, size)]


def _through(x_hat: Tensor, h_hat: Tensor, middle: Tensor, in_place: bool) -> Tensor:
    """Spectra (r, B, F) of the r correlations diag(ρ) C(hᵢ)ᵀ x of a spectrum (B, F)."""
    length = middle.shape[-1]
    parts = []
    for part in _chunks(h_hat.shape[0], x_hat.shape[0] * length):
        correlated = torch.fft.irfft(x_hat * h_hat[part, None], n=length)
        parts.append(torch.fft.rfft(correlated.mul_(middle) if in_place else correlated * middle))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _combine(middle_hat: Tensor, g_hat: Tensor, length: int) -> Tensor:
    """Σ C(gᵢ) tᵢ, (B, L), of the spectra (r, B, F) of the tᵢ."""
    parts = []
    for part in _chunks(g_hat.shape[0], middle_hat.shape[1] * length):
        products = middle_hat[part] * g_hat[part, None]
        parts.append(products[0] if products.shape[0] == 1 else products.sum(0))
    return torch.fft.irfft(reduce(torch.add, parts), n=length)


def _summed_products(hat: Tensor, hats: Tensor) -> Tensor:
    """Σ_b of products of spectra, (r, F) of (B, F) and (r, B, F)."""
    return torch.cat([(hats[part] * hat).sum(1) for part in _chunks(hats.shape[0], 2 * hat.numel())])


def _weight_gradient(x: Tensor, unfolded: Tensor) -> Tensor:
    """The gradient (L,) of the weights of :func:`_unfold`, from that (B, L) of what it returns."""
    n, length = x.shape[-1], unfolded.shape[-1]
    again = min(n, length - n)
    head, tail = (x * unfolded[:, :n]).sum(0), (x[:, :again] * unfolded[:, n : n + again]).sum(0)
    return torch.cat([head, tail, tail.new_zeros(length - n - again)])


def _forward(*inputs: Tensor, in_place: bool = False) -> tuple[Tensor, ...]:
    x, g, h, in_weights, out_weights, middle = inputs
    length = middle.shape[-1]
    g_hat, h_hat = generator_spectra(g, h, length)
    product = multiply_by_spectra(x, g_hat, h_hat, in_weights, out_weights, middle, g.shape[-1], in_place=in_place)
    return *product, g_hat, h_hat


def _product(*inputs: Tensor) -> Tensor:
    return _forward(*inputs)[0]


class _MultiplyBySpectra(torch.autograd.Function):
    """:func:`multiply_by_spectra` in memory of its own, and not so under vmap, which cannot follow that."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return multiply_by_spectra(*inputs, in_place=True)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], int]:
        return torch.func.vmap(multiply_by_spectra, in_dims)(*inputs), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: it is called without gradients."""


class _ScaledToeplitz(torch.autograd.Function):
    """:func:`scaled_toeplitz_matmul` and, after the product, what the backward pass uses again."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return _forward(*inputs, in_place=True)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], int]:
        return torch.func.vmap(_forward, in_dims)(*inputs), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if u is None:
            return (None,) * 6
        inputs, kept = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        if torch.is_grad_enabled():  # to be differentiated again: spectra that were kept have no graph
            pullback = torch.func.vjp(lambda *others: _product(*others, inputs[5]), *inputs[:5])[1]
            return *pullback(u), None
        x, g, h, in_weights, out_weights, middle = inputs
        x_hat, middle_hat, convolved, g_hat, h_hat = kept
        needed, length = ctx.needs_input_grad, middle.shape[-1]
        # The transpose of M is of the same form.
        dx, u_hat, back_hat, unfolded = _MultiplyBySpectra.apply(
            u, conjugate(h_hat), conjugate(g_hat), out_weights, in_weights, middle, x.shape[-1]
        )
        products = [
            _summed_products(conjugate(hat), hats)
            for hat, hats, wanted in ((u_hat, middle_hat, needed[1]), (x_hat, back_hat, needed[2]))
            if wanted
        ]
        generators = [*torch.fft.irfft(torch.cat(products).conj(), n=length).split(g.shape[0])] if products else []
        return (
            dx if needed[0] else None,
            generators[0][:, : g.shape[-1]] if needed[1] else None,
            generators[-1][:, : h.shape[-1]] if needed[2] else None,
            _weight_gradient(x, unfolded) if needed[3] else None,
            _weight_gradient(u, convolved) if needed[4] else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:6]
        terms = [
            _product(*inputs[:i], tangent, *inputs[i + 1 :])
            for i, tangent in enumerate(tangents[:5])
            if tangent is not None
        ]
        return reduce(torch.add, terms), None, None, None, None, None
