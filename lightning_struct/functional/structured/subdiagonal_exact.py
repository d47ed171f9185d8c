"""The two ways of LDR-SD that divide by nothing: the Stein equation, row by row, and trees of Krylov matrices.

**The Stein equation** M - A M Bᵀ = R. With A and B subdiagonal plus corner, M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ has the rows

    M[k] = S[k] + a[k] (b ∘ roll(M[k - 1], 1)),

a being the corner of A followed by its subdiagonal, b that of B. All entries of M are sums of products of paths: exact
for any operators, zeros and steep ones among them, in O(mn) operations.

**Krylov trees**: products with K(A, g) in O(n log² n), by the recursion of Thomas et al. (Theorem 1; Appendix C.2,
Algorithm 1) with a large branching factor. Blocks of rows of one size are taken together. What one block gives to
another d blocks below is a convolution, between the entries of the source that reach its end and d segments of t, times
the product along the blocks between. Inside the smallest blocks the Krylov matrices are formed. There are one to three
levels instead of log₂ n, each one batch of short transforms and one batched matrix product. The operator is a circle:
node k receives from k - 1 by the factor ``weights[k]``, ``weights[0]`` being the corner. It is unrolled into a line, on
which a path of fewer than n steps to node k >= 0 starts after k - n: the corner is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def stein_matrix(a: Tensor, b: Tensor, G: Tensor, H: Tensor) -> Tensor:
    """M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ with p = min(m, n): equation (2) with Bᵀ for B.

    Without a corner of A, the source S of the recurrence is R = G Hᵀ and M[-1] = 0. With one, Aᵐ = w I, w being the
    product of a, and M - A M Bᵀ = R - w R (Bᵐ)ᵀ if m <= n. So a first sweep, from zero, yields the last row, which
    holds no path through the corner; a second one starts from there.

    Args:
        a: (m,), the corner of A and its subdiagonal.
        b: (n,), those of B.
        G: (m, r).
        H: (n, r).

    Returns:
        (m, n).
    """
    m, n = a.shape[0], b.shape[0]
    if m > n:
        return stein_matrix(b, a, H, G).mT
    # Two sweeps of the recurrence M[k] = S[k] + a[k] (b ∘ roll(M[k - 1], 1)).
    last = _Sweep.apply(a, b, G @ H.mT, a.new_zeros(n), True)[-1]
    returned = _cyclic_products(a, m)[0] * _cyclic_products(b, m)[:, None] * H.roll(m, 0)
    return _Sweep.apply(a, b, G @ (H - returned).mT, last, True)


def _cyclic_products(weights: Tensor, count: int) -> Tensor:
    """Π_{i<count} weights[k - i] for each k, cyclically: (n,) for (n,), by doubling, without division."""
    product, power, offset = torch.ones_like(weights), weights, 0
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            product = product * power.roll(offset)
            offset += 1 << bit
        power = power * power.roll(1 << bit)
    return product


# Columns that a row of the recurrence holds twice: so many rows can be computed by one operation each, a view of the
# row before serving as the rolled one, before the copies must be renewed.
_HALO = 64


def _sweep(a: Tensor, b: Tensor, source: Tensor, seed: Tensor, downwards: bool) -> Tensor:
    """The recurrence of :class:`_Sweep`."""
    n, halo = source.shape[-1], min(_HALO, source.shape[-1])
    if downwards:
        copies, originals, inner = slice(0, halo), slice(n, n + halo), slice(halo, None)
        to, came_from = slice(1, None), slice(0, -1)
    else:
        a, b = a.roll(-1, -1), b.roll(-1, -1)
        copies, originals, inner = slice(n, n + halo), slice(0, halo), slice(0, n)
        to, came_from = slice(0, -1), slice(1, None)

    def extended(tensor: Tensor) -> Tensor:
        # Not by an index, which torch.autograd.grad(..., is_grads_batched=True) cannot take if it is all of a row.
        copied = tensor.narrow(-1, n - halo if downwards else 0, halo)
        return torch.cat([copied, tensor] if downwards else [tensor, copied], -1)

    def views(matrix: Tensor, columns: slice) -> tuple[Tensor, ...]:
        of_rows = matrix[..., columns].unbind(-2)  # all at once: slicing in the loop would take longer than computing
        return of_rows if downwards else of_rows[::-1]

    rows, weights = extended(source), a[..., :, None] * extended(b)[..., None, :]
    previous = (extended(seed)[..., came_from], *views(rows, came_from))
    for k, (row, weight, before) in enumerate(zip(views(rows, to), views(weights, to), previous[:-1], strict=True), 1):
        row.addcmul_(weight, before)
        if k % halo == 0:
            row = rows[..., k - 1 if downwards else -k, :]
            row[..., copies] = row[..., originals]
    return rows[..., inner]


def _before(rows: Tensor, seed: Tensor) -> Tensor:
    """roll(M[k - 1], 1) for each k, M[-1] being the seed."""
    return torch.cat([seed[..., None, :], rows[..., :-1, :]], -2).roll(1, -1)


def _weight_gradients(a: Tensor, b: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a and b, given that of their outer product."""
    return (products @ b[..., :, None])[..., 0], (a[..., None, :] @ products)[..., 0, :]


class _Sweep(torch.autograd.Function):
    """M[k] = S[k] + a[k] (b ∘ roll(M[k - 1], 1)) of a source S (..., m, n), from M[-1] = ``seed`` (..., n) on.

    Not ``downwards`` it is N[k] = S[k] + roll(a[k + 1] (b ∘ N[k + 1]), -1), from N[m] = ``seed`` = 0 on. Both are each
    other's derivative, so that they can be differentiated as often as wanted.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor, source: Tensor, seed: Tensor, downwards: bool) -> Tensor:
        return _sweep(a, b, source, seed, downwards)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, _, seed, ctx.downwards = inputs
        ctx.save_for_backward(a, b, seed, output)
        ctx.save_for_forward(a, b, seed, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b, seed, rows = ctx.saved_tensors
        zeros = torch.zeros_like(gradient[..., 0, :])
        source = _Sweep.apply(a, b, gradient, zeros, not ctx.downwards)
        if not ctx.downwards:
            return *_weight_gradients(a, b, rows * _before(source, zeros)), source, None, None
        of_seed = (a[..., :1] * b * source[..., 0, :]).roll(-1, -1)
        return *_weight_gradients(a, b, source * _before(rows, seed)), source, of_seed, None

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor, source: Tensor, seed: Tensor, _: None) -> Tensor:
        a, b, start, rows = ctx.saved_tensors
        weights = da[..., :, None] * b[..., None, :] + a[..., :, None] * db[..., None, :]  # the derivative of a bᵀ
        if ctx.downwards:
            moved = weights * _before(rows, start)
        else:
            moved = F.pad((weights * rows).roll(-1, -1)[..., 1:, :], (0, 0, 0, 1))
        return _Sweep.apply(a, b, source + moved, seed, ctx.downwards)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, downwards = inputs
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[:-1], strict=True)
        ]
        return _Sweep.apply(*batched, downwards), 0


# Rows of the smallest blocks; how many blocks make the next larger one; how many of the largest there may be.
_LEAF, _BRANCHES, _MOST_BLOCKS = 32, 32, 64


@dataclass(frozen=True)
class _Level:
    """One level of the recursion: the transfers between blocks of one size.

    Args:
        transfer: (F, W, r D), of each of W blocks, each rank and each distance d = 1, ..., D: the spectrum of the
            source in the block d above times the product along the blocks between.
        inlet: (W, c), the product from the start of a block to each of its c nodes.
        smaller: the level of the next smaller blocks; None for the smallest.
    """

    transfer: Tensor
    inlet: Tensor
    smaller: _Level | None


@dataclass(frozen=True)
class KrylovTree:
    """The matrices K(A, gᵢ)[:, :p], i = 1, ..., r, prepared for products by :meth:`of`.

    Args:
        leaves: (N, r c), the first c columns of all matrices as far as they stay in the smallest blocks.
        level: that of the largest blocks.
        rank: r.
        size: n; N is the multiple of the size of the largest blocks above it.
        columns: p.
    """

    leaves: Tensor
    level: _Level
    rank: int
    size: int
    columns: int

    @staticmethod
    def of(weights: Tensor, generators: Tensor, columns: int) -> KrylovTree:
        """The tree of A with corner ``weights[0]`` and subdiagonal ``weights[1:]``, (n,), and of g (r, n); p <= n."""
        rank, size = generators.shape
        blocks = [min(_LEAF, size)]  # the rows of a block of each level
        while size > _MOST_BLOCKS * blocks[-1]:
            blocks.append(_BRANCHES * blocks[-1])
        above, below = (-(-count // blocks[-1]) * blocks[-1] for count in (columns, size))
        line = torch.arange(-above, below, device=weights.device) % size
        weights, generators = weights[line], generators[:, line]
        level = None
        for block, parent in pairwise(blocks):
            level = _level(weights, generators, above, block, parent, level, cyclic=False)
        level = _level(weights, generators, above, blocks[-1], above + blocks[-1], level, cyclic=True)
        leaves = _leaves(weights[above:].unflatten(0, (-1, blocks[0])), generators[:, above:])
        return KrylovTree(leaves, level, rank, size, columns)

    def _levels(self) -> Iterator[_Level]:
        level: _Level | None = self.level
        while level is not None:
            yield level
            level = level.smaller

    def matmul(self, t: Tensor) -> Tensor:
        """Krylov multiplication (Appendix C.2, Proposition 6): Σᵢ K(A, gᵢ) tᵢ, (B, n) for t (B, r, p)."""
        result = _fit(t, self.leaves.shape[1] // self.rank).flatten(1) @ self.leaves.mT
        for level in self._levels():
            block = level.inlet.shape[1]
            distances = level.transfer.shape[2] // self.rank
            segments = _fit(t, (distances + 1) * block).unfold(2, 2 * block, block)
            hats = torch.fft.rfft(segments).flatten(1, 2).permute(2, 1, 0)
            received = torch.fft.irfft((level.transfer @ hats).permute(2, 1, 0), n=2 * block)[..., block:]
            result = result + (received * level.inlet).flatten(1)
        return result[:, : self.size]

    def rmatmul(self, x: Tensor) -> Tensor:
        """Krylov transpose multiplication (Appendix C.2, Algorithm 1): all K(A, gᵢ)ᵀ x, (B, r, p) for x (B, n)."""
        x = _fit(x, self.leaves.shape[0])
        result = _fit((x @ self.leaves).unflatten(1, (self.rank, -1)), self.columns)
        for level in self._levels():
            block = level.inlet.shape[1]
            hats = torch.fft.rfft(F.pad(x.unflatten(1, level.inlet.shape) * level.inlet, (block, 0)))
            # Algorithm 1, step 8: the products of polynomials, here of all pairs of blocks of one level at once.
            segments = torch.fft.irfft((level.transfer.mH @ hats.permute(2, 1, 0)).permute(2, 1, 0), n=2 * block)
            first, second = (half.unflatten(1, (self.rank, -1)).flatten(2) for half in segments.split(block, -1))
            result = result + _fit(F.pad(first, (0, block)) + F.pad(second, (block, 0)), self.columns)
        return result


def _fit(t: Tensor, length: int) -> Tensor:
    """``t`` with a last dimension of ``length``: cut, or followed by zeros."""
    return F.pad(t, (0, length - t.shape[-1]))


def _running_products(x: Tensor) -> Tensor:
    """The cumulative products along the last dimension, whose derivatives divide by nothing either: by doubling."""
    shift = 1
    while shift < x.shape[-1]:
        x = torch.cat([x[..., :shift], x[..., shift:] * x[..., :-shift]], -1)
        shift *= 2
    return x


def _leaves(weights: Tensor, generators: Tensor) -> Tensor:
    """The first c columns of the Krylov matrices within each of the smallest blocks.

    Args:
        weights: (N / c, c).
        generators: (r, N).

    Returns:
        (N, r c).
    """
    columns = [generators.unflatten(1, weights.shape)]
    for _ in range(weights.shape[1] - 1):
        columns.append(F.pad(weights[:, 1:] * columns[-1][..., :-1], (1, 0)))
    return torch.stack(columns, -1).flatten(1, 2).movedim(0, 1).flatten(1)


def _level(
    weights: Tensor, generators: Tensor, above: int, block: int, parent: int, smaller: _Level | None, *, cyclic: bool
) -> _Level:
    """The level of the blocks of one size: they receive from those above in their parent, the largest from all.

    Args:
        weights, generators: of the line, (above + N,) and (r, above + N).
        above: the number of nodes before 0.
        block, parent: the rows of a block, and of the next larger one.
        smaller: the level below.
        cyclic: whether these are the largest blocks.
    """
    weights, generators = weights.unflatten(0, (-1, block)), generators.unflatten(1, (-1, block))
    first, distances = above // block, parent // block - 1
    products = _running_products(weights)
    outlets = F.pad(_running_products(weights.flip(1))[:, :-1].flip(1), (0, 1), value=1.0)
    hats = torch.fft.rfft(generators * outlets, n=2 * block)
    targets = torch.arange(weights.shape[0] - first, device=weights.device)
    distance = torch.arange(1, distances + 1, device=weights.device)
    sources = first + targets[:, None] - distance
    between = F.pad(_running_products(products[sources[:, :-1], -1]), (1, 0), value=1.0)
    if not cyclic:
        between = between * (distance <= targets[:, None] % (distances + 1))
    transfer = (hats[:, sources] * between[..., None]).permute(3, 1, 0, 2).flatten(2)
    return _Level(transfer, products[first:], smaller)
