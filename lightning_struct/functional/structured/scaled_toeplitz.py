"""Products with matrices of low displacement rank by 2 + 2r real Fourier transforms, the operators having no zeros.

M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ, A (m, m) and B (n, n) being subdiagonal with a corner and p = min(m, n). With no zero below
the diagonal, A = c D Z_f D⁻¹, where D = diag(a) holds the cumulative products of its subdiagonal, divided by c each. So

    M = D_a · [ Σᵢ K(Z_f, gᵢ/a) diag(ρ) K(Z_w, hᵢ/b)ᵀ ] · D_b

is a diagonally scaled Toeplitz-like matrix; ρ are the powers of the c of A times the c of B. Multiplying by K(Z_f, g)
is the circular convolution with [g, 0, f g], of a length of at least 2m, cut to its first m numbers: the corner costs
nothing. Its transpose is the correlation with the same vector. So the transpose of M has the same structure, with the
two sides exchanged, which is what derivatives rest on.

The paper needs log₂ n levels of transforms (Theorem 1); this is one level. The same product is computed in five ways:

- in training, :func:`scaled_toeplitz_matmul`: one autograd function, which works in place, in chunks of rows and ranks,
  and keeps for its backward pass the spectra that it has computed;
- its derivatives where those are differentiated again, :func:`_gradients`, and along tangents, :func:`_tangent`: the
  same formulas by operations that are differentiable themselves;
- under compilers and ``vmap``, :func:`~.spectra.plain_product`, by such operations too;
- for weights that do not change, :class:`~.spectra.ScaledToeplitzSpectra`, from spectra that are prepared:
  for many rows an autograd function in x alone;
- and for few rows, if M is square, :class:`~.fourier.HalfLengthProduct`, by complex transforms of half the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_struct.functional.structured.arguments import has_values
from lightning_struct.functional.structured.spectra import (
    GeneratorSpectra,
    ScaledToeplitzSpectra,
    by_side,
    chunk_sizes,
    extended,
    filled_up_middle,
    keep_freed_memory,
    middle_scale,
    product_in_place,
    transformed_length,
)


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
    """:func:`scaled_toeplitz_matmul` and, after the product, what the backward pass uses again."""

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
        # To be differentiated again, for which what was kept has no graph; or under vmap, where nothing is kept; or for
        # several gradients at once (is_grads_batched).
        if torch.is_grad_enabled() or ctx.small is None or not has_values(u):
            return _gradients(inputs, u)
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
        return _tangent(ctx.saved_tensors[:7], moved), *(None,) * (ctx.outputs - 1)


def _plain_product(*inputs: Tensor) -> Tensor:
    """:func:`scaled_toeplitz_matmul` by operations that are differentiable themselves."""
    return ScaledToeplitzSpectra.of(*inputs[1:]).multiply_plainly(inputs[0])


def _tangent(inputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> Tensor:
    """The derivative of the product along tangents of all inputs; differentiable itself."""
    x, dx = inputs[0], tangents[0]
    sides, moved = [], []
    for parameters, along in zip(by_side(inputs[1:]), by_side(tangents[1:]), strict=True):
        side = GeneratorSpectra.of(*parameters)
        dscale, dcorner = (t.to(x.dtype) for t in side.similarity.tangent(parameters[1], *along[1:]))
        dg = (along[0].mT - side.generators * dscale[:, None]) / side.scale[:, None]
        dspectra = torch.fft.rfft(extended(dg, side.corner * dg + dcorner[:, None, None] * side.generators))
        sides.append(side)
        moved.append((dscale, dspectra))
    a, b, middle = sides[0].scale[0], sides[-1].scale[-1], middle_scale(sides)
    (da, dleft), (db, dright) = ([tensor[k] for tensor in moved[k]] for k in (0, -1))
    left, dleft = sides[0].spectra[0, :, None], dleft[:, None]
    right, dright = sides[-1].spectra[-1, :, None].conj(), dright[:, None].conj()
    in_length, out_length = transformed_length(right), transformed_length(left)
    of_inputs, dof_inputs = torch.fft.rfft(x * b, n=in_length), torch.fft.rfft(dx * b + x * db, n=in_length)
    spectra = _through_the_middle(of_inputs * right, middle, in_length, out_length)
    dspectra = _through_the_middle(dof_inputs * right + of_inputs * dright, middle, in_length, out_length)
    y, dy = (
        torch.fft.irfft(product.sum(0), n=out_length)[..., : a.shape[0]]
        for product in (spectra * left, dspectra * left + spectra * dleft)
    )
    return dy * a + y * da


def _through_the_middle(spectra: Tensor, middle: Tensor, length: int, next_length: int) -> Tensor:
    """The spectra after the multiplication by ρ, (p,), given those before it, of vectors of these lengths."""
    return torch.fft.rfft(torch.fft.irfft(spectra, n=length)[..., : middle.shape[0]] * middle, n=next_length)


def _gradients(inputs: Sequence[Tensor], u: Tensor) -> tuple[Tensor, ...]:
    """The gradients of all inputs, given the gradient u of the product; differentiable themselves."""
    x = inputs[0]
    sides = [GeneratorSpectra.of(*side) for side in by_side(inputs[1:])]
    a, b, middle = sides[0].scale[0], sides[-1].scale[-1], middle_scale(sides)
    left, right = sides[0].spectra[0, :, None], sides[-1].spectra[-1, :, None]
    in_length, out_length = transformed_length(right), transformed_length(left)
    of_inputs, of_cotangents = torch.fft.rfft(x * b, n=in_length), torch.fft.rfft(u * a, n=out_length)
    spectra = _through_the_middle(of_inputs * right.conj(), middle, in_length, out_length)
    backs = _through_the_middle(of_cotangents * left.conj(), middle, out_length, in_length)
    product = torch.fft.irfft((spectra * left).sum(0), n=out_length)[..., : a.shape[0]]
    back = torch.fft.irfft((backs * right).sum(0), n=in_length)[..., : b.shape[0]]
    of_spectra = (spectra.conj() * of_cotangents).sum(1), (backs.conj() * of_inputs).sum(1)
    of_scales = (u * product).sum(0), (x * back).sum(0)
    return back * b, *_parameter_gradients(sides, of_spectra, of_scales)


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
