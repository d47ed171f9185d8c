"""A linear layer that learns in closed form, row by row: exact recursive least squares without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_gather_unequal, broadcast_numbers, world_size
from lightning_struct.functional.checks import Positive, check_dense, checked, is_extended, is_integer, is_real
from lightning_struct.functional.curvature.weighted_ridge import WeightedRidge

_FLOATS = torch.float32, torch.float64
_MOST_FEATURES = 2**20  # the state would have 8 TiB


class RecursiveLinear(nn.Linear):
    """A linear layer y = W x + b whose :meth:`update` learns in closed form.

    After t rows, weight and bias are the solution of weighted ridge regression over all of them, to rounding, for
    features of any scale::

        argmin_{W, b}  Σₛ λᵗ⁻ˢ wₛ ‖W xₛ + b - yₛ‖² + δ (‖W‖² + ‖b‖²)

    for λ = 1. With λ < 1 old rows fade, and a direction in which rows no longer vary keeps its weights: before each
    further 1/(1 - λ) rows the regularization, which fades as the rows do, is renewed to δ around the weights of that
    time. :class:`~lightning_struct.functional.curvature.weighted_ridge.WeightedRidge` writes the problem down.

    Nothing is stored but a triangular matrix, and no row is read twice: the result does not depend on how the rows were
    cut into batches. The layer needs no optimizer, and its parameters require no gradients; gradients pass through to
    its inputs. A block of m rows takes 2 m n² operations, with n the sum of inputs, outputs and one for the bias.

    The state, float64, is part of ``state_dict``: a stream goes on bit for bit. A state with more or fewer inputs or
    outputs can be loaded, one of another λ or δ cannot. Conversions of the module to another dtype leave it alone.
    Under torch.distributed every process must call :meth:`update`, each with its own rows, in any numbers; all learn
    from the rows of all, in the order of ranks.

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

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        forgetting: float = 1.0,
        half_life: float | None = None,
        regularization: Positive = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if half_life is not None:
            if forgetting != 1:
                raise ValueError(f"give forgetting or half_life, not both: got {forgetting!r} and {half_life!r}")
            if not (is_extended(half_life) and half_life > 0):
                raise ValueError(f"half_life must be a number of rows > 0, got {half_life!r}")
            forgetting = 0.5 ** (1 / half_life)
        if not (is_real(forgetting) and 0 < forgetting <= 1):
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting!r}")
        _check_number("in_features", in_features)
        _check_number("out_features", out_features)
        self.forgetting, self._first_regularization = float(forgetting), float(regularization)
        super().__init__(in_features, out_features, bias, device, dtype)
        _check_dtype(self.weight, "dtype")
        self.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Forget all rows: parameters are zero, as before the first one."""
        inputs, device = self.in_features + (self.bias is not None), self.weight.device
        self.regularization = self._first_regularization
        self._ridge = WeightedRidge.start(inputs, self.out_features, self.regularization, self.forgetting, device)
        self._write()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, forgetting={self.forgetting:g}, regularization={self.regularization:g}"

    def update(self, x: Any, y: Any, weights: Any = None) -> None:
        """Learn from rows, in their order. They are tensors, arrays or nested lists.

        Args:
            x: (..., in_features), float32 or float64.
            y: targets, (..., out_features), or (...) if there is one output; or, of at least two outputs, labels,
                (...), integers below ``out_features``, which stand for one-hot targets.
            weights: (...), w >= 0 of the rows; None: 1.

        Raises:
            TypeError: there is something else than numbers, or a tensor that is sparse, nested or on the meta device.
            ValueError: shapes or dtypes are others, weights negative, or labels beyond the outputs.
            NotFinite: NaN, infinite or immense numbers. Here as above, nothing has changed.
        """
        ridge, dtype = self._ridge, self._parameters["weight"].dtype  # type: ignore[union-attr]
        is_quick = ridge.is_quick and weights is None and world_size() == 1  # as little as can be, for streams
        row = _row(x, self.in_features) if is_quick else None
        target = _row(y, self.out_features) if row is not None else None
        if row is not None and target is None:  # labels, targets (1,), or what is no tensor
            target = _row(self._targets(self._numbers("y", y), torch.Size([1])).double(), self.out_features)
        if target is not None:
            ridge.learn_row(row, target, dtype)
        else:
            x, y = self._numbers("x", x), self._numbers("y", y)
            columns = [self._rows(x), self._targets(y, x.shape[:-1])]
            if self.bias is not None:
                columns.insert(1, columns[0].new_ones(len(columns[0]), 1))
            weights = x.new_ones(x.shape[:-1]) if weights is None else self._numbers("weights", weights)
            of_rows = self._weights(weights, x.shape[:-1])
            columns, of_rows = [all_gather_unequal(part) for part in columns], all_gather_unequal(of_rows)
            ridge.learn(columns, of_rows, dtype)
        self._write()

    def predictive_variance(self, x: Any) -> Tensor:
        """Variance of the predictions for x that comes from the rows being few and noisy.

        It is s² xᵀ(Σₛ λᵗ⁻ˢ wₛ xₛ xₛᵀ + λʳ δ I)⁻¹ x, with a one in x for the bias, r rows after the regularization was
        renewed. For the variance of a new target add s², :attr:`noise_variance`. In directions in which rows no longer
        vary it grows up to s²/(λʳ δ) times ‖x‖².

        Args:
            x: (..., in_features).

        Returns:
            Tensor: (..., out_features), float64.

        Raises:
            ValueError: shape or dtype of x is another.
        """
        x = self._numbers("x", x)
        rows = self._rows(x).to(torch.float64)
        rows = rows if self.bias is None else nn.functional.pad(rows, (0, 1), value=1.0)
        return (self._ridge.variance_factors(rows)[:, None] * self.noise_variance).reshape(
            *x.shape[:-1], self.out_features
        )

    @property
    def noise_variance(self) -> Tensor:
        """s² of each output, (out_features,), float64: the minimum that the weights solve for by the sum Σₛ λᵗ⁻ˢ wₛ.

        This is the estimate of maximum likelihood; infinite before the first row.
        """
        residuals, samples = self._ridge.residuals(), self._ridge.samples
        return residuals / samples if samples > 0 else torch.full_like(residuals, float("inf"))

    def choose_regularization(self) -> float:
        """Raise δ to the value with the least error by generalized cross-validation, as if it had been that all along.

        The squared error of rows that are left out, summed over outputs, is estimated from the state: no row is needed.
        The values are δ, √10 δ, 10 δ and so on: begin with a small δ. To compare, or to choose anew later, call this
        on a copy (``copy.deepcopy``). It takes about as long as 10 n rows for n inputs.

        Returns:
            float: δ, which is also :attr:`regularization`.

        Raises:
            ValueError: λ < 1.
        """
        if self.forgetting < 1:
            raise ValueError(f"choose_regularization takes forgetting=1, not {self.forgetting!r}: try values of δ")
        values, errors = self._ridge.cross_validation()
        (self.regularization,) = broadcast_numbers([values[errors.argmin()].item()], self.weight.device)
        self._ridge = self._ridge.with_regularization(self.regularization)
        self._write()
        return self.regularization

    def add_outputs(self, number: int) -> None:
        """Add outputs: the layer becomes the one that had them all along, with targets of zero.

        Args:
            number: how many, >= 1.

        Raises:
            ValueError: it is no integer above 0.
        """
        _check_number("add_outputs", number)
        self._resize(self.out_features + number, self.in_features)
        self._ridge = self._ridge.with_outputs(number)
        self._write()

    def add_inputs(self, number: int) -> None:
        """Add inputs after the others: the layer becomes the one that had them all along, with zeros in all rows.

        Args:
            number: how many, >= 1.

        Raises:
            ValueError: it is no integer above 0.
        """
        _check_number("add_inputs", number)
        self._ridge = self._ridge.with_inputs(number, self.in_features)
        self._resize(self.out_features, self.in_features + number)
        self._write()

    def get_extra_state(self) -> dict[str, Any]:
        """State of the recursion, for ``state_dict``."""
        ridge = self._ridge
        options = {"forgetting": self.forgetting, "regularization": self._first_regularization}
        options["chosen_regularization"] = self.regularization
        return {"weights": ridge.weights, "factor": ridge.factor, "samples": ridge.samples, "age": ridge.age} | options

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`get_extra_state`.

        Raises:
            ValueError: it is of another number of inputs.
        """
        device, inputs = self.weight.device, self.in_features + (self.bias is not None)
        weights, factor = (state[name].to(device, torch.float64, copy=True) for name in ("weights", "factor"))
        if weights.shape[1] != inputs:
            raise ValueError(
                f"the state is of {weights.shape[1]} inputs, with that of the bias, and the layer has {inputs}"
            )
        self.regularization = state.get("chosen_regularization", self._first_regularization)
        self._ridge = WeightedRidge(
            weights, factor, self.regularization, self.forgetting, state["samples"], state.get("age")
        )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        state = state_dict.get(f"{prefix}_extra_state", {})
        for name, own in (("forgetting", self.forgetting), ("regularization", self._first_regularization)):
            if state.get(name, own) != own:
                raise ValueError(
                    f"the state is of a layer with {name}={state[name]!r}, and this one has {own!r}: "
                    f"make it with {name}={state[name]!r}"
                )
        outputs, inputs = state_dict.get(f"{prefix}weight", self.weight).shape
        if (outputs, inputs) != (self.out_features, self.in_features):  # some were added, or are to be
            self._resize(outputs, inputs)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> RecursiveLinear:
        super()._apply(fn, recurse)
        self._ridge = self._ridge.to(self.weight.device)
        return self

    def _resize(self, outputs: int, inputs: int) -> None:
        """New parameters, of zeros, for numbers of outputs and inputs."""
        self.out_features, self.in_features = outputs, inputs
        self.weight = nn.Parameter(self.weight.new_zeros(outputs, inputs), requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.new_zeros(outputs), requires_grad=False)

    def _write(self) -> None:
        """Copy Θ to the parameters."""
        ridge, weight, bias = self._ridge, self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if bias is None:
            weight.detach().copy_(ridge.weights)
        else:
            weight.detach().copy_(ridge.slopes)
            bias.detach().copy_(ridge.intercepts)

    def _numbers(self, name: str, value: Any) -> Tensor:
        """A dense tensor: of an array or lists in float64, but whole numbers of y, which may be labels."""
        if not isinstance(value, Tensor):
            try:
                found = torch.as_tensor(value)
                is_number = found.is_floating_point() or (name != "y" and _is_whole(found))
                value = torch.as_tensor(value, dtype=torch.float64 if is_number else None, device=self.weight.device)
            except (ValueError, TypeError, RuntimeError) as error:
                raise TypeError(
                    f"{name} must be a tensor, an array or nested lists of real numbers, got {repr(value)[:80]}"
                ) from error
        check_dense(name, value, has_numbers=True)
        return value

    def _rows(self, x: Tensor) -> Tensor:
        """(m, in_features)"""
        _check_dtype(x, "x")
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x must be (..., {self.in_features}), got {tuple(x.shape)}")
        return x.detach().reshape(-1, self.in_features)

    def _targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        """(m, out_features), of targets or labels for rows of a shape."""
        outputs = self.out_features
        if _is_whole(y) and outputs == 1:
            raise ValueError(
                f"y has whole numbers, {y.dtype}, and the layer one output: convert targets of a regression by "
                ".float(); labels need out_features >= 2"
            )
        if _is_whole(y) and y.shape == shape:
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
        of_rows = (weights.real if weights.is_complex() else weights).to(torch.float64).reshape(-1)
        if weights.is_complex() or weights.shape != shape or not bool(((of_rows >= 0) & of_rows.isfinite()).all()):
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


def _check_number(name: str, number: object) -> None:
    """Raise unless it is a number of inputs or outputs.

    Raises:
        ValueError: it is not.
    """
    if not (is_integer(number) and 1 <= number <= _MOST_FEATURES):  # type: ignore[operator]
        raise ValueError(f"{name} takes an integer in 1 ... {_MOST_FEATURES}, got {number!r}")


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _row(tensor: Any, size: int) -> Any:
    """The array (size,) of a dense tensor (1, size) on the CPU, in float32 or float64, without gradients; else None."""
    try:
        array = tensor.numpy()
    except (AttributeError, TypeError, RuntimeError):
        return None
    return array[0] if array.shape == (1, size) and array.dtype.char in "fd" else None
