"""Baselines of Thomas et al. (section 5.1, Tables 1, 8 and 9): circulant, Fastfood, pruning, fewer hidden units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.structured.arguments import computing_dtype, require_one_of
from lightning_struct.functional.structured.cost_model import (
    LARGEST_KEPT_MATRIX,
    kept_circulant_is_faster,
    kept_hadamard_matrix_is_faster,
    making_is_faster,
)
from lightning_struct.functional.structured.prepared import LeadingSubmatrix, PreparedMatrix
from lightning_struct.functional.structured.real_transforms import as_pair, multiplied, real_irfft, real_rfft
from lightning_struct.functional.structured.transforms import circulant_matmul, circulant_product, hadamard_transform
from lightning_struct.nn.generators import Init
from lightning_struct.nn.structured import StructuredLinear, positive_size


@dataclass(frozen=True)
class CirculantSpectrum:
    """A square circulant matrix by the transform of its first column: a ``PreparedMatrix``.

    Args:
        spectrum: (size // 2 + 1,).
        size: rows and columns.
    """

    spectrum: Tensor
    size: int

    keeps_precision: ClassVar[bool] = True

    def dense_is_faster(self, m: int, n: int, rows: int) -> bool:
        return kept_circulant_is_faster(m, n, rows)

    def matmul(self, x: Tensor) -> Tensor:
        computed = x.to(computing_dtype(x))
        if torch.onnx.is_in_onnx_export():
            y = real_irfft(multiplied(real_rfft(computed), as_pair(self.spectrum)), self.size)
        else:
            y = circulant_product(self.spectrum, computed, self.size)
        return y.to(x.dtype)


class Circulant(StructuredLinear):
    """A layer with M[a, b] = c[(a - b) mod N], N = max(m, n): a circulant matrix, or a part of one. N parameters.

    ``from_linear`` gives the nearest one, the means over the wrapped diagonals. A baseline of Thomas et al. (Table 1).

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.

    Raises:
        ValueError: a size is not positive.

    Example:
        >>> layer = Circulant(100, 50)
        >>> layer(torch.randn(8, 100)).shape, layer.weight_parameters
        (torch.Size([8, 50]), 100)
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

    def _draw_weights(self) -> None:
        """Draw c from N(0, 1/n), which keeps the variance of the input; the authors' code does the same."""
        nn.init.normal_(self.column, std=self.in_features**-0.5)

    def _dense(self) -> Tensor:
        return self.column[self._diagonals()]

    def _multiply(self, x: Tensor) -> Tensor:
        return circulant_matmul(self.column, x, self.out_features)

    def _makes_matrix(self, rows: int) -> bool:
        return making_is_faster(self.out_features, self.in_features, rows, break_even=220)

    def _keeps_dense(self, batch: int) -> bool:
        return kept_circulant_is_faster(self.out_features, self.in_features, batch)

    def _compressed(self) -> PreparedMatrix:
        size = self.column.numel()
        square = CirculantSpectrum(torch.fft.rfft(self.column.to(computing_dtype(self.column))), size)
        return LeadingSubmatrix(square, size - self.in_features, self.out_features)

    def _start_near(self, weight: Tensor) -> None:
        sums = torch.zeros_like(self.column).index_add(0, self._diagonals().flatten(), weight.flatten())
        self.column.copy_(sums / min(weight.shape))

    def _diagonals(self) -> Tensor:
        """The index of the entry of c at each place of M, (m, n)."""
        rows, columns = (
            torch.arange(size, device=self.column.device) for size in (self.out_features, self.in_features)
        )
        return (rows[:, None] - columns) % self.column.numel()


@dataclass(frozen=True)
class FastfoodFactors:
    """M = S H G Π H B by its factors: a :class:`~lightning_struct.functional.structured.prepared.PreparedMatrix`.

    Args:
        S, G, B: (m,), (k,) and (n,), the diagonals.
        order: (k,), the coordinates that Π picks.
        length: N, the size of H.
    """

    S: Tensor
    G: Tensor
    B: Tensor
    order: Tensor
    length: int

    def dense_is_faster(self, m: int, n: int, rows: int) -> bool:
        return kept_hadamard_matrix_is_faster(m, n, 1, rows)

    def to_dense(self) -> Tensor:
        """(m, n), by its rows."""
        rows = hadamard_transform(_filled_up(self.S.diag(), self.length), normalize=True)[:, : len(self.G)] * self.G
        spread = rows.new_zeros(len(rows), self.length).index_copy(1, self.order, rows)
        return hadamard_transform(spread, normalize=True)[:, : len(self.B)] * self.B

    def matmul(self, x: Tensor) -> Tensor:
        spread = hadamard_transform(_filled_up(x * self.B, self.length), normalize=True)
        mixed = hadamard_transform(_filled_up(spread[..., self.order] * self.G, self.length), normalize=True)
        return mixed[..., : self.S.shape[0]] * self.S


class Fastfood(StructuredLinear):
    """A layer with M = S H G Π H B: Fastfood with three learned diagonal matrices (Le et al. 2013, Yang et al. 2015).

    B has n entries, S has m, and G has k = max(m, n): 3n if square. H are orthonormal Walsh-Hadamard transforms of the
    smallest power of two N ≥ k; between them Π picks k of the N coordinates, in an order that is drawn once. Where n, k
    or m is less than N, vectors are filled up with zeros before a transform, and cut after it.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        init: ``"variance"``: B of random signs, G of N(0, 1), S of the lengths of Gaussian vectors (Le et al.), scaled
            such that the variance of the input is kept; ``"reference"``: with the scale of the authors' code, whose
            transforms are not normalised: outputs are some 1000 times larger.

    Raises:
        ValueError: a size is not positive, or ``init`` is unknown.

    Example:
        >>> layer = Fastfood(100, 50)
        >>> layer(torch.randn(8, 100)).shape, layer.weight_parameters
        (torch.Size([8, 50]), 250)
    """

    weight_names: ClassVar[tuple[str, ...]] = ("S", "G", "B")
    _places: ClassVar[tuple[str, ...]] = ("order",)

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
        require_one_of("init", init, get_args(Init))
        self.init = init
        middle = max(self.in_features, self.out_features)
        self.length = 1 << (middle - 1).bit_length()
        self.S = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.G = nn.Parameter(torch.empty(middle, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        self.register_buffer("order", torch.empty(middle, device=device, dtype=torch.int64))
        self.reset_parameters()

    def _draw_weights(self) -> None:
        """Draw B, G, S and the order."""
        if self.S.is_meta:  # there are no numbers to draw, and torch has no such distribution there
            return
        n, k = self.B.numel(), self.G.numel()
        self.order.copy_(torch.randperm(self.length, device=self.order.device)[:k])
        self.B.bernoulli_(0.5).mul_(2).sub_(1)
        nn.init.normal_(self.G)
        chi_squared = torch.distributions.Chi2(torch.full_like(self.S, n, dtype=computing_dtype(self.S))).sample()
        self.S.copy_(chi_squared.sqrt() / self.G.norm())
        if self.init == "reference":
            self.S.mul_(self.length)
        else:
            # The variance falls by n/N in the first transform, by ‖G‖²/N in the second, and rises by n/‖G‖² in S.
            self.S.mul_(self.length / n)

    def _dense(self) -> Tensor:
        return self._compressed().to_dense() if self.out_features < self.in_features else super()._dense()

    def _multiply(self, x: Tensor) -> Tensor:
        return self._compressed().matmul(x)

    def _makes_matrix(self, rows: int) -> bool:
        return making_is_faster(self.out_features, self.in_features, rows, break_even=512)

    def _keeps_dense(self, batch: int) -> bool:
        return kept_hadamard_matrix_is_faster(self.out_features, self.in_features, 1, batch)

    def _compressed(self) -> FastfoodFactors:
        return FastfoodFactors(self.S, self.G, self.B, self.order, self.length)


@dataclass(frozen=True)
class SparseEntries:
    """A matrix by its entries that are not zero: a ``PreparedMatrix``.

    Args:
        values: (k,).
        places: (k,) int64, in the flattened matrix.
        rows: m.
        columns: n.
    """

    values: Tensor
    places: Tensor
    rows: int
    columns: int

    def dense_is_faster(self, m: int, n: int, rows: int) -> bool:
        return m * n <= LARGEST_KEPT_MATRIX

    def matmul(self, x: Tensor) -> Tensor:
        return F.linear(x, self.to_dense())

    def to_dense(self) -> Tensor:
        """(m, n)."""
        flat = self.values.new_zeros(self.rows * self.columns).index_put((self.places,), self.values)
        return flat.view(self.rows, self.columns)


class PrunedLinear(StructuredLinear):
    """A layer whose matrix is zero but at fixed places: the pruning baseline of Thomas et al., Tables 8 and 9.

    ``PrunedLinear.from_linear(linear, parameters=k)`` keeps the k largest weights of a trained layer, to be trained on
    with that pattern. A new layer has its places at random. ``torch.nn.utils.prune`` takes its ``values``;
    ``torch.nn.utils.parametrize`` does not, as no parameter of that name.

    Args:
        in_features, out_features, bias, device, dtype: see :class:`StructuredLinear`.
        parameters: k, how many entries are kept.

    Raises:
        ValueError: a size is not positive, or k is not from 1 to in_features * out_features.

    Example:
        >>> layer = PrunedLinear.from_linear(nn.Linear(100, 50), parameters=300)
        >>> layer.weight_parameters, (layer.to_dense() != 0).sum().item()
        (300, 300)
    """

    weight_names: ClassVar[tuple[str, ...]] = ("values",)
    _places: ClassVar[tuple[str, ...]] = ("places",)
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
                f"parameters must be at most in_features * out_features = {entries}, but is {parameters}: take "
                "nn.Linear"
            )
        self.values = nn.Parameter(torch.empty(parameters, device=device, dtype=dtype))
        self.register_buffer("places", torch.empty(parameters, device=device, dtype=torch.int64))
        self.reset_parameters()

    def _draw_weights(self) -> None:
        """Draw places without repetition, and values from N(0, m/k), which keeps the inputs' variance on average."""
        entries = self.in_features * self.out_features
        kept = self.values.numel()
        self.places.copy_(torch.randperm(entries, device=self.places.device)[:kept].sort().values)
        nn.init.normal_(self.values, std=math.sqrt(self.out_features / kept))

    def _dense(self) -> Tensor:
        return self._compressed().to_dense()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parameters={self.values.numel()}"

    def _multiply(self, x: Tensor) -> Tensor:
        return self._compressed().matmul(x)

    def _compressed(self) -> SparseEntries:
        return SparseEntries(self.values, self.places, self.out_features, self.in_features)

    def _start_near(self, weight: Tensor) -> None:
        flat = weight.flatten()
        self.places.copy_(flat.abs().topk(self.values.numel()).indices.sort().values)
        self.values.copy_(flat[self.places])


def reduced_hidden_units(in_features: int, out_features: int, parameters: int, *, bias: bool = False) -> int:
    """The number of hidden units with which a dense network has a budget: the baseline RHU of Tables 8 and 9.

    The smallest width with which in_features → width → out_features has at least ``parameters`` parameters: the output
    layer has a bias, the hidden layer one if ``bias``.

    Args:
        in_features, out_features: sizes of the network.
        parameters: the budget.
        bias: whether the hidden layer has one.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> reduced_hidden_units(784, 10, 10986)
        14
    """
    per_unit = positive_size("in_features", in_features) + positive_size("out_features", out_features) + bias
    return max(1, math.ceil((positive_size("parameters", parameters) - out_features) / per_unit))


def _filled_up(x: Tensor, length: int) -> Tensor:
    """``x`` with zeros up to a last dimension of ``length``."""
    return F.pad(x, (0, length - x.shape[-1]))
