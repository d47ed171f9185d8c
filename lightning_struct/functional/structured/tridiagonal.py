"""LDR-TD: matrices of low displacement rank whose operators are tridiagonal with corners (Thomas et al., section 3).

M = Σ_i K(A, g_i) K(B', h_i)ᵀ, with p = min(m, n) columns in each Krylov matrix; A and B' = Bᵀ of equation (2) are both
given as they multiply. All pr columns of both matrices are computed, O(pr(m + n)) numbers, in one of two ways:

- ``"recurrence"``: one column after the other, those of both matrices in one loop of p steps, in float64; the memory
  of them has the dtype of the arguments.
- ``"giant_steps"``: s columns at once, by blocks of Aˢ, which reaches no farther than s entries: p/s steps of batched
  matrix products, with s times the multiplications; s is 16, and √n for more than 256 entries. For devices on which the
  number of steps is what takes time.

Powers of an operator whose norm is above 1 may overflow: the result is then not finite, and no error is raised.

Both ways are linear recurrences S_{t+1} = W S_t + F_{t+1}, S_0 = F_0, whose matrix W is tridiagonal and cyclic: each
entry is made of itself and its two neighbours; the first and the last are neighbours. An entry is a number
(:class:`TridiagonalArithmetic`) or a block of numbers (:class:`BlockTridiagonalArithmetic`). With F_0 = v and F_t = 0
beyond, S_t = Wᵗv: the columns of a Krylov matrix (Thomas et al., Proposition 3). Backwards, cotangents run through the
same recurrence with Wᵀ and the cotangents of S_t as F_t, from the last t to the first. So one function is its own
derivative of any order. Several recurrences, each with its own W, may run in one loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.checks import checked
from lightning_struct.functional.structured import arguments
from lightning_struct.functional.structured.operators import TridiagonalOperator, krylov_product
from lightning_struct.functional.torch_tools import denormals_flushed, opaque_operator

METHODS = ("recurrence", "giant_steps")
"""The values of ``method`` besides ``"auto"``."""

# Columns that a giant step makes at least. It makes a power of two, since A is squared until it makes as many.
GIANT_STEP = 16


def tridiagonal_method(device: torch.device) -> str:
    """The method for operators on a device: ``"recurrence"`` on a CPU, elsewhere ``"giant_steps"``.

    On a CPU both take about as long at small ranks, giant steps longer at large ones, the recurrence keeps more digits.
    """
    return "recurrence" if device.type == "cpu" else "giant_steps"


@checked
def tridiagonal_matmul(
    a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, x: Tensor, method: str = "auto"
) -> Tensor:
    """x Mᵀ for M = Σ_i K(A, g_i) K(B', h_i)ᵀ, equation (2) of Thomas et al. with tridiagonal operators.

    Args:
        a: A, of size m.
        b: B' = Bᵀ, of size n.
        G: (m, r).
        H: (n, r).
        x: (..., n).
        method: ``"recurrence"``, ``"giant_steps"``, or ``"auto"``: see :func:`tridiagonal_method`.

    Returns:
        (..., m), in the dtype to which those of all arguments promote; it is computed in float32 at least.

    Raises:
        TypeError: an argument is complex.
        ValueError: G, H or x has another shape, or there is no such method.

    Example:
        >>> from lightning_struct.functional import TridiagonalOperator
        >>> A = TridiagonalOperator(torch.ones(2), torch.zeros(3), torch.ones(2), torch.zeros(2))
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> tridiagonal_matmul(A, A, G, H, torch.tensor([1.0, 0.0, 0.0]))
        tensor([2., 0., 1.])
    """
    arguments.require_vectors(x, b.size)
    return _product(*_tensors(a, b), G, H, x, method=method)


def _computed_product(*tensors: Tensor, method: str) -> Tensor:
    """x Mᵀ for the entries of A and of B, G, H and x."""
    *parameters, x = tensors
    a, b, G, H = *_operators(parameters), *parameters[8:]
    left, right, dtype = _krylov_rows(a, b, G, H, method, x)
    return krylov_product(left, right, x.to(left.dtype)).to(dtype)  # equation (2), Krylov matrices formed (section 3)


@checked
def tridiagonal_to_dense(
    a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, method: str = "auto"
) -> Tensor:
    """M = Σ_i K(A, g_i) K(B', h_i)ᵀ, (m, n).

    Args:
        a: A, of size m.
        b: B' = Bᵀ, of size n.
        G: (m, r).
        H: (n, r).
        method: as in :func:`tridiagonal_matmul`.

    Returns:
        (m, n), in the dtype to which those of all arguments promote.

    Raises:
        TypeError: an argument is complex.
        ValueError: G or H has another shape, or there is no such method.

    Example:
        >>> from lightning_struct.functional import TridiagonalOperator
        >>> A = TridiagonalOperator(torch.ones(2), torch.zeros(3), torch.zeros(2), torch.zeros(2))
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> tridiagonal_to_dense(A, A, G, H)
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    return _matrix(*_tensors(a, b), G, H, method=method)


def _computed_matrix(*parameters: Tensor, method: str) -> Tensor:
    """M for the entries of A and of B, G and H."""
    a, b, G, H = *_operators(parameters), *parameters[8:]
    left, right, dtype = _krylov_rows(a, b, G, H, method)
    return (left.mT @ right).to(dtype)  # equation (2)


def _tensors(a: TridiagonalOperator, b: TridiagonalOperator) -> list[Tensor]:
    return [tensor for op in (a, b) for tensor in (op.subdiagonal, op.diagonal, op.superdiagonal, op.corners)]


def _operators(tensors: Sequence[Tensor]) -> tuple[TridiagonalOperator, TridiagonalOperator]:
    return TridiagonalOperator(*tensors[:4]), TridiagonalOperator(*tensors[4:8])


# As many steps one after the other as there are rows would be as many nodes of a graph.
# Their arguments end in G, H and x, or in G and H.
_product = opaque_operator(
    "tridiagonal_matmul",
    _computed_product,
    lambda t: t[10].new_empty(*t[10].shape[:-1], len(t[8]), dtype=arguments.promoted_dtype(*t)),
)
_matrix = opaque_operator(
    "tridiagonal_to_dense",
    _computed_matrix,
    lambda t: t[8].new_empty(len(t[8]), len(t[9]), dtype=arguments.promoted_dtype(*t)),
)


def _krylov_rows(
    a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, method: str, *others: Tensor
) -> tuple[Tensor, Tensor, torch.dtype]:
    """The columns of all K(A, g_i) and K(B', h_i) as rows, (pr, m) and (pr, n), and the dtype of all arguments."""
    arguments.require_generators(G, H, a.size, b.size)
    arguments.require_one_of("method", method, ("auto", *METHODS))
    if method == "auto":
        method = tridiagonal_method(G.device)
    bands = [_bands(a), _bands(b)]
    dtype = arguments.promoted_dtype(*bands, G, H, *others)
    if dtype.is_complex:
        raise TypeError(f"tridiagonal operators are multiplied in real dtypes, got {dtype}")
    computed = torch.promote_types(dtype, torch.float32)
    bands, (G, H) = [weight.to(computed) for weight in bands], (G.to(computed), H.to(computed))
    count = min(a.size, b.size)
    if method == "recurrence":
        left, right = _Recurrences.apply(TridiagonalArithmetic(), count, False, *bands, G.mT[None], H.mT[None])
        return left.flatten(0, 1), right.flatten(0, 1), dtype
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
    power = blocks(v.new_zeros(n, 3 * longest).scatter(1, columns, bands.mT))

    arithmetic, states = BlockTridiagonalArithmetic(), blocks(v)
    while states.shape[-1] < step * r:
        states = torch.cat([states, arithmetic.multiply(power, states)], -1)
        power = _square(power)
    (states,) = _Recurrences.apply(arithmetic, -(-count // step), False, power, states[None])
    rows = states.flatten(1, 2)
    rows = rows.index_select(1, slot) if padded else rows
    return rows.mT.flatten(0, 1)[: count * r]


def _square(blocks: Tensor) -> Tensor:
    """A² for a block-tridiagonal A (k, b, 3b) that reaches no farther than b/2 entries."""
    b = blocks.shape[1]
    before = F.pad(blocks.roll(1, 0)[..., b:], (0, b))
    after = F.pad(blocks.roll(-1, 0)[..., : 2 * b], (b, 0))
    return blocks @ torch.cat([before, blocks, after], 1)


class _Recurrences(torch.autograd.Function):
    """S_0, ..., S_{count-1} of each recurrence S_t = W S_{t-1} + F_t; ``backwards``, S_t = W S_{t+1} + F_t.

    Args:
        arithmetic: how W and the states are stored.
        count: number of states.
        backwards: the direction.
        *tensors: W of each recurrence, and then F_0, ..., F_{count-1} of each; or, forwards, F_0 alone, the others
            being zero.

    Returns:
        The states of each recurrence, shaped as the sources but for the first dimension, ``count``.
    """

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
        adjoints = _Recurrences.apply(ctx.arithmetic, ctx.count, not ctx.backwards, *transposed, *cotangents)
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
        return _Recurrences.apply(ctx.arithmetic, ctx.count, ctx.backwards, *weights, *sources)

    @staticmethod
    def vmap(info: Any, dims: Any, arithmetic: CyclicArithmetic, count: int, backwards: bool, *tensors: Tensor) -> Any:
        size, columns = info.batch_size, arithmetic.columns
        (weights, sources), (weight_dims, source_dims) = _halves(tensors), _halves(dims[3:])
        if all(dim is None for dim in weight_dims):
            merged = [_merge(source, dim, size, columns) for source, dim in zip(sources, source_dims, strict=True)]
            states = _Recurrences.apply(arithmetic, count, backwards, *weights, *merged)
            return tuple(state.unflatten(columns, (-1, size)) for state in states), (columns + 1,) * len(states)
        runs = []
        for i in range(size):
            entries = [t if dim is None else t.select(dim, i) for t, dim in zip(tensors, dims[3:], strict=True)]
            runs.append(_Recurrences.apply(arithmetic, count, backwards, *entries))
        return tuple(torch.stack(states) for states in zip(*runs, strict=True)), (0,) * len(sources)


class TridiagonalArithmetic:
    """Arithmetic of tridiagonal cyclic matrices W of numbers, stored as three bands.

    With n entries and r columns the states are (count, r, n), and W is (3, n): the factors by which entry i takes entry
    i - 1, itself, and entry i + 1.
    """

    columns = 1
    """The dimension of the states along which independent columns lie."""

    # The states lie in one buffer with copies of the other end at both ends, so that neighbours are views. Copies of
    # this many entries need renewing only after as many steps, since values from beyond spread by one a step.
    HALO = 16

    def run(self, weights: Sequence[Tensor], states: Sequence[Tensor], steps: list[tuple[int, int]]) -> list[Tensor]:
        """The states, by S_new <- W S_old + F_new for each (old, new) of the steps, in turn.

        Args:
            weights: W of each recurrence.
            states: F of each recurrence, one for each t, or F_0 alone.
            steps: len(steps) + 1 is the number of states.
        """
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
        """Wᵀ, stored as W."""
        return torch.stack([weight[2].roll(1), weight[1], weight[0].roll(-1)])

    def multiply(self, weight: Tensor, states: Tensor) -> Tensor:
        """W S_t for all t."""
        return weight[0] * states.roll(1, -1) + weight[1] * states + weight[2] * states.roll(-1, -1)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """The entries of Σ_t L_t R_tᵀ at the positions that W has, stored as W."""
        of_left = [_dot(left[..., :1], right[..., -1:]), _dot(left[..., 1:], right[..., :-1])]
        of_right = [_dot(left[..., :-1], right[..., 1:]), _dot(left[..., -1:], right[..., :1])]
        return torch.stack([torch.cat(of_left), _dot(left, right), torch.cat(of_right)])


class BlockTridiagonalArithmetic:
    """The same for matrices of b x b blocks, stored as rows of three blocks.

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


CyclicArithmetic = TridiagonalArithmetic | BlockTridiagonalArithmetic


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
