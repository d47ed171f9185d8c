"""The step of a batch of residuals: the damping and the acceleration that lower the true loss most."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_struct.functional.solvers.factored_least_squares import geodesic_acceleration
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.residual_model import ResidualModel
from lightning_struct.optim.shf.residual_solvers import ResidualSolver

# From one damping that is tried to the next, λ² changes by this factor, at most so often.
_FACTOR, _MOST = 4.0, 10
# Factors of λ² where none of these lowers the loss.
_LARGER = tuple(10.0**power for power in range(1, 13))
# Acceleration is taken where 2‖a‖ is below this share of ‖v‖. Transtrum & Sethna (2012, section 5) have .75.
_LARGEST_ACCELERATION = 1.5


@dataclass(frozen=True)
class DampedStep:
    """A step of a damped least-squares problem.

    Attributes:
        velocity: v, the solution, flat.
        damping: λ it was computed with.
        value: f(w + d); infinity where it is not finite.
        acceleration: a; None where d = v.
    """

    velocity: Tensor
    damping: float
    value: float
    acceleration: Tensor | None = None

    @property
    def direction(self) -> Tensor:
        """d = v + a."""
        return self.velocity if self.acceleration is None else self.velocity + self.acceleration


class DampedSteps:
    """Steps of one batch with different dampings.

    Args:
        model: the problem.
        solver: its solver, after ``begin``.
        bounds: the smallest and the largest λ.
        accelerated: whether steps get a geodesic acceleration.
    """

    def __init__(
        self, model: ResidualModel, solver: ResidualSolver, bounds: tuple[float, float], *, accelerated: bool
    ) -> None:
        self._model, self._solver, self._accelerated = model, solver, accelerated
        # λ² added to squared singular values that rounding hides it from would change nothing.
        smallest = torch.finfo(model.residual.dtype).eps * solver.largest
        self._smallest, self._largest = min(max(bounds[0], smallest), bounds[1]), bounds[1]

    def best(self, damping: float, *, adapts: bool) -> DampedStep | None:
        """The step of the lowest loss, found by going from λ to larger and to smaller dampings while the loss falls.

        Args:
            damping: λ.
            adapts: whether others are tried where λ lowers the loss.

        Returns:
            None where no damping lowers the loss.
        """
        best = self._step(damping)
        if adapts:
            for factor in (_FACTOR, 1.0 / _FACTOR):
                further = self._descend(best, factor)
                if further is not best:
                    best = further
                    break
        for factor in _LARGER:
            if best.value < self._model.value:
                return best
            if best.damping >= self._largest:  # a larger one is the same
                return None
            best = self._step(damping * math.sqrt(factor))
        return best if best.value < self._model.value else None

    def _descend(self, best: DampedStep, factor: float) -> DampedStep:
        """The last step that is better than the one before, with λ² times ``factor`` from each to the next."""
        for _ in range(_MOST):
            damping = self._within(best.damping * math.sqrt(factor))
            if damping == best.damping:
                break
            step = self._step(damping)
            if not step.value < best.value:
                break
            best = step
        return best

    def _step(self, damping: float) -> DampedStep:
        damping = self._within(damping)
        velocity = self._solver.direction(damping)
        if self._accelerated:
            a = geodesic_acceleration(self._solver, self._model.residual, self._model.residual_at, velocity, damping)
            if 2.0 * math.sqrt(inner(a, a).item()) < _LARGEST_ACCELERATION * math.sqrt(
                inner(velocity, velocity).item()
            ):
                value = self._value(velocity + a)
                if value < self._model.value:
                    return DampedStep(velocity, damping, value, a)
        return DampedStep(velocity, damping, self._value(velocity))

    def _within(self, damping: float) -> float:
        return min(max(damping, self._smallest), self._largest)

    def _value(self, d: Tensor) -> float:
        value = self._model.value_at(d)
        return value if math.isfinite(value) else math.inf
