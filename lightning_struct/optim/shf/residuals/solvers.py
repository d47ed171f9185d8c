"""Solvers of the damped least-squares problem of a batch of residuals, for all dampings at once."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_struct.collective import all_gather_unequal, all_reduce, gather_numbers, world_size
from lightning_struct.functional.checks import NotFinite
from lightning_struct.functional.residuals.jacobians import DenseJacobian, JacobianForm, matrix_form
from lightning_struct.functional.solvers.factored_least_squares import GramLeastSquares
from lightning_struct.functional.solvers.projected_least_squares import ProjectedLeastSquares
from lightning_struct.optim.memory import check_memory, fits_memory
from lightning_struct.optim.shf.residuals.model import ResidualBatch, ResidualModel

# Cost model for the choice between the solvers, in multiplications. Half of JᵀJ or J Jᵀ is computed. A step takes three
# or four Cholesky factorisations, given as multiplications for each number and row. A Krylov solver takes about as many
# iterations as the third constant, if λ is not very small. An iteration costs a multiplication for each byte that it
# reads, and a fixed number for its small operations; that number is larger on a GPU, because the host waits for each.
_HALF, _FACTORISATIONS, _ITERATIONS, _ITERATION, _ITERATION_OF_GPU = 0.5, 1.2, 60, 1e7, 1e10
# Beyond these sizes J is not formed: its bytes, and those of JᵀJ or J Jᵀ.
_LARGEST_JACOBIAN, _LARGEST_GRAM = 2**31, 2**28
# A Krylov solver ends when the gradient of the damped problem has fallen to this share.
_TOLERANCE = 1e-4


class FreeMemory:
    """Decisions about memory, taken once: use by other processes changes from step to step.

    Sizes that fitted are not asked about again; those that did not are not tried again, in a resumed run either.

    Attributes:
        too_many: by name, the rows of J from which on there was too little. It belongs to the state of a run.
    """

    def __init__(self) -> None:
        self.too_many: dict[str, int] = {}
        self._fitted: dict[str, int] = {}

    def suffices_for(self, name: str, batch: ResidualBatch, needed: Mapping[str, tuple[int, str]]) -> bool:
        """Whether all processes have enough memory.

        Args:
            name: of the matrix that needs it.
            batch: of the problem, which it is the larger for the more rows it has.
            needed: as for :func:`~lightning_struct.optim.memory.fits_memory`.
        """
        rows, device = batch.rows, batch.residual.device
        too_many, fitted = self.too_many.get(name, sys.maxsize), self._fitted.get(name, 0)
        fits = _everywhere(rows < too_many and (rows <= fitted or fits_memory(needed, device)), device)
        if fits:
            self._fitted[name] = max(rows, fitted)
        else:
            self.too_many[name] = min(rows, too_many)
        return fits

    def suffices_for_exact(self, batch: ResidualBatch) -> bool:
        """Whether all processes have enough memory for the exact solver."""
        return self.suffices_for("exact", batch, _memory_of_exact(batch)[1])


class ResidualSolver(ABC):
    """Solutions of min ‖r + J d‖² + λ²‖d - d0‖² for any λ.

    Attributes:
        start: d0; None for zero.
        largest: the largest singular value of J, or its estimate.
        smallest_damping: a λ that adapts does not fall below it.
        iterations: iterations so far; 0 for the exact solver.
        stop_reason: why it stopped: ``"exact"``, ``"normal_residual"``, ``"maxiter"``.
    """

    start: Tensor | None
    largest: float
    smallest_damping: float = 0.0
    iterations: int = 0
    stop_reason: str

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

    def corrected(self, d: Tensor, residual: Tensor, damping: float) -> Tensor:
        """The solution e of min ‖r(w + d) + J (e - d)‖² + λ²‖e - d0‖², or one close to it; ``residual`` is r(w + d)."""
        moved = d if self.start is None else d - self.start
        solution = self.solve(self.product(moved) - residual, damping)
        return solution if self.start is None else solution.add_(self.start)


class ExactSolver(ResidualSolver):
    """By factorisations, in float64: of JᵀJ + λ² or J Jᵀ + λ², whichever is smaller, refined if λ is too small.

    A λ below about 1e-13 of the largest singular value counts as that.

    Args:
        model: the problem, with J.

    Raises:
        ValueError: NaN or infinity in the products of J.
    """

    stop_reason = "exact"

    def __init__(self, model: ResidualModel) -> None:
        assert model.jacobian is not None
        self._model, self._jacobian = model, model.jacobian
        if isinstance(self._jacobian, DenseJacobian) and model.residual.device.type != "mps":  # mps has no float64
            self._jacobian = DenseJacobian(self._jacobian.dense().double())
        self._gram: GramLeastSquares | None = None

    def begin(self, start: Tensor | None, damping: float | None) -> None:
        residual = self._model.residual
        self.start, self._b = start, -residual if start is None else -residual - self.product(start)
        if self._gram is None:
            self._gram = self._form_gram()
        self._coordinates = self._coordinates_of(self._b)

    def direction(self, damping: float) -> Tensor:
        step = self._solution(self._coordinates_for(damping), damping)
        return step if self.start is None else step.add_(self.start)

    def product(self, d: Tensor) -> Tensor:
        return self._jacobian.product(d.to(self._jacobian.dtype))

    def solve(self, b: Tensor, damping: float) -> Tensor:
        self._coordinates_for(damping)
        return self._solution(self._coordinates_of(b), damping)

    def _solution(self, coordinates: Tensor, damping: float) -> Tensor:
        assert self._gram is not None, "begin() comes first"
        damping = max(damping, self._gram.smallest_damping)
        return self._gram.solve_coordinates(coordinates, damping).to(self._model.residual.dtype)

    def _coordinates_of(self, b: Tensor) -> Tensor:
        assert self._gram is not None, "begin() comes first"
        return self._gram.coordinates(b.to(self._jacobian.dtype))

    def _coordinates_for(self, damping: float) -> Tensor:
        """The coordinates of -r for a factorisation that is fine enough for λ."""
        assert self._gram is not None, "begin() comes first"
        if damping < self._gram.smallest_damping and not self._gram.is_refined:
            self._gram.refine()
            self._coordinates = self._coordinates_of(self._b)
        return self._coordinates

    def _form_gram(self) -> GramLeastSquares:
        gram = GramLeastSquares(
            self._jacobian,
            rows=self._model.rows,
            all_reduce=all_reduce,
            all_gather=all_gather_unequal if world_size() > 1 else None,
        )
        self.largest = gram.largest_singular_value
        if not math.isfinite(self.largest):
            raise NotFinite(
                f"products of the derivatives of the residuals are too large for {self._jacobian.dtype}; the "
                "weights are unchanged. Divide the residuals by their usual size in the module"
            )
        if self._model.batch.form_for_gram.kept:  # J is kept as outer products, and never formed: it is wide
            self.smallest_damping = gram.smallest_damping
        return gram


class KrylovSolver(ResidualSolver):
    """LSMR by one bidiagonalisation, in the Krylov space of the batch.

    Args:
        model: the problem.
        maxiter: bound on the iterations.

    Raises:
        FloatingPointError: a product holds NaN or infinity.
    """

    def __init__(self, model: ResidualModel, maxiter: int) -> None:
        self._model, self._maxiter = model, maxiter

    def begin(self, start: Tensor | None, damping: float | None) -> None:
        residual, self.start = self._model.residual, start
        self._projected = ProjectedLeastSquares(
            self._model.forward,
            self._model.backward,
            -residual if start is None else -residual - self.product(start),
            self._maxiter,
            damping=0.5 * (damping or 0.0),  # the next smaller one, which is tried too
            tolerance=_TOLERANCE,
            all_reduce=all_reduce,
            gradient=self._model.gradient if start is None else None,
        )
        self.iterations += self._projected.steps
        self.largest = self._projected.largest_singular_value
        self.stop_reason = "maxiter" if self._projected.steps == self._maxiter else "normal_residual"

    def direction(self, damping: float) -> Tensor:
        step = self._projected.solution(damping)
        return step if self.start is None else step.add_(self.start)

    def product(self, d: Tensor) -> Tensor:
        return self._model.forward(d)

    def solve(self, b: Tensor, damping: float) -> Tensor:
        return self._projected.solve(b, damping)


def chosen_solver(
    rows: int, columns: int, element_size: int, maxiter: int, form: JacobianForm | None = None, *, on_gpu: bool = False
) -> str:
    """``"exact"`` if a factorisation takes less than the iterations of a Krylov solver, and not too much memory.

    Decided by the sizes alone, so that a run repeats itself.

    Args:
        rows, columns: of J, over all processes.
        element_size: bytes of a number.
        maxiter: bound on the iterations of the other.
        form: of J, with the rows of all processes; a matrix if not given.
        on_gpu: whether J is on a GPU, which multiplies while the host would wait for an iteration.

    Example:
        >>> chosen_solver(1020, 9873, 8, 150), chosen_solver(100_000, 100_000, 8, 150)
        ('exact', 'lsmr')
        >>> chosen_solver(6000, 4000, 8, 150), chosen_solver(6000, 4000, 8, 150, on_gpu=True)
        ('lsmr', 'exact')
    """
    shorter = min(rows, columns)
    form = form or matrix_form(rows, columns)
    exact = _HALF * form.cost * shorter**2 + _FACTORISATIONS * shorter**3
    krylov = min(maxiter, _ITERATIONS) * (element_size * form.work + (_ITERATION_OF_GPU if on_gpu else _ITERATION))
    fits = form.numbers * element_size <= _LARGEST_JACOBIAN and shorter**2 * element_size <= _LARGEST_GRAM
    return "exact" if fits and exact <= krylov else "lsmr"


def method_of(batch: ResidualBatch, name: str | None, maxiter: int, free_memory: FreeMemory) -> str:
    """``"exact"`` or ``"lsmr"``.

    Args:
        batch: the residuals.
        name: of the solver; None for one by :func:`chosen_solver`, which is ``"lsmr"`` where memory is short too.
        maxiter: bound on the iterations of LSMR.
        free_memory: decisions about it.

    Raises:
        MemoryError: ``"exact"`` was asked for, and takes more than is free, on any of the processes.
    """
    if name == "exact":
        _check_memory_of_exact(batch)
    elif name is None:
        sizes = batch.rows, len(batch.weights.vector), batch.residual.element_size(), maxiter
        matrix, on_gpu = matrix_form(*sizes[:2]), batch.residual.device.type != "cpu"
        name = chosen_solver(*sizes, replace(matrix, numbers=0, cost=0.0), on_gpu=on_gpu)  # however J is kept
        if name == "exact":
            name = chosen_solver(*sizes, batch.form_for_gram, on_gpu=on_gpu)
        if name == "exact" and not free_memory.suffices_for_exact(batch):
            name = "lsmr"
    return name


def linearized(batch: ResidualBatch, method: str, maxiter: int, free_memory: FreeMemory) -> ResidualModel:
    """The model of a batch, with J in the form that its solver, of :func:`method_of`, takes.

    LSMR multiplies by outer products, and by columns where these are smaller, as far as they fit into memory; else by
    passes through the module, and J is not formed.

    Raises:
        ValueError: NaN or infinity in J.
    """
    if method == "exact":
        return ResidualModel(batch, batch.jacobian(batch.form_for_gram), method)
    form = batch.form_for_products
    fits = free_memory.suffices_for("J", batch, _memory_of_products(batch, form, maxiter))  # asked on all processes
    return ResidualModel(batch, batch.jacobian(form) if form is not None and fits else None, method)


def _check_memory_of_exact(batch: ResidualBatch) -> None:
    memory = what, needed, device, remedy = _memory_of_exact(batch)
    if not _everywhere(fits_memory(needed, device), device):
        check_memory(*memory)
        raise MemoryError(f"{what} take more than is free on another process. {remedy}")


def _everywhere(holds: bool, device: torch.device) -> bool:
    """Whether something holds on all processes."""
    return all(held for (held,) in gather_numbers([holds], device))


def _memory_of_products(batch: ResidualBatch, form: JacobianForm | None, maxiter: int) -> dict[str, tuple[int, str]]:
    """Bytes of J and of the solver's bases; more than there are if J is beyond its bound, or has no form."""
    element, rows, columns = batch.residual.element_size(), len(batch.residual), len(batch.weights.vector)
    size = sys.maxsize if form is None else form.numbers * element
    steps = min(maxiter, batch.rows, columns)
    return {
        "J": (2 * size if size <= _LARGEST_JACOBIAN else sys.maxsize, "and as much while it is made"),
        "the bases": ((steps + 1) * (rows + columns) * element, f"{steps + 1} vectors of each side"),
    }


def _memory_of_exact(batch: ResidualBatch) -> tuple[str, dict[str, tuple[int, str]], torch.device, str]:
    """Arguments of :func:`~lightning_struct.optim.memory.check_memory` for the exact solver."""
    rows, columns, form = batch.rows, len(batch.weights.vector), batch.form_for_gram
    size = batch.residual.element_size()
    matrix, side = size * len(batch.residual) * columns, size * min(rows, columns) ** 2
    text = f"{min(rows, columns)} x {min(rows, columns)}"
    if form.kept:
        needed = {
            "J": (2 * size * form.numbers, "outer products of its rows, and as much while they are made"),
            "J Jᵀ": (2 * side, f"{text}, and its Cholesky factor"),
        }
    else:
        needed = {
            "J": (matrix, f"{len(batch.residual)} x {columns}"),
            "its factors": (matrix * 8 // size, "as many numbers in float64"),
            "JᵀJ": (4 * side * 8 // size, f"{text}, and its factors"),
        }
    return (
        f"The matrices of solver='exact' for {rows:,} residuals and {columns:,} parameters",
        needed,
        batch.residual.device,
        "Take fewer points in a step, or solver='lsmr', which keeps two vectors for each of its iterations instead",
    )
