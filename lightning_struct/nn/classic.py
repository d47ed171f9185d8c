"""The structured classes with fixed operators, and the baselines of the paper (Thomas et al., section 5.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.operators import SubdiagonalOperator
from lightning_struct.functional.structured.cost_model import kept_matrix_is_faster, made_matrix_is_faster
from lightning_struct.functional.structured.subdiagonal import subdiagonal_to_dense
from lightning_struct.functional.structured.toeplitz import prepare_toeplitz_like, toeplitz_like_matmul
from lightning_struct.functional.transforms import (
    cauchy_like_matmul,
    circulant_matmul,
    hadamard_transform,
    hankel_like_matmul,
    vandermonde_like_matmul,
)
from lightning_struct.nn.approximation import stein_residual
from lightning_struct.nn.generators import GeneratorLinear, Init, checked_init
from lightning_struct.nn.structured import Form, PartForm, StructuredLinear, positive_size


@dataclass(frozen=True)
class FactoredForm:
    """G Hᵀ as its factors, (out_features, r) and (in_features, r)."""

    G: Tensor
    H: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.H.T), self.G)


class LowRank(GeneratorLinear):
    """M = G Hᵀ with r (m + n) parameters.

    ``from_linear`` gives the truncated singular value decomposition, the nearest matrix of that rank.
    """

    _is_of_matmuls: ClassVar[bool] = True

    def _sum_of_squares(self) -> float:
        return self.out_features * self.in_features

    def _square_to_dense(self) -> Tensor:
        return self.G @ self.H.T

    def _square_multiply(self, x: Tensor) -> Tensor:
        return FactoredForm(self.G, self.H).matmul(x)

    def _prepare(self, batch: int) -> Form:
        return FactoredForm(self.G[: self.out_features].detach(), self.H[: self.in_features].detach())

    def _start_near(self, weight: Tensor) -> None:
        self._set_generators(self._squared(weight))


class ToeplitzLike(GeneratorLinear):
    """M = Σ_i K(Z_1, g_i) K(Z_-1, h_i)ᵀ: Toeplitz-like with r (m + n) parameters.

    Square, these are all matrices whose displacement Z_1 M - M Z_-1 has rank r (Sindhwani et al.); the authors of the paper
    have corners 0 instead of 1 and -1.
    """

    def _sum_of_squares(self) -> float:
        return self.out_features * self.in_features * min(self.rows, self.columns)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._makes_matrix(x):
            return F.linear(x, self.to_dense())
        return super()._multiply(x)

    def _makes_matrix(self, x: Tensor) -> bool:
        """Whether M, made row after row, is faster than transforms: not where each row is a launch, or a piece of a graph."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        return made_matrix_is_faster(self.rows, self.columns, self.rank, x.shape[:-1].numel())

    def _square_to_dense(self) -> Tensor:
        return self._shifted_to_dense(self.H)

    def _shifted_to_dense(self, H: Tensor) -> Tensor:
        """Σ_i K(Z_1, g_i) K(Z_-1, h_i)ᵀ."""
        ones_a, ones_b, one = self.G.new_ones(self.rows - 1), self.G.new_ones(self.columns - 1), self.G.new_ones(())
        return subdiagonal_to_dense(ones_a, one, ones_b, -one, self.G, H)

    def _square_multiply(self, x: Tensor) -> Tensor:
        return toeplitz_like_matmul(self.G, self.H, x)

    def _prepare(self, batch: int) -> Form:
        if kept_matrix_is_faster(self.out_features, self.in_features, self.rank, batch):
            return super()._prepare(batch)
        return self._part(self._prepare_square())

    def _prepare_square(self) -> Form:
        return prepare_toeplitz_like(self.G, self.H)

    def _start_near(self, weight: Tensor) -> None:
        self._start_near_square(self._squared(weight))

    def _start_near_square(self, target: Tensor) -> None:
        one = target.new_ones(())
        a = SubdiagonalOperator(target.new_ones(self.rows - 1), one)
        b = SubdiagonalOperator(target.new_ones(self.columns - 1), -one)
        self._set_generators(stein_residual(target, a, b))


@dataclass(frozen=True)
class FlippedForm:
    """Of a form: its inputs in reverse order."""

    form: Form

    def matmul(self, x: Tensor) -> Tensor:
        return self.form.matmul(x.flip(-1))


class HankelLike(ToeplitzLike):
    """M = Σ_i K(Z_1, g_i) K(Z_-1ᵀ, h_i)ᵀ: Hankel-like with r (m + n) parameters, a Toeplitz-like matrix with its columns in
    reverse order.
    """

    def _square_multiply(self, x: Tensor) -> Tensor:
        return hankel_like_matmul(self.G, self.H, x, 1.0, -1.0)

    def _square_to_dense(self) -> Tensor:
        return self._shifted_to_dense(self.H.flip(0)).flip(1)

    def _prepare_square(self) -> Form:
        return FlippedForm(prepare_toeplitz_like(self.G, self.H.flip(0)))

    def _start_near_square(self, target: Tensor) -> None:
        super()._start_near_square(target.flip(1))
        self.H.copy_(self.H.flip(0))


class VandermondeLike(GeneratorLinear):
    """M = Σ_i K(diag(v), g_i) K(Z_0, h_i)ᵀ with r (m + n) parameters: Vandermonde matrices V[a, b] = v_aᵇ are of rank 1.

    The nodes v (m,) are fixed: the paper counts G and H alone. By default they are Chebyshev's, cos((2a + 1)π / 2m), which
    cover (-1, 1) such that no power grows; ``init="reference"`` draws them from U(-0.7, 0.7), as the authors' code does.
    """

    nodes: Tensor

    def _add_operators(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.register_buffer("nodes", torch.empty(self.rows, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        if self.init == "reference":
            nn.init.uniform_(self.nodes, -0.7, 0.7)
        else:
            places = torch.arange(self.rows, device=self.nodes.device, dtype=torch.float64)
            self.nodes.copy_(torch.cos((2 * places + 1) * (math.pi / (2 * self.rows))))
        super().reset_parameters()

    def _sum_of_squares(self) -> float:
        squares = self.nodes[: self.out_features, None].double().square()
        powers = squares ** torch.arange(self.in_features, device=squares.device)
        return float(powers.cumsum(1).sum())

    def _square_multiply(self, x: Tensor) -> Tensor:
        return vandermonde_like_matmul(self.nodes, self.G, self.H, x)

    def _start_near(self, weight: Tensor) -> None:
        target = self._squared(weight)
        # M - diag(v) M Z_0ᵀ is G Hᵀ; Z_0ᵀ shifts the columns to the right.
        displacement = target - self.nodes[:, None] * F.pad(target, (1, -1))
        self._set_generators(displacement)


class CauchyLike(GeneratorLinear):
    """M[a, b] = (G Hᵀ)[a, b] / (s_a - t_b) with r (m + n) parameters: diag(s) M - M diag(t) = G Hᵀ.

    The nodes s (m,) and t (n,) are fixed. They are the integers 0 to m + n - 1, dealt out evenly to both in turn: for m = n
    the even and the odd ones.
    """

    row_nodes: Tensor
    column_nodes: Tensor

    def _add_operators(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.register_buffer("row_nodes", torch.empty(self.rows, device=device, dtype=dtype))
        self.register_buffer("column_nodes", torch.empty(self.columns, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        places = [(torch.arange(size, dtype=torch.float64) + 0.5) / size for size in (self.rows, self.columns)]
        order = torch.cat(places).argsort(stable=True).argsort()
        self.row_nodes.copy_(order[: self.rows])
        self.column_nodes.copy_(order[self.rows :])
        super().reset_parameters()

    def _sum_of_squares(self) -> float:
        differences = self.row_nodes[: self.out_features, None].double() - self.column_nodes[: self.in_features]
        return float((1 / differences.square()).sum())

    def _square_multiply(self, x: Tensor) -> Tensor:
        return cauchy_like_matmul(self.row_nodes, self.column_nodes, self.G, self.H, x, check_nodes=False)

    def _start_near(self, weight: Tensor) -> None:
        self._set_generators((self.row_nodes[:, None] - self.column_nodes) * self._squared(weight))


@dataclass(frozen=True)
class CirculantForm:
    """A square circulant matrix as the transform of its first column."""

    spectrum: Tensor
    size: int

    def matmul(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=self.size)


class Circulant(StructuredLinear):
    """M[a, b] = c[(a - b) mod N], N = max(m, n): a circulant matrix, or a part of one. N parameters.

    ``from_linear`` gives the nearest one, the means over the wrapped diagonals.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("column",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.column = nn.Parameter(torch.empty(max(in_features, out_features), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw c from N(0, 1/n), which keeps the variance of the input; the authors' code does the same."""
        nn.init.normal_(self.column, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def to_dense(self) -> Tensor:
        return self.column[self._diagonals()]

    def _multiply(self, x: Tensor) -> Tensor:
        return circulant_matmul(self.column, x, self.out_features)

    def _prepare(self, batch: int) -> Form:
        if kept_matrix_is_faster(self.out_features, self.in_features, 0, batch):
            return super()._prepare(batch)
        size = self.column.numel()
        return PartForm(CirculantForm(torch.fft.rfft(self.column), size), size - self.in_features, self.out_features)

    def _start_near(self, weight: Tensor) -> None:
        sums = torch.zeros_like(self.column).index_add(0, self._diagonals().flatten(), weight.flatten())
        self.column.copy_(sums / min(weight.shape))

    def _diagonals(self) -> Tensor:
        """(m, n), which entry of c stands at each place."""
        rows, columns = (
            torch.arange(size, device=self.column.device) for size in (self.out_features, self.in_features)
        )
        return (rows[:, None] - columns) % self.column.numel()


@dataclass(frozen=True)
class FastfoodForm:
    """The three diagonals, the order of the coordinates and the size of the transforms."""

    S: Tensor
    G: Tensor
    B: Tensor
    order: Tensor
    length: int

    def matmul(self, x: Tensor) -> Tensor:
        spread = hadamard_transform(_filled_up(x * self.B, self.length), normalize=True)
        mixed = hadamard_transform(_filled_up(spread[..., self.order] * self.G, self.length), normalize=True)
        return mixed[..., : self.S.shape[0]] * self.S


class Fastfood(StructuredLinear):
    """M = S H G Π H B: Fastfood with all three diagonal matrices learned (Le et al. 2013; Yang et al. 2015).

    B has n entries, S has m, and G has k = max(m, n): 3n if square. H are orthonormal Walsh-Hadamard transforms of the
    smallest power of two N ≥ k; between them Π picks k of the N coordinates, in an order that is drawn once. Where n, k or
    m is less than N, vectors are filled up with zeros before a transform, and cut after it.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        init: ``"variance"``: B of random signs, G of N(0, 1), S of the lengths of Gaussian vectors (Le et al.), scaled such
            that the variance of the input is kept; ``"reference"``: with the scale of the authors' code, whose transforms
            are not normalised: outputs are some 1000 times larger.

    Raises:
        ValueError: a size is not positive, or ``init`` is unknown.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("S", "G", "B")

    order: Tensor
    """(k,) int64, the coordinates that Π picks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        init: Init = "variance",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.init = checked_init(init)
        middle = max(in_features, out_features)
        self.length = 1 << (middle - 1).bit_length()
        self.S = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.G = nn.Parameter(torch.empty(middle, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        self.register_buffer("order", torch.empty(middle, device=device, dtype=torch.int64))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw B, G, S and the order; set the bias to zero."""
        n, k = self.B.numel(), self.G.numel()
        self.order.copy_(torch.randperm(self.length, device=self.order.device)[:k])
        self.B.bernoulli_(0.5).mul_(2).sub_(1)
        nn.init.normal_(self.G)
        chi_squared = torch.distributions.Chi2(torch.full_like(self.S, n)).sample()
        self.S.copy_(chi_squared.sqrt() / self.G.norm())
        if self.init == "reference":
            self.S.mul_(self.length)
        else:
            # The variance falls by n/N in the first transform, by ‖G‖²/N in the second, and rises by n/‖G‖² in S.
            self.S.mul_(self.length / n)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _multiply(self, x: Tensor) -> Tensor:
        return self._form().matmul(x)

    def _prepare(self, batch: int) -> Form:
        return (
            super()._prepare(batch)
            if kept_matrix_is_faster(self.out_features, self.in_features, 0, batch)
            else self._form()
        )

    def _form(self) -> FastfoodForm:
        return FastfoodForm(self.S, self.G, self.B, self.order, self.length)


class PrunedLinear(StructuredLinear):
    """A matrix that is zero but at fixed places: the pruning baseline of Tables 8 and 9.

    ``PrunedLinear.from_linear(linear, parameters=k)`` keeps the k largest weights of a trained layer, to be trained on with
    that pattern. A new layer has its places at random.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        parameters: k, how many entries are kept.

    Raises:
        ValueError: a size is not positive, or k is not from 1 to in_features * out_features.
    """

    weight_names: ClassVar[tuple[str, ...]] = ("values",)
    _is_of_matmuls: ClassVar[bool] = True

    places: Tensor
    """(parameters,) int64, the places of ``values`` in the flattened matrix, ascending."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parameters: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        entries = in_features * out_features
        if positive_size("parameters", parameters) > entries:
            raise ValueError(
                f"parameters must be at most in_features * out_features = {entries}, but is {parameters}: take nn.Linear"
            )
        self.values = nn.Parameter(torch.empty(parameters, device=device, dtype=dtype))
        self.register_buffer("places", torch.empty(parameters, device=device, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw places without repetition, and values from N(0, m/k), which keeps the variance of the input on average."""
        entries = self.in_features * self.out_features
        kept = self.values.numel()
        self.places.copy_(torch.randperm(entries, device=self.places.device)[:kept].sort().values)
        nn.init.normal_(self.values, std=math.sqrt(self.out_features / kept))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def to_dense(self) -> Tensor:
        flat = self.values.new_zeros(self.in_features * self.out_features).index_put((self.places,), self.values)
        return flat.view(self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parameters={self.values.numel()}"

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.to_dense())

    def _start_near(self, weight: Tensor) -> None:
        flat = weight.flatten()
        self.places.copy_(flat.abs().topk(self.values.numel()).indices.sort().values)
        self.values.copy_(flat[self.places])


def reduced_hidden_units(in_features: int, out_features: int, parameters: int, *, bias: bool = False) -> int:
    """Hidden units of a dense network with one hidden layer and a budget (the baseline RHU of Tables 8 and 9).

    The smallest width with which in_features → width → out_features has at least ``parameters`` parameters: the output
    layer has a bias, the hidden layer one if ``bias``.

    Raises:
        ValueError: a number is not positive.
    """
    per_unit = positive_size("in_features", in_features) + positive_size("out_features", out_features) + bias
    return max(1, math.ceil((positive_size("parameters", parameters) - out_features) / per_unit))


def _filled_up(x: Tensor, length: int) -> Tensor:
    return F.pad(x, (0, length - x.shape[-1]))
