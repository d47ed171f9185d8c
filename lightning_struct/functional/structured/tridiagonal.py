"""LDR-TD: matrices of low displacement rank whose operators are tridiagonal with corners (Thomas et al., section 3).

M = Σ_i K(A, g_i) K(B', h_i)ᵀ, with p = min(m, n) columns in each Krylov matrix; A and B' = Bᵀ of equation (2) are both
given as they multiply. All pr columns of both matrices are computed, O(pr(m + n)) numbers, s columns at once, by blocks
of Aˢ, which reaches no farther than s entries: p/s steps of batched matrix products. s is 16, and √n for more than 256
entries. Aˢ and the first s columns are computed in float64, whose errors all others would multiply.

Powers of an operator whose norm is above 1 may overflow: the result is then not finite, and no error is raised.

The steps are a linear recurrence S_{t+1} = W S_t + F_{t+1}, S_0 = F_0, whose matrix W is tridiagonal and cyclic, with
blocks of numbers as its entries: each is made of itself and its two neighbours; the first and the last are neighbours.
With F_0 = v and F_t = 0 beyond, S_t = Wᵗv: the columns of a Krylov matrix (Thomas et al., Proposition 3). Backwards,
cotangents run through the same recurrence with Wᵀ and the cotangents of S_t as F_t, from the last t to the first. So
one function is its own derivative of any order.

W is stored as the rows of its blocks, (k, b, 3b): the matrices by which block i takes block i - 1, itself, and block
i + 1. The states of c columns are (count, k, b, c).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.checks import checked
from lightning_struct.functional.structured import arguments
from lightning_struct.functional.structured.operators import TridiagonalOperator, krylov_product
from lightning_struct.functional.torch_tools import denormals_flushed, opaque_operator

# Columns that a giant step makes at least. It makes a power of two, since A is squared until it makes as many.
GIANT_STEP = 16


@checked
def tridiagonal_matmul(a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, x: Tensor) -> Tensor:
    """x Mᵀ for M = Σ_i K(A, g_i) K(B', h_i)ᵀ, equation (2) of Thomas et al. with tridiagonal operators.

    Args:
        a: A, of size m.
        b: B' = Bᵀ, of size n.
        G: (m, r).
        H: (n, r).
        x: (..., n).

    Returns:
        (..., m), in the dtype to which those of all arguments promote; it is computed in float32 at least.

    Raises:
        TypeError: an argument is complex.
        ValueError: G, H or x has another shape.

    Example:
        >>> from lightning_struct.functional import TridiagonalOperator
        >>> A = TridiagonalOperator(torch.ones(2), torch.zeros(3), torch.ones(2), torch.zeros(2))
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> tridiagonal_matmul(A, A, G, H, torch.tensor([1.0, 0.0, 0.0]))
        tensor([2., 0., 1.])
    """
    arguments.require_vectors(x, b.size)
    return _product(*_tensors(a, b), G, H, x, method="auto")


def _computed_product(*tensors: Tensor) -> Tensor:
    """x Mᵀ for the entries of A and of B, G, H and x."""
    *parameters, x = tensors
    a, b, G, H = *_operators(parameters), *parameters[8:]
    left, right, dtype = _krylov_rows(a, b, G, H, x)
    return krylov_product(left, right, x.to(left.dtype)).to(dtype)  # equation (2), Krylov matrices formed (section 3)


@checked
def tridiagonal_to_dense(a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor) -> Tensor:
    """M = Σ_i K(A, g_i) K(B', h_i)ᵀ, (m, n).

    Args:
        a: A, of size m.
        b: B' = Bᵀ, of size n.
        G: (m, r).
        H: (n, r).

    Returns:
        (m, n), in the dtype to which those of all arguments promote.

    Raises:
        TypeError: an argument is complex.
        ValueError: G or H has another shape.

    Example:
        >>> from lightning_struct.functional import TridiagonalOperator
        >>> A = TridiagonalOperator(torch.ones(2), torch.zeros(3), torch.zeros(2), torch.zeros(2))
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> tridiagonal_to_dense(A, A, G, H)
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    return _matrix(*_tensors(a, b), G, H, method="auto")


def _computed_matrix(*parameters: Tensor) -> Tensor:
    """M for the entries of A and of B, G and H."""
    a, b, G, H = *_operators(parameters), *parameters[8:]
    left, right, dtype = _krylov_rows(a, b, G, H)
    return (left.mT @ right).to(dtype)  # equation (2)


def _tensors(a: TridiagonalOperator, b: TridiagonalOperator) -> list[Tensor]:
    return [tensor for op in (a, b) for tensor in (op.subdiagonal, op.diagonal, op.superdiagonal, op.corners)]


def _operators(tensors: Sequence[Tensor]) -> tuple[TridiagonalOperator, TridiagonalOperator]:
    return TridiagonalOperator(*tensors[:4]), TridiagonalOperator(*tensors[4:8])


# As many steps one after the other as there are rows would be as many nodes of a graph.
# Their arguments end in G, H and x, or in G and H.
_product = opaque_operator(
    "tridiagonal_matmul",
    lambda *tensors, method: _computed_product(*tensors),
    lambda t: t[10].new_empty(*t[10].shape[:-1], len(t[8]), dtype=arguments.promoted_dtype(*t)),
)
_matrix = opaque_operator(
    "tridiagonal_to_dense",
    lambda *tensors, method: _computed_matrix(*tensors),
    lambda t: t[8].new_empty(len(t[8]), len(t[9]), dtype=arguments.promoted_dtype(*t)),
)


def _krylov_rows(
    a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, torch.dtype]:
    """The columns of all K(A, g_i) and K(B', h_i) as rows, (pr, m) and (pr, n), and the dtype of all arguments."""
    arguments.require_generators(G, H, a.size, b.size)
    bands = [_bands(a), _bands(b)]
    dtype = arguments.promoted_dtype(*bands, G, H, *others)
    if dtype.is_complex:
        raise TypeError(f"tridiagonal operators are multiplied in real dtypes, got {dtype}")
    computed = torch.promote_types(dtype, torch.float32)
    bands, (G, H) = [weight.to(computed) for weight in bands], (G.to(computed), H.to(computed))
    count = min(a.size, b.size)
    return _giant_steps(bands[0], G, count), _giant_steps(bands[1], H, count), dtype


def _bands(operator: TridiagonalOperator) -> Tensor:
    """The bands of A, (3, n): the factors by which entry i of A v takes entries i - 1, i and i + 1 of v, cyclically."""
    before = torch.cat([operator.corners[:1], operator.subdiagonal])
    after = torch.cat([operator.superdiagonal, operator.corners[1:]])
    return torch.stack([before, operator.diagonal, after])


def _giant_steps(bands: Tensor, v: Tensor, count: int) -> Tensor:
    """v, Av, ..., A^(count - 1)v one after the other: (count r, n) for v (n, r).

    The n entries are cut into k blocks of n/k, rounded up or down; a block that is shorter than the longest ends in a
    zero. Since no block is shorter than the reach of the power of A, that power is block-tridiagonal and cyclic.
    """
    n, r = v.shape
    step = 2 ** (min(max(GIANT_STEP, math.isqrt(n)), n).bit_length() - 1)
    k = n // step
    longest = -(-n // k)
    place = torch.arange(n, device=v.device)
    block = place * k // n
    offset = place - (block * n + k - 1) // k
    padded = n < k * longest
    slot = block * longest + offset

    def blocks(rows: Tensor) -> Tensor:
        spread = rows.new_zeros(k * longest, rows.shape[1]).index_copy(0, slot, rows) if padded else rows
        return spread.view(k, longest, -1)

    # Within the window of a block: the block before it, itself, and the block after it.
    before = torch.where(offset > 0, longest + offset - 1, offset.roll(1))
    after = torch.where(offset.roll(-1) > 0, longest + offset + 1, 2 * longest)
    columns = torch.stack([before, longest + offset, after], 1)
    power = blocks(v.new_zeros(n, 3 * longest).scatter(1, columns, bands.mT)).double()

    states = blocks(v).double()
    while states.shape[-1] < step * r:
        states = torch.cat([states, _multiply(power, states)], -1)
        power = _square(power)
    states = _Recurrence.apply(-(-count // step), False, power.to(v.dtype), states[None].to(v.dtype))
    rows = states.flatten(1, 2)
    rows = rows.index_select(1, slot) if padded else rows
    return rows.mT.flatten(0, 1)[: count * r]


def _square(blocks: Tensor) -> Tensor:
    """A² for a block-tridiagonal A (k, b, 3b) that reaches no farther than b/2 entries."""
    b = blocks.shape[1]
    before = F.pad(blocks.roll(1, 0)[..., b:], (0, b))
    after = F.pad(blocks.roll(-1, 0)[..., : 2 * b], (b, 0))
    return blocks @ torch.cat([before, blocks, after], 1)


class _Recurrence(torch.autograd.Function):
    """S_0, ..., S_{count-1} of the recurrence S_t = W S_{t-1} + F_t; ``backwards``, S_t = W S_{t+1} + F_t.

    Args:
        count: number of states.
        backwards: the direction.
        weight: W.
        source: F_0, ..., F_{count-1}; or, forwards, F_0 alone, the others being zero.

    Returns:
        The states, shaped as the source but for the first dimension, ``count``.
    """

    @staticmethod
    def forward(count: int, backwards: bool, weight: Tensor, source: Tensor) -> Tensor:
        _, k, b, c = source.shape
        buffer = source.new_zeros(count, k + 2, b, c)
        body = slice(1, k + 1)
        buffer[: len(source), body] = source
        windows = buffer.as_strided((count, k, 3 * b, c), ((k + 2) * b * c, b * c, c, 1))
        steps = [(t, t + 1) for t in range(count - 1)]
        with denormals_flushed():
            for old, new in [(new, old) for old, new in reversed(steps)] if backwards else steps:
                ends = buffer[old]
                ends[0], ends[-1] = ends[-2], ends[1]
                buffer[new, body].baddbmm_(weight, windows[old])
        return buffer[:, body]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.count, ctx.backwards, weight, source = inputs
        ctx.length = len(source)
        ctx.save_for_backward(weight, output)
        ctx.save_for_forward(weight, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        weight, states = ctx.saved_tensors
        adjoint = _Recurrence.apply(ctx.count, not ctx.backwards, _transpose(weight), cotangent)
        later, earlier = _neighbours(ctx.backwards)
        of_weight = _outer(adjoint[later], states[earlier]) if ctx.needs_input_grad[2] else None
        return None, None, of_weight, adjoint[: ctx.length]

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, of_weight: Tensor | None, of_source: Tensor | None) -> Tensor:
        weight, states = ctx.saved_tensors
        zeros = torch.zeros_like(states)
        total = zeros if of_source is None else torch.cat([of_source, zeros[len(of_source) :]])
        if of_weight is not None:
            product = _multiply(of_weight, states[_neighbours(ctx.backwards)[1]])
            total = total + torch.cat([product, zeros[:1]] if ctx.backwards else [zeros[:1], product])
        return _Recurrence.apply(ctx.count, ctx.backwards, weight, total)

    @staticmethod
    def vmap(info: Any, dims: Any, count: int, backwards: bool, weight: Tensor, source: Tensor) -> tuple[Tensor, int]:
        size = info.batch_size
        if dims[2] is None:  # more columns, which run faster than a loop over the batch
            columns = source.movedim(dims[3], 4).flatten(3)
            return _Recurrence.apply(count, backwards, weight, columns).unflatten(3, (-1, size)), 4
        sources = [source] * size if dims[3] is None else source.unbind(dims[3])
        runs = zip(weight.unbind(dims[2]), sources, strict=True)
        return torch.stack([_Recurrence.apply(count, backwards, w, of) for w, of in runs]), 0


def _transpose(weight: Tensor) -> Tensor:
    """Wᵀ, stored as W."""
    left, own, right = weight.chunk(3, -1)
    return torch.cat([right.roll(1, 0).mT, own.mT, left.roll(-1, 0).mT], -1)


def _multiply(weight: Tensor, states: Tensor) -> Tensor:
    """W S_t for all t."""
    return weight @ torch.cat([states.roll(1, -3), states, states.roll(-1, -3)], -2)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """The blocks of Σ_t L_t R_tᵀ at the positions that W has, stored as W."""
    left, right = (states.movedim(0, 2).reshape(*states.shape[1:3], -1) for states in (left, right))
    return torch.cat([left @ right.roll(shift, 0).mT for shift in (1, 0, -1)], -1)


def _neighbours(backwards: bool) -> tuple[slice, slice]:
    """The indices t of the states that are made of others, and those of the others."""
    return (slice(None, -1), slice(1, None)) if backwards else (slice(1, None), slice(None, -1))
