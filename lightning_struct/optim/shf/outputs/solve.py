"""The subproblem of one iteration: a direction from the damped model of a batch, and the step along it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_struct.collective import all_reduce, world_size
from lightning_struct.functional.solvers.conjugate_gradient import conjugate_gradient
from lightning_struct.functional.solvers.least_squares import lsmr
from lightning_struct.functional.solvers.line_search import armijo
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.outputs.batch_model import BatchModel, Line
from lightning_struct.optim.shf.outputs.preconditioner import Preconditioner
from lightning_struct.optim.shf.samples import Batches
from lightning_struct.optim.shf.settings import CG, LSMR, Settings
from lightning_struct.optim.shf.steps import Update

# α of the line search (Table 1).
_ARMIJO = 1e-4


@dataclass(frozen=True)
class Solution:
    """The end of a solve.

    Attributes:
        direction: d that the step tries, flat.
        last: the solver's last iterate, from which the next solve starts.
        iterations: iterations done.
        stop_reason: why the solver stopped.
        line: value, slope and curvature along d.
        merits: (iteration, φ) as evaluated during the solve.
    """

    direction: Tensor
    last: Tensor
    iterations: int
    stop_reason: str
    line: Line
    merits: tuple[tuple[int, float], ...] = ()


class MeritStopping:
    """A solver callback that evaluates a merit function over growing intervals of iterations (section 5).

    It stops at iteration k when k > ``miniter`` and either the merit is the lowest so far but fell by less than
    ``ftol`` of itself per iteration since the last evaluation, or it is not the lowest and was lowest more than
    ``recover`` iterations ago.

    Args:
        merit: x -> φ(x).
        start: φ at the start of the solve.
        solver: its ``miniter``, ``recover`` and ``ftol``.
        maxiter: bound on the solver's iterations; the last iterate is always evaluated.

    Attributes:
        values: (iteration, φ) of each evaluation, the start included.
    """

    def __init__(self, merit: Callable[[Tensor], float], start: float, solver: LSMR, maxiter: int) -> None:
        self._merit, self._solver, self._maxiter = merit, solver, maxiter
        self._next, self._previous, self._previous_value = min(5, maxiter), 0, start
        self._lowest, self._lowest_at = math.inf, 0
        self.values: list[tuple[int, float]] = [(0, start)]

    def __call__(self, iteration: int, solution: Callable[[], Tensor]) -> bool:
        if iteration != self._next:
            return False
        value = self._merit(solution())
        self.values.append((iteration, value))
        if value < self._lowest:
            self._lowest, self._lowest_at = value, iteration
        lowest = value == self._lowest
        # Algorithm 6 divides by an undefined f_val here; the text of section 5 has f_k, the value of this iteration.
        # (f_prev - f_k)/f_k < (k - k_prev) ftol, and k > k_min + recover (section 5)
        stagnates = lowest and self._previous_value - value < (iteration - self._previous) * self._solver.ftol * value
        rises = not lowest and iteration > self._lowest_at + self._solver.recover
        self._next = min(math.ceil(1.25 * self._next), self._maxiter)
        self._previous, self._previous_value = iteration, value
        return iteration > self._solver.miniter and (stagnates or rises)


def solve(
    model: BatchModel,
    settings: Settings,
    *,
    damping: float,
    start: Tensor | None,
    preconditioner: Preconditioner,
    maxiter: int,
    validation: Batches | None,
    scale: float = 1.0,
) -> Solution:
    """Minimise the model with λ²‖d - d0‖² (or λ²‖d‖², equation (18)) and the penalty, by the solver of the settings.

    Args:
        model: the model of a batch.
        settings: solver, centre and space of the damping, tolerances, rules of stopping.
        damping: λ.
        start: d0, the solver's first iterate; None for zero.
        preconditioner: c (Algorithm 3), an object that solves with C, or None.
        maxiter: bound on the iterations.
        validation: the data of the merit φ that ends LSMR; None for none.
        scale: σ of the rule of the next batch: d is σ times the end of the solve.

    Raises:
        FloatingPointError: NaN or infinity within the solve.
    """
    anchor = start if settings.damping.center == "start" else None
    solver: Any = settings.solver
    if isinstance(solver, CG):
        return _solve_by_cg(model, solver, settings.l2, damping, start, anchor, preconditioner, maxiter, scale)
    # LSMR (Algorithm 6) on min ‖A d - b‖² + n λ²‖d - center‖², until the merit stops falling
    stopping: MeritStopping | None = None
    if validation is not None:
        stopping = MeritStopping(
            lambda d: model.objective.merit(d, validation),
            model.objective.merit(torch.zeros_like(model.gradient) if start is None else start, validation),
            solver,
            maxiter,
        )
    strength: float = damping
    center: str | Tensor = settings.damping.center
    if settings.l2:
        strength, center = model.joined_damping(damping, anchor)
    result = lsmr(
        model.forward,
        model.backward,
        model.right_hand_side,
        damp=strength * math.sqrt(model.samples),
        x0=start,
        damping_center=center,
        damping_space=settings.damping_space,
        preconditioner=preconditioner,
        maxiter=maxiter,
        atol=solver.atol,
        btol=0.0,
        callback=stopping,
        all_reduce=all_reduce if world_size() > 1 else None,
        gradient=model.gradient_of_rows() if start is None else None,
    )
    merits = () if stopping is None else tuple(stopping.values)
    d = _scaled(result.x, scale)
    return Solution(d, result.x, result.iterations, result.stop_reason, model.along(d), merits)


def _solve_by_cg(
    model: BatchModel,
    solver: Any,
    l2: float,
    damping: float,
    start: Tensor | None,
    anchor: Tensor | None,
    preconditioner: Preconditioner,
    maxiter: int,
    scale: float,
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
    x, d = result.x, _scaled(result.x, scale)
    earlier = [iterate for iteration, iterate in iterates if iteration < result.iterations]
    others = [model.gradient, *([] if anchor is None else [anchor])]
    directions = [x, *earlier[-1:], *([] if d is x else [d])]
    evaluated = [model.objective.parts_at(direction) for direction in directions]
    # One look at the device for all that the common case asks for.
    numbers = iter(torch.stack([inner(x, x), *(inner(t, x) for t in others), *chain(*evaluated)]).tolist())
    squares, slope_of_x = next(numbers), next(numbers)
    along_anchor = 0.0 if anchor is None else next(numbers)
    slope = scale * slope_of_x
    values = [model.objective.value_of(*(next(numbers) for _ in parts)) for parts in evaluated]
    best, value = x, values[0]
    for k, iterate in enumerate(reversed(earlier)):
        trial = values[1] if k == 0 else model.objective.value_at(iterate)
        if trial > value:
            break
        best, value = iterate, trial
    if best is not x:
        d = _scaled(best, scale)
        return Solution(d, x, result.iterations, result.stop_reason, model.along(d))
    # the quadratic less its damping and its slope
    curvature = result.quadratic - damping**2 * (0.5 * squares - along_anchor) - slope_of_x
    line = Line(values[0] if d is x else values[-1], slope, curvature if d is x else scale**2 * curvature)
    return Solution(d, x, result.iterations, result.stop_reason, line)


def _scaled(d: Tensor, scale: float) -> Tensor:
    return d if scale == 1.0 else d * scale


def update_along(model: BatchModel, solution: Solution, *, damping: float, iterations: int) -> Update | None:
    """s by Armijo's rule and ρ (section 4.2) for the direction of a solve; None if no step along it lowers f.

    Args:
        model: the model that was solved.
        solution: the solve.
        damping: λ of the solve.
        iterations: iterations of this solve and of those before it in the same step.
    """
    d, (full, slope, curvature) = solution.direction, solution.line
    predicted = slope + curvature
    if not (slope < 0.0 and predicted < 0.0):
        return None
    found = armijo(partial(model.objective.value_at, d), model.value, slope, alpha=_ARMIJO, first_value=full)
    if found.step_length == 0.0:
        return None
    ratio = (
        (full - model.value) / predicted if math.isfinite(full) else 0.0
    )  # ρ = (f(w + d) - f(w)) / (½‖A d‖² - d·Aᵀb)
    s = found.step_length
    last_is_known = bool(solution.merits) and solution.merits[-1][0] == solution.iterations
    return Update(
        loss=found.value,
        damping=damping,
        stop_reason=solution.stop_reason,
        iterations=iterations,
        change=_scaled(d, s),
        direction=solution.last,
        step_length=s,
        reduction_ratio=ratio,
        merits=solution.merits,
        last_merit=solution.merits[-1][1] if s == 1.0 and d is solution.last and last_is_known else None,
    )
