"""Products with matrices of low displacement rank by 2 + 2r real Fourier transforms, the operators having no zeros.

M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ, A (m, m) and B (n, n) being subdiagonal with a corner and p = min(m, n). With no zero below
the diagonal, A = c D Z_f D⁻¹, where D = diag(a) holds the cumulative products of its subdiagonal, divided by c each. So

    M = D_a · [ Σᵢ K(Z_f, gᵢ/a) diag(ρ) K(Z_w, hᵢ/b)ᵀ ] · D_b

is a diagonally scaled Toeplitz-like matrix; ρ are the powers of the c of A times the c of B. Multiplying by K(Z_f, g)
is the circular convolution with [g, 0, f g], of a length of at least 2m, cut to its first m numbers: the corner costs
nothing. Its transpose is the correlation with the same vector. So the transpose of M has the same structure, with the
two sides exchanged: derivatives rest on that.

The paper needs log₂ n levels of transforms (Theorem 1); this is one level. The same product is computed in three ways:

- in training, :func:`scaled_toeplitz_matmul`: one autograd function, which works in place, in chunks of rows and ranks,
  and keeps for its backward pass the spectra that it has computed;
- for weights that do not change, under compilers and ``vmap``, and for derivatives of derivatives,
  :class:`ScaledToeplitzSpectra`, by operations that are differentiable themselves;
- and for few rows of weights that do not change, if M is square, :class:`~.fourier.HalfLengthProduct`, by complex
  transforms of half the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.structured import cost_model, fourier
from lightning_struct.functional.structured.arguments import by_rows, has_values


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
        path, trend = detrended_path(s.abs().log())
        scale = F.pad(path.exp() * s.detach().sign().cumprod(-1), (1, 0), value=1.0)
        last = scale[..., -1] * torch.exp(-trend)
        return Similarity(scale, corner * last, last, trend)

    def gradient(self, subdiagonal: Tensor, of_scale: Tensor, of_corner: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of s and the corner of A, given those of D and f."""
        # Each s_i is a factor of all entries from the i-th on, and of f.
        from_the_end = (of_scale * self.scale)[..., 1:].flip(-1).cumsum(-1).flip(-1)
        of_both = from_the_end + (of_corner * self.corner)[..., None]
        return of_both / subdiagonal, of_corner * self.corner_derivative


def detrended_path(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """log|s₁ ⋯ s_k| less its trend, (..., n - 1), for log|s| (..., n - 1), s a subdiagonal; and the trend, (...)."""
    trend = logarithms.detach().sum(-1) / max(1, logarithms.shape[-1])
    return (logarithms - trend[..., None]).cumsum(-1), trend


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
    between = cost_model.transform_length(2 * head.shape[-1]) - 2 * head.shape[-1]
    return torch.cat([head, tail] if not between else [head, head.new_zeros(*head.shape[:-1], between), tail], -1)


def transformed_length(spectra: Tensor) -> int:
    """The length of the vectors with these spectra, which is even."""
    return 2 * (spectra.shape[-1] - 1)


# Numbers that one batch of transforms works on at most: of more, ranks and then rows are taken in parts. On a CPU, as
# many as stay in its cache from one operation to the next, but at least so many rows: each part is planned anew.
_CHUNK, _CHUNK_ON_CPU, _LEAST_ROWS_ON_CPU = 1 << 19, 1 << 17, 16
# The same of prepared products, which take all ranks at once.
_CHUNK_OF_PREPARED = 1 << 22


@dataclass(frozen=True)
class ScaledToeplitzSpectra:
    """All of x Mᵀ that does not depend on x: a ``PreparedMatrix``.

    Args:
        left: the spectra of [gᵢ/a, 0, f gᵢ/a], (r, F).
        right: the conjugates of those of [hᵢ/b, 0, w hᵢ/b], (r, F').
        out_scale: a, (m,).
        in_scale: b, (n,).
        middle: ρ, (p,).
        half_length: the product of few rows by complex transforms of half the length, if that is faster.
    """

    left: Tensor
    right: Tensor
    out_scale: Tensor
    in_scale: Tensor
    middle: Tensor
    half_length: fourier.HalfLengthProduct | None = None

    @staticmethod
    def of(*parameters: Tensor, few_rows: bool = False) -> ScaledToeplitzSpectra:
        """The spectra of the matrix of :func:`scaled_toeplitz_matmul`, given its arguments but x.

        Args:
            *parameters: G, H, subdiagonal and corner of A, subdiagonal and corner of B.
            few_rows: prepare products of few rows, too.
        """
        sides = [GeneratorSpectra.of(*side) for side in by_side(parameters)]
        a, left, b, right = sides[0].scale[0], sides[0].spectra[0], sides[-1].scale[-1], sides[-1].spectra[-1]
        middle, half_length = middle_scale(sides), None
        if few_rows and cost_model.half_length_pays(len(a), len(b), a.device):
            (g, h), (f, w) = sides[0].generators, sides[0].corner.flatten()
            half_length = fourier.HalfLengthProduct.of(g, h, a, f, b, w, middle)
        return ScaledToeplitzSpectra(left, right.conj().resolve_conj(), a, b, middle, half_length)

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (..., m) for x (..., n), in the dtype of x; computed in that of M."""
        return by_rows(self.multiply, x, self.in_scale.dtype).to(x.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """x Mᵀ, (B, m) for x (B, n) in the dtype of M, by operations that are differentiable themselves."""
        ranks = self.left.shape[0]
        if self.half_length is not None and rows.shape[0] * ranks <= cost_model.ROWS_OF_HALF_LENGTH:
            return self.half_length.matmul(rows)
        if torch.compiler.is_compiling():  # a graph of any number of rows has no chunks
            return self._multiply_chunk(rows)
        size = max(1, _CHUNK_OF_PREPARED // (ranks * transformed_length(self.left)))
        return torch.cat([self._multiply_chunk(chunk) for chunk in rows.split(size)])

    def _multiply_chunk(self, x: Tensor) -> Tensor:
        (m,), (p,) = self.out_scale.shape, self.middle.shape
        in_length, out_length = transformed_length(self.right), transformed_length(self.left)
        of_inputs = torch.fft.rfft(x * self.in_scale, n=in_length)
        between = torch.fft.irfft(of_inputs * self.right[:, None], n=in_length)
        spectra = torch.fft.rfft(between[..., :p] * self.middle, n=out_length) * self.left[:, None]
        return torch.fft.irfft(_sum_of_ranks(spectra), n=out_length)[..., :m] * self.out_scale


def product_in_place(
    x: Tensor,
    in_scale: Tensor,
    right: Tensor,
    middle: Tensor,
    left: Tensor,
    m: int,
    ranks: int,
    saved: list[Tensor] | None = None,
) -> Tensor:
    """x Mᵀ but for the last scale, in as little fresh memory as can be.

    Args:
        x: (B, n).
        in_scale, right, left: as of :class:`ScaledToeplitzSpectra`.
        middle: ρ, by :func:`filled_up_middle`.
        m: the outputs.
        ranks: how many are taken at once.
        saved: a list to which the spectra are appended: those of the scaled x, (B, F'), and
            those of ρ C(hᵢ)ᵀ x, (ranks, B, F), for so many ranks after the other.
    """
    n, in_length, out_length = x.shape[1], transformed_length(right), transformed_length(left)
    entry = x.new_empty(x.shape[0], in_length)
    torch.mul(x, in_scale, out=entry[:, :n])
    entry[:, n:].zero_()
    of_inputs = torch.fft.rfft(entry)
    del entry  # memory that is freed at once is still in the cache when the next result takes its place
    if saved is not None:
        saved.append(of_inputs)
    total: Tensor | None = None
    for to, fro in zip(right[:, None].split(ranks), left[:, None].split(ranks), strict=True):
        between = torch.fft.irfft(of_inputs * to, n=in_length)
        if in_length == out_length:
            between.mul_(middle)
        else:
            between = F.pad(between[..., : middle.shape[0]] * middle, (0, out_length - middle.shape[0]))
        spectra = torch.fft.rfft(between)
        del between
        if saved is not None:
            saved.append(spectra)
            spectra = spectra * fro
        else:
            spectra.mul_(fro)
        total = _sum_of_ranks(spectra) if total is None else total.add_(_sum_of_ranks(spectra))
    assert total is not None
    return torch.fft.irfft(total, n=out_length)[:, :m]


def filled_up_middle(middle: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """ρ (p,), filled up with zeros to the length of the transforms if both sides have the same."""
    length = transformed_length(left)
    return F.pad(middle, (0, length - middle.shape[0])) if length == transformed_length(right) else middle


def chunk_sizes(x: Tensor, left: Tensor, right: Tensor) -> tuple[int, int]:
    """Rows of x and ranks that are taken at once."""
    length = max(transformed_length(left), transformed_length(right))
    chunk = max(_CHUNK_ON_CPU, _LEAST_ROWS_ON_CPU * length) if x.device.type == "cpu" else _CHUNK
    rows = max(1, min(x.shape[0], chunk // length))
    return rows, max(1, chunk // (rows * length))


@cache
def keep_freed_memory() -> None:
    """Let glibc's malloc keep memory that a step has freed for the next one, as it does once 16 to 32 MiB were freed.

    Before that it returns a few MiB to the system several times in a step, only to ask for them again: touching fresh
    memory was a quarter of the time of a step (n = 4096, 64 rows). Elsewhere this does nothing. Once in a process.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def _sum_of_ranks(spectra: Tensor) -> Tensor:
    return spectra[0] if spectra.shape[0] == 1 else spectra.sum(0)


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
    return _plain_product(*inputs) if torch.compiler.is_compiling() else _TrainingProduct.apply(*inputs)[0]


class _ParameterSpectra(NamedTuple):
    """Spectra of the parameters for a product and its derivatives: as small as these.

    Args:
        sides: of A and G, and of B and H.
        a, b: (m,) and (n,), the scales.
        left, right: (r, F) and (r, F'), the spectra of both sides.
        left_conj, right_conj: their conjugates.
        middle: ρ, as :func:`product_in_place` takes it.
    """

    sides: list[GeneratorSpectra]
    a: Tensor
    b: Tensor
    left: Tensor
    right: Tensor
    left_conj: Tensor
    right_conj: Tensor
    middle: Tensor

    @staticmethod
    def of(parameters: Sequence[Tensor]) -> _ParameterSpectra:
        """The spectra of G, H and the operators."""
        sides = [GeneratorSpectra.of(*side) for side in by_side(parameters)]
        a, b = (scale for side in sides for scale in side.scale.unbind())
        left, right = (spectra for side in sides for spectra in side.spectra.unbind())
        left_conj, right_conj = (spectra for side in sides for spectra in torch.conj_physical(side.spectra).unbind())
        middle = filled_up_middle(middle_scale(sides), left, right)
        return _ParameterSpectra(sides, a, b, left, right, left_conj, right_conj, middle)


class _TrainingProduct(torch.autograd.Function):
    """:func:`scaled_toeplitz_matmul` and, after the product, tensors that the backward pass uses again."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Any, ...]:
        keep_freed_memory()
        x, *parameters = inputs
        small = _ParameterSpectra.of(parameters)
        y, saved = x.new_empty(x.shape[0], small.a.shape[0]), []
        size, ranks = chunk_sizes(x, small.left, small.right)
        for rows, y_rows in zip(x.split(size), y.split(size), strict=True):
            spectra: list[Tensor] = []
            product = product_in_place(
                rows, small.b, small.right_conj, small.middle, small.left, y.shape[1], ranks, spectra
            )
            torch.mul(product, small.a, out=y_rows)
            saved += [product, *spectra]
        return y, small, *saved

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (torch.func.vmap(_plain_product, in_dims)(*inputs), None), (0, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Any, ...]) -> None:
        # Tensors as small as the parameters are kept aside: each tensor that is saved takes microseconds.
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
        # To be differentiated again, for which what was kept has no graph; or under vmap, where nothing is kept; or for
        # several gradients at once (is_grads_batched).
        if torch.is_grad_enabled() or ctx.small is None or not has_values(u):
            return torch.func.vjp(_plain_product, *inputs)[1](u)
        x, small = inputs[0], ctx.small
        dx = torch.empty_like(x)
        size, ranks = chunk_sizes(x, small.left, small.right)
        total: list[Tensor] | None = None
        for x_rows, u_rows, dx_rows in zip(x.split(size), u.split(size), dx.split(size), strict=True):
            product, of_inputs = next(rest), next(rest)
            spectra: list[Tensor] = []
            # The transpose of M has the same structure, with the sides exchanged.
            back = product_in_place(
                u_rows, small.a, small.left_conj, small.middle, small.right, x.shape[1], ranks, spectra
            )
            of_cotangents, *backs = spectra
            torch.mul(back, small.b, out=dx_rows)
            of_cotangents.conj_physical_()
            to_left = [(next(rest) * of_cotangents).sum(1) for _ in backs]
            to_right = [(part.conj_physical_() * of_inputs).sum(1) for part in backs]
            sums = [torch.cat(to_left), torch.cat(to_right), (u_rows * product).sum(0), (x_rows * back).sum(0)]
            total = sums if total is None else [whole.add_(part) for whole, part in zip(total, sums, strict=True)]
        assert total is not None
        total[0].conj_physical_()
        return dx, *_parameter_gradients(small.sides, total[:2], total[2:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        moved = [
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(ctx.saved_tensors[:7], tangents, strict=True)
        ]
        inputs = ctx.saved_tensors[:7]
        # Not by jvp, which cannot be nested: the derivative of u -> Jᵀu is J v.
        u = inputs[0].new_zeros(inputs[0].shape[0], inputs[1].shape[0])
        transposed = torch.func.vjp(lambda u: torch.func.vjp(_plain_product, *inputs)[1](u), u)[1]
        return transposed(tuple(moved))[0], *(None,) * (ctx.outputs - 1)


def _plain_product(x: Tensor, *parameters: Tensor) -> Tensor:
    """:func:`scaled_toeplitz_matmul` by operations that are differentiable themselves."""
    return ScaledToeplitzSpectra.of(*parameters).multiply(x)


def _parameter_gradients(
    sides: list[GeneratorSpectra], of_spectra: Sequence[Tensor], of_scales: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of G, H and the operators, given those of the spectra and of the scales of both sides."""
    dtype = sides[0].scale.dtype
    if len(sides) == 1:
        stacked = sides[0].gradients(torch.stack(list(of_spectra)), torch.stack(list(of_scales)))
        (dG, dH), of_subdiagonals, of_corners = (gradient.to(dtype).unbind() for gradient in stacked)
        (da, db), (df, dw) = of_subdiagonals, of_corners
    else:
        (dG, da, df), (dH, db, dw) = (
            [gradient[0].to(dtype) for gradient in side.gradients(spectra[None], scale[None])]
            for side, spectra, scale in zip(sides, of_spectra, of_scales, strict=True)
        )
    return dG, dH, da, df, db, dw
