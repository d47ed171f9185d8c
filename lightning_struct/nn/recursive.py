"""A linear layer that learns in closed form, row by row: exact recursive least squares without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_gather_unequal, world_size
from lightning_struct.functional.checks import is_integer, is_real
from lightning_struct.functional.curvature.weighted_ridge import WeightedRidge

_FLOATS = torch.float32, torch.float64


class RecursiveLinear(nn.Linear):
    """A linear layer y = W x + b whose :meth:`update` learns in closed form.

    After t rows, weight and bias are the solution of weighted ridge regression over all of them, to rounding, for
    features of any scale::

        argmin_{W, b}  Σₛ λᵗ⁻ˢ wₛ ‖W xₛ + b - yₛ‖² + λᵗ δ (‖W‖² + ‖b‖²)

    Nothing is stored but a triangular matrix, and no row is read twice: the result does not depend on how the rows were
    cut into batches. The layer needs no optimizer, and its parameters require no gradients; gradients pass through to
    its inputs. See :class:`~lightning_struct.functional.curvature.weighted_ridge.WeightedRidge` for the recursion. A
    block of m rows takes 2 m n² operations, with n the sum of inputs, outputs and one for the bias.

    The state, float64, is part of ``state_dict``: a stream goes on bit for bit. A state with more or fewer outputs can
    be loaded. Conversions of the module to another dtype leave it alone. Under torch.distributed every process must
    call :meth:`update`, each with its own rows, in any numbers; all learn from the rows of all, in the order of ranks.

    Args:
        in_features: number of inputs.
        out_features: number of outputs.
        bias: whether there is one. It is regularized as the weights are.
        forgetting: λ in (0, 1], by which each row multiplies the weight of all rows before it.
        half_life: number of rows after which a row counts half, > 0, in place of ``forgetting``: λ = 2^(-1/half_life).
        regularization: δ > 0.
        device: of the parameters and of the state.
        dtype: of the parameters, float32 or float64.

    Raises:
        ValueError: a number is out of its range; ``forgetting`` and ``half_life`` are both given; another dtype.

    Example:
        >>> layer = RecursiveLinear(2, 1, regularization=1e-9)
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])
        >>> layer.update(x, x @ torch.tensor([[3.0], [-1.0]]) + 5)
        >>> layer(torch.tensor([1.0, 1.0])).round(decimals=4)
        tensor([7.])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        forgetting: float = 1.0,
        half_life: float | None = None,
        regularization: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if half_life is not None:
            if forgetting != 1:
                raise ValueError(f"give forgetting or half_life, not both: got {forgetting!r} and {half_life!r}")
            if not (is_real(half_life) and half_life > 0):
                raise ValueError(f"half_life must be a number of rows > 0, got {half_life!r}")
            forgetting = 0.5 ** (1 / half_life)
        if not (is_real(forgetting) and 0 < forgetting <= 1):
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting!r}")
        if not (is_real(regularization) and 0 < regularization < float("inf")):
            raise ValueError(f"regularization must be a finite number > 0, got {regularization!r}")
        self.forgetting, self.regularization = float(forgetting), float(regularization)
        super().__init__(in_features, out_features, bias, device, dtype)
        _check_dtype(self.weight, "dtype")
        self.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Forget all rows: parameters are zero, as before the first one."""
        start = torch.zeros(
            self.out_features,
            self.in_features + (self.bias is not None),
            dtype=torch.float64,
            device=self.weight.device,
        )
        self._ridge = WeightedRidge.start(start, self.regularization)
        self._write()

    def update(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Learn from rows, in their order.

        Args:
            x: (..., in_features), float32 or float64.
            y: targets, (..., out_features), or (...) if there is one output; or labels, (...), integers below
                ``out_features``, which stand for one-hot targets.
            weights: (...), w >= 0 of the rows; None: 1.

        Raises:
            ValueError: shapes or dtypes are others, weights negative, or labels beyond the outputs.
            NotFinite: NaN, infinite or immense numbers. Here as above, nothing has changed.
        """
        ridge = self._ridge
        one_row, one_target = (1, self.in_features), (1, self.out_features)
        is_plain = x.shape == one_row and y.shape == one_target and x.dtype in _FLOATS and y.dtype in _FLOATS
        if is_plain and weights is None and world_size() == 1:  # as little as can be, for streams
            has_bias = self._parameters["bias"] is not None
            ridge.learn([x.detach(), ridge.one, y.detach()] if has_bias else [x.detach(), y.detach()], self.forgetting)
        else:
            columns = [self._rows(x), self._targets(y, x.shape[:-1])]
            if self.bias is not None:
                columns.insert(1, columns[0].new_ones(len(columns[0]), 1))
            of_rows = self._weights(x.new_ones(x.shape[:-1]) if weights is None else weights, x.shape[:-1])
            columns, of_rows = [all_gather_unequal(part) for part in columns], all_gather_unequal(of_rows)
            ages = torch.arange(len(of_rows) - 1, -1, -1, dtype=torch.float64, device=x.device)
            ridge.learn(columns, self.forgetting ** len(ages), of_rows * self.forgetting**ages)
        self._write()

    def predictive_variance(self, x: Tensor) -> Tensor:
        """Variance of the predictions for x that comes from the rows being few and noisy.

        It is s² xᵀ(Σₛ λᵗ⁻ˢ wₛ xₛ xₛᵀ + λᵗ δ I)⁻¹ x, with a one in x for the bias. For the variance of a new target add
        s², :attr:`noise_variance`.

        Args:
            x: (..., in_features).

        Returns:
            Tensor: (..., out_features), float64.

        Raises:
            ValueError: shape or dtype of x is another.
        """
        rows = self._rows(x).to(torch.float64)
        factors = self._ridge.variance_factors(
            rows if self.bias is None else nn.functional.pad(rows, (0, 1), value=1.0)
        )
        return (factors[:, None] * self.noise_variance).reshape(*x.shape[:-1], self.out_features)

    @property
    def noise_variance(self) -> Tensor:
        """s² of each output, (out_features,), float64: the least sum of squares by the sum of weights Σₛ λᵗ⁻ˢ wₛ.

        This is the estimate of maximum likelihood; infinite before the first row.
        """
        residuals, samples = self._ridge.residuals(), self._ridge.samples
        return residuals / samples if samples > 0 else torch.full_like(residuals, float("inf"))

    def add_outputs(self, number: int) -> None:
        """Add outputs: the layer becomes the one that had them all along, with targets of zero.

        Args:
            number: how many, >= 1.

        Raises:
            ValueError: it is no integer above 0.
        """
        if not (is_integer(number) and number >= 1):
            raise ValueError(f"add_outputs takes an integer >= 1, got {number!r}")
        self._ridge = self._ridge.with_outputs(number)
        self._write()

    def get_extra_state(self) -> dict[str, Any]:
        """State of the recursion, for ``state_dict``."""
        ridge = self._ridge
        return {"weights": ridge.weights, "factor": ridge.factor, "samples": ridge.samples}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`get_extra_state`.

        Raises:
            ValueError: it is of another number of inputs.
        """
        device = self.weight.device
        weights, factor = (state[name].to(device, torch.float64, copy=True) for name in ("weights", "factor"))
        if weights.shape[1] != self._ridge.weights.shape[1]:
            raise ValueError(
                f"the state is of {weights.shape[1]} inputs, with that of the bias, and the layer has "
                f"{self._ridge.weights.shape[1]}"
            )
        self._ridge = WeightedRidge(weights, factor, state["samples"])

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        outputs = len(state_dict.get(f"{prefix}weight", self.weight))
        if outputs != self.out_features:  # outputs were added, or are to be
            self._resize(outputs)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> RecursiveLinear:
        super()._apply(fn, recurse)
        ridge, device = self._ridge, self.weight.device
        if ridge.factor.device != device:
            self._ridge = ridge.to(device)
        return self

    def _resize(self, outputs: int) -> None:
        """New parameters, of zeros, for a number of outputs."""
        self.out_features = outputs
        self.weight = nn.Parameter(self.weight.new_zeros(outputs, self.in_features), requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.new_zeros(outputs), requires_grad=False)

    def _write(self) -> None:
        """Copy Θ to the parameters."""
        weights = self._ridge.weights
        if len(weights) != self.out_features:
            self._resize(len(weights))
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if bias is None:
            weight.detach().copy_(weights)
        else:
            weight.detach().copy_(weights.narrow(1, 0, self.in_features))
            bias.detach().copy_(weights.select(1, self.in_features))

    def _rows(self, x: Tensor) -> Tensor:
        """(m, in_features)"""
        _check_dtype(x, "x")
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x must be (..., {self.in_features}), got {tuple(x.shape)}")
        return x.detach().reshape(-1, self.in_features)

    def _targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        """(m, out_features), of targets or labels for rows of a shape."""
        outputs = self.out_features
        if not y.is_floating_point() and y.shape == shape and y.dtype != torch.bool and not y.is_complex():
            labels = y.reshape(-1)
            low, high = (labels.min().item(), labels.max().item()) if len(labels) else (0, 0)
            if low < 0 or high >= outputs:
                raise ValueError(
                    f"labels must be in 0 ... {outputs - 1}, got {low} ... {high}. add_outputs makes room for new "
                    "classes; targets of a regression are floating-point numbers"
                )
            return nn.functional.one_hot(labels.long(), outputs)
        _check_dtype(y, "y")
        if y.shape != (*shape, outputs) and (y.shape != shape or outputs > 1):
            raise ValueError(
                f"y must be targets {(*shape, outputs)} or integer labels {tuple(shape)}, got {tuple(y.shape)}"
            )
        return y.detach().reshape(-1, outputs)

    def _weights(self, weights: Tensor, shape: torch.Size) -> Tensor:
        """(m,), float64, of the weights of rows of a shape."""
        of_rows = weights.to(torch.float64).reshape(-1)
        if weights.shape != shape or not bool(((of_rows >= 0) & of_rows.isfinite()).all()):
            raise ValueError(
                f"weights must be finite numbers >= 0, {tuple(shape)}, got {tuple(weights.shape)}"
                + (f" with {of_rows.min().item():g} ... {of_rows.max().item():g}" if len(of_rows) else "")
            )
        return of_rows


def _check_dtype(tensor: Tensor, name: str) -> None:
    """Raise unless a tensor is in float32 or float64.

    Raises:
        ValueError: it is in another dtype.
    """
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"RecursiveLinear takes float32 or float64, and {name} is {tensor.dtype}: convert by .float()")
