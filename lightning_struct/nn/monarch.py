"""Layers whose matrix is a product of sparse ones: Monarch (arXiv 2204.00595) and Butterfly (arXiv 1903.05895)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import checked
from lightning_struct.functional.structured.arguments import computing_dtype
from lightning_struct.functional.structured.cost_model import making_is_faster
from lightning_struct.functional.structured.monarch import (
    MonarchFactors,
    Order,
    butterfly_as_monarch,
    butterfly_order,
    butterfly_shapes,
    leading_blocks,
    monarch_to_dense,
    nearby_butterfly,
    nearest_monarch,
)
from lightning_struct.nn.approximation import relative_error
from lightning_struct.nn.structured import Device, Dtype, StructuredLinear, positive_size

if TYPE_CHECKING:
    from typing_extensions import Self


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


def _default_blocks(in_features: int, out_features: int) -> int:
    """The largest divisor of both sizes up to the root of the smaller one; the root itself if that is twice as much."""
    root = math.isqrt(min(in_features, out_features))
    divisors = (b for b in range(root, root // 2, -1) if in_features % b == 0 and out_features % b == 0)
    return next(divisors, root)


@dataclass(frozen=True)
class ReorderedMonarch:
    """A part of a Monarch matrix that takes its inputs in another order: a ``PreparedMatrix``.

    Args:
        monarch: the matrix, with all of its columns.
        places: (N,), the input at each of its columns.
        zeros: inputs that are filled up.
    """

    monarch: MonarchFactors
    places: Tensor
    zeros: int

    def dense_is_faster(self, m: int, n: int, rows: int) -> bool:
        return self.monarch.dense_is_faster(m, n, rows)

    def matmul(self, x: Tensor) -> Tensor:
        return self.monarch.matmul(F.pad(x, (0, self.zeros)).index_select(-1, self.places))


class Butterfly(StructuredLinear):
    """A layer with M = B_d ... B_2 B_1 Π: d = log2 N factors, each of which mixes pairs of coordinates by small blocks.

    Dao et al., "Learning fast algorithms for linear transforms using butterfly factorizations"
    (`arXiv 1903.05895 <https://arxiv.org/abs/1903.05895>`__). B_j mixes the coordinates whose numbers differ in bit j -
    1 alone, by blocks 2 x 2 of rank r = 1: 2N log2 N parameters. Of rank r there are r numbers at each coordinate
    between two factors, and blocks 2r x 2r. Π is a fixed order of the inputs.

    N is the smallest power of two that neither size exceeds, and at least 2: inputs are filled up with zeros, outputs
    are cut. All N coordinates count as parameters, those too that meet nothing but the zeros.

    The class contains, for n = m = N,

    - of rank 1, in the natural order: the Hadamard matrix, and all Kronecker products of matrices 2 x 2;
    - of rank 2, in the order ``"fourier"``: the real and the imaginary part of the discrete Fourier transform, and the
      Hartley transform;
    - of rank 2, in the order ``"cosine"``: the cosine and sine transforms DCT-II, DCT-IV, DST-II and DST-IV,
      orthonormal or not.

    ``from_linear`` finds these, and each other member of the class, to rounding. Where W is none, each step of its
    start is the nearest in itself, which all together need not be.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        rank: r.
        order: Π: ``"natural"``; ``"fourier"``: with the bits of the inputs' numbers in reverse; ``"cosine"``: first the
            even inputs, then the odd ones backwards, and of these the bits in reverse. ``from_linear`` takes the one of
            the least error, unless it is given.

    Raises:
        ValueError: a size or the rank is not positive, or ``order`` is unknown.

    Example:
        >>> layer = Butterfly(1024, 1024, bias=False)
        >>> layer(torch.randn(8, 1024)).shape, layer.weight_parameters
        (torch.Size([8, 1024]), 20480)
        >>> [tuple(factor.shape) for factor in Butterfly(8, 8).factors]
        [(4, 1, 2, 2), (2, 2, 2, 2), (1, 4, 2, 2)]
    """

    weight_names: ClassVar[tuple[str, ...]] = ("entries",)
    _places: ClassVar[tuple[str, ...]] = ("places",)
    _is_of_matmuls: ClassVar[bool] = True

    entries: nn.Parameter
    """The entries of all factors, one after the other, flat."""
    places: Tensor | None
    """(N,) int64, the input at each coordinate before B_1; None in the natural order."""

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 1,
        bias: bool = True,
        *,
        order: Order = "natural",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.rank = positive_size("rank", rank)
        self.order: Order = order
        self.levels = max(1, (max(self.in_features, self.out_features) - 1).bit_length())
        self._shapes = butterfly_shapes(self.levels, rank)
        places = butterfly_order(order, self.length).to(device)
        self.register_buffer("places", None if order == "natural" else places)
        self.entries = nn.Parameter(torch.empty(sum(map(math.prod, self._shapes)), device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def length(self) -> int:
        """N, the coordinates of each factor."""
        return 2**self.levels

    @property
    def factors(self) -> list[Tensor]:
        """B_1 to B_d, views of ``entries``: (N/2^j, 2^(j-1), 2 r_j, 2 r_(j-1)), the blocks of B_j for each pair.

        The first two dimensions count the higher and the lower bits of the pair's numbers. r_j is r, and less where it
        can be: r_j = min(r, 2^j, 2^(d-j)).
        """
        parts = self.entries.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _draw_weights(self) -> None:
        """Draw orthogonal blocks, such that the variance of the input is kept."""
        places = butterfly_order(self.order, self.length)
        if self.places is not None:
            self.places.copy_(places)
        for factor in self.factors:
            _random_orthogonal_(factor)
        self.factors[0].mul_((self.length / self.in_features) ** 0.5)  # the filling has no variance

    def _dense(self) -> Tensor:
        columns = self.in_features if self.places is None else self.length
        M = monarch_to_dense(*self._as_monarch(columns))[: self.out_features]
        if self.places is not None:
            M = M.index_select(1, self.places.argsort())
        return M[:, : self.in_features]

    @torch.no_grad()
    def scale_(self, factor: float) -> Self:
        self.factors[0].mul_(factor)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, order={self.order!r}"

    def _makes_matrix(self, rows: int) -> bool:
        return making_is_faster(self.out_features, self.in_features, rows, break_even=200 * self.rank)

    def _prepare_factors(self) -> MonarchFactors | ReorderedMonarch:
        # More numbers than the parameters, but a compiled or exported graph would form them in each product.
        if self.places is None:
            return MonarchFactors(*self._as_monarch(self.in_features), self.out_features, self.in_features)
        matrix = MonarchFactors(*self._as_monarch(self.length), self.out_features, self.length)
        return ReorderedMonarch(matrix, self.places, self.length - self.in_features)

    def _as_monarch(self, columns: int) -> tuple[Tensor, Tensor]:
        """The parts of L and R that the rows and the first columns need."""
        return leading_blocks(*butterfly_as_monarch(self.factors), self.out_features, columns)

    @classmethod
    def _made_near(cls, weight: Tensor, *arguments: Any, **options: Any) -> Self:
        orders = [options.pop("order")] if "order" in options else get_args(Order)
        layers = [super(Butterfly, cls)._made_near(weight, *arguments, order=order, **options) for order in orders]
        return min(layers, key=lambda layer: relative_error(layer.to_dense(), weight))

    def _start_near(self, weight: Tensor) -> None:
        W = F.pad(weight, (0, self.length - self.in_features, 0, self.length - self.out_features))
        if self.places is not None:
            W = W.index_select(1, self.places)
        for factor, near in zip(self.factors, nearby_butterfly(W, self.rank), strict=True):
            factor.copy_(near)


def _random_orthogonal_(factor: Tensor) -> None:
    """Fill with orthogonal blocks, times a number if they have fewer rows: lengths remain on average."""
    rows, columns = factor.shape[-2:]
    gaussian = torch.randn_like(factor if rows >= columns else factor.mT, dtype=computing_dtype(factor))
    Q, R = torch.linalg.qr(gaussian)
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # all orthogonal matrices alike
    factor.copy_(Q if rows >= columns else Q.mT * (columns / rows) ** 0.5)
