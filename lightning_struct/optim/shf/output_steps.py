"""Steps of SHF for a loss of a module's outputs (Emirahmetoglu & Stewart, Algorithms 1 to 6)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce, rank
from lightning_struct.functional.jacobian.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GaussNewtonLoss,
    SquaredError,
    derivative_error,
    transpose_error,
)
from lightning_struct.functional.layers.calls import rows_of_arguments
from lightning_struct.functional.randomness import seeded
from lightning_struct.functional.solvers.damping import ScaledDamping, next_batch_rule
from lightning_struct.optim.requirements import warn
from lightning_struct.optim.shf.batch_model import BatchModel
from lightning_struct.optim.shf.buffers import BufferUpdates
from lightning_struct.optim.shf.choice import chosen_settings, first_damping, with_first_damping
from lightning_struct.optim.shf.objective import Batches
from lightning_struct.optim.shf.preconditioner import (
    KroneckerAverages,
    StepPreconditioner,
    check_per_sample,
    preconditioner_by_name,
    preconditioner_by_object,
)
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.samples import arguments, check_arguments
from lightning_struct.optim.shf.settings import CG, Kronecker, NextBatch, Settings, name_of
from lightning_struct.optim.shf.solve import Update, merit_after, shortened, solve, update_along
from lightning_struct.optim.shf.step_state import StepState
from lightning_struct.optim.shf.unreached import called_without_gradients, without_gradients_message

_log = logging.getLogger(__name__)
# A step whose direction is no descent direction, or along which no step length will do, is solved anew from zero with
# the damping multiplied by this, so often. The paper has no such guard.
_RETRY_DAMPING, _RETRIES = 4.0, 5
# Weight of the old in the averages that the rule of the next batch goes by.
_RATIO_DECAY = 0.8
# The loss of the next batch rises by more than this share: the step is taken back.
_HARM = 0.1
# S r of a loss differs by more than this share from the derivative of its value: a warning.
_LARGEST_DERIVATIVE_ERROR = 0.01
# The outputs of two calls differ by more than this share: a warning. Autocast to bfloat16 stays below.
_LARGEST_CHANGE = 0.05
# So do products with J and with its transpose, where they are not of one matrix.
_LARGEST_PRODUCT_ERROR = 0.05
# Bound on the tolerance of the solver, which is loosened where steps are shortened.
_LOOSEST_TOLERANCE = 0.3


class OutputSteps:
    """Steps on batches of a module whose outputs are compared with targets.

    Args:
        module: the network.
        loss: of its outputs.
        given: the settings as given to the optimizer.
        named: name -> the trained parameters.

    Attributes:
        loss: as given.
        settings: with values for what was left; λ₁ and its bounds once the first step has chosen them.
        exact_variance: see SHF.
        kronecker: the Kronecker factors; None where the preconditioner is another.

    Raises:
        ValueError: a setting that is for residuals.
        MemoryError: the Kronecker factors take more than is free.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: GaussNewtonLoss,
        given: Settings,
        named: Mapping[str, nn.Parameter],
    ) -> None:
        self._module, self.loss = module, loss
        self._given, self._named = given, named
        self._choose_settings(given)
        of_cg = not isinstance(given.solver, CG) or given.solver.is_left("progress_tolerance")
        self._adapts_tolerance = not given.is_of_paper and of_cg
        # The gradients of single samples can cost tens of gradients per step.
        self._single_samples = self.exact_variance = given.is_of_paper
        self._buffers = BufferUpdates(module)
        self._validation: Batches | None = None
        self._checked_loss: GaussNewtonLoss | None = None
        self._checked_module = False

    def _choose_settings(self, given: Settings) -> None:
        settings, factors = chosen_settings(given, self._module, self._named)
        self._chosen = self.settings = settings
        self.kronecker: KroneckerAverages | None = None
        if factors is not None:
            chosen: Any = settings.preconditioner
            self.kronecker = KroneckerAverages(factors, decay=chosen.decay, interval=chosen.interval, l2=settings.l2)

    def take(self, now: StepState, inputs: Any, targets: Tensor | None) -> StepReport:
        """One step of the weights.

        Raises:
            TypeError: inputs or targets are missing; targets in a dict, list or tuple.
        """
        if inputs is None or targets is None:
            raise TypeError(
                "SHF.step needs the batch: step(inputs=..., targets=...). In Lightning put SHFOptimization before the "
                "LightningModule: automatic optimization gives an optimizer no batch"
            )
        if not hasattr(targets, "shape"):
            raise TypeError(
                f"SHF.step takes targets as one tensor, got {type(targets).__name__}: pass the tensor itself, with row "
                "i for sample i. A loss of your own may split its columns"
            )
        self._take_over(now.memory)
        model = self._model_of(now, inputs, targets)  # A and b (Algorithms 4 and 5)
        self._check_loss(model)
        self._check_module(now, model, inputs, targets)
        self._choose_damping(now, model)
        if self._took_back(now, model):  # beyond the paper
            model = self._model_of(now, inputs, targets)
        preconditioner = self._preconditioner_of(now, model)  # c (Algorithm 3)
        update = self._search(now, model, preconditioner)  # d by LSMR (Algorithm 6), ρ and s (section 4.2)
        if self._buffers.are_needed():
            model.write_buffers(self._buffers)
        if update.solution is not None:
            model.weights.add_(update.solution.direction * update.step_length)  # w <- w + s d
        self._adapt(now, model, preconditioner, update)  # λ, γ and maxiter (sections 4.2 and 4.5)
        return self._report(now, model, update)  # n̂ (Algorithm 2)

    def summary(self) -> str:
        """What each parameter has of the Kronecker preconditioner, see SHF.

        Raises:
            ValueError: the preconditioner is another.
        """
        if self.kronecker is None:
            raise ValueError(f"only preconditioner='kronecker' has a summary, not {self.settings.preconditioner!r}")
        return self.kronecker.summary()

    def set_validation(self, batches: Batches | None, device: torch.device) -> None:
        """The validation data, see SHF.

        Raises:
            ValueError: no samples on any process.
        """
        self._validation = None if batches is None else list(batches)
        if self._validation is None:
            return
        samples = torch.tensor([sum(len(targets) for _, targets in self._validation)], device=device)
        if all_reduce(samples).item() == 0:
            self._validation = None
            raise ValueError("the validation data has no samples: give a validation set, or None to do without")

    def _take_over(self, memory: Mapping[str, Any]) -> None:
        """Factors as large as those of the state, which may have been loaded: they were chosen by the free memory."""
        chosen = self._chosen.preconditioner
        if not isinstance(chosen, Kronecker) or "max_factor_size" not in memory:
            return
        given = self._given.preconditioner
        is_left = not isinstance(given, Kronecker) or given.is_left("max_size")
        if memory["max_factor_size"] != chosen.max_size and is_left and not self._given.is_of_paper:
            given = given if isinstance(given, Kronecker) else Kronecker()
            given = replace(given, max_size=memory["max_factor_size"])
            self._choose_settings(replace(self._given, preconditioner=given))

    def _model_of(self, now: StepState, inputs: Any, targets: Tensor) -> BatchModel:
        """The damped least-squares model of a batch at the current weights."""
        settings, device = self.settings, now.group["params"][0].device
        check_per_sample(settings.preconditioner, self._module)
        seed = now.seed(f"network on rank {rank()}")
        with now.timed("linearize"), seeded(seed, device), self._buffers.watched():
            try:
                model = BatchModel(
                    self._module,
                    self.loss,
                    now.weights,
                    inputs,
                    targets,
                    l2=settings.l2,
                    backend=settings.backend,
                    chunk_size=settings.chunk_size,
                    held_out=settings.held_out,
                    curvature_share=settings.solver.curvature_share if isinstance(settings.solver, CG) else 1.0,
                    single_samples=self._single_samples,
                    layers_show=self.exact_variance and not now.memory.get("uncovered", False),
                )
            except TypeError:
                check_arguments(self._module, arguments(inputs))
                raise
        if model.uncovered is not None and self._single_samples:
            warn(
                "SHF takes the variance from the gradients of single samples, which costs much more than from what "
                f"each layer reads. That does not do here: {model.uncovered}."
            )
        if model.uncovered is not None:
            now.memory = now.memory | {"uncovered": True}
        return model

    def _check_loss(self, model: BatchModel) -> None:
        """Warn once of a loss of somebody's own whose parts do not belong together."""
        if self._checked_loss is self.loss or type(self.loss) in (SquaredError, CrossEntropy, BinaryCrossEntropy):
            return
        self._checked_loss = self.loss
        error = derivative_error(self.loss, model.outputs, model.targets)
        if error > _LARGEST_DERIVATIVE_ERROR:
            warn(
                f"SHF: sqrt_hessian of the residual, S r, differs by {error:.0%} from the derivative of the value of "
                f"{type(self.loss).__name__}. S r must be the derivative of each sample's loss in its outputs, and the "
                "value the mean over samples; else steps and their measure belong to different losses"
            )
        error = transpose_error(self.loss, model.outputs, model.targets)
        if error > _LARGEST_DERIVATIVE_ERROR:
            warn(
                f"SHF: sqrt_hessian_transpose of {type(self.loss).__name__} is not the transpose of its sqrt_hessian: "
                f"Sᵀv differs by {error:.0%} from what autograd makes of S. The curvature of the model is then wrong"
            )

    def _check_module(self, now: StepState, model: BatchModel, inputs: Any, targets: Tensor) -> None:
        """Warn in the first step of a module that is differentiated wrongly, or not, or has a state between calls."""
        if self._checked_module:
            return
        self._checked_module = True
        if model.linearization.backend != "layer_rules":  # whose layers are known
            self._check_calls(model)
        penalty = model.weights.vector * self.settings.l2
        gradient = model.weights.unflat(model.gradient - penalty)
        rows = slice(self.settings.chunk_size)
        args = rows_of_arguments(arguments(inputs), rows, len(targets))
        with seeded(now.seed(f"network on rank {rank()}"), model.gradient.device):
            names = called_without_gradients(self._module, now.weights, gradient, args)
        if names:
            warn(without_gradients_message(names))

    def _check_calls(self, model: BatchModel) -> None:
        change, error = model.change_by_repetition(), model.product_error()
        if change > _LARGEST_CHANGE:
            warn(
                "SHF: a step calls the module several times, and its outputs change from call to call, with the same "
                f"weights, inputs and random numbers of torch, by {change:.0%}: the losses of a step cannot be "
                "compared. Keep in a buffer (register_buffer) what a forward leaves for the next one, such as a hidden "
                "state, and draw random numbers from torch"
            )
        if error > _LARGEST_PRODUCT_ERROR:
            warn(
                "SHF: products with the Jacobian J of the outputs are wrong, as where the backward of a "
                "torch.autograd.Function has no derivative, because of once_differentiable, detach or numpy: uᵀJ Jᵀu "
                f"differs from ‖Jᵀu‖² by {error:.0%}. Write that backward in differentiable operations of torch, or "
                "give the function setup_context and jvp, and take SHF(backend='linearize')"
            )

    def _measures(self, now: StepState) -> bool:
        """Whether the batch shows what the last step gained."""
        return isinstance(self.settings.damping, NextBatch) and now.memory.get("change") is not None

    def _took_back(self, now: StepState, model: BatchModel) -> bool:
        """Measure by this batch what the last step gained, and adapt σ and λ; a harmful step is taken back.

        Returns:
            Whether the weights are those of before the last step again.
        """
        if not self._measures(now):
            return False
        memory = now.memory
        change = memory["change"].to(model.gradient)
        with now.timed("next_batch"):
            fresh = model.value - model.objective.value_at(-change)
        own, scale = memory["own_change"], memory["step_scale"]
        changes = _averaged(memory["average_changes"], (fresh, own))
        fits = _averaged(memory.get("average_fits", (0.0, 0.0)), (-own / scale, memory.get("largest_fall", 0.0)))
        ratio = min(max(changes[0] / changes[1], -1.0), 1.0) if changes[1] < 0.0 else 0.0
        harmful = not fresh <= max(_HARM * (model.value - fresh), -own)
        if harmful:
            _log.debug(f"SHF: the loss of the next batch rose by {fresh:.3g}; the last step is taken back")
            model.weights.add_(-change)
            changes, ratio = (0.0, changes[1]), -1.0
        smallest, largest = self.settings.damping.bounds
        ruled = next_batch_rule(
            ScaledDamping(scale, now.damping),
            ratio,
            fits[0] / fits[1] if fits[1] > 0.0 else 1.0,
            drop=now.group["drop"],
            min_damping=smallest,
            max_damping=largest,
        )
        now.damping = ruled.damping
        now.memory = memory | {
            "step_scale": ruled.scale / 2 if harmful else ruled.scale,
            "ratio": ratio,
            "average_changes": changes,
            "average_fits": fits,
            "change": None,
            "direction": None if harmful else memory["direction"],
        }
        return harmful

    def _choose_damping(self, now: StepState, model: BatchModel) -> None:
        """λ₁ and its bounds from the first batch, where they were not given."""
        memory = now.memory
        known = memory.get("first_damping")
        if self._chosen.damping.initial is not None or (known is not None and known == self.settings.damping.initial):
            return  # it was given, or is that of the state, which may have been loaded since
        first = now.group["damping"] if known is None else known  # which somebody may have set
        if first is None:
            with now.timed("first_damping"):
                now.damping = first = first_damping(model, now.seed("curvature"))
        now.memory = memory | {"first_damping": first}
        self.settings = with_first_damping(self._chosen, first, model.gradient.dtype)
        if rank() == 0:
            s, (smallest, largest) = self.settings, self.settings.damping.bounds
            preconditioner = repr(s.preconditioner)
            if isinstance(s.preconditioner, Kronecker):
                steps = "step" if s.preconditioner.interval == 1 else f"{s.preconditioner.interval} steps"
                preconditioner = f"'kronecker' (every {steps})"
            _log.info(
                f"SHF chose solver={name_of(s.solver)!r}, preconditioner={preconditioner}, backend="
                f"{model.linearization.backend!r}, damping={first:.3g} in [{smallest:.2g}, {largest:.2g}] "
                f"by {name_of(s.damping)!r}, warm_start={s.warm_start.initial:g}, maxiter={s.maxiter}",
            )

    def _preconditioner_of(self, now: StepState, model: BatchModel) -> StepPreconditioner:
        """The preconditioner that the settings name."""
        given, damping = self.settings.preconditioner, now.damping
        if self.kronecker is not None:
            with now.timed("precondition"):
                return self.kronecker.of_step(model, now.memory, damping, now.seed("signs"))
        if given is None:
            return StepPreconditioner(lambda _: None, damping)
        if isinstance(given, str):
            return StepPreconditioner(preconditioner_by_name(given, model, now.seed("signs")), damping)
        return StepPreconditioner(preconditioner_by_object(given, model, self.loss), damping)

    def _search(self, now: StepState, model: BatchModel, preconditioner: StepPreconditioner) -> Update:
        """Solve the model and search along the direction, anew from zero with larger damping where that fails."""
        if model.gradient_squared == 0.0:
            warn("SHF: the gradient of this batch is zero; no step is taken")
            return Update(None, 0.0, model.value, 0.0, now.damping, 0, "zero_gradient")
        damping, start, iterations = now.damping, now.start(model.gradient), 0
        settings, scale = self.settings, now.step_scale
        if self._adapts_tolerance and isinstance(settings.solver, CG):
            assert settings.solver.progress_tolerance is not None
            tolerance = min(settings.solver.progress_tolerance / scale, _LOOSEST_TOLERANCE)
            settings = replace(settings, solver=replace(settings.solver, progress_tolerance=tolerance))
        for _ in range(1 + _RETRIES):
            with now.timed("precondition"):
                scaling = preconditioner.at(damping)
            with now.timed("solve"):
                solution = solve(
                    model,
                    settings,
                    damping=damping,
                    start=start,
                    preconditioner=scaling,
                    maxiter=self._maxiter_for(now, model),
                    validation=self._validation,
                )
            iterations += solution.iterations
            solution = shortened(solution, scale)
            with now.timed("line_search"):
                update = update_along(model, solution, damping=damping, iterations=iterations)
            if update is not None:
                return update
            # The paper goes on with whatever direction it has. One that started from d0 != 0 need not be of descent,
            # which says nothing about the damping.
            tried, damping, start = damping, damping if start is not None else self._raised(damping), None
        warn(
            f"SHF: no step along {1 + _RETRIES} directions lowers the loss {model.value:.6g} of this batch, the last "
            f"one with damping {tried:.3g}; the weights stay. If it goes on, the limit of the precision is reached: "
            "use float64 or stop"
        )
        return Update(None, 0.0, model.value, 0.0, self._raised(now.damping), iterations, "line_search")

    def _maxiter_for(self, now: StepState, model: BatchModel) -> int:
        """maxiter <- ⌈n_next/n · maxiter⌉ (section 4.5)."""
        maxiter, largest = now.group["maxiter"], now.memory["largest_batch"]
        solver: Any = self.settings.solver
        grows = solver.scale_maxiter and largest and model.n > largest
        return math.ceil(model.n / largest * maxiter) if grows else maxiter

    def _raised(self, damping: float) -> float:
        return min(damping * _RETRY_DAMPING, self.settings.damping.bounds[1])

    def _adapt(self, now: StepState, model: BatchModel, preconditioner: StepPreconditioner, update: Update) -> None:
        """λ by the Levenberg-Marquardt rule (section 4.2), γ and maxiter (section 4.5), and the memory of the step."""
        settings, group, memory = self.settings, now.group, now.memory
        group["maxiter"] = self._maxiter_for(now, model)
        group["warm_start"] = settings.warm_start.grown(group["warm_start"])
        now.damping = update.damping
        if group["drop"] is not None:
            now.damping = settings.damping.adapted(update.damping, update.reduction_ratio, group["drop"])
        measured: dict[str, Any] = {}
        if isinstance(settings.damping, NextBatch):
            measured = {
                "step_scale": now.step_scale,
                "average_changes": memory.get("average_changes", (0.0, 0.0)),
                "average_fits": memory.get("average_fits", (0.0, 0.0)),
                "ratio": memory.get("ratio"),
                "change": None if update.solution is None else update.solution.direction * update.step_length,
                "own_change": update.loss - model.value,
                "largest_fall": model.largest_fall,
            }
        decided: dict[str, Any] = {name: memory[name] for name in ("first_damping", "uncovered") if name in memory}
        now.memory = {
            "steps": memory["steps"] + 1,
            "largest_batch": max(model.n, memory["largest_batch"]),
            "direction": None if update.solution is None else update.solution.last,
            "max_factor_size": None if self.kronecker is None else self.kronecker.max_size,
            "factors": preconditioner.factors,
            "factor_damping": preconditioner.factor_damping,
            **measured,
            **decided,
        }

    def _report(self, now: StepState, model: BatchModel, update: Update) -> StepReport:
        """The report of a step, with the merit at the new weights and n̂ (Algorithm 2)."""
        with now.timed("merit"):
            merit = None
            if self._validation is not None:
                merit = merit_after(model, update, self._validation, new_buffers=self._buffers.are_needed())
        return StepReport(
            loss_before=model.value,
            loss_after=update.loss,
            reduction_ratio=update.reduction_ratio,
            step_length=update.step_length,
            damping=update.damping,
            solver_iterations=update.iterations,
            stop_reason=update.stop_reason,
            merits=() if update.solution is None else update.solution.merits,
            merit=merit,
            gradient_norm=math.sqrt(model.gradient_squared),
            gradient_variance=model.variance,
            batch_size=model.samples,
            predicted_batch_size=self.settings.predicted_batch_size(model.variance, model.gradient_squared),
            seconds=now.timed.seconds,
            step_scale=now.step_scale,
            next_batch_ratio=now.memory.get("ratio"),
        )


def _averaged(old: tuple[float, float], new: tuple[float, float]) -> tuple[float, float]:
    """The running averages that the rule of the next batch goes by."""
    kept, taken = _RATIO_DECAY, 1.0 - _RATIO_DECAY
    return kept * old[0] + taken * new[0], kept * old[1] + taken * new[1]
