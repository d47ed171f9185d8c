"""Steps of SHF for a module that returns residuals (``loss="least_squares"``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_struct.collective import rank
from lightning_struct.functional.randomness import seeded
from lightning_struct.functional.residuals.residual_rows import RowRecords
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.requirements import warn
from lightning_struct.optim.shf.buffers import BufferUpdates
from lightning_struct.optim.shf.damped_steps import DampedStep, DampedSteps
from lightning_struct.optim.shf.objective import Batches
from lightning_struct.optim.shf.report import PhaseTimer, StepReport
from lightning_struct.optim.shf.residual_model import ResidualModel
from lightning_struct.optim.shf.residual_solvers import ResidualSolver, Room, make_solver
from lightning_struct.optim.shf.samples import arguments, check_arguments
from lightning_struct.optim.shf.settings import Settings, name_of
from lightning_struct.optim.shf.step_state import StepState
from lightning_struct.optim.shf.unreached import called_without_gradients, without_gradients_message

_log = logging.getLogger(__name__)
# Where a step fails, the next one goes on with λ times this, at most with the largest singular value of J: the step has
# tried all larger ones, and from far above it a step on other samples may be too short to change the loss.
_RAISED = 10.0
# γ rises no further by itself: the paper's γ₁.
_LARGEST_WARM_START = 0.7
# λ of the first step, as a share of the largest singular value of J.
_FIRST_SHARE = 0.1
# What the forward of a module must be.
_FORWARD = (
    "With loss='least_squares' forward gets all of them, measurements too, and returns residuals, as "
    "`forward(self, x, y)` with `return self.net(x) - y`. "
)


@dataclass(frozen=True)
class ResidualUpdate:
    """The update w <- w + d of one step.

    Attributes:
        model: the problem of the batch.
        method: the solver's.
        gradient: ∇f at the old weights, flat.
        direction: d, flat; None where the weights stay.
        report: of the step; where the weights stay, its λ is that from which the next step goes on.
    """

    model: ResidualModel
    method: str
    gradient: Tensor
    direction: Tensor | None
    report: StepReport


class ResidualSteps:
    """Steps on batches of a module that returns residuals.

    Args:
        module: returns residuals.
        loss: the weights of their blocks.
        given: the settings as given to the optimizer.

    Attributes:
        loss: as given.
        exact_variance: see SHF; no other is estimated here where rows show the gradients of samples.
        settings: with values for what was left, but for λ₁, which the first batch decides about, and the solver, about
            which each does.

    Raises:
        ValueError: a setting that has no meaning here.
    """

    def __init__(self, module: nn.Module, loss: LeastSquares, given: Settings) -> None:
        self.loss, self.exact_variance = loss, True
        self._adapts_warm_start = given.warm_start.is_left("initial")
        self.settings = given.for_residuals()
        self._module, self._checked_reached = module, False
        self._records, self._buffers, self._room = RowRecords(module), BufferUpdates(module), Room()
        self._warned: set[str] = set()

    def take(self, now: StepState, inputs: Any, targets: Tensor | None) -> StepReport:
        """One step of the weights.

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
        group, memory, weights = now.group, now.memory, now.weights
        self._take_over(memory.get("decisions", {}))
        like = group["params"][0]
        seed = now.seed(f"network on rank {rank()}")
        with seeded(seed, like.device), self._buffers.watched():
            update = self._update(
                weights,
                inputs,
                damping=group["damping"],
                adapts=group["drop"] is not None,
                start=now.start(like),
                counts=memory.get("blocks"),
                timed=now.timed,
            )
        report = update.report
        if not self._checked_reached:
            self._checked_reached = True
            with seeded(seed, like.device):
                gradient = update.model.weights.unflat(update.gradient)
                names = called_without_gradients(self._module, weights, gradient, arguments(inputs))
            if names:
                warn(without_gradients_message(names))
        if self._buffers.are_needed():
            with seeded(seed, like.device), torch.enable_grad():  # residuals may be derivatives in the inputs
                self._buffers.run(arguments(inputs))
        if update.direction is not None:
            update.model.weights.add_(update.direction)
        if self._adapts_warm_start:
            left, rounding = memory.get("loss_after"), torch.finfo(like.dtype).eps ** 0.5
            group["warm_start"] = adapted_warm_start(group["warm_start"], report.loss_before, left, rounding)
        else:
            group["warm_start"] = self.settings.warm_start.grown(group["warm_start"])
        if memory["steps"] == 0 and rank() == 0:
            _log.info(
                f"SHF chose solver={update.method!r} for {update.model.rows:,} residuals and "
                f"{len(update.model.weights.vector):,} parameters, damping={report.damping:.3g}",
            )
        if group["drop"] is not None or group["damping"] is None:
            now.damping = report.damping
        now.memory = {
            "steps": memory["steps"] + 1,
            "largest_batch": 0,
            "direction": update.direction,
            "blocks": update.model.counts,
            "loss_after": report.loss_after,
            "decisions": {
                "refused_rows": dict(self._records.refused),
                "refused_batches": self._records.whole_batches.refused,
                "too_many_rows": dict(self._room.too_many),
            },
        }
        return report

    def summary(self) -> NoReturn:
        """Nothing: there are no factors, see SHF.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "with loss='least_squares' there are no factors to summarise: its solvers work on the Jacobian of the "
            "residuals and have no preconditioner. summary() is for other losses with preconditioner='kronecker'"
        )

    def set_validation(self, batches: Batches | None, device: torch.device) -> None:
        """Nothing: no solver of residuals needs a merit."""

    def _take_over(self, decisions: Mapping[str, Any]) -> None:
        """What the steps before found to be impossible, of a state that may have been loaded since."""
        self._records.refused = dict(decisions.get("refused_rows", {}))
        self._records.whole_batches.refused = decisions.get("refused_batches", False)
        self._room.too_many = dict(decisions.get("too_many_rows", {}))

    def _update(
        self,
        weights: dict[str, Tensor],
        inputs: Any,
        *,
        damping: float | None,
        adapts: bool,
        start: Tensor | None,
        counts: Mapping[str, int] | None,
        timed: PhaseTimer,
    ) -> ResidualUpdate:
        """The update of one batch; the weights are not changed.

        Args:
            weights: name -> the trainable weights, detached.
            inputs: this process's share of the batch.
            damping: λ; None for one that is taken from the singular values of J.
            adapts: whether λ may change where it lowers the loss.
            start: d0 = γ d of the last step; None for zero.
            counts: name -> rows of the blocks of the step before; None in the first step.
            timed: the phases of the step.
        """
        with timed("linearize"):
            try:
                model = ResidualModel(self._records, self.loss, weights, inputs, counts=counts)
            except TypeError:
                check_arguments(self._module, arguments(inputs), _FORWARD)
                raise
        with torch.autocast(model.residual.device.type, enabled=False):  # which is for the module, not for solvers
            return self._update_of(model, damping=damping, adapts=adapts, start=start, timed=timed)

    def _update_of(
        self, model: ResidualModel, *, damping: float | None, adapts: bool, start: Tensor | None, timed: PhaseTimer
    ) -> ResidualUpdate:
        """The same, given the problem of the batch."""
        with timed("linearize"):
            method = None if self.settings.solver is None else name_of(self.settings.solver)
            solver = make_solver(model, method, self.settings.maxiter, self._room)
        if solver.method == "exact":
            self._warn_of_slow_rows()
        squared, step = inner(solver.gradient, solver.gradient).item(), None
        if squared == 0.0:
            why = ""
            if model.value > 0.0:
                why = ": it is at a minimum, or no residual depends on the weights (look for detach, no_grad, item)"
            self._warn("zero", f"SHF: the gradient of this batch is zero{why}; no step is taken")
            damping, reason = damping or 1.0, "zero_gradient"
        else:
            step, damping, reason = self._search(
                model, solver, damping=damping, adapts=adapts, start=start, timed=timed
            )
        loss, ratio = model.value, 0.0
        if step is not None:
            loss = step.value
            change = model.value_of(model.residual + solver.product(step.velocity)) - model.value
            ratio = (loss - model.value) / change if change < 0.0 else 0.0
        report = StepReport(
            loss_before=model.value,
            loss_after=loss,
            reduction_ratio=ratio,
            step_length=0.0 if step is None else 1.0,
            damping=damping,
            solver_iterations=solver.iterations,
            stop_reason=reason,
            merits=(),
            merit=None,
            gradient_norm=math.sqrt(squared),
            gradient_variance=solver.variance,
            batch_size=model.samples,
            predicted_batch_size=self.settings.predicted_batch_size(solver.variance, squared),
            seconds=timed.seconds,
            block_losses=model.block_losses,
        )
        return ResidualUpdate(model, solver.method, solver.gradient, None if step is None else step.direction, report)

    def _search(
        self,
        model: ResidualModel,
        solver: ResidualSolver,
        *,
        damping: float | None,
        adapts: bool,
        start: Tensor | None,
        timed: PhaseTimer,
    ) -> tuple[DampedStep | None, float, str]:
        """The step around d0, else around zero, None where neither lowers the loss; its λ, and why the solve ended."""
        rule: Any = self.settings.damping
        for center in (None,) if start is None else (start, None):
            with timed("solve"):
                solver.begin(center, damping)
                smallest = solver.smallest_damping if adapts else 0.0
                bounds = max(rule.minimum, smallest), rule.maximum
                around = _FIRST_SHARE * solver.largest if damping is None else max(damping, smallest)
                steps = DampedSteps(model, solver, bounds, accelerated=rule.acceleration)
            with timed("line_search"):
                step = steps.best(around, adapts=adapts)
            if step is not None:
                return step, step.damping, solver.stop_reason
        self._warn_of_precision(model)
        raised = min(around * _RAISED, max(solver.largest, bounds[0]))
        return None, min(raised, rule.maximum), "line_search"

    def _warn_of_slow_rows(self) -> None:
        for name, reason in self._records.refused.items():
            self._warn(
                f"rows of {name}",
                f"SHF: the rows of J for the residuals {name!r} take a backward pass each through the whole batch, or "
                f"one for each parameter, since {reason}. Where each row of a block depends on one row of the inputs "
                "they are far cheaper",
            )

    def _warn_of_precision(self, model: ResidualModel) -> None:
        if model.residual.dtype == torch.float32:
            what = "float32 ends here; go on in float64 (module.double(), precision='64-true')"
        else:
            what = "the limit of the precision is reached, or a minimum"
        self._warn(
            "precision", f"SHF: no step lowers the loss {model.value:.6g} of this batch, the weights stay: {what}"
        )

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn(message)


def adapted_warm_start(warm_start: float, loss: float, left: float | None, rounding: float) -> float:
    """γ for the steps to come, by how much of the loss of a batch the one before did not show.

    Where the samples stay, a batch begins with the loss that the last step left: γ stays, at first 0. Samples that are
    drawn anew have a larger loss, as far as the steps fitted the noise of the last ones; γ then moves half of the way
    to the share 1 - left/loss, .7 at most, and averages over the batches (see SPRING, Goldshlager et al. 2024).

    Args:
        warm_start: γ.
        loss: of the batch, before its step.
        left: the loss that the last step left of its batch; None for the first step.
        rounding: share of the loss that rounding may change.
    """
    if left is None or abs(loss - left) <= rounding * left:
        return warm_start
    unseen = 1.0 - left / loss if loss > left else 0.0
    return 0.5 * (warm_start + min(unseen, _LARGEST_WARM_START))
