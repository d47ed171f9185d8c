"""The exact solution of a damped least-squares step: all dampings from one factorisation, the best by the true loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_struct.collective import all_gather_unequal, all_reduce, world_size
from lightning_struct.functional.factored_least_squares import FactoredLeastSquares, geodesic_acceleration
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.memory import check_memory
from lightning_struct.optim.shf.residual_model import ResidualModel

# Factors of λ² that are tried in each step, those beyond where none of them lowers the loss, and those of the accelerated
# steps around the best.
_FACTORS = (100.0, 10.0, 3.0, 1.0, 1 / 3, 1 / 10, 1 / 100)
_LARGER = tuple(10.0**power for power in range(3, 13))
_ACCELERATED = (3.0, 1.0, 1 / 3, 1 / 10)
# Acceleration is taken where 2‖a‖ is below this share of ‖v‖ (Transtrum & Sethna 2012 have .75 for ‖a‖/‖v‖ too).
_LARGEST_ACCELERATION = 1.5
# λ² of the first step, as a share of the largest eigenvalue of JᵀJ, and the smallest λ as a share of its root.
_FIRST_SHARE = 1e-2


@dataclass(frozen=True)
class DampedStep:
    """A step of a damped least-squares problem.

    Attributes:
        velocity: v, the solution, flat.
        damping: λ it was computed with.
        value: f(w + d).
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


class ExactSolver:
    """Steps of one batch for any λ.

    Args:
        model: the problem.
        bounds: the smallest and the largest λ.

    Raises:
        MemoryError: J and its factors take more than is free.
        ValueError: NaN or infinity in J.
    """

    def __init__(self, model: ResidualModel, bounds: tuple[float, float]) -> None:
        self._model = model
        _check_memory(model)
        self._factored = (FactoredLeastSquares if world_size() == 1 else SharedLeastSquares)(model.jacobian())
        self.gradient = all_reduce(self._factored.jacobian.mT @ model.residual)
        largest = self._factored.singular_values[0].item()
        self.first_damping = math.sqrt(_FIRST_SHARE) * largest
        self._smallest = max(bounds[0], torch.finfo(model.residual.dtype).eps * largest)
        self._largest = bounds[1]

    def best(self, damping: float, start: Tensor | None, *, adapts: bool, accelerated: bool) -> DampedStep | None:
        """The step with the lowest loss; None where no step lowers it.

        Args:
            damping: λ around which the dampings lie.
            start: d0, around which the step is damped; None for zero.
            adapts: whether other dampings than λ are tried where λ lowers the loss.
            accelerated: whether steps with geodesic acceleration are tried too.
        """
        right_hand_side = -self._model.residual
        if start is not None:
            right_hand_side = right_hand_side - self._factored.jacobian @ start
        coordinates = self._factored.coordinates(right_hand_side)

        def direction(damping: float) -> Tensor:
            step = self._factored.solve_coordinates(coordinates, damping)
            return step if start is None else step + start

        def plain(damping: float) -> DampedStep:
            d = direction(damping)
            return DampedStep(d, damping, self._model.value_at(d))

        tries = map(plain, self._dampings(damping, _FACTORS if adapts else (1.0,)))
        best = min(tries, key=lambda step: step.value if math.isfinite(step.value) else math.inf)
        for larger in self._dampings(damping, _LARGER if adapts else (10.0, 100.0, *_LARGER)):
            if best.value < self._model.value:
                break
            best = plain(larger)
        if accelerated:
            for around in self._dampings(best.damping, _ACCELERATED if adapts else (1.0,)):
                step = self._accelerated(direction(around), around)
                if step is not None and step.value < best.value:
                    best = step
        return best if best.value < self._model.value else None

    def predicted_change(self, d: Tensor) -> float:
        """½‖r + J d‖² - ½‖r‖²."""
        return self._model.value_of(self._model.residual + self._factored.jacobian @ d) - self._model.value

    def _accelerated(self, velocity: Tensor, damping: float) -> DampedStep | None:
        a = geodesic_acceleration(self._factored, self._model.residual, self._model.residual_at, velocity, damping)
        sizes = math.sqrt(inner(a, a).item()), math.sqrt(inner(velocity, velocity).item())
        if not 2.0 * sizes[0] < _LARGEST_ACCELERATION * sizes[1]:
            return None
        return DampedStep(velocity, damping, self._model.value_at(velocity + a), a)

    def _dampings(self, damping: float, factors: Iterable[float]) -> list[float]:
        """λ for factors of λ², within the bounds, none twice."""
        bounded = (min(max(damping * math.sqrt(factor), self._smallest), self._largest) for factor in factors)
        return list(dict.fromkeys(bounded))


class SharedLeastSquares(FactoredLeastSquares):
    """A factored J whose rows are distributed over processes; ``jacobian`` and right-hand sides are of this process.

    Each process reduces its rows to a triangle where it has more rows than J has columns; the triangles of all are
    factored on all. Q is never formed.
    """

    def __init__(self, jacobian: Tensor) -> None:
        rows, columns = jacobian.shape
        self._own = torch.geqrf(jacobian) if rows > columns else None
        super().__init__(all_gather_unequal(jacobian if self._own is None else self._own[0][:columns].triu()))
        self.jacobian = jacobian

    def coordinates(self, b: Tensor) -> Tensor:
        """Uᵀ b of this process's rows of b, the same on all processes."""
        if self._own is not None:
            b = torch.ormqr(*self._own, b[:, None], left=True, transpose=True)[: len(self._own[1]), 0]
        return super().coordinates(all_gather_unequal(b))


def _check_memory(model: ResidualModel) -> None:
    rows, columns = model.samples, len(model.weights.vector)
    size = model.residual.element_size()
    matrix, side = size * model.rows * columns, size * min(rows, columns) ** 2
    check_memory(
        f"The matrices of solver='exact' for {rows} residuals and {columns} parameters",
        {
            "J": (matrix, f"{model.rows} x {columns}"),
            "its factors": (matrix, "as many numbers"),
            "the triangle": (4 * side, f"{min(rows, columns)} x {min(rows, columns)}, and its singular vectors"),
        },
        model.residual.device,
        "Take fewer points in a step, or solver='lsmr', which forms no matrix",
    )
