"""The subproblem of one iteration: a direction from the damped model of a batch, and the step along it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_struct.collective import all_reduce
from lightning_struct.functional.solvers.conjugate_gradient import conjugate_gradient
from lightning_struct.functional.solvers.least_squares import RightPreconditioner, lsmr, lsqr
from lightning_struct.functional.solvers.line_search import armijo
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.batch_model import BatchModel
from lightning_struct.optim.shf.merit import MeritStopping
from lightning_struct.optim.shf.objective import Batches
from lightning_struct.optim.shf.settings import CG, LSMR, LSQR, Settings

# α of the line search (Table 1).
_ARMIJO = 1e-4

Preconditioner: TypeAlias = Tensor | RightPreconditioner | None


@dataclass(frozen=True)
class Solution:
    """The end of a solve.

    Attributes:
        direction: d that the step tries, flat.
        last: the solver's last iterate, from which the next solve starts.
        iterations: iterations done.
        stop_reason: why the solver stopped.
        merits: (iteration, φ) as evaluated during the solve.
        value: f(w + d), where the solver had to know it; else None.
        curvature: ½‖A d‖²/m + ½ l2 ‖d‖², where the solver had to know it; else None.
    """

    direction: Tensor
    last: Tensor
    iterations: int
    stop_reason: str
    merits: tuple[tuple[int, float], ...] = ()
    value: float | None = None
    curvature: float | None = None


@dataclass(frozen=True)
class Update:
    """The update w <- w + s d of one iteration.

    Attributes:
        solution: the solve that d comes from; None where the weights stay.
        step_length: s; 0 where the weights stay.
        loss: f at the new weights.
        reduction_ratio: ρ; 0 where the weights stay.
        damping: λ that d was computed with; where the weights stay, λ from which the next step goes on.
        iterations: iterations of all solves together.
        stop_reason: why the last solver stopped, or ``"line_search"`` or ``"zero_gradient"`` where the weights stay.
    """

    solution: Solution | None
    step_length: float
    loss: float
    reduction_ratio: float
    damping: float
    iterations: int
    stop_reason: str


def solve(
    model: BatchModel,
    settings: Settings,
    *,
    damping: float,
    start: Tensor | None,
    preconditioner: Preconditioner,
    maxiter: int,
    validation: Batches | None,
) -> Solution:
    """Minimise the model with λ²‖d - d0‖² (or λ²‖d‖², equation (18)) and the penalty, by the solver of the settings.

    Args:
        model: the model of a batch.
        settings: solver, centre and space of the damping, tolerances, rules of stopping.
        damping: λ.
        start: d0, where the solver starts; None for zero.
        preconditioner: c (Algorithm 3), an object that solves with C, or None.
        maxiter: bound on the iterations.
        validation: the data of the merit φ that ends LSMR and LSQR; None for none.

    Raises:
        FloatingPointError: NaN or infinity within the solve.
    """
    anchor = start if settings.damping.center == "start" else None
    solver: Any = settings.solver
    if isinstance(solver, CG):
        return _solve_by_cg(model, solver, settings.l2, damping, start, anchor, preconditioner, maxiter)
    # LSMR (Algorithm 6) or LSQR on min ‖A d - b‖² + n λ²‖d - center‖², until the merit stops falling
    stopping = None if validation is None else _merit_stopping(model, solver, start, maxiter, validation)
    strength: float = damping
    center: str | Tensor = settings.damping.center
    if settings.l2:
        strength, center = model.joined_damping(damping, anchor)
    result = (lsqr if isinstance(solver, LSQR) else lsmr)(
        model.forward,
        model.backward,
        model.right_hand_side,
        damp=strength * math.sqrt(model.n),
        x0=start,
        damping_center=center,
        damping_space=settings.damping_space,
        preconditioner=preconditioner,
        maxiter=maxiter,
        atol=solver.atol,
        btol=0.0,
        callback=stopping,
        all_reduce=all_reduce,
        gradient=model.gradient_of_rows() if start is None else None,
    )
    merits = () if stopping is None else tuple(stopping.values)
    return Solution(result.x, result.x, result.iterations, result.stop_reason, merits)


def _merit_stopping(
    model: BatchModel, solver: LSMR, start: Tensor | None, maxiter: int, validation: Batches
) -> MeritStopping:
    return MeritStopping(
        lambda d: model.objective.merit(d, validation),
        model.objective.merit(torch.zeros_like(model.gradient) if start is None else start, validation),
        maxiter=maxiter,
        miniter=solver.miniter,
        recover=solver.recover,
        ftol=solver.ftol,
    )


def _solve_by_cg(
    model: BatchModel,
    solver: Any,
    l2: float,
    damping: float,
    start: Tensor | None,
    anchor: Tensor | None,
    preconditioner: Preconditioner,
    maxiter: int,
) -> Solution:
    """CG of Martens (2010) on (AᵀA/m + λ² + l2) d = -∇f + λ² d0, then back over stored iterates while f gets lower."""
    strength = damping**2 + l2
    right_hand_side = -model.gradient
    if anchor is not None:
        right_hand_side.add_(anchor, alpha=damping**2)
    iterates: list[tuple[int, Tensor]] = []
    store_at = 1.0

    def store(iteration: int, solution: Callable[[], Tensor]) -> None:
        nonlocal store_at
        if iteration >= store_at:
            iterates.append((iteration, solution()))
            store_at = max(iteration + 1, 1.3 * iteration)

    result = conjugate_gradient(
        lambda d: model.curvature(d).add_(d, alpha=strength),
        right_hand_side,
        x0=start,
        preconditioner=preconditioner,
        maxiter=maxiter,
        progress_tolerance=solver.progress_tolerance,
        progress_window=solver.progress_window,
        callback=store,
    )
    best, value = result.x, model.objective.value_at(result.x)
    earlier = [iterate for iteration, iterate in iterates if iteration < result.iterations]
    for iterate in reversed(earlier):
        trial = model.objective.value_at(iterate)
        if trial > value:
            break
        best, value = iterate, trial
    curvature = None
    if best is result.x:  # the quadratic less its damping and its slope
        damped = 0.5 * inner(best, best).item() - (0.0 if anchor is None else inner(anchor, best).item())
        curvature = result.quadratic - damping**2 * damped - model.slope(best)
    return Solution(best, result.x, result.iterations, result.stop_reason, value=value, curvature=curvature)


def shortened(solution: Solution, scale: float) -> Solution:
    """A solution whose direction is ``scale`` times as long; the next solve starts from the whole."""
    if scale == 1.0:
        return solution
    curvature = None if solution.curvature is None else scale**2 * solution.curvature
    return replace(solution, direction=solution.direction * scale, value=None, curvature=curvature)


def update_along(model: BatchModel, solution: Solution, *, damping: float, iterations: int) -> Update | None:
    """s by Armijo's rule and ρ (section 4.2) for the direction of a solve; None where no step along it lowers f.

    Args:
        model: the model that was solved.
        solution: the solve.
        damping: λ of the solve.
        iterations: iterations of this solve and of those before it in the same step.
    """
    d = solution.direction
    slope = model.slope(d)
    predicted = slope + (model.curvature_along(d) if solution.curvature is None else solution.curvature)
    if not (slope < 0.0 and predicted < 0.0):
        return None
    full = model.objective.value_at(d) if solution.value is None else solution.value
    found = armijo(partial(model.objective.value_at, d), model.value, slope, alpha=_ARMIJO, first_value=full)
    if found.step_length == 0.0:
        return None
    actual = model.objective.held_out_change(d) if model.has_held_out else full - model.value
    ratio = actual / predicted if math.isfinite(actual) else 0.0  # ρ = (f(w + d) - f(w)) / (½‖A d‖² - d·Aᵀb)
    return Update(solution, found.step_length, found.value, ratio, damping, iterations, solution.stop_reason)


def merit_after(model: BatchModel, update: Update, validation: Batches, *, new_buffers: bool) -> float:
    """φ at the new weights, from the solve where it was evaluated there, and with the buffers that are there now."""
    solution = update.solution
    if solution is None:
        return model.objective.merit(torch.zeros_like(model.gradient), validation)
    last_is_known = bool(solution.merits) and solution.merits[-1][0] == solution.iterations
    if update.step_length == 1.0 and solution.direction is solution.last and last_is_known and not new_buffers:
        return solution.merits[-1][1]
    return model.objective.merit(solution.direction * update.step_length, validation)
