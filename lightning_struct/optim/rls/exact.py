"""The weight that ``RLS.exact`` trains: the recursion of weighted ridge regression on targets read from gradients."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.curvature.weighted_ridge import WeightedRidge
from lightning_struct.optim.rls.settings import ExactP
from lightning_struct.optim.rls.weights import StepBounds, TrainedWeight


class ExactWeight(TrainedWeight):
    """A weight, with its bias, that is the solution of weighted ridge regression after every step."""

    _ridge: WeightedRidge | None = None

    @property
    def most_rows(self) -> float:
        return math.inf

    @property
    def memory(self) -> int:
        return 8 * (self.size + self.outputs) ** 2

    def kept_rows(self, rows: Tensor) -> Tensor:
        return rows.clone()  # others may write to the inputs of a layer

    def initial_state(self) -> dict[str, Any]:
        """Θ, the factor of :class:`WeightedRidge`, the sum of weights, and the number of steps."""
        form = self.settings.form
        assert isinstance(form, ExactP)
        start = torch.cat(self._theta(), 2)[0].to(torch.float64)
        return {"steps": 0} | self._take_over(WeightedRidge.start(start, form.regularization))

    def _take_over(self, ridge: WeightedRidge) -> dict[str, Any]:
        self._ridge = ridge
        return {"weights": ridge.weights, "factor": ridge.factor, "samples": ridge.samples}

    def holds(self, state: Mapping[str, Any]) -> bool:
        return state["factor"].device == self.parameter.device

    def check_state(self, state: Mapping[str, Any]) -> None:
        if (found := getattr(state.get("weights"), "shape", None)) != (self.outputs, self.size):
            raise ValueError(
                f"RLS.exact needs a state of {self.name} for weights {(self.outputs, self.size)}, biases included, and "
                f"this one has {found and tuple(found)}"
            )

    def converted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        device = self.parameter.device
        ridge = WeightedRidge(state["weights"].to(device), state["factor"].to(device), state["samples"])
        return {"steps": state["steps"]} | self._take_over(ridge)

    def step_(self, state: dict[str, Any], mean: Tensor, group: Mapping[str, Any], bounds: StepBounds) -> None:
        """Θ ← (1 - lr) Θ + lr Θ*, with Θ* the minimum over all rows so far: equations (20) and (24).

        The gradients dZ of the outputs Z say which targets the rows X have: Y = Z - M dZ, with M their number.

        Raises:
            ValueError: the gradient is not dZᵀX.
        """
        few = self._few_rows()
        if few is None:
            raise ValueError(
                f"RLS.exact: the gradient of {self.name} is not that of ½‖outputs - targets‖² alone, from which the "
                "targets are read: leave out penalties on weights, and hooks and autocast that change gradients"
            )
        rows, cotangents = few[0][0].to(torch.float64), few[1][0].to(torch.float64)
        if self.biases:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        theta = self._theta()
        outputs = rows @ torch.cat(theta, 2)[0].to(torch.float64).T
        if self._ridge is None or state["factor"] is not self._ridge.factor:  # of a copy of the optimizer
            state.update(self.converted(state))
        ridge = self._ridge
        assert ridge is not None
        ridge.learn([rows, outputs - self.statistics.samples_seen * cotangents], self.settings.forgetting)
        lr = float(group["lr"])
        for part, found in zip(theta, ridge.weights[None].split([self.features, len(self.biases)], 2), strict=True):
            part.copy_(found if lr == 1 else part + lr * (found - part))
        state["samples"] = ridge.samples
        state["steps"] += 1
        self._write(*theta)
