"""Monarch matrices, products of two block-diagonal factors, and butterfly matrices, products of log2 N of them.

**Monarch matrices** (Dao et al., arXiv 2204.00595). Inputs are numbered by (k, p), in k blocks one after the other,
outputs by (s, l), in l interleaved blocks. Then

    M[(s, l), (k, p)] = Σ_t L[l, s, (k, t)] R[k, (l, t), p],    t < r,

is a product of two block-diagonal matrices, L with l blocks and R with k blocks, and of the permutations that swap the
two halves of an index. For each pair (l, k) it is a block of rank r (Dao et al., section 3.1, for r = 1). These blocks
are disjoint, so that the nearest Monarch matrix is that of their truncated singular value decompositions (their section
3.3).

**Butterfly matrices** (Dao et al., 2019) have factors of small blocks, as in the fast Fourier transform. The size is N
= 2^d. Factor j, for j = 1, ..., d, has a block for each of N/2 pairs of coordinates: those whose numbers differ in bit
j - 1 alone. In a butterfly matrix of rank r there are r numbers at each coordinate between two factors, r_j = min(r,
2^j, 2^(d-j)) after factor j, which is 1 at both ends. So factor j is a tensor

    (N/2^j, 2^(j-1), 2 r_j, 2 r_(j-1)),

where the first two places count the pairs, by the higher and by the lower bits of their numbers. Of rank 1 the blocks
are 2 x 2, which makes 2 N log2 N entries. Neighbouring factors multiply to factors of the same kind with larger blocks:
all of the first h to block-diagonal matrices, those after them to interleaved ones. So a butterfly matrix is a Monarch
matrix, in d - 1 ways, and it is multiplied as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.structured.arguments import require_one_of
from lightning_struct.functional.structured.cost_model import monarch_factors_are_faster

# Rows of the input up to which they come first in all products. Measured on one CPU thread, n = 512 to 4,096.
_FEW_ROWS = 8


def monarch_matmul(L: Tensor, R: Tensor, x: Tensor) -> Tensor:
    """x Mᵀ for the Monarch matrix M of L and R.

    Args:
        L: (l, s, k r), the blocks of the second factor.
        R: (k, l r, p), the blocks of the first factor.
        x: (..., k p), of at least one vector.

    Returns:
        (..., s l).

    Raises:
        ValueError: a shape does not fit.

    Example:
        >>> L, R = torch.ones(2, 3, 5), torch.ones(5, 2, 4)
        >>> monarch_matmul(L, R, torch.ones(7, 20)).shape
        torch.Size([7, 6])
    """
    l, s, k, r, p = _sizes(L, R)
    if x.ndim == 0 or x.shape[-1] != k * p:
        raise ValueError(f"x must be (..., {k * p}) for {k} blocks of {p} columns, got {tuple(x.shape)}")
    blocks = x.reshape(-1, k, p)
    if not torch.compiler.is_compiling() and blocks.shape[0] <= _FEW_ROWS:
        middle = torch.bmm(blocks.transpose(0, 1), R.mT)  # (k, rows, l r)
        middle = middle.reshape(k, -1, l, r).permute(2, 1, 0, 3).reshape(l, -1, k * r)
        y = torch.bmm(middle, L.mT).permute(1, 2, 0)  # from (l, rows, s)
    else:  # rows last, so that permutations move whole runs of them
        middle = torch.bmm(R, blocks.permute(1, 2, 0))  # (k, l r, rows)
        middle = middle.reshape(k, l, r, -1).transpose(0, 1).reshape(l, k * r, -1)
        y = torch.bmm(L, middle).permute(2, 1, 0)  # from (l, s, rows)
    return y.reshape(*x.shape[:-1], s * l)


def monarch_to_dense(L: Tensor, R: Tensor) -> Tensor:
    """The Monarch matrix M of L and R.

    Args:
        L: (l, s, k r).
        R: (k, l r, p).

    Returns:
        (s l, k p).

    Raises:
        ValueError: a shape does not fit.

    Example:
        >>> monarch_to_dense(torch.ones(1, 2, 1), torch.tensor([[[1.0, 2.0, 3.0]]]))
        tensor([[1., 2., 3.],
                [1., 2., 3.]])
    """
    l, s, k, r, p = _sizes(L, R)
    blocks = L.reshape(l, s, k, r).transpose(1, 2) @ R.reshape(k, l, r, p).transpose(0, 1)  # (l, k, s, p)
    return blocks.permute(2, 0, 1, 3).reshape(s * l, k * p)


def leading_blocks(L: Tensor, R: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """L and R without the blocks, or parts of blocks, that the first rows and columns of M do not depend on.

    Args:
        L: (l, s, k r).
        R: (k, l r, p).
        rows: 1 to s l.
        columns: 1 to k p.

    Returns:
        Views, those of the smallest Monarch matrix that begins with the same ``rows`` and ``columns``.

    Example:
        >>> L, R = leading_blocks(torch.ones(8, 8, 8), torch.ones(8, 8, 8), rows=3, columns=20)
        >>> L.shape, R.shape
        (torch.Size([3, 1, 3]), torch.Size([3, 3, 8]))
    """
    l, _, _, r, p = _sizes(L, R)
    block_columns = -(-columns // p)
    L = L[: min(l, rows), : -(-rows // l), : block_columns * r]
    return L, R[:block_columns, : min(l, rows) * r, : min(p, columns)]


def nearest_monarch(W: Tensor, rows: int, columns: int, rank: int) -> tuple[Tensor, Tensor]:
    """L and R of the Monarch matrix nearest to W in the Frobenius norm.

    Args:
        W: (..., s l, k p), any number of matrices.
        rows: l, the interleaved blocks of rows.
        columns: k, the blocks of columns.
        rank: r.

    Returns:
        L (..., l, s, k r) and R (..., k, l r, p). If r is more than a block can have, the rest is zero.

    Example:
        >>> W = torch.arange(16.0).reshape(4, 4)
        >>> L, R = nearest_monarch(W, 2, 2, rank=2)
        >>> torch.allclose(monarch_to_dense(L, R), W, atol=1e-5)
        True
    """
    l, k = rows, columns
    s, p = W.shape[-2] // l, W.shape[-1] // k
    blocks = W.reshape(*W.shape[:-2], s, l, k, p).movedim(-4, -2)  # (..., l, k, s, p)
    U, singular_values, Vh = torch.linalg.svd(blocks, full_matrices=False)
    root = singular_values[..., :rank].sqrt()
    missing = max(0, rank - min(s, p))
    left = F.pad(U[..., :rank] * root[..., None, :], (0, missing))  # (..., l, k, s, r)
    right = F.pad(root[..., :, None] * Vh[..., :rank, :], (0, 0, 0, missing))  # (..., l, k, r, p)
    L = left.transpose(-3, -2).flatten(-2)
    R = right.transpose(-4, -3).flatten(-3, -2)
    return L.contiguous(), R.contiguous()


def _sizes(L: Tensor, R: Tensor) -> tuple[int, int, int, int, int]:
    """l, s, k, r and p of the formula."""
    if L.ndim == R.ndim == 3 and 0 not in (*L.shape, *R.shape):
        (l, s, left), (k, right, p) = L.shape, R.shape
        r = left // k
        if (left, right) == (k * r, l * r):
            return l, s, k, r, p
    shapes = f"{tuple(L.shape)} and {tuple(R.shape)}"
    raise ValueError(f"L must be (l, s, k r) and R (k, l r, p), none of them 0, got {shapes}")


@dataclass(frozen=True)
class MonarchFactors:
    """A part of a Monarch matrix by its factors: a ``PreparedMatrix``.

    Args:
        L, R: the blocks, as :func:`monarch_matmul` takes them.
        rows: the rows of M that are kept, the first ones.
        columns: the columns of M that are kept, the first ones.
    """

    L: Tensor
    R: Tensor
    rows: int
    columns: int

    def dense_is_faster(self, m: int, n: int, rows: int) -> bool:
        return not monarch_factors_are_faster(m, n, self.L.numel() + self.R.numel(), rows)

    def matmul(self, x: Tensor) -> Tensor:
        k, _, p = self.R.shape
        filled_up = x if k * p == self.columns else F.pad(x, (0, k * p - self.columns))
        y = monarch_matmul(self.L, self.R, filled_up)
        return y if y.shape[-1] == self.rows else y[..., : self.rows]


Order = Literal["natural", "fourier", "cosine"]


def butterfly_ranks(levels: int, rank: int) -> list[int]:
    """r_0, ..., r_d for d = ``levels``.

    Example:
        >>> butterfly_ranks(4, rank=3)
        [1, 2, 3, 2, 1]
    """
    return [min(rank, 2**level, 2 ** (levels - level)) for level in range(levels + 1)]


def butterfly_shapes(levels: int, rank: int) -> list[tuple[int, int, int, int]]:
    """The shapes of the factors 1 to d for d = ``levels``.

    Example:
        >>> butterfly_shapes(3, rank=1)
        [(4, 1, 2, 2), (2, 2, 2, 2), (1, 4, 2, 2)]
    """
    r = butterfly_ranks(levels, rank)
    return [(2 ** (levels - k), 2 ** (k - 1), 2 * r[k], 2 * r[k - 1]) for k in range(1, levels + 1)]


def butterfly_as_monarch(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """L and R of the Monarch matrix that is the product of the factors, with about √N blocks in each.

    Args:
        factors: d ≥ 1 of them, the one that is applied first at the front.

    Returns:
        L (2^h, 2^(d-h), 2^(d-h) r) and R (2^(d-h), 2^h r, 2^h) with h = ⌈d/2⌉, as
        :func:`monarch_matmul` takes them.

    Example:
        >>> haar = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> L, R = butterfly_as_monarch([haar.expand(2, 1, 2, 2), haar.expand(1, 2, 2, 2)])
        >>> L.shape, R.shape
        (torch.Size([2, 2, 2]), torch.Size([2, 2, 2]))
    """
    half = (len(factors) + 1) // 2
    R = reduce(_product, factors[:half]).squeeze(1)
    if len(factors) > half:
        return reduce(_product, factors[half:]).squeeze(0), R
    return R.new_ones(R.shape[1], 1, 1), R


def nearby_butterfly(W: Tensor, rank: int) -> list[Tensor]:
    """The factors of a butterfly matrix near to W: W itself if it is one, up to rounding.

    W is split into the factors of the nearest Monarch matrix, and these in the same way, as they are butterfly matrices
    (Zheng, Riccietti and Gribonval, "Efficient identification of butterfly sparse matrix factorizations", arXiv
    2110.01235, for rank 1). Each split gives the nearest matrix; all together need not.

    Args:
        W: (N, N), N a power of two from 2 on.
        rank: r.

    Raises:
        ValueError: W has another shape.

    Example:
        >>> haar = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> [factor.shape[:2] for factor in nearby_butterfly(torch.kron(haar, haar), rank=1)]
        [torch.Size([2, 1]), torch.Size([1, 2])]
    """
    N = W.shape[-1]
    if W.ndim != 2 or W.shape[0] != N or N < 2 or N & (N - 1):
        raise ValueError(f"W must be square, of a size that is a power of two from 2 on, got {tuple(W.shape)}")
    factors = _split(W[None], butterfly_ranks(N.bit_length() - 1, rank))
    return [factor.squeeze(0).contiguous() for factor in factors]


def butterfly_order(order: Order, size: int) -> Tensor:
    """The number of the input at each place before the first factor, (size,) int64, for a size that is a power of two.

    Args:
        order: ``"natural"``: 0, 1, 2, ...; ``"fourier"``: with the bits in reverse, as a fast Fourier transform by
            decimation in time begins; ``"cosine"``: the even inputs and then the odd ones from the last to the first,
            in that order with the bits in reverse, as a fast cosine transform begins (Makhoul, 1980).
        size: N.

    Raises:
        ValueError: there is no such order.

    Example:
        >>> butterfly_order("fourier", 8).tolist(), butterfly_order("cosine", 8).tolist()
        ([0, 4, 2, 6, 1, 5, 3, 7], [0, 7, 4, 3, 2, 5, 6, 1])
    """
    require_one_of("order", order, get_args(Order))
    places = torch.arange(size)
    if order == "natural":
        return places
    if order == "cosine":
        places = torch.cat([places[::2], places[1::2].flip(0)])
    levels = size.bit_length() - 1
    return places.view([2] * levels).permute(*reversed(range(levels))).reshape(-1)


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Two neighbouring factors as one.

    (K b, D, a r', a r) and then (K, a D, b r'', b r') make (K, D, b a r'', b a r).
    """
    K, D = second.shape[0], first.shape[1]
    a, b = second.shape[1] // D, first.shape[0] // K
    rank = first.shape[2] // a
    before = first.view(K, b, D, a, rank, -1).permute(0, 2, 1, 3, 4, 5)  # (K, D, j2, i1, t, (j1, r))
    after = second.view(K, a, D, -1, b, rank).permute(0, 2, 4, 1, 3, 5)  # (K, D, j2, i1, (i2, r''), t)
    blocks = after * before if rank == 1 else after @ before  # (K, D, j2, i1, (i2, r''), (j1, r))
    rows, columns = blocks.shape[-2] // b, blocks.shape[-1] // a
    blocks = blocks.view(K, D, b, a, b, rows, a, columns).permute(0, 1, 4, 3, 5, 2, 6, 7)
    return blocks.reshape(K, D, b * a * rows, b * a * columns)


def _split(W: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    """The factors of each of the matrices W (many, N r_d, N r_0), whose first dimension is of the same matrices."""
    levels = len(ranks) - 1
    if levels == 1:
        return [W[:, None, None]]
    many, half = W.shape[0], (levels + 1) // 2
    low, high, before, after = 2**half, 2 ** (levels - half), ranks[0], ranks[-1]
    # From rows (s, l, after) to ((s, after), l), which are interleaved by l.
    rows = W.view(many, high, low, after, -1).transpose(2, 3).reshape(many, high * after * low, -1)
    L, R = nearest_monarch(rows, low, high, ranks[half])
    # L is (many, l, (s, after), (k, r)), and R is (many, k, (l, r), (p, before)): butterfly matrices for each l and k.
    blocks = _split(R.reshape(many * high, low * ranks[half], low * before), ranks[: half + 1])
    interleaved = _split(L.reshape(many * low, high * after, high * ranks[half]), ranks[half:])
    first = [factor.unflatten(0, (many, high)).flatten(1, 2) for factor in blocks]
    second = [factor.unflatten(0, (many, low)).movedim(1, 3).flatten(2, 3) for factor in interleaved]
    return [*first, *second]
