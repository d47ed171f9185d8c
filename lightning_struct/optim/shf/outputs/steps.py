"""Steps of SHF for a loss of a module's outputs (Emirahmetoglu & Stewart, Algorithms 1 to 6)."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import gather_numbers, rank
from lightning_struct.functional.checks import warn
from lightning_struct.functional.jacobian.losses import GaussNewtonLoss
from lightning_struct.functional.layers.calls import refuse_other_dtypes, rows_of_arguments
from lightning_struct.functional.randomness import normal_numbers
from lightning_struct.functional.solvers.damping import ScaledDamping, next_batch_rule
from lightning_struct.functional.vectors import inner, root
from lightning_struct.optim.shf.outputs.batch_model import BatchModel
from lightning_struct.optim.shf.outputs.preconditioner import (
    KroneckerFactors,
    StepPreconditioner,
    check_per_sample,
    preconditioner_of_step,
)
from lightning_struct.optim.shf.outputs.solve import solve, update_along
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.samples import Batches, arguments, check_arguments
from lightning_struct.optim.shf.settings import CG, Kronecker, NextBatch, Settings, name_of
from lightning_struct.optim.shf.step_state import StepState
from lightning_struct.optim.shf.steps import Steps, Update

_log = logging.getLogger(__name__)
# λ₁ in units of the square root of the largest eigenvalue of the Gauss-Newton matrix: the first step is shorter than
# the longest stable step of gradient descent in all directions, since longer first steps saturate logistic units.
_FIRST_DAMPING, _POWER_ITERATIONS = 1.5, 12
# A step whose direction is no descent direction, or along which no step length will do, is solved anew from zero with
# the damping multiplied by this, so often. The paper has no such guard.
_RETRY_DAMPING, _RETRIES = 4.0, 5
# Weight of the old in the averages that the rule of the next batch goes by.
_RATIO_DECAY = 0.8
# The loss of the next batch rises by more than this share: the step is taken back.
_HARM = 0.1
# Bound on the tolerance of the solver, which is loosened if steps are shortened.
_LOOSEST_TOLERANCE = 0.3


class OutputSteps(Steps):
    """Steps on batches of a module whose outputs are compared with targets.

    Args:
        module: the network.
        loss: of its outputs.
        given: the settings as given to the optimizer.
        named: name -> the trained parameters.

    Attributes:
        settings: with values for all omitted ones; λ₁ and its bounds once the first step has chosen them.
        kronecker: the Kronecker factors; None with another preconditioner.

    Raises:
        ValueError: a setting that is for residuals.
        MemoryError: the Kronecker factors take more than is free.
    """

    def __init__(
        self, module: nn.Module, loss: GaussNewtonLoss, given: Settings, named: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(module, loss, given.for_outputs(), exact_variance=given.is_of_paper)
        self._given, self._named = given, named
        self._single_samples = given.is_of_paper  # they can cost tens of gradients per step
        self._make_factors()
        is_unset = not isinstance(given.solver, CG) or given.solver.is_unset("progress_tolerance")
        self._adapts_tolerance = not given.is_of_paper and is_unset
        self._validation: Batches | None = None
        self._checks_untrained = True

    def _make_factors(self, max_size: int | None = None) -> None:
        """Make the Kronecker factors, if the settings ask for them; ``max_size`` is that of a state."""
        self.kronecker: KroneckerFactors | None = None
        given, settings = self._given.for_outputs().preconditioner, self.settings
        if isinstance(given, Kronecker):
            given = given if max_size is None else replace(given, max_size=max_size)
            inverted = isinstance(settings.solver, CG)
            self.kronecker = KroneckerFactors(self.module, self._named, given, inverted=inverted, l2=settings.l2)
            self.settings = replace(settings, preconditioner=self.kronecker.settings)

    def set_validation(self, batches: Batches | None, device: torch.device) -> None:
        """The validation data, see SHF.

        Raises:
            ValueError: no samples on any process.
        """
        self._validation = None
        if batches is None:
            return
        is_list = isinstance(batches, Sequence)
        if not is_list or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in batches):
            raise TypeError(f"batches must be a list of pairs (inputs, targets), got {batches!r:.80}")
        self._validation = list(batches)
        samples = sum(len(targets) for _, targets in self._validation)
        if not any(count for (count,) in gather_numbers([samples], device)):
            self._validation = None
            raise ValueError("the validation data has no samples: give a validation set, or None to do without")

    def linearize(self, now: StepState, inputs: Any, targets: Tensor | None) -> BatchModel:
        """The damped least-squares model of a batch at the current weights.

        Raises:
            TypeError: inputs or targets are missing; targets in a dict, list or tuple.
        """
        self._check_batch(inputs, targets)
        self._take_over(now)
        model = self._model_of(now, inputs, targets)
        self._diagnose(now, model, inputs)
        return model

    def _check_batch(self, inputs: Any, targets: Any) -> None:
        if inputs is None or targets is None:
            raise TypeError(
                "SHF.step needs the batch: step(inputs=..., targets=...). In Lightning put SHFOptimization before the "
                "LightningModule: automatic optimization gives an optimizer no batch. If accelerate has wrapped the "
                "optimizer, step the one within: prepared.optimizer.step(inputs=..., targets=...)"
            )
        if not isinstance(targets, Tensor):
            raise TypeError(
                f"SHF.step takes targets as one tensor, got {type(targets).__name__}: pass the tensor itself, with row "
                "i for sample i. A loss of your own may split its columns"
            )

    def choose_damping(self, now: StepState, model: BatchModel) -> None:
        """λ₁ and its bounds from the first batch, if they were not given."""
        known = now.memory.first_damping
        if self._given.is_of_paper or (known is not None and known == self.settings.damping.initial):
            return  # λ₁ was given, or comes from a loaded state
        first = now.group["damping"] if known is None else known  # the user may have set it
        if first is None:
            with now.timed("first_damping"):
                now.damping = first = first_damping(model, now.seed("curvature"))
        now.memory = replace(now.memory, first_damping=first)
        given = replace(self.settings, damping=self._given.for_outputs().damping)
        self.settings = given.with_first_damping(first, torch.finfo(model.gradient.dtype).eps)
        if rank() == 0:
            self._log_choice(model)

    def _log_choice(self, model: BatchModel) -> None:
        s, (smallest, largest) = self.settings, self.settings.damping.bounds
        preconditioner = repr(s.preconditioner)
        if isinstance(s.preconditioner, Kronecker):
            steps = "step" if s.preconditioner.interval == 1 else f"{s.preconditioner.interval} steps"
            preconditioner = f"'kronecker' (every {steps})"
        _log.info(
            f"SHF chose solver={name_of(s.solver)!r}, preconditioner={preconditioner}, backend="
            f"{model.linearization.backend!r}, damping={s.damping.initial:.3g} in [{smallest:.2g}, {largest:.2g}] "
            f"by {name_of(s.damping)!r}, warm_start={s.warm_start.initial:g}, maxiter={s.maxiter}"
        )

    def adapt_to_next_batch(self, now: StepState, model: BatchModel) -> bool:
        """Adapt σ and λ to how much of the last step's gain this batch shows; return whether that step did harm."""
        memory = now.memory
        if memory.change is None or model.value_before is None:
            return False
        fresh = model.value - model.value_before
        own, scale = memory.own_change, memory.step_scale
        changes = _averaged(memory.average_changes, (fresh, own))
        fits = _averaged(memory.average_fits, (-own / scale, memory.largest_fall))
        ratio = min(max(changes[0] / changes[1], -1.0), 1.0) if changes[1] < 0.0 else 0.0
        harmful = not fresh <= max(_HARM * (model.value - fresh), -own)
        if harmful:
            _log.debug(f"SHF: the loss of the next batch rose by {fresh:.3g}; the last step is taken back")
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
        now.memory = replace(
            memory,
            step_scale=ruled.scale / 2 if harmful else ruled.scale,
            ratio=ratio,
            average_changes=changes,
            average_fits=fits,
            change=memory.change if harmful else None,
        )
        return harmful

    def solver(self, now: StepState, model: BatchModel) -> StepPreconditioner:
        """The preconditioner c (Algorithm 3), or another one that the settings name."""
        if self.kronecker is None:
            return preconditioner_of_step(self.settings.preconditioner, model, now.seed("signs"))
        with now.timed("precondition"):
            return self.kronecker.of_step(model, now.memory, now.damping, now.seed("signs"))

    def search(self, now: StepState, model: BatchModel, solver: StepPreconditioner) -> Update:
        """Solve the model and search along the direction, anew from zero with larger damping if that fails."""
        if model.gradient_squared == 0.0:
            warn("SHF: the gradient of this batch is zero; no step is taken")
            return Update(model.value, now.damping, "zero_gradient")
        damping, start, iterations = now.damping, now.start(model.gradient), 0
        settings, scale = self.settings, now.memory.step_scale
        if self._adapts_tolerance and isinstance(settings.solver, CG):
            assert settings.solver.progress_tolerance is not None
            tolerance = min(settings.solver.progress_tolerance / scale, _LOOSEST_TOLERANCE)
            settings = replace(settings, solver=replace(settings.solver, progress_tolerance=tolerance))
        for _ in range(1 + _RETRIES):
            with now.timed("precondition"):
                preconditioner = solver.at(damping)
            with now.timed("solve"):
                solution = solve(
                    model,
                    settings,
                    damping=damping,
                    start=start,
                    preconditioner=preconditioner,
                    maxiter=self.scaled_maxiter(now, model),
                    validation=self._validation,
                    scale=scale,
                )
            iterations += solution.iterations
            with now.timed("line_search"):
                update = update_along(model, solution, damping=damping, iterations=iterations)
            if update is not None:
                return update
            # The paper goes on with whatever direction it has. One that started from d0 != 0 need not be of descent,
            # which says nothing about the damping.
            tried, damping, start = damping, damping if start is not None else self._raised(damping), None
        warn(
            f"SHF: no step along {1 + _RETRIES} directions lowers the loss {model.value:.6g} of this batch, the last "
            f"one with damping {tried:.3g}; the weights stay. If this repeats, the limit of the precision is reached: "
            "use float64 or stop"
        )
        return Update(model.value, self._raised(now.damping), "line_search", iterations)

    def adapt(self, now: StepState, model: BatchModel, solver: StepPreconditioner, update: Update) -> None:
        """λ by the Levenberg-Marquardt rule (section 4.2), γ and maxiter (section 4.5), and the memory of the step."""
        group, memory, rule = now.group, now.memory, self.settings.damping
        group["maxiter"] = self.scaled_maxiter(now, model)
        group["warm_start"] = self.settings.warm_start.grown(group["warm_start"])
        now.damping = update.damping
        if group["drop"] is not None:
            now.damping = rule.adapted(update.damping, update.reduction_ratio, group["drop"])
        memory = replace(
            memory,
            steps=memory.steps + 1,
            largest_batch=max(model.samples, memory.largest_batch),
            direction=update.direction,
            first_loss=model.value if memory.first_loss is None else memory.first_loss,
            last_loss=update.loss,
            max_factor_size=None if self.kronecker is None else self.kronecker.max_size,
            factors=solver.factors,
            factor_damping=solver.factor_damping,
        )
        if isinstance(rule, NextBatch):
            own_change = update.loss - model.value
            memory = replace(memory, change=update.change, own_change=own_change, largest_fall=model.largest_fall)
        now.memory = memory

    def report(self, now: StepState, model: BatchModel, update: Update) -> StepReport:
        """The report of a step, with the merit at the new weights, and the buffers that are there now."""
        merit = update.last_merit
        with now.timed("merit"):
            if self._validation is not None and (merit is None or self.buffers.are_needed()):
                change = torch.zeros_like(model.gradient) if update.change is None else update.change
                merit = model.objective.merit(change, self._validation)
        return replace(super().report(now, model, update), merit=merit)

    def _take_over(self, now: StepState) -> None:
        """Make factors as large as those of a state that was loaded: their size was chosen by the free memory."""
        given, size = self._given.preconditioner, now.memory.max_factor_size
        is_unset = not isinstance(given, Kronecker) or given.is_unset("max_size")
        if self.kronecker is None or not is_unset or self._given.is_of_paper or size is None:
            return
        if size != self.kronecker.max_size:
            self._make_factors(size)

    def _model_of(self, now: StepState, inputs: Any, targets: Any) -> BatchModel:
        check_per_sample(self.settings.preconditioner, self.module)
        layers = self.exact_variance and not now.memory.uncovered
        change = now.memory.change if isinstance(self.settings.damping, NextBatch) else None
        with now.timed("linearize"), self._network_draws(now), self.buffers.watched():
            try:
                model = BatchModel(
                    self.module,
                    self.loss,
                    now.weights,
                    inputs,
                    targets,
                    self.settings,
                    layers=layers,
                    single_samples=self._single_samples,
                    change=change,
                )
            except TypeError:
                check_arguments(self.module, arguments(inputs))
                raise
            except RuntimeError as error:
                refuse_other_dtypes(inputs, now.weights, error)
                raise
        if model.uncovered is not None:
            now.memory = replace(now.memory, uncovered=True)
            if self._single_samples:
                warn(
                    "SHF takes the variance from the gradients of single samples, which costs much more than from the "
                    f"inputs of each layer. These do not suffice here: {model.uncovered}."
                )
        return model

    def _diagnose(self, now: StepState, model: BatchModel, inputs: Any) -> None:
        self.diagnostics.check_loss(model)
        self.diagnostics.check_calls(model)
        if self._checks_untrained:
            self._checks_untrained = False
            gradient = model.weights.unflat(model.gradient - model.weights.vector * self.settings.l2)
            args = rows_of_arguments(arguments(inputs), slice(self.settings.chunk_size), len(model.targets))
            with self._network_draws(now):
                self.diagnostics.check_untrained(now.weights, gradient, args)

    def scaled_maxiter(self, now: StepState, model: BatchModel) -> int:
        """maxiter <- ⌈n_next/n · maxiter⌉ (section 4.5)."""
        maxiter, largest, solver = now.group["maxiter"], now.memory.largest_batch, self.settings.solver
        grows = getattr(solver, "scale_maxiter", False) and largest and model.samples > largest
        return math.ceil(model.samples / largest * maxiter) if grows else maxiter

    def _raised(self, damping: float) -> float:
        return min(damping * _RETRY_DAMPING, self.settings.damping.bounds[1])


def first_damping(model: BatchModel, seed: int) -> float:
    """λ₁ = 1.5 times the root of the largest eigenvalue of AᵀA/m on the first batch, by power iteration.

    Args:
        model: the model of the first batch.
        seed: seed of the vector that the iteration starts from.
    """
    generator, like = torch.Generator().manual_seed(seed), model.gradient
    vector = largest = normal_numbers(*like.shape, like=like, dtype=like.dtype, generator=generator)
    for _ in range(_POWER_ITERATIONS):
        vector = vector.div_(root(inner(vector, vector)))
        product = model.curvature(vector)
        largest, vector = inner(vector, product), product
    found = largest.item()
    return _FIRST_DAMPING * math.sqrt(found) if found > 0.0 and math.isfinite(found) else 1.0


def _averaged(old: tuple[float, float], new: tuple[float, float]) -> tuple[float, float]:
    """The running averages that the rule of the next batch goes by."""
    decay = _RATIO_DECAY
    return decay * old[0] + (1.0 - decay) * new[0], decay * old[1] + (1.0 - decay) * new[1]
