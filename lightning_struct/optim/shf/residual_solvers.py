"""Solvers of the damped least-squares problem of a batch of residuals, for all dampings at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_struct.collective import all_gather_unequal, all_reduce, world_size
from lightning_struct.functional.factored_least_squares import FactoredLeastSquares
from lightning_struct.functional.projected_least_squares import ProjectedLeastSquares
from lightning_struct.optim.memory import check_memory
from lightning_struct.optim.shf.residual_model import ResidualModel

# Cost model of the choice between the solvers, in multiplications: of a step of a Krylov solver, for each residual and each
# parameter, as it is done by many small operations; and of the SVD of a triangle, for each of its numbers and rows.
_PRODUCTS, _SVD = 30.0, 20.0
# Beyond these sizes J is not formed: its bytes, and those of the triangle.
_LARGEST_JACOBIAN, _LARGEST_TRIANGLE = 2**29, 2**28
# A Krylov solver ends where the gradient of the damped problem has fallen to this share.
_TOLERANCE = 1e-4


class ResidualSolver(ABC):
    """Solutions of min ‖r + J d‖² + λ²‖d - d0‖² for any λ.

    Attributes:
        gradient: Jᵀr, (P,): ∇f.
        variance: ‖Var‖₁ of the gradients of single samples; None where it is not defined.
        largest: the largest singular value of J, or its estimate.
        iterations: iterations so far; 0 for the exact solver.
        name: why it stops.
    """

    gradient: Tensor
    variance: float | None
    largest: float
    iterations: int = 0
    name: str

    @abstractmethod
    def begin(self, start: Tensor | None, damping: float | None) -> None:
        """Prepare the solutions around d0 = ``start``, zero for None, which are wanted for λ about ``damping``."""

    @abstractmethod
    def direction(self, damping: float) -> Tensor:
        """d for one λ."""

    @abstractmethod
    def product(self, d: Tensor) -> Tensor:
        """J d, this process's rows."""

    @abstractmethod
    def solve(self, b: Tensor, damping: float) -> Tensor:
        """The solution of min ‖J d - b‖² + λ²‖d‖², or one close to it."""


class ExactSolver(ResidualSolver):
    """By a factorisation of J, a QR of its shorter side and an SVD of the triangle.

    Raises:
        MemoryError: J and its factors take more than is free.
        ValueError: NaN or infinity in J.
    """

    name = "exact"

    def __init__(self, model: ResidualModel) -> None:
        self._model = model
        _check_memory(model)
        jacobian = model.jacobian()
        self._factored = (FactoredLeastSquares if world_size() == 1 else SharedLeastSquares)(jacobian)
        self.gradient = all_reduce(jacobian.mT @ model.residual)
        self.variance = model.variance_from_rows(jacobian)
        self.largest = self._factored.singular_values[0].item()

    def begin(self, start: Tensor | None, damping: float | None) -> None:
        residual, self._start = self._model.residual, start
        self._coordinates = self._factored.coordinates(
            -residual if start is None else -residual - self._factored.product(start)
        )

    def direction(self, damping: float) -> Tensor:
        step = self._factored.solve_coordinates(self._coordinates, damping)
        return step if self._start is None else step.add_(self._start)

    def product(self, d: Tensor) -> Tensor:
        return self._factored.product(d)

    def solve(self, b: Tensor, damping: float) -> Tensor:
        return self._factored.solve(b, damping)


class KrylovSolver(ResidualSolver):
    """By one bidiagonalisation, in the Krylov space of the batch; J is not formed.

    Args:
        model: the problem.
        method: ``"lsmr"``, ``"lsqr"``, or ``"cg"``, which in exact arithmetic is LSQR.
        maxiter: bound on the iterations.

    Raises:
        FloatingPointError: a product holds NaN or infinity.
    """

    def __init__(self, model: ResidualModel, method: str, maxiter: int) -> None:
        self._model, self._method, self._maxiter = model, "lsmr" if method == "lsmr" else "lsqr", maxiter
        self._products = model.products()
        self.gradient = self._products.backward(model.residual)
        self.variance = model.variance_from_parts(self._products.backward)

    def begin(self, start: Tensor | None, damping: float | None) -> None:
        residual, self._start = self._model.residual, start
        self._projected = ProjectedLeastSquares(
            self._products.forward,
            self._products.backward,
            -residual if start is None else -residual - self.product(start),
            self._maxiter,
            damping=damping or 0.0,
            tolerance=_TOLERANCE,
            method=self._method,
            all_reduce=all_reduce,
        )
        self.iterations += self._projected.steps
        self.largest = max(self._projected.singular_values.tolist(), default=0.0)
        self.name = "maxiter" if self._projected.steps == self._maxiter else "normal_residual"

    def direction(self, damping: float) -> Tensor:
        step = self._projected.solution(damping)
        return step if self._start is None else step.add_(self._start)

    def product(self, d: Tensor) -> Tensor:
        return self._products.forward(d)

    def solve(self, b: Tensor, damping: float) -> Tensor:
        return self._projected.solve(b, damping)


class SharedLeastSquares(FactoredLeastSquares):
    """A factored J whose rows are distributed over processes; ``jacobian`` and right-hand sides are of this process.

    Each process reduces its rows to a triangle where it has more rows than J has columns; the triangles of all are
    factored on all.
    """

    def __init__(self, jacobian: Tensor) -> None:
        rows, columns = jacobian.shape
        self._own = torch.geqrf(jacobian) if rows > columns else None
        super().__init__(all_gather_unequal(jacobian if self._own is None else self._own[0][:columns].triu()))
        self.jacobian = jacobian

    def coordinates(self, b: Tensor) -> Tensor:
        """Uᵀ b of the rows of b on all processes."""
        if self._own is not None:
            b = torch.ormqr(*self._own, b[:, None], left=True, transpose=True)[: len(self._own[1]), 0]
        return super().coordinates(all_gather_unequal(b))


def chosen_solver(rows: int, columns: int, element_size: int, maxiter: int) -> str:
    """``"exact"`` where a factorisation takes less than the iterations of a Krylov solver, and not too much memory.

    Decided by the sizes alone, so that a run repeats itself.

    Args:
        rows, columns: of J, over all processes.
        element_size: bytes of a number.
        maxiter: bound on the iterations of the other.

    Example:
        >>> chosen_solver(1020, 9873, 8, 150), chosen_solver(100_000, 100_000, 8, 150)
        ('exact', 'lsmr')
    """
    shorter, longer = sorted((rows, columns))
    exact = 2.0 * longer * shorter**2 + _SVD * shorter**3
    krylov = maxiter * _PRODUCTS * rows * columns
    fits = rows * columns * element_size <= _LARGEST_JACOBIAN and shorter**2 * element_size <= _LARGEST_TRIANGLE
    return "exact" if fits and exact <= krylov else "lsmr"


def _check_memory(model: ResidualModel) -> None:
    rows, columns = model.samples, len(model.weights.vector)
    size = model.residual.element_size()
    matrix, side = size * len(model.residual) * columns, size * min(rows, columns) ** 2
    check_memory(
        f"The matrices of solver='exact' for {rows:,} residuals and {columns:,} parameters",
        {
            "J": (matrix, f"{len(model.residual)} x {columns}"),
            "its factors": (matrix, "as many numbers"),
            "the triangle": (4 * side, f"{min(rows, columns)} x {min(rows, columns)}, and its singular vectors"),
        },
        model.residual.device,
        "Take fewer points in a step, or solver='lsmr', which forms no matrix",
    )
