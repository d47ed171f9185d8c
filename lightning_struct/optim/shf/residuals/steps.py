"""Steps of SHF for a module that returns residuals (``loss="least_squares"``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_gather_unequal, all_reduce, gather_numbers, rank
from lightning_struct.functional.randomness import random_signs
from lightning_struct.functional.residuals.jacobians import matrix_form
from lightning_struct.functional.residuals.penalties import EVERY_N_STEPS, Penalties
from lightning_struct.functional.residuals.residual_rows import RowRecords
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.functional.solvers.curve_fit import inverse_of_normal_matrices
from lightning_struct.functional.torch_tools import triangular_factor
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.residuals.model import ResidualBatch, ResidualModel
from lightning_struct.optim.shf.residuals.solvers import (
    ExactSolver,
    FreeMemory,
    KrylovSolver,
    ResidualSolver,
    linearized,
    method_of,
)
from lightning_struct.optim.shf.samples import arguments, check_arguments
from lightning_struct.optim.shf.settings import Settings, name_of
from lightning_struct.optim.shf.step_state import Memory, StepState
from lightning_struct.optim.shf.steps import Steps, Update

_log = logging.getLogger(__name__)
# After a failed step λ grows by this factor, at most to the largest singular value of J: the step has tried all larger
# ones, and with a far larger λ a step on other samples may be too short to change the loss.
_RAISED = 10.0
# λ of the first step, as a share of the largest singular value of J.
_FIRST_SHARE = 0.1
# The smallest λ is taken whose step lowers the loss by this share of the prediction (DSGNAR, arXiv 2607.02194).
_SMALLEST_RATIO = 0.075
# λ is first divided by a factor. If that step is taken, the factor is squared, else it becomes its root, between these
# bounds. From one try to the next λ rises by the factor, which grows by a half each time.
_SMALLEST_FACTOR, _LARGEST_FACTOR, _FASTER = 2.0**0.125, 4.0, 1.5
# A step is corrected at most so many times, as long as the loss above the prediction falls to the first share, or is
# more than the second share of the prediction.
_CORRECTIONS, _GAIN, _REST = 20, 0.8, 0.01
# Multiplications of JᵀJ and its factorisations in place of a step on outputs: at most so many, in about a second of one
# core; and at most the lower number, or those of so many passes through the module.
_LARGEST, _SMALL, _PASSES, _LARGEST_JACOBIAN = 1e10, 1e9, 640, 2**26
# Noise is looked for above this share of the first loss, and found if the error on new samples rises so much.
_NOISE, _TOLERATED, _PROBES = 0.01, 1.2, 8
_NOISY = (
    "SHF: the weights stay, since further steps would fit the noise of this batch and raise the error on new samples. "
    "To fit the batch as well as possible choose solver='exact'"
)
# Remedy for a forward that does not take the inputs.
_FORWARD = (
    "With loss='least_squares' forward gets all of them, measurements too, and returns residuals, as "
    "`forward(self, x, y)` with `return self.net(x) - y`. "
)


class ResidualSteps(Steps):
    """Steps on batches of a module that returns residuals.

    Args:
        module: returns residuals.
        loss: the weights of their blocks.
        given: the settings as given to the optimizer.
        stops_at_noise: whether no step is taken that lowers the loss by fitting noise (:meth:`_fits_noise`).

    Raises:
        ValueError: a setting that has no meaning here.
    """

    def __init__(self, module: nn.Module, loss: LeastSquares, given: Settings, *, stops_at_noise: bool = False) -> None:
        super().__init__(module, loss, given.for_residuals(), exact_variance=True)
        self._stops_at_noise = stops_at_noise
        self._checks_untrained = True
        self._records, self._free_memory = RowRecords(module), FreeMemory()

    def linearize(self, now: StepState, inputs: Any, targets: Tensor | None) -> ResidualModel:
        """The problem of a batch at the current weights.

        Raises:
            TypeError: there are targets, or no inputs, or not those that the module takes.
        """
        if targets is not None:
            raise TypeError(
                "with loss='least_squares' the module returns residuals, which need no targets: step(inputs=...). Give "
                "measurements as inputs, or choose loss='mse'"
            )
        if inputs is None:
            raise TypeError(
                "SHF.step needs the points or measurements of the residuals: step(inputs=...), () for none. In "
                "Lightning put SHFOptimization before the LightningModule: automatic optimization gives an optimizer "
                "no batch"
            )
        try:
            batch = self.residuals(now, inputs, now.weights)
            model = self.linearized(now, batch, self.method(batch))
        except TypeError:
            check_arguments(self.module, arguments(inputs), _FORWARD)
            raise
        if self._checks_untrained:
            self._checks_untrained = False
            with self._network_draws(now):
                self.diagnostics.check_untrained(now.weights, model.weights.unflat(model.gradient), model.batch.args)
        return model

    def residuals(self, now: StepState, inputs: Any, weights: dict[str, Tensor]) -> ResidualBatch:
        """The residuals of a batch at the current weights, which are given by their names in the module."""
        decisions = now.memory.decisions
        self._records.refused = dict(decisions.refused_rows)
        self._records.whole_batches.refused = decisions.refused_batches
        self._free_memory.too_many = dict(decisions.too_many_rows)
        with now.timed("linearize"), self._network_draws(now), self.buffers.watched():
            penalties = Penalties(**decisions.penalties).weights
            return ResidualBatch(
                self._records, self.loss, weights, inputs, counts=now.memory.blocks, penalties=penalties
            )

    def method(self, batch: ResidualBatch) -> str:
        """``"exact"`` or ``"lsmr"``, as the settings or the sizes have it."""
        name = None if self.settings.solver is None else name_of(self.settings.solver)
        return method_of(batch, name, self.settings.maxiter, self._free_memory)

    def is_exact_cheap(self, batch: ResidualBatch) -> bool:
        """Whether the exact solver takes little more time than steps on outputs would, and not too much memory."""
        shorter, longer = sorted((batch.rows, len(batch.weights.vector)))
        factorisations = (0.5 * longer + 1.2 * shorter) * shorter**2
        if (
            factorisations > _LARGEST
            or longer * shorter > _LARGEST_JACOBIAN
            or (passed := batch.multiplications) is None
        ):
            return False
        return factorisations <= max(_SMALL, _PASSES * passed) and self._free_memory.suffices_for_exact(batch)

    def linearized(self, now: StepState, batch: ResidualBatch, method: str) -> ResidualModel:
        """The problem of a batch, for the solver ``"exact"`` or ``"lsmr"``."""
        # Autocast is for the module, not for solvers.
        with now.timed("linearize"), torch.autocast(batch.residual.device.type, enabled=False):
            model = linearized(batch, method, self.settings.maxiter, self._free_memory)
        if method == "exact":
            self._warn_of_slow_rows()
        return model

    def choose_damping(self, now: StepState, model: ResidualModel) -> None:
        """Nothing: λ₁ is a share of the largest singular value of J, which the solver tells the search."""

    def solver(self, now: StepState, model: ResidualModel) -> ResidualSolver:
        """The solver of the problem for any λ."""
        with now.timed("linearize"), torch.autocast(model.residual.device.type, enabled=False):
            return ExactSolver(model) if model.method == "exact" else KrylovSolver(model, self.settings.maxiter)

    def search(self, now: StepState, model: ResidualModel, solver: ResidualSolver) -> Update:
        """The longest step around d0 = γ d of the last step, else around zero, that the model predicts well enough."""
        damping, rule, adapts = now.group["damping"], self.settings.damping, now.group["drop"] is not None
        factor = now.memory.decisions.damping_factor

        def stay(why: str, name: str, damping: float) -> Update:
            ends = {name: 0.0}
            return Update(
                model.batch.plain_value, damping, why, solver.iterations, convergence=ends, damping_factor=factor
            )

        if model.gradient_squared == 0.0:
            name, why = "underflow" if bool(model.gradient.any()) else "gtol", ""
            if name == "underflow":
                why = " in its square, which is too small for its dtype: multiply the residuals by a larger number"
            elif model.value > 0.0:
                why = ": it is at a minimum, or no residual depends on the weights (look for detach, no_grad, item)"
            self.diagnostics.once("zero", f"SHF: the gradient of this batch is zero{why}; no step is taken")
            return stay("zero_gradient", name, damping or 1.0)
        start = now.start(model.weights.vector) if self.settings.warm_start.initial else None
        with torch.autocast(model.residual.device.type, enabled=False):
            for center in (None,) if start is None else (start, None):
                with now.timed("solve"):
                    solver.begin(center, damping)
                    smallest = solver.smallest_damping if adapts else 0.0
                    bounds = max(rule.bounds[0], smallest), rule.bounds[1]
                    around = _FIRST_SHARE * solver.largest if damping is None else max(damping, smallest)
                    accelerated = getattr(rule, "acceleration", True)
                    steps = DampedSteps(model, solver, bounds, factor, accelerated=accelerated)
                with now.timed("line_search"):
                    step = steps.best(around, adapts=adapts)
                    factor = steps.factor
                    if step is not None and self._fits_noise(now, model, solver, step):
                        self.diagnostics.once("noise", _NOISY)
                        factor = now.memory.decisions.damping_factor
                        return stay("noise", "noise", damping or around)
                if step is not None:
                    d, w = step.direction, model.weights.vector
                    squares = torch.stack([inner(d, d), inner(w, w)]).tolist()
                    change, fall = step.predicted - model.value, model.value - step.value
                    size = solver.largest * math.sqrt(2.0 * model.value)
                    convergence = {
                        "gtol": math.sqrt(model.gradient_squared) / size if size else 0.0,
                        "ftol": max(fall, -change) / model.value,
                        "xtol": math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf,
                    }
                    return Update(
                        loss=model.batch.plain_value_of(step.residual, step.value),
                        damping=step.damping,
                        stop_reason=solver.stop_reason,
                        iterations=solver.iterations,
                        change=d,
                        direction=d,
                        step_length=1.0,
                        reduction_ratio=-fall / change if change < 0.0 else 0.0,
                        convergence=convergence,
                        damping_factor=factor,
                    )
        self._warn_of_precision(model)
        raised = min(around * _RAISED, max(solver.largest, bounds[0]))
        return stay("line_search", "precision", min(raised, bounds[1]))

    def _fits_noise(self, now: StepState, model: ResidualModel, solver: ResidualSolver, step: DampedStep) -> bool:
        """Whether generalised cross-validation tells that a step fits noise (Craven and Wahba, 1979).

        With degrees of freedom p of n residuals the error on new samples is f/(1 - p/n)². p = tr J (JᵀJ + μ²)⁻¹ Jᵀ is
        estimated by random signs. As many damped steps as one of μ shrink the residuals as much: 1/μ² is the sum of
        the 1/λ² so far. A fit to a hundredth of the first loss has little noise.
        """
        memory, decisions = now.memory, now.memory.decisions
        if not self._stops_at_noise or memory.first_loss is None or step.value <= _NOISE * memory.first_loss:
            return False
        inverse_squares, own = decisions.inverse_squares + step.damping**-2, model.residual
        first = sum(count for (count,) in gather_numbers([len(own)], own.device)[: rank()])
        generator = torch.Generator(own.device).manual_seed(0)
        signs = random_signs(_PROBES, model.rows, like=own, generator=generator)[:, first:][:, : len(own)]
        fitted = [solver.product(solver.solve(probe, inverse_squares**-0.5)).to(own) for probe in signs]
        degrees = all_reduce(inner(signs, torch.stack(fitted))).item() / _PROBES
        error = step.value / max(1.0 - degrees / model.rows, _NOISE) ** 2
        lowest = min(decisions.lowest_error, memory.first_loss)
        if error > _TOLERATED * lowest:
            return True
        decisions = replace(decisions, inverse_squares=inverse_squares, lowest_error=min(error, lowest))
        now.memory = replace(memory, decisions=decisions)
        return False

    def report(self, now: StepState, model: ResidualModel, update: Update) -> StepReport:
        report = super().report(now, model, update)
        return replace(report, loss_before=model.batch.plain_value, block_weights=model.batch.penalties)

    def adapt(self, now: StepState, model: ResidualModel, solver: ResidualSolver, update: Update) -> None:
        """λ and γ of the next step, and the memory of this one."""
        group, memory = now.group, now.memory
        group["warm_start"] = self.settings.warm_start.grown(group["warm_start"])
        if memory.blocks is None and rank() == 0:
            _log.info(
                f"SHF chose solver={model.method!r} for {model.rows:,} residuals and "
                f"{len(model.weights.vector):,} parameters, damping={update.damping:.3g}"
            )
        if group["drop"] is not None or group["damping"] is None:
            now.damping = update.damping
        now.memory = replace(
            memory,
            steps=memory.steps + 1,
            direction=update.direction,
            change=None,
            last_loss=update.loss,
            blocks=model.batch.counts,
            decisions=replace(
                memory.decisions,
                refused_rows=dict(self._records.refused),
                refused_batches=self._records.whole_batches.refused,
                too_many_rows=dict(self._free_memory.too_many),
                damping_factor=update.damping_factor,
                penalties=self._penalties(memory, model.block_losses),
            ),
        )

    def _penalties(self, memory: Memory, losses: Mapping[str, float]) -> Mapping[str, Any]:
        """Weights of the conditions for the next step, as fields of Penalties."""
        kept = memory.decisions.penalties
        is_due = (memory.steps + 1) % EVERY_N_STEPS == 0
        if self.loss.weights is not None or self.loss.equation not in losses or not is_due:
            return kept
        before = Penalties(**kept)
        after = before.compared(losses, self.loss.equation)
        is_another = self.loss.equation in after.given_back  # problem has begun
        for name in () if is_another else set(after.given_back) - set(before.given_back):
            share = losses[name] / sum(losses.values())
            self.diagnostics.once(
                f"penalty of {name}",
                f"SHF: the residuals {name!r} hold {share:.0%} of the loss, and no weight lowers them: they are noisy "
                f"measurements, contradict another block, or the network is too small. Their weight is 1 again",
            )
        return dict(vars(after))

    def covariance(self, now: StepState, inputs: Any) -> Tensor:
        """s² (JᵀJ)⁻¹ at the current weights, (P, P), with s² = ‖r‖²/(N - P).

        Raises:
            ValueError: there are not more residuals than parameters, or J is singular.
        """
        model = self.linearize(now, inputs, None)
        count = len(model.weights.vector)
        if model.rows <= count:
            raise ValueError(f"{model.rows} residuals are too few for a covariance of {count} parameters")
        rows = model.batch.jacobian(matrix_form(model.rows, count)).gathered(all_gather_unequal).dense()
        inverse = inverse_of_normal_matrices(triangular_factor(rows)[..., None])[..., 0]
        if not bool(inverse.isfinite().all()):
            raise ValueError("the residuals do not determine the parameters: their Jacobian is singular")
        return 2.0 * model.value / (model.rows - count) * inverse

    def _warn_of_slow_rows(self) -> None:
        for name, reason in self._records.refused.items():
            self.diagnostics.once(
                f"rows of {name}",
                f"SHF: the rows of J for the residuals {name!r} take a backward pass each through the whole batch, or "
                f"one for each parameter, since {reason}. If each row of a block depends on one row of the inputs, "
                "they are far cheaper",
            )

    def _warn_of_precision(self, model: ResidualModel) -> None:
        if model.residual.dtype == torch.float32:
            what = "float32 ends here; go on in float64 (module.double(), precision='64-true')"
        else:
            what = "the limit of the precision is reached, or a minimum"
        self.diagnostics.once(
            "precision", f"SHF: no step lowers the loss {model.value:.6g} of this batch, the weights stay: {what}"
        )


@dataclass(frozen=True)
class DampedStep:
    """A step of a damped least-squares problem.

    Attributes:
        direction: d, flat.
        damping: λ it was computed with.
        value: f(w + d); infinity if it is not finite.
        predicted: ½‖r + J d‖² of the solution d before its corrections.
        residual: r(w + d), this process's rows.
    """

    direction: Tensor
    damping: float
    value: float
    predicted: float
    residual: Tensor


class DampedSteps:
    """Steps of one batch with different dampings.

    Args:
        model: the problem.
        solver: its solver, after ``begin``.
        bounds: the smallest and the largest λ.
        factor: by which λ falls.
        accelerated: whether steps are corrected for the curvature of the residuals.

    Attributes:
        factor: the one for the next batch.
    """

    def __init__(
        self,
        model: ResidualModel,
        solver: ResidualSolver,
        bounds: tuple[float, float],
        factor: float,
        *,
        accelerated: bool,
    ) -> None:
        self._model, self._solver, self.factor = model, solver, factor
        self._corrections = _CORRECTIONS if accelerated else 0
        # λ² added to squared singular values that rounding hides it from would change nothing.
        smallest = torch.finfo(model.residual.dtype).eps * solver.largest
        self._smallest, self._largest = min(max(bounds[0], smallest), bounds[1]), bounds[1]

    def best(self, damping: float, *, adapts: bool) -> DampedStep | None:
        """The longest step that lowers the loss by a share of the prediction, for a smaller or a larger damping.

        The lowest loss of all λ would be short-sighted: longer steps reach lower losses later.

        Args:
            damping: λ.
            adapts: whether a smaller damping is tried first.

        Returns:
            None if no damping lowers the loss.
        """
        ratio, factor = _SMALLEST_RATIO if adapts else 0.0, self.factor
        tried = [self._step(damping / factor if adapts else damping)]
        while not self._is_close(tried[-1], ratio) and tried[-1].damping < self._largest:
            tried.append(self._step(tried[-1].damping * factor))
            factor *= _FASTER
        is_close = self._is_close(tried[-1], ratio)
        step = tried[-1] if is_close else min(tried, key=lambda step: step.value)
        if not step.value < self._model.value:
            self.factor = _LARGEST_FACTOR  # λ rises far
            return None
        first_will_do = is_close and len(tried) == 1
        self.factor = min(self.factor**2, _LARGEST_FACTOR) if first_will_do else max(self.factor**0.5, _SMALLEST_FACTOR)
        return step

    def _is_close(self, step: DampedStep, ratio: float) -> bool:
        """Whether a step lowers the loss, and by more than this share of the prediction."""
        fall = self._model.value - step.value
        return fall > 0.0 and fall >= ratio * (self._model.value - step.predicted)

    def _step(self, damping: float) -> DampedStep:
        """The step for one λ: about the minimum over d of ½‖r(w + d)‖² + ½λ²‖d - d0‖², with J as it is at w."""
        damping, model = min(max(damping, self._smallest), self._largest), self._model
        d = self._solver.direction(damping)
        batch = model.batch
        residual = batch.residual_at(d)
        ends = batch.squares_of(residual), batch.squares_of(model.residual + self._solver.product(d))
        value, predicted = (0.5 * square for square in torch.stack(ends).tolist())
        for _ in range(self._corrections):
            if not math.isfinite(value) or value <= (1.0 + _REST) * predicted:
                break
            corrected = self._solver.corrected(d, residual, damping)
            new = batch.residual_at(corrected)
            lower = 0.5 * batch.squares_of(new).item()
            if not lower < value:
                break
            is_slow = lower - predicted > _GAIN * (value - predicted)
            d, value, residual = corrected, lower, new
            if is_slow:
                break
        return DampedStep(d, damping, value if math.isfinite(value) else math.inf, predicted, residual)
