"""Monarch matrices: products of two block-diagonal factors (Dao et al., arXiv 2204.00595).

Inputs are numbered by (k, p), in k blocks one after the other, outputs by (s, l), in l interleaved blocks. Then

    M[(s, l), (k, p)] = Σ_t L[l, s, (k, t)] R[k, (l, t), p],    t < r,

is a product of two block-diagonal matrices, L with l blocks and R with k blocks, and of the permutations that swap the
two halves of an index. For each pair (l, k) it is a block of rank r (Dao et al., section 3.1, for r = 1). These blocks
are disjoint, so that the nearest Monarch matrix is that of their truncated singular value decompositions (their section
3.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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

    def matmul(self, x: Tensor) -> Tensor:
        k, _, p = self.R.shape
        filled_up = x if k * p == self.columns else F.pad(x, (0, k * p - self.columns))
        y = monarch_matmul(self.L, self.R, filled_up)
        return y if y.shape[-1] == self.rows else y[..., : self.rows]
