"""The layer whose matrix is a product of two block-diagonal ones: Monarch (arXiv 2204.00595)."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import checked, positive_size
from lightning_struct.functional.structured.cost_model import LARGEST_PREPARED_MATRIX
from lightning_struct.functional.structured.monarch import MonarchFactors, monarch_to_dense, nearest_monarch
from lightning_struct.nn.structured import Device, Dtype, StructuredLinear


class Monarch(StructuredLinear):
    """A layer with M = P L Pᵀ R: L and R block-diagonal with b blocks each, P the order that interleaves them.

    Dao et al., "Monarch: expressive structured matrices for efficient and accurate training"
    (`arXiv 2204.00595 <https://arxiv.org/abs/2204.00595>`__), section 3.1. Columns go one after the other into b
    blocks, rows by turns; each of the b² blocks of M has rank r. There are b r (m + n) parameters, in products of small
    matrices alone: a device multiplies them at full speed, in half precision too.

    ``from_linear`` gives the nearest Monarch matrix itself, by a truncated singular value decomposition of each block.
    The class contains the matrices of rank r (b = 1), Kronecker products of a matrix of b columns with one of b rows,
    and so the Hadamard matrices.

    Sizes that b does not divide are filled up with zeros and cut, so that the blocks on the border are smaller: the
    count is b r (b⌈m/b⌉ + b⌈n/b⌉).

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        blocks: b, from 1 to the smaller of both sizes. None: the largest divisor of both sizes up to the square root of
            the smaller one, with which the count is least; or that root, rounded down, if no divisor is near.
        rank: r, at most the smaller side of a block. None: such that L and R have the width of the smaller side of M
            between them, as Monarch matrices have: r = 1 with b = √n.

    Raises:
        ValueError: a size is not positive, or ``blocks`` or ``rank`` is out of range.

    Example:
        >>> layer = Monarch(1024, 1024, bias=False)
        >>> layer.blocks, layer.rank, layer.weight_parameters
        (32, 1, 65536)
        >>> layer(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
    """

    weight_names: ClassVar[tuple[str, ...]] = ("L", "R")
    _is_of_matmuls: ClassVar[bool] = True

    L: nn.Parameter
    """(b, ⌈m/b⌉, b r), the blocks of the second factor."""
    R: nn.Parameter
    """(b, b r, ⌈n/b⌉), the blocks of the first factor."""

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        blocks: int | None = None,
        rank: int | None = None,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        smaller = min(in_features, out_features)
        self.blocks = _default_blocks(in_features, out_features) if blocks is None else positive_size("blocks", blocks)
        if self.blocks > smaller:
            raise ValueError(f"blocks must be at most min(in_features, out_features) = {smaller}, but is {blocks}")
        b, s, p = self.blocks, -(-out_features // self.blocks), -(-in_features // self.blocks)
        self.rank = max(1, min(s, p) // b) if rank is None else positive_size("rank", rank)
        if self.rank > min(s, p):
            raise ValueError(f"rank must be at most {min(s, p)}, the smaller side of a block {s} x {p}, but is {rank}")
        self.L = nn.Parameter(torch.empty(b, s, b * self.rank, device=device, dtype=dtype))
        self.R = nn.Parameter(torch.empty(b, b * self.rank, p, device=device, dtype=dtype))
        self.reset_parameters()

    def _draw_weights(self) -> None:
        """Draw L and R from normal distributions that keep the variance of the input."""
        nn.init.normal_(self.L, std=(self.blocks * self.rank) ** -0.5)
        nn.init.normal_(self.R, std=(self.blocks / self.in_features) ** 0.5)

    def _dense(self) -> Tensor:
        return monarch_to_dense(self.L, self.R)[: self.out_features, : self.in_features]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, blocks={self.blocks}, rank={self.rank}"

    def _start_near(self, weight: Tensor) -> None:
        rows, columns = self.L.shape[1] * self.blocks, self.R.shape[2] * self.blocks
        filled_up = F.pad(weight, (0, columns - self.in_features, 0, rows - self.out_features))
        L, R = nearest_monarch(filled_up, self.blocks, self.blocks, self.rank)
        self.L.copy_(L)
        self.R.copy_(R)

    def _prepare_factors(self) -> MonarchFactors:
        return MonarchFactors(self.L, self.R, self.out_features, self.in_features)

    def _prepares_dense(self, rows: int) -> bool:
        # Small ones are multiplied faster as they are: the factors are many small products.
        m, n = self.out_features, self.in_features
        is_small = min(m, n) < 512 or 2 * self.weight_parameters > m * n
        return is_small and m * n <= LARGEST_PREPARED_MATRIX


def _default_blocks(in_features: int, out_features: int) -> int:
    """The largest divisor of both sizes up to the root of the smaller one; the root itself if that is twice as much."""
    root = math.isqrt(min(in_features, out_features))
    divisors = (b for b in range(root, root // 2, -1) if in_features % b == 0 and out_features % b == 0)
    return next(divisors, root)
