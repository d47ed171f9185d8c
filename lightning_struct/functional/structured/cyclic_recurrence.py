"""Linear recurrences S_{t+1} = W S_t + F_{t+1}, S_0 = F_0, whose matrix W is tridiagonal and cyclic.

Each entry is made of itself and its two neighbours; the first and the last are neighbours. An entry is a number
(:class:`TridiagonalArithmetic`) or a block of numbers (:class:`BlockTridiagonalArithmetic`). With F_0 = v and F_t = 0
beyond, S_t = Wᵗv: the columns of a Krylov matrix (Thomas et al., Proposition 3). Backwards, cotangents run through the
same recurrence with Wᵀ and the cotangents of S_t as F_t, from the last t to the first. So one function is its own
derivative of any order.

Several recurrences, each with its own W, may run in one loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_struct.functional.torch_helpers import denormals_flushed


class CyclicArithmetic(Protocol):
    """Arithmetic of tridiagonal cyclic matrices W, for one way of storing W and the states S_t, (count, ...)."""

    columns: int
    """The dimension of the states along which independent columns lie."""

    def run(self, weights: Sequence[Tensor], states: Sequence[Tensor], steps: list[tuple[int, int]]) -> list[Tensor]:
        """The states, by S_new <- W S_old + F_new for each (old, new) of the steps, in turn.

        Args:
            weights: W of each recurrence.
            states: F of each recurrence, one for each t, or F_0 alone.
            steps: len(steps) + 1 is the number of states.
        """

    def transpose(self, weight: Tensor) -> Tensor:
        """Wᵀ, stored as W."""

    def multiply(self, weight: Tensor, states: Tensor) -> Tensor:
        """W S_t for all t."""

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """The entries of Σ_t L_t R_tᵀ at the positions that W has, stored as W."""


def recurrences(
    arithmetic: CyclicArithmetic,
    weights: Sequence[Tensor],
    sources: Sequence[Tensor],
    count: int,
    backwards: bool = False,
) -> tuple[Tensor, ...]:
    """S_0, ..., S_{count-1} of each recurrence; ``backwards``, S_t = W S_{t+1} + F_t.

    Args:
        arithmetic: how W and the states are stored.
        weights: W of each recurrence.
        sources: F_0, ..., F_{count-1} of each recurrence; or, forwards, F_0 alone, the others being zero.
        count: number of states.
        backwards: the direction.

    Returns:
        The states of each recurrence, shaped as the sources but for the first dimension, ``count``.
    """
    return _Recurrences.apply(arithmetic, count, backwards, *weights, *sources)


class _Recurrences(torch.autograd.Function):
    @staticmethod
    def forward(arithmetic: CyclicArithmetic, count: int, backwards: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, sources = _halves(tensors)
        steps = [(t, t + 1) for t in range(count - 1)]
        if backwards:
            steps = [(new, old) for old, new in reversed(steps)]
        with denormals_flushed():
            return tuple(arithmetic.run(weights, sources, steps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.arithmetic, ctx.count, ctx.backwards = inputs[:3]
        weights, sources = _halves(inputs[3:])
        ctx.lengths = [source.shape[0] for source in sources]
        ctx.save_for_backward(*weights, *output)
        ctx.save_for_forward(*weights, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        weights, states = _halves(ctx.saved_tensors)
        transposed = [ctx.arithmetic.transpose(weight) for weight in weights]
        adjoints = recurrences(ctx.arithmetic, transposed, cotangents, ctx.count, not ctx.backwards)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[3 : 3 + len(weights)]):
            later, earlier = _neighbours(ctx.backwards)
            of_weights = [
                ctx.arithmetic.outer(adjoint[later], state[earlier])
                for adjoint, state in zip(adjoints, states, strict=True)
            ]
        of_sources = [adjoint[:length] for adjoint, length in zip(adjoints, ctx.lengths, strict=True)]
        return None, None, None, *of_weights, *of_sources

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        weights, states = _halves(ctx.saved_tensors)
        of_weights, of_sources = _halves(tangents[3:])
        _, earlier = _neighbours(ctx.backwards)
        sources = []
        for weight, source, state in zip(of_weights, of_sources, states, strict=True):
            zeros = torch.zeros_like(state)
            total = zeros if source is None else torch.cat([source, zeros[source.shape[0] :]])
            if weight is not None:
                product = ctx.arithmetic.multiply(weight, state[earlier])
                total = total + torch.cat([product, zeros[:1]] if ctx.backwards else [zeros[:1], product])
            sources.append(total)
        return recurrences(ctx.arithmetic, weights, sources, ctx.count, ctx.backwards)

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        arithmetic: CyclicArithmetic,
        count: int,
        backwards: bool,
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        weight_dims, source_dims = _halves(dims[3:])
        weights, sources = _halves(tensors)
        if all(dim is None for dim in weight_dims):
            merged = [
                _merge(s, dim, info.batch_size, arithmetic.columns) for s, dim in zip(sources, source_dims, strict=True)
            ]
            states = recurrences(arithmetic, weights, merged, count, backwards)
            split = tuple(state.unflatten(arithmetic.columns, (-1, info.batch_size)) for state in states)
            return split, (arithmetic.columns + 1,) * len(split)
        runs = [
            recurrences(
                arithmetic, _entries(weights, weight_dims, i), _entries(sources, source_dims, i), count, backwards
            )
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(states) for states in zip(*runs, strict=True)), (0,) * len(sources)


class TridiagonalArithmetic:
    """Arithmetic of matrices of numbers, stored as three bands.

    With n entries and r columns the states are (count, r, n), and W is (3, n): the factors by which entry i takes entry
    i - 1, itself, and entry i + 1.
    """

    columns = 1

    # The states lie in one buffer with copies of the other end at both ends, so that neighbours are views. Copies of
    # this many entries need renewing only after as many steps, since what they take from beyond spreads by one a step.
    HALO = 16

    def run(self, weights: Sequence[Tensor], states: Sequence[Tensor], steps: list[tuple[int, int]]) -> list[Tensor]:
        halo = min(self.HALO, *(weight.shape[-1] for weight in weights))
        bodies = list(_bodies((weight.shape[-1] for weight in weights), halo))
        like, given = states[0], states[0].shape[0]
        shape = (len(steps) + 1, like.shape[1], bodies[-1].stop + halo)
        kept, bands = like.new_empty(shape), weights[0].new_zeros(3, shape[-1], dtype=torch.float64)
        kept[:given] = 0
        for body, weight, state in zip(bodies, weights, states, strict=True):
            kept[:given, :, body] = state
            bands[:, body] = weight
        _renew(kept[:given], bodies, halo)
        _renew(bands, bodies, halo)
        # Two rows in turn, in float64 whatever is kept of them: in float32 the errors of hundreds of steps exceed 1e-5.
        rows = like.new_zeros(2, *shape[1:], dtype=torch.float64)
        width = shape[-1] - 2
        left, own, right = (rows[..., k : k + width].unbind() for k in range(3))
        of_left, of_own, of_right = bands[:, 1:-1].unbind()
        of_steps = kept.unbind()
        if steps:
            rows[0] = of_steps[steps[0][0]]
        for done, (_, new) in enumerate(steps, 1):
            old, now = (done - 1) % 2, done % 2
            if new < given:
                rows[now] = of_steps[new]
                own[now].addcmul_(left[old], of_left)
            else:
                torch.mul(left[old], of_left, out=own[now])
            own[now].addcmul_(own[old], of_own).addcmul_(right[old], of_right)
            if done % halo == 0:
                _renew(rows[now], bodies, halo)
            of_steps[new].copy_(rows[now])
        return [kept[..., body] for body in bodies]

    def transpose(self, weight: Tensor) -> Tensor:
        return torch.stack([weight[2].roll(1), weight[1], weight[0].roll(-1)])

    def multiply(self, weight: Tensor, states: Tensor) -> Tensor:
        return weight[0] * states.roll(1, -1) + weight[1] * states + weight[2] * states.roll(-1, -1)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        of_left = [_dot(left[..., :1], right[..., -1:]), _dot(left[..., 1:], right[..., :-1])]
        of_right = [_dot(left[..., :-1], right[..., 1:]), _dot(left[..., -1:], right[..., :1])]
        return torch.stack([torch.cat(of_left), _dot(left, right), torch.cat(of_right)])


class BlockTridiagonalArithmetic:
    """Arithmetic of matrices of b x b blocks, stored as rows of three blocks.

    With k blocks and c columns the states are (count, k, b, c), and W is (k, b, 3b): the matrices by which block i
    takes block i - 1, itself, and block i + 1.
    """

    columns = 3

    def run(self, weights: Sequence[Tensor], states: Sequence[Tensor], steps: list[tuple[int, int]]) -> list[Tensor]:
        return [self._run(weight, state, steps) for weight, state in zip(weights, states, strict=True)]

    def _run(self, weight: Tensor, state: Tensor, steps: list[tuple[int, int]]) -> Tensor:
        _, k, b, c = state.shape
        buffer = state.new_zeros(len(steps) + 1, k + 2, b, c)
        body = slice(1, k + 1)
        buffer[: state.shape[0], body] = state
        windows = buffer.as_strided((len(steps) + 1, k, 3 * b, c), ((k + 2) * b * c, b * c, c, 1))
        for old, new in steps:
            ends = buffer[old]
            ends[0], ends[-1] = ends[-2], ends[1]
            buffer[new, body].baddbmm_(weight, windows[old])
        return buffer[:, body]

    def transpose(self, weight: Tensor) -> Tensor:
        left, own, right = weight.chunk(3, -1)
        return torch.cat([right.roll(1, 0).mT, own.mT, left.roll(-1, 0).mT], -1)

    def multiply(self, weight: Tensor, states: Tensor) -> Tensor:
        return weight @ torch.cat([states.roll(1, -3), states, states.roll(-1, -3)], -2)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = (states.movedim(0, 2).flatten(2) for states in (left, right))
        return torch.cat([left @ right.roll(shift, 0).mT for shift in (1, 0, -1)], -1)


def _bodies(sizes: Iterator[int], halo: int) -> Iterator[slice]:
    """The slices of one buffer for n numbers each, with ``halo`` numbers at both sides."""
    start = halo
    for n in sizes:
        yield slice(start, start + n)
        start += n + 2 * halo


def _renew(buffer: Tensor, bodies: list[slice], halo: int) -> None:
    """Copy both ends of each body to the other side."""
    for body in bodies:
        buffer[..., body.start - halo : body.start] = buffer[..., body.stop - halo : body.stop]
        buffer[..., body.stop : body.stop + halo] = buffer[..., body.start : body.start + halo]


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum((0, 1))


def _halves(tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    half = len(tensors) // 2
    return tensors[:half], tensors[half:]


def _neighbours(backwards: bool) -> tuple[slice, slice]:
    """The indices t of the states that are made of others, and those of the others."""
    return (slice(None, -1), slice(1, None)) if backwards else (slice(1, None), slice(None, -1))


def _merge(source: Tensor, dim: int | None, size: int, columns: int) -> Tensor:
    """A batch of sources as more columns, which run faster than a loop over the batch."""
    if dim is None:
        batched = source.unsqueeze(columns + 1).expand(*source.shape[: columns + 1], size, *source.shape[columns + 1 :])
    else:
        batched = source.movedim(dim, columns + 1)
    return batched.flatten(columns, columns + 1)


def _entries(tensors: Sequence[Tensor], dims: Sequence[int | None], i: int) -> list[Tensor]:
    return [tensor if dim is None else tensor.select(dim, i) for tensor, dim in zip(tensors, dims, strict=True)]
