"""The structured classes with fixed operators: Table 5 of Thomas et al., low rank (section 5.1), and their base."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import checked, positive_size
from lightning_struct.functional.structured.arguments import require_one_of
from lightning_struct.functional.structured.cost_model import (
    LARGEST_MATRIX,
    krylov_product_is_faster,
    made_matrix_is_faster,
    prepared_matrix_is_faster,
)
from lightning_struct.functional.structured.operators import SubdiagonalOperator
from lightning_struct.functional.structured.prepared import LeadingSubmatrix, PreparedMatrix, ReversedColumns
from lightning_struct.functional.structured.scaled_toeplitz import ScaledToeplitzSpectra
from lightning_struct.functional.structured.subdiagonal import subdiagonal_to_dense
from lightning_struct.functional.structured.transforms import (
    cauchy_like_matmul,
    hankel_like_matmul,
    prepare_toeplitz_like,
    toeplitz_like_matmul,
    toeplitz_like_to_dense,
    vandermonde_like_matmul,
    vandermonde_like_to_dense,
)
from lightning_struct.nn.approximation import stein_residual, truncated_factors
from lightning_struct.nn.structured import Device, Dtype, StructuredLinear, center_
from lightning_struct.nn.torch_modules import HALF_PRECISION, restore_precision

if TYPE_CHECKING:
    from typing_extensions import Self


Init = Literal["variance", "reference"]
Pad = Literal["square"]


class GeneratorLinear(StructuredLinear):
    """A layer whose matrix is made of generators G (m, r) and H (n, r), and of operators that a derived class adds.

    The parameters G and H are those of Thomas et al., section 3; the operators A and B are fixed or learned.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        rank: r, from 1 to the smaller of both sizes.
        init: ``"variance"``: G and H from one normal distribution, such that outputs of independent inputs of one
            variance have that variance on average; ``"reference"``: N(0, 1/(rm)) and N(0, 1/(rn)), as in the authors'
            code.
        pad: ``"square"`` makes the matrix a part of a square one of size max(m, n), as the authors' code does: inputs
            are filled up with zeros, outputs cut off. It has more parameters. None: rectangular as it is.

    Raises:
        ValueError: a size or the rank is not positive, the rank is larger than the matrix, or ``init`` or ``pad`` is
            unknown.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("G", "H")
    _gain_of_rest: ClassVar[float] = 1.1
    """The factor that makes up for the power of the mean; measured at 32 to 256 units, ranks 1 to 16."""

    G: nn.Parameter
    H: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 1,
        bias: bool = True,
        *,
        init: Init = "variance",
        pad: Pad | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.rank, largest_rank = positive_size("rank", rank), min(self.in_features, self.out_features)
        if self.rank > largest_rank:
            limit = f"min(in_features, out_features) = {largest_rank}"
            raise ValueError(f"rank must be at most {limit}, but is {rank}: give a smaller one, or take nn.Linear")
        if pad is not None and pad not in get_args(Pad):
            raise ValueError(f"pad must be 'square' or None, but is {pad!r}")
        require_one_of("init", init, get_args(Init))
        self.init = init
        self.pad = pad
        largest = max(self.in_features, self.out_features)
        self.rows, self.columns = (largest, largest) if pad == "square" else (self.out_features, self.in_features)
        self.G = nn.Parameter(torch.empty(self.rows, self.rank, device=device, dtype=dtype))
        self.H = nn.Parameter(torch.empty(self.columns, self.rank, device=device, dtype=dtype))
        self._add_operators(device, dtype)
        self.reset_parameters()

    def _draw_weights(self) -> None:
        """Draw G and H."""
        if self.init == "reference":
            nn.init.normal_(self.G, std=(self.rank * self.rows) ** -0.5)
            nn.init.normal_(self.H, std=(self.rank * self.columns) ** -0.5)
        else:
            # The expectation of ‖M‖² is r σ⁴ times the sum of squares; ‖M‖² = out_features keeps the variance.
            std = (self.out_features / (self.rank * self._sum_of_squares())) ** 0.25
            nn.init.normal_(self.G, std=std)
            nn.init.normal_(self.H, std=std)
            self._balance()

    def _balance(self) -> None:
        """Change G and H, as they were drawn, such that a stack of layers with rectifiers keeps the power of its input.

        An operator of shifts takes the mean of its input, which rectifiers give a third of the power, almost to one
        number, and the next rectifier leaves all of it or nothing. Without it some of the power is missing.
        """
        center_(self.G).mul_(self._gain_of_rest)

    def _dense(self) -> Tensor:
        dense = self._square_to_dense()
        return dense[: self.out_features, : self.in_features] if self.pad == "square" else dense

    def extra_repr(self) -> str:
        pad = f", pad={self.pad!r}" if self.pad else ""
        return f"{super().extra_repr()}, rank={self.rank}{pad}"

    def _add_operators(self, device: Device, dtype: Dtype) -> None:
        """Register the parameters or buffers of the operators, if the class has any."""

    def _sum_of_squares(self) -> float:
        """The expectation of ‖M‖² (Frobenius, after M is cut) for r = 1 and G, H of unit variance."""
        raise NotImplementedError

    def _square_to_dense(self) -> Tensor:
        """The matrix (rows, columns) before it is cut."""
        identity = torch.eye(self.columns, device=self.H.device, dtype=self.H.dtype)
        return self._square_multiply(identity).T

    def _square_multiply(self, x: Tensor) -> Tensor:
        """The product with the matrix before it is cut: (..., rows) for x (..., columns)."""
        raise NotImplementedError

    def _squared(self, weight: Tensor) -> Tensor:
        """``weight`` filled up with zeros to (rows, columns)."""
        return F.pad(weight, (0, self.columns - self.in_features, 0, self.rows - self.out_features))

    def _generators(self) -> tuple[Tensor, Tensor]:
        """G and H. A column alone is a view, so that its gradient has the strides of the parameter, as DDP wants it."""
        if self.rank > 1:
            return self.G, self.H
        return self.G.flatten().unsqueeze(1), self.H.flatten().unsqueeze(1)

    def _set_generators(self, R: Tensor) -> None:
        """Make G Hᵀ the matrix of rank r nearest to R (rows, columns)."""
        for generators, near in zip((self.G, self.H), truncated_factors(R, self.rank), strict=True):
            generators.copy_(near)

    def _multiply(self, x: Tensor) -> Tensor:
        filled_up = x if self.columns == self.in_features else F.pad(x, (0, self.columns - self.in_features))
        y = self._square_multiply(filled_up)
        return y if self.rows == self.out_features else y[..., : self.out_features]

    def _part(self, matrix: PreparedMatrix) -> PreparedMatrix:
        """The matrix (out_features, in_features) as a part of the matrix (rows, columns)."""
        if self.pad is None:
            return matrix
        return LeadingSubmatrix(matrix, self.columns - self.in_features, self.out_features)


def sum_of_overlaps(m: int, n: int) -> int:
    """The sum of squares of a Toeplitz-like matrix without corners: Σ of min(a, b) + 1 over a < m and b < n."""
    return sum(min(a, n) * (min(a, n) + 1) // 2 + max(n - a, 0) * a for a in range(1, m + 1))


@dataclass(frozen=True)
class LowRankFactors:
    """G Hᵀ by its factors: a :class:`~lightning_struct.functional.structured.prepared.PreparedMatrix`.

    Args:
        G: (out_features, r).
        H: (in_features, r).
    """

    G: Tensor
    H: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.H.T), self.G)


@checked
class LowRank(GeneratorLinear):
    """A layer with M = G Hᵀ, of rank r: r (m + n) parameters.

    ``from_linear`` gives the truncated singular value decomposition, the nearest matrix of that rank. A baseline of
    Thomas et al. (Table 1); among the LDR-TD matrices, by Proposition 2(b).

    Args:
        in_features, out_features, rank, bias, init, pad, device, dtype: see :class:`GeneratorLinear`.

    Raises:
        ValueError: as there.

    Example:
        >>> layer = LowRank(100, 50, rank=4, bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters()), layer(torch.randn(2, 100)).shape
        (600, torch.Size([2, 50]))
    """

    _is_of_matmuls: ClassVar[bool] = True

    def _balance(self) -> None:
        # A layer keeps the power on average over r random directions; that of its logarithm is lower.
        self.G.mul_(math.exp(0.6 * self.rank**-1.5))

    def _sum_of_squares(self) -> float:
        return self.out_features * self.in_features

    def _square_to_dense(self) -> Tensor:
        return self.G @ self.H.T

    def _square_multiply(self, x: Tensor) -> Tensor:
        return LowRankFactors(self.G, self.H).matmul(x)

    def _prepare_factors(self) -> PreparedMatrix:
        return LowRankFactors(self.G[: self.out_features], self.H[: self.in_features])

    def _prepares_dense(self, rows: int) -> bool:
        return self.rank * (self.out_features + self.in_features) >= self.out_features * self.in_features

    def _start_near(self, weight: Tensor) -> None:
        self._set_generators(self._squared(weight))


@checked
class ToeplitzLike(GeneratorLinear):
    """A layer with M = Σ_i K(Z_1, g_i) K(Z_-1, h_i)ᵀ, Toeplitz-like: r (m + n) parameters.

    Thomas et al., section 2 and Table 5, by equation (2). Square, these are all matrices whose displacement Z_1 M - M
    Z_-1, equation (1), has rank r (Sindhwani et al.); the authors' code has corners 0 instead of 1 and -1.

    Args:
        in_features, out_features, rank, bias, init, pad, device, dtype: see :class:`GeneratorLinear`.

    Raises:
        ValueError: as there.

    Example:
        >>> layer = ToeplitzLike(100, 50, rank=2)
        >>> layer(torch.randn(8, 100)).shape, layer.weight_parameters
        (torch.Size([8, 50]), 300)
    """

    def _sum_of_squares(self) -> float:
        return self.out_features * self.in_features * min(self.rows, self.columns)

    def _makes_matrix(self, rows: int) -> bool:
        return made_matrix_is_faster(self.rows, self.columns, self.rank, rows, self.G.device)

    def _square_to_dense(self) -> Tensor:
        return self._shifted_to_dense(*self._generators())

    def _shifted_to_dense(self, G: Tensor, H: Tensor) -> Tensor:
        """Σ_i K(Z_1, g_i) K(Z_-1, h_i)ᵀ: equation (2) with A = Z_1 and B = Z_-1ᵀ."""
        if krylov_product_is_faster(self.rows, self.columns, self.rank):
            return toeplitz_like_to_dense(G, H)
        ones_a, ones_b, one = G.new_ones(self.rows - 1), G.new_ones(self.columns - 1), G.new_ones(())
        return subdiagonal_to_dense(ones_a, one, ones_b, -one, G, H)

    def _square_multiply(self, x: Tensor) -> Tensor:
        return toeplitz_like_matmul(*self._generators(), x)

    def _prepare_factors(self) -> PreparedMatrix:
        return self._part(self._prepare_square())

    def _prepares_dense(self, rows: int) -> bool:
        return prepared_matrix_is_faster(self.out_features, self.in_features, 2 + 2 * self.rank, rows)

    def _prepare_square(self) -> ScaledToeplitzSpectra | ReversedColumns:
        return prepare_toeplitz_like(self.G, self.H)

    def _start_near(self, weight: Tensor) -> None:
        self._start_near_square(self._squared(weight))

    def _start_near_square(self, target: Tensor) -> None:
        one = target.new_ones(())
        a = SubdiagonalOperator(target.new_ones(self.rows - 1), one)
        b = SubdiagonalOperator(target.new_ones(self.columns - 1), -one)
        self._set_generators(stein_residual(target, a, b))


@checked
class HankelLike(ToeplitzLike):
    """A layer with M = Σ_i K(Z_1, g_i) K(Z_-1ᵀ, h_i)ᵀ, Hankel-like: r (m + n) parameters.

    Equation (2) of Thomas et al. with A = Z_1 and B = Z_-1: a Toeplitz-like matrix with its columns in reverse order.
    Table 5 has Z_0 for Z_-1. The authors' code reverses the outputs of a Toeplitz-like layer, that is the rows, where
    inputs are reversed here. Square, both ways give the same class: all M whose displacement Z_1 M - M Z_-1ᵀ has rank
    r.

    Args:
        in_features, out_features, rank, bias, init, pad, device, dtype: see :class:`GeneratorLinear`.

    Raises:
        ValueError: as there.

    Example:
        >>> layer = HankelLike(100, 50, rank=2)
        >>> layer(torch.randn(8, 100)).shape, layer.weight_parameters
        (torch.Size([8, 50]), 300)
    """

    def _square_multiply(self, x: Tensor) -> Tensor:
        return hankel_like_matmul(*self._generators(), x, 1.0, -1.0)

    def _square_to_dense(self) -> Tensor:
        G, H = self._generators()
        return self._shifted_to_dense(G, H.flip(0)).flip(1)

    def _prepare_square(self) -> ReversedColumns:
        return ReversedColumns(prepare_toeplitz_like(self.G, self.H.flip(0)))

    def _start_near_square(self, target: Tensor) -> None:
        super()._start_near_square(target.flip(1))
        self.H.copy_(self.H.flip(0))


class _FixedNodesLinear(GeneratorLinear):
    """A layer with diagonal operators. Nodes are buffers, float32 at least: half precision would merge them."""

    node_names: ClassVar[tuple[str, ...]]
    """The buffers: those of the rows, then those of the columns if these have any."""

    def _add_operators(self, device: Device, dtype: Dtype) -> None:
        at_least_single = torch.promote_types(self.G.dtype, torch.float32)
        for name, size in zip(self.node_names, (self.rows, self.columns), strict=False):
            self.register_buffer(name, torch.empty(size, device=device, dtype=at_least_single))

    def _draw_weights(self) -> None:
        for name, nodes in zip(self.node_names, self._drawn_nodes(), strict=True):
            getattr(self, name).copy_(nodes)
        super()._draw_weights()

    def _drawn_nodes(self) -> tuple[Tensor, ...]:
        """The nodes of a new layer."""
        raise NotImplementedError

    def _nodes(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.node_names}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        nodes = self._nodes()
        super()._apply(fn, recurse)
        restore_precision(self, nodes)
        return self


@checked
class VandermondeLike(_FixedNodesLinear):
    """A layer with M = Σ_i K(diag(v), g_i) K(Z_0, h_i)ᵀ, Vandermonde-like: r (m + n) parameters.

    Thomas et al., Table 5, by equation (2). Vandermonde matrices V[a, b] = v_aᵇ are of rank 1.

    The nodes v (m,) are fixed, in float32 at least: the paper counts G and H alone. By default they are spaced evenly
    in (-1, 1), v_a = 1 - (2a + 1) / m, so that no power grows; ``init="reference"`` draws them from U(-0.7, 0.7), as
    the authors' code does.

    Args:
        in_features, out_features, rank, bias, init, pad, device, dtype: see :class:`GeneratorLinear`.

    Raises:
        ValueError: as there.

    Example:
        >>> layer = VandermondeLike(100, 50, rank=2)
        >>> layer(torch.randn(8, 100)).shape, layer.nodes.shape
        (torch.Size([8, 50]), torch.Size([50]))
    """

    node_names = ("nodes",)

    nodes: Tensor

    def _drawn_nodes(self) -> tuple[Tensor, ...]:
        even = self.init != "reference"
        return (self._even_nodes() if even else nn.init.uniform_(torch.empty_like(self.nodes), -0.7, 0.7),)

    def _even_nodes(self) -> Tensor:
        # Not Chebyshev's, which crowd at 1 and -1: there all rows are alike, and together they make SGD diverge.
        places = torch.arange(self.rows, device="cpu", dtype=torch.float64)
        return (1 - (2 * places + 1) / self.rows).to(self.nodes.dtype)

    def _balance(self) -> None:
        center_(self.H).mul_(1.18)  # the row of a node near 1 would multiply the mean most

    def _sum_of_squares(self) -> float:
        # Of the nodes as they are drawn, not as they are: on the meta device they have no values.
        squares = self._even_nodes()[: self.out_features, None].double().square()
        powers = squares ** torch.arange(self.in_features, device="cpu")
        return float(powers.cumsum(1).sum())

    def _square_multiply(self, x: Tensor) -> Tensor:
        return vandermonde_like_matmul(self.nodes, *self._generators(), x).to(x.dtype)

    def _square_to_dense(self) -> Tensor:
        return vandermonde_like_to_dense(self.nodes, *self._generators()).to(self.H.dtype)

    def _makes_matrix(self, rows: int) -> bool:
        # A row of M takes three transforms, one of the input 1 + r and r products with a matrix like M. Measured.
        return rows * 8 > self.rows and self.rows * self.columns <= LARGEST_MATRIX

    def _start_near(self, weight: Tensor) -> None:
        target = self._squared(weight)
        # M - diag(v) M Z_0ᵀ is G Hᵀ; Z_0ᵀ shifts the columns to the right.
        displacement = target - self.nodes[:, None] * F.pad(target, (1, -1))
        self._set_generators(displacement)

    def _refinement(self) -> int:
        # An evaluation takes ten times that of a Toeplitz-like matrix.
        return super()._refinement() * 512 // max(512, self.in_features, self.out_features)


@checked
class CauchyLike(_FixedNodesLinear):
    """A layer with M[a, b] = (G Hᵀ)[a, b] / (s_a - t_b), Cauchy-like: r (m + n) parameters.

    Thomas et al., Table 5: equation (1) with diag(s) and diag(t), diag(s) M - M diag(t) = G Hᵀ. The nodes s (m,) and t
    (n,) are fixed, in float32 at least. By default those of the shorter side are 0, 2, 4, ..., and those of the other
    are spread over the middle halves of the gaps after them, so that none is far from all others: for m = n they are 1,
    3, 5, .... ``init="reference"`` deals the integers 0 to m + n - 1 out in turn, which for m = n is the same.

    Args:
        in_features, out_features, rank, bias, init, pad, device, dtype: see :class:`GeneratorLinear`.

    Raises:
        ValueError: as there.

    Example:
        >>> layer = CauchyLike(3, 3)
        >>> layer.row_nodes, layer.column_nodes
        (tensor([0., 2., 4.]), tensor([1., 3., 5.]))
    """

    node_names = ("row_nodes", "column_nodes")

    row_nodes: Tensor
    column_nodes: Tensor

    def _drawn_nodes(self) -> tuple[Tensor, Tensor]:
        if self.init == "reference":
            return self._dealt_nodes()
        # Not dealt out: an entry is G Hᵀ over the distance, and most of 256 columns would be far from each of 10 rows.
        sizes = sorted((self.rows, self.columns))
        few, many = (torch.arange(size, device="cpu", dtype=torch.float64) for size in sizes)
        places = (many + 0.5) * (sizes[0] / sizes[1])
        spread = 2 * places.floor() + 0.5 + places.frac()
        return (2 * few, spread) if self.rows <= self.columns else (spread, 2 * few)

    def _dealt_nodes(self) -> tuple[Tensor, Tensor]:
        of_both = [torch.arange(size, device="cpu", dtype=torch.float64) for size in (self.rows, self.columns)]
        shares = [(numbers + 0.5) / len(numbers) for numbers in of_both]
        order = torch.cat(shares).argsort(stable=True).argsort()
        return order[: self.rows], order[self.rows :]

    def _sum_of_squares(self) -> float:
        row_nodes, column_nodes = self._drawn_nodes()  # not the buffers: on the meta device they have no values
        differences = row_nodes[: self.out_features, None].double() - column_nodes[: self.in_features]
        return float((1 / differences.square()).sum())

    def _balance(self) -> None:
        # The nearest nodes make most of a row: it has a like number of entries of one size with signs alone, and one in
        # each row of H.
        size = (self.out_features / self._sum_of_squares()) ** 0.25
        self.G.sign_().mul_(size)
        self.H.sign_().mul_(size)
        self.H[torch.arange(self.columns)[:, None] % self.rank != torch.arange(self.rank)] = 0

    def _square_multiply(self, x: Tensor) -> Tensor:
        y = cauchy_like_matmul(self.row_nodes, self.column_nodes, *self._generators(), x, check_nodes=False)
        return y.to(x.dtype)

    def _start_near(self, weight: Tensor) -> None:
        self._set_generators((self.row_nodes[:, None] - self.column_nodes) * self._squared(weight))

    def _refinement(self) -> int:
        # An evaluation takes three times that of a Toeplitz-like matrix.
        return super()._refinement() * 1024 // max(1024, self.in_features, self.out_features)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # Version 0.2 rounded the nodes of layers in half precision, and all of its layers had the nodes dealt out.
        for name, dealt, drawn in zip(self.node_names, self._dealt_nodes(), self._drawn_nodes(), strict=True):
            nodes = state_dict.get(prefix + name)
            if isinstance(nodes, Tensor) and nodes.dtype in HALF_PRECISION:
                exact = drawn if torch.equal(nodes, drawn.to(nodes)) else dealt
                state_dict[prefix + name] = exact.to(nodes.device, torch.float32)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
