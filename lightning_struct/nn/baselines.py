"""Baselines of the papers: circulant and pruned matrices, fewer hidden units, sparse initial weights."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.checks import Positive, Size, checked, positive_size, require_real
from lightning_struct.functional.structured.arguments import computing_dtype
from lightning_struct.functional.structured.cost_model import (
    making_is_faster,
    prepared_matrix_is_faster,
    transform_length,
)
from lightning_struct.functional.structured.prepared import LeadingSubmatrix, PreparedMatrix
from lightning_struct.functional.structured.transforms import circulant_matmul, circulant_product
from lightning_struct.nn.structured import Device, Dtype, StructuredLinear, center_


@dataclass(frozen=True)
class CirculantSpectrum:
    """A square circulant matrix by the transform of its first column: a ``PreparedMatrix``.

    Args:
        spectrum: (size // 2 + 1,).
        size: rows and columns.
    """

    spectrum: Tensor
    size: int

    def matmul(self, x: Tensor) -> Tensor:
        return circulant_product(self.spectrum, x.to(computing_dtype(x)), self.size).to(x.dtype)


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

    @checked
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.column = nn.Parameter(torch.empty(max(in_features, out_features), device=device, dtype=dtype))
        self.reset_parameters()

    def _draw_weights(self) -> None:
        """Draw c from N(0, 1/n) without its mean: a stack of such layers with rectifiers keeps the power."""
        # The authors' code keeps the mean of c, by which the mean of the input is multiplied. After a rectifier that
        # has 1/π of the power: it now is left out, and the rest enlarged.
        nn.init.normal_(self.column, std=self.in_features**-0.5)
        center_(self.column).mul_((1 - self.in_features / self.column.numel() / math.pi) ** -0.5)

    def _dense(self) -> Tensor:
        return self.column[self._diagonals()]

    def _multiply(self, x: Tensor) -> Tensor:
        return circulant_matmul(self.column, x, self.out_features)

    def _makes_matrix(self, rows: int) -> bool:
        return making_is_faster(self.out_features, self.in_features, rows, break_even=220)

    def _prepare_factors(self) -> PreparedMatrix:
        size = self.column.numel()
        square = CirculantSpectrum(torch.fft.rfft(self.column.to(computing_dtype(self.column))), size)
        return LeadingSubmatrix(square, size - self.in_features, self.out_features)

    def _prepares_dense(self, rows: int) -> bool:
        size = self.column.numel()
        least = 250 if transform_length(size) == size else 900  # other lengths take up to 20 times as long
        return prepared_matrix_is_faster(self.out_features, self.in_features, 2, rows, least)

    def _start_near(self, weight: Tensor) -> None:
        sums = torch.zeros_like(self.column).index_add(0, self._diagonals().flatten(), weight.flatten())
        self.column.copy_(sums / min(weight.shape))

    def _diagonals(self) -> Tensor:
        """The index of the entry of c at each place of M, (m, n)."""
        rows, columns = (
            torch.arange(size, device=self.column.device) for size in (self.out_features, self.in_features)
        )
        return (rows[:, None] - columns) % self.column.numel()


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

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        parameters: int,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        entries = in_features * out_features
        if positive_size("parameters", parameters) > entries:
            raise ValueError(
                f"parameters must be at most in_features * out_features = {entries}, but is {parameters}: use nn.Linear"
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
        flat = self.values.new_zeros(self.out_features * self.in_features).index_put((self.places,), self.values)
        return flat.view(self.out_features, self.in_features)

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._dense())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parameters={self.values.numel()}"

    def _start_near(self, weight: Tensor) -> None:
        flat = weight.flatten()
        self.places.copy_(flat.abs().topk(self.values.numel()).indices.sort().values)
        self.values.copy_(flat[self.places])


@checked
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


@checked
def sparse_normal_(weight: Tensor, connections: Size, std: Positive = 1.5) -> Tensor:
    """Fill ``weight`` in place such that every unit has few, strong incoming connections.

    Of the ``in_features`` weights of each unit, ``min(connections, in_features)`` at random places are drawn from
    N(0, std²); the rest is zero. Emirahmetoglu & Stewart, equation (9), after Martens, "Deep learning via Hessian-free
    optimization" (2010). Random numbers come from torch's global generator.

    Args:
        weight: weight of a linear layer, (out_features, in_features), any floating dtype.
        connections: nonzero weights into each unit, m_0 of the paper.
        std: standard deviation of the nonzero weights, sigma of the paper.

    Returns:
        ``weight``.

    Raises:
        ValueError: ``weight`` is not a matrix, or ``connections`` or ``std`` is not positive.

    Example:
        >>> layer = torch.nn.Linear(100, 10)
        >>> (sparse_normal_(layer.weight, connections=15) != 0).sum(1).tolist()
        [15, 15, 15, 15, 15, 15, 15, 15, 15, 15]
    """
    require_real(2, weight=weight)
    in_features = weight.shape[1]
    zeros = max(in_features - connections, 0)
    # sparse_ zeroes ceil(sparsity * rows) entries of each column: half an entry below the count is safe from rounding
    torch.nn.init.sparse_(weight.detach().T, sparsity=(zeros - 0.5) / in_features, std=std)
    return weight
