"""Krylov products of a subdiagonal operator with a corner, without division, in O(n log² n).

The recursion of Thomas et al. (Theorem 1; Appendix C.2, Algorithm 1) with a large branching factor. Blocks of rows of
one size are taken together. What one block gives to another d blocks below is a convolution, between the entries of the
source that reach its end and d segments of t, times the product along the blocks between. Inside the smallest blocks
the Krylov matrices are formed. There are one to three levels instead of log₂ n, each one batch of short transforms and
one batched matrix product.

The operator is a circle: node k receives from k - 1 by the factor ``weights[k]``, ``weights[0]`` being the corner. It
is unrolled into a line, on which a path of fewer than n steps to node k >= 0 starts after k - n: the corner is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

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
        blocks = _block_sizes(size)
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


def _block_sizes(size: int) -> list[int]:
    """The rows of a block of each level, from the smallest on."""
    blocks = [min(_LEAF, size)]
    while size > _MOST_BLOCKS * blocks[-1]:
        blocks.append(_BRANCHES * blocks[-1])
    return blocks


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
