"""The structured classes with fixed operators, and the baselines of the paper (Thomas et al., section 5.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_struct.functional.operators import SubdiagonalOperator
from lightning_struct.functional.toeplitz import prepare_toeplitz_like, toeplitz_like_matmul
from lightning_struct.nn.approximation import stein_residual
from lightning_struct.nn.generators import GeneratorLinear
from lightning_struct.nn.structured import Form, StructuredLinear, positive_size


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
        return F.linear(F.linear(x, self.H.T), self.G)

    def _prepare(self) -> Form:
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

    def _square_multiply(self, x: Tensor) -> Tensor:
        return toeplitz_like_matmul(self.G, self.H, x)

    def _prepare_large(self) -> Form:
        return self._part(prepare_toeplitz_like(self.G, self.H))

    def _start_near(self, weight: Tensor) -> None:
        self._start_near_square(self._squared(weight))

    def _start_near_square(self, target: Tensor) -> None:
        one = target.new_ones(())
        a = SubdiagonalOperator(target.new_ones(self.rows - 1), one)
        b = SubdiagonalOperator(target.new_ones(self.columns - 1), -one)
        self._set_generators(stein_residual(target, a, b))


@dataclass(frozen=True)
class FlippedForm:
    """Of a form: its outputs in reverse order."""

    form: Form

    def matmul(self, x: Tensor) -> Tensor:
        return self.form.matmul(x).flip(-1)


class HankelLike(ToeplitzLike):
    """A Toeplitz-like matrix with its rows in reverse order, which is Hankel-like; r (m + n) parameters."""

    def _square_multiply(self, x: Tensor) -> Tensor:
        return super()._square_multiply(x).flip(-1)

    def _prepare_large(self) -> Form:
        return self._part(FlippedForm(prepare_toeplitz_like(self.G, self.H)))

    def _start_near_square(self, target: Tensor) -> None:
        super()._start_near_square(target.flip(0))


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
