"""SHF: stochastic Hessian-free optimization with LSMR (Emirahmetoglu & Stewart, Algorithms 1 to 6)."""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce, rank
from lightning_struct.functional.damping import ScaledDamping, next_batch_rule
from lightning_struct.functional.gradient_norms import required_batch_size
from lightning_struct.functional.layers import coupling_layer
from lightning_struct.functional.losses import GaussNewtonLoss, get_loss
from lightning_struct.functional.randomness import seeded
from lightning_struct.functional.residuals import LeastSquares
from lightning_struct.optim.pickling import state_without_hooks
from lightning_struct.optim.shf.batch_model import BatchModel
from lightning_struct.optim.shf.choice import chosen_settings, first_damping, with_first_damping
from lightning_struct.optim.shf.kronecker import KroneckerFactors
from lightning_struct.optim.shf.objective import Batches
from lightning_struct.optim.shf.preconditioner import (
    KroneckerAverages,
    StepPreconditioner,
    check_per_sample,
    preconditioner_by_name,
    preconditioner_by_object,
)
from lightning_struct.optim.shf.report import PhaseTimer, StepReport
from lightning_struct.optim.shf.residual_steps import ResidualSteps, adapted_warm_start, check_settings_of_outputs
from lightning_struct.optim.shf.settings import Settings, check_damping
from lightning_struct.optim.shf.solve import Update, merit_after, shortened, solve, update_along

_log = logging.getLogger(__name__)
# A step whose direction is no descent direction, or along which no step length will do, is solved anew from zero with
# the damping multiplied by this, so often. The paper has no such guard.
_RETRY_DAMPING, _RETRIES = 4.0, 5
# Frames from a method that `step` calls to the caller of `step`: the method, `step`, and torch's two wrappers of it.
_CALLER_OF_STEP = 5
# Weight of the old in the averages that the rule of the next batch goes by.
_RATIO_DECAY = 0.8
# The loss of the next batch rises by more than this share: the step is taken back.
_HARM = 0.1
# Bound on the tolerance of the solver, which is loosened where steps are shortened.
_LOOSEST_TOLERANCE = 0.3


class SHF(torch.optim.Optimizer):
    """Stochastic Hessian-free optimization: each step solves a damped Gauss-Newton model of the batch.

    It trains every parameter below ``module`` that requires a gradient. Under torch.distributed each process passes its
    own share of the batch, and all take the step of the whole. Batch-norm statistics are updated once per step. Draw the
    batch of each step afresh.

    ``SHF(module, loss)`` is enough: without ``damping``, what is not given is chosen from sizes, layers and data, and
    adapted while training; the log says at the first step what was chosen. With ``damping``, what is not given is the
    paper's, as it is with :meth:`paper`.

    Args:
        module: called as ``module(inputs)`` (or ``module(*inputs)`` for a tuple or list); returns one tensor (n, ...).
            Its weights are float32 or float64.
        loss: ``"mse"``: ½‖outputs - targets‖² averaged over samples; ``"cross_entropy"``: of logits; an object with
            the methods of :class:`~lightning_struct.functional.losses.GaussNewtonLoss`; or ``"least_squares"``, for a module
            that returns residuals, or a :class:`~lightning_struct.functional.LeastSquares` with weights of their blocks.
        damping: λ₁ > 0; the model is damped by λ². Chosen: 1.5 times the root of the largest eigenvalue of the Gauss-Newton
            matrix of the first batch; with residuals a tenth of the largest singular value.
        drop: the Levenberg-Marquardt rule multiplies λ by it where ρ > ``upper`` and divides where ρ < ``lower``;
            None leaves λ alone. The paper's .99; chosen .85.
        lower: ρ below which λ rises.
        upper: ρ above which λ falls.
        min_damping: λ never falls below it. The paper's 0; chosen: λ₁ times the root of the dtype's epsilon.
        max_damping: λ never rises above it. 1e9 (the paper has no bound); chosen: 1,000 λ₁.
        damping_rule: ``"levenberg_marquardt"``, by ρ (the paper's); ``"next_batch"`` (chosen): by how much of the gain of a step
            the next batch shows, see :func:`~lightning_struct.functional.damping.next_batch_rule`. Steps that fit the noise
            of their batch are shortened, and λ falls where the next batch confirms full steps; λ rises by ρ < ``lower``. A
            step that raises the loss of the next batch by more than a tenth, and by more than it lowered that of its own, is
            taken back.
        solver: ``"lsmr"``, ``"lsqr"``, or ``"cg"`` with the stopping rule and the backtracking over iterates of
            Martens (2010), the paper's rival; with residuals ``"exact"``, by a dense factorisation of the shorter side of J.
            The paper's ``"lsmr"``; chosen ``"cg"``, with residuals from the sizes.
        preconditioner: ``"diagonal"`` (Algorithm 3); ``"diagonal_sum"`` (the formula in the text of section 4.4);
            ``"fisher"`` (Martens 2010); ``"kronecker"``, the layers' Kronecker factors, averaged over steps and damped by
            μ² = λ² + l2 (not in the paper; :meth:`summary` says what each parameter has); None; or an object with
            ``solve`` and ``solve_transpose`` on dicts of tensors by parameter name, and optionally
            ``update(linearization, loss, targets, damping)``, called in each step. The paper's ``"diagonal"``; chosen
            ``"kronecker"``.
        damping_center: ``"start"``: λ²‖d - d0‖² (Algorithm 6); ``"origin"``: λ²‖d‖² (equation (18)).
        damping_space: ``"y"``: the damping is on the preconditioned direction (Algorithm 6); ``"x"``: on the direction
            itself. If not given, ``"y"`` for LSMR and LSQR without ``l2``, else ``"x"``, the only one possible there, as
            it is for Kronecker factors, and for a preconditioner object with damping around the origin.
        warm_start: γ₁ in [0, 1): the solver starts at d0 = γ d of the last step; 0 starts it at zero. The paper's .7;
            chosen .9, with residuals 0, which then rises to as much as .7 where new samples show that the steps fitted the noise of the old ones.
        warm_start_growth: γ is multiplied by it after each step, up to ``max_warm_start``. The paper's 1.002; chosen 1.
        max_warm_start: bound on γ, in [0, 1).
        maxiter: bound on the solver's iterations. The paper's 150; chosen 20, without Kronecker factors 50.
        scale_maxiter: let ``maxiter`` grow in the ratio of the batch size, rounded up in each step. The paper does; chosen: no.
        miniter: the validation data (see :meth:`set_validation`) end no solve before this iteration.
        recover: iterations that the validation loss is given to fall below its minimum again.
        atol: LSMR and LSQR stop when ‖Aᵀr‖ <= atol ‖A‖ ‖r‖.
        ftol: a solve ends when the validation loss falls by less than this share of itself per iteration.
        progress_tolerance: ε of Martens' rule for CG (see :func:`~lightning_struct.functional.conjugate_gradient`), 5e-4;
            chosen .05, and more, up to .3, where steps are shortened: what fits noise need not be solved for.
        progress_window: fewest iterations that this rule looks back, 10; chosen 1.
        return_best: take the iterate with the lowest validation value instead of the last (slower to make progress).
        armijo: α of the line search.
        l2: weight of ½‖w‖² added to the loss.
        theta: θ of the norm test behind ``predicted_batch_size``.
        dataset_size: N of the norm test; None for a stream.
        backend: passed to :func:`~lightning_struct.functional.linearize`. If not given,
            ``"layer_rules"`` for chains of Linear and elementwise layers, else ``"double_backward"`` where it does.
        chunk_size: form products over chunks of so many samples, to save memory.
        factor_decay: weight of the old in the running average of the Kronecker factors, in [0, 1).
        factor_interval: steps from one update of the Kronecker factors, and of their Cholesky factors, to the next: 1; chosen
            from their sizes, up to 10.
        max_factor_size: a Kronecker factor with more rows is kept as its diagonal; None for no bound. Chosen: 4,096, or as
            many as there is memory for.
        exclude_factors: layers, or their names, that have a diagonal instead of Kronecker factors.
        held_out: share of each batch, in [0, 1), that the model is not made of, and on which ρ is measured: its last
            samples, in eval mode. ρ on the batch itself stays near 1 while the batch is overfitted; this one falls, and
            the damping rises.
        curvature_share: share of the samples of a batch, in (0, 1], its first ones, that the curvature is measured on, in
            the products with J, the preconditioner and the Kronecker factors; loss and gradient are of all (Byrd et al.
            2011). For CG only.
        single_samples: where layers do not show the gradients of single samples, form these for their variance (the paper's
            way, which can cost tens of gradients a step); chosen: no, but the variance is estimated from the two halves of
            the batch there.
        seed: seed, with the step's number, of the preconditioner's random signs and of the network's own draws (dropout).
        geodesic_acceleration: with residuals, try steps with a second-order correction too (Transtrum & Sethna 2012); if
            not given, they are tried.

    Attributes:
        settings: the arguments above as one value, with what was chosen; λ₁ and its bounds once the first step has chosen
            them. The current λ (None until then), ``drop``, γ and ``maxiter`` are in ``param_groups[0]``.
        report: the :class:`StepReport` of the last step; None before the first.

    Raises:
        ValueError: an argument out of range; weights that are neither float32 nor float64, or of mixed dtype.
        MemoryError: the Kronecker factors take more than is free.

    Example:
        >>> inputs = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
        >>> model = nn.Linear(1, 1, dtype=torch.float64)
        >>> optimizer = SHF(model, "mse")
        >>> for _ in range(30):
        ...     report = optimizer.step(inputs=inputs, targets=3 * inputs + 1)
        >>> [round(weight.item(), 3) for weight in model.parameters()]
        [3.0, 1.0]
    """

    def __init__(
        self,
        module: nn.Module,
        loss: str | GaussNewtonLoss | LeastSquares,
        *,
        damping: float | None = None,
        drop: float | Literal["auto"] | None = "auto",
        lower: float = 0.25,
        upper: float = 0.75,
        min_damping: float | None = None,
        max_damping: float | None = None,
        damping_rule: str | None = None,
        solver: str | None = None,
        preconditioner: str | Any | None = "auto",
        damping_center: str = "start",
        damping_space: str | None = None,
        warm_start: float | None = None,
        warm_start_growth: float | None = None,
        max_warm_start: float = 0.95,
        maxiter: int | None = None,
        scale_maxiter: bool | None = None,
        miniter: int = 50,
        recover: int = 100,
        atol: float = 1e-8,
        ftol: float = 1e-7,
        progress_tolerance: float | None = None,
        progress_window: int | None = None,
        return_best: bool = False,
        armijo: float = 1e-4,
        l2: float = 0.0,
        theta: float = 0.5,
        dataset_size: int | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
        factor_decay: float = 0.8,
        factor_interval: int | None = None,
        max_factor_size: int | Literal["auto"] | None = "auto",
        exclude_factors: Sequence[str | nn.Module] = (),
        held_out: float = 0.0,
        curvature_share: float = 1.0,
        single_samples: bool | None = None,
        seed: int = 0,
        geodesic_acceleration: bool | None = None,
    ) -> None:
        # Every argument but the first two is a field of the settings.
        arguments = locals()
        self.loss = get_loss(loss)
        given = Settings(**{field.name: arguments[field.name] for field in fields(Settings)})
        self.module = module
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check_parameters(named)
        self._names = list(named)
        self._residual_steps: ResidualSteps | None = None
        if isinstance(self.loss, LeastSquares):
            self._residual_steps = ResidualSteps(module, self.loss, given)
            settings = self._residual_steps.settings
        else:
            check_settings_of_outputs(given)
            settings = chosen_settings(given, module, named)
        self.settings = settings
        self._adapts_tolerance = settings.is_left("damping") and given.is_left("progress_tolerance")
        self._kronecker: KroneckerAverages | None = None
        if isinstance(settings.preconditioner, str) and settings.preconditioner == "kronecker":
            factors = KroneckerFactors(module, named, max_size=settings.max_factor_size, exclude=exclude_factors)
            self._kronecker = KroneckerAverages(factors, decay=factor_decay, interval=settings.factor_interval, l2=l2)
        self._validation: Batches | None = None
        self._uncovered = False
        self._timed = PhaseTimer()
        self.report: StepReport | None = None
        super().__init__(
            named.values(), {name: getattr(settings, name) for name in ("damping", "drop", "warm_start", "maxiter")}
        )

    @classmethod
    def paper(cls, module: nn.Module, loss: str | GaussNewtonLoss, **overrides: Any) -> SHF:
        """SHF with the paper's settings: LSMR, the diagonal preconditioner, Levenberg and Marquardt's rule, λ₁ = 10.

        Args:
            module, loss: as for SHF.
            **overrides: other settings. The paper's λ₁ is 5 to 12, by the task.

        Example:
            >>> SHF.paper(nn.Linear(2, 2), "mse", maxiter=200).settings.solver
            'lsmr'
        """
        return cls(module, loss, **{"damping": 10.0, **overrides})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, inputs: Any = None, targets: Tensor | None = None
    ) -> StepReport:
        """One iteration of Algorithm 1 on a batch.

        Args:
            closure: called once before the step, its result unused (Lightning's hooks hang on it).
            inputs: this process's share of the batch: a tensor (n, ...), or a tuple or list of them for a module of several.
            targets: what the loss compares the outputs with; row i belongs to row i of the inputs.

        Returns:
            StepReport: also kept as ``report``.

        Raises:
            TypeError: inputs or targets are missing.
            ValueError: NaN or infinity in the data, the outputs or the loss; an empty batch; a forward that changes its
                inputs in place; a preconditioner of gradients
                per sample beside batch normalisation. The weights are unchanged.
            FloatingPointError: NaN or infinity within the solve. The weights are unchanged.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self._residual_steps is not None:
            return self._step_on_residuals(self._residual_steps, inputs, targets)
        if inputs is None or targets is None:
            raise TypeError(
                "SHF.step needs the batch: step(inputs=..., targets=...). In Lightning put SHFOptimization before the "
                "LightningModule: automatic optimization gives an optimizer no batch"
            )
        self._timed = PhaseTimer()
        coupled = coupling_layer(self.module) is not None
        buffers = {name: b.clone() for name, b in self.module.named_buffers()} if coupled else {}
        model = self._model_of(inputs, targets)  # A and b (Algorithms 4 and 5)
        self._choose_damping(model)
        if self._took_back(model):  # beyond the paper
            for name, buffer in buffers.items():
                self.module.get_buffer(name).copy_(buffer)
            model = self._model_of(inputs, targets)
        preconditioner = self._preconditioner_of(model)  # c (Algorithm 3)
        update = self._search(model, preconditioner)  # d by LSMR (Algorithm 6), ρ and s (section 4.2)
        self._move(model, update)  # w <- w + s d
        self._adapt(model, preconditioner, update)  # λ, γ and maxiter (sections 4.2 and 4.5)
        return self._report(model, update)  # n̂ (Algorithm 2)

    def _step_on_residuals(self, steps: ResidualSteps, inputs: Any, targets: Any) -> StepReport:
        """One iteration for a module that returns residuals."""
        if targets is not None:
            raise TypeError(
                "with loss='least_squares' the module returns residuals, which need no targets: step(inputs=...). Give "
                "measurements as inputs, or choose loss='mse'"
            )
        if inputs is None:
            raise TypeError("SHF.step needs the points or measurements of the residuals: step(inputs=...), () for none")
        group, memory, self._timed = self.param_groups[0], self._memory, PhaseTimer()
        weights = {name: p.detach() for name, p in zip(self._names, group["params"], strict=True)}
        like = group["params"][0]
        with seeded(self._seed(f"network on rank {rank()}"), like.device):
            update = steps.take(
                weights,
                inputs,
                damping=group["damping"],
                adapts=self.drop is not None,
                start=self._start(like),
                counts=memory.get("blocks"),
                timed=self._timed,
            )
        if update.direction is not None:
            for name, change in update.model.weights.unflat(update.direction).items():
                weights[name].add_(change)
        if steps.adapts_warm_start:
            group["warm_start"] = adapted_warm_start(group["warm_start"], update.model.value, memory.get("loss_after"))
        else:
            group["warm_start"] = min(
                group["warm_start"] * self.settings.warm_start_growth,
                max(self.settings.max_warm_start, group["warm_start"]),
            )
        if memory["steps"] == 0 and rank() == 0:
            _log.info(
                f"SHF chose solver={update.solver!r} for {update.model.rows:,} residuals and "
                f"{len(update.model.weights.vector):,} parameters, damping={update.damping:.3g}"
            )
        self.damping = update.damping
        self.state["shf"] = {  # type: ignore[index]
            "steps": memory["steps"] + 1,
            "largest_batch": 0,
            "direction": update.direction,
            "blocks": update.model.counts,
            "loss_after": update.loss,
        }
        self.report = update.report(self.settings, self._timed.seconds)
        return self.report

    def _model_of(self, inputs: Any, targets: Tensor) -> BatchModel:
        """The damped least-squares model of a batch at the current weights."""
        settings, parameters = self.settings, self.param_groups[0]["params"]
        check_per_sample(settings.preconditioner, self.module)
        with self._timed("linearize"), seeded(self._seed(f"network on rank {rank()}"), parameters[0].device):
            model = BatchModel(
                self.module,
                cast(GaussNewtonLoss, self.loss),
                {name: p.detach() for name, p in zip(self._names, parameters, strict=True)},
                inputs,
                targets,
                l2=settings.l2,
                backend=settings.backend,
                chunk_size=settings.chunk_size,
                held_out=settings.held_out,
                curvature_share=settings.curvature_share,
                products=2 * self.param_groups[0]["maxiter"],
                single_samples=settings.single_samples,
                layers_show=not self._uncovered,
            )
        if model.uncovered is not None and settings.single_samples:
            warnings.warn(
                "SHF takes the variance from the gradients of single samples, which costs much more than from what each "
                f"layer reads. That does not do here: {model.uncovered}.",
                stacklevel=_CALLER_OF_STEP,
            )
        self._uncovered = self._uncovered or model.uncovered is not None
        return model

    def _took_back(self, model: BatchModel) -> bool:
        """Measure by this batch what the last step gained, and adapt σ and λ; a harmful step is taken back.

        Returns:
            Whether the weights are those of before the last step again.
        """
        memory = self._memory
        change = memory.get("change")
        if change is None or self.settings.damping_rule != "next_batch":
            return False
        change = change.to(model.gradient)
        with self._timed("next_batch"):
            fresh = model.value - model.objective.value_at(-change)
        settings, own = self.settings, memory["own_change"]
        old_fresh, old_own = memory["average_changes"]
        averages = (
            _RATIO_DECAY * old_fresh + (1 - _RATIO_DECAY) * fresh,
            _RATIO_DECAY * old_own + (1 - _RATIO_DECAY) * own,
        )
        ratio = min(max(averages[0] / averages[1], -1.0), 1.0) if averages[1] < 0.0 else 0.0
        harmful = not fresh <= max(_HARM * (model.value - fresh), -own)
        if harmful:
            _log.debug(f"SHF: the loss of the next batch rose by {fresh:.3g}; the last step is taken back")
            for name, part in model.weights.unflat(change).items():
                model.weights.by_name[name].sub_(part)
            averages, ratio = (0.0, averages[1]), -1.0
        now = next_batch_rule(
            ScaledDamping(memory["step_scale"], self.damping),
            ratio,
            drop=self.drop,
            min_damping=settings.min_damping,
            max_damping=settings.max_damping,
        )
        self.damping = now.damping
        self.state["shf"] = memory | {  # type: ignore[index]
            "step_scale": now.scale / 2 if harmful else now.scale,
            "ratio": ratio,
            "average_changes": averages,
            "change": None,
            "direction": None if harmful else memory["direction"],
        }
        return harmful

    def _choose_damping(self, model: BatchModel) -> None:
        """λ₁ and its bounds from the first batch, where they were not given."""
        if not self.settings.is_left("damping"):
            return
        memory = self._memory
        first = memory.get("first_damping", self.damping)  # which somebody may have set
        if first is None:
            with self._timed("first_damping"):
                self.damping = first = first_damping(model, self._seed("curvature"))
        self.state["shf"] = memory | {"first_damping": first}  # type: ignore[index]
        self.settings = with_first_damping(self.settings, first, model.gradient.dtype)
        if rank() == 0:
            s = self.settings
            factors = f" (every {s.factor_interval} steps)" if self._kronecker is not None else ""
            _log.info(
                f"SHF chose solver={s.solver!r}, preconditioner={s.preconditioner!r}{factors}, backend="
                f"{model.linearization.backend!r}, damping={s.damping:.3g} in [{s.min_damping:.2g}, {s.max_damping:.2g}] "
                f"by {s.damping_rule!r}, warm_start={s.warm_start:g}, maxiter={s.maxiter}"
            )

    def _preconditioner_of(self, model: BatchModel) -> StepPreconditioner:
        """The preconditioner that the settings name."""
        given, damping = self.settings.preconditioner, self.damping
        if self._kronecker is not None:
            with self._timed("precondition"):
                return self._kronecker.of_step(model, self._memory, damping, self._seed("signs"))
        if given is None:
            return StepPreconditioner(lambda _: None, damping)
        if isinstance(given, str):
            return StepPreconditioner(preconditioner_by_name(given, model, self._seed("signs")), damping)
        return StepPreconditioner(preconditioner_by_object(given, model, cast(GaussNewtonLoss, self.loss)), damping)

    def _search(self, model: BatchModel, preconditioner: StepPreconditioner) -> Update:
        """Solve the model and search along the direction, anew from zero with larger damping where that fails."""
        if model.gradient_squared == 0.0:
            warnings.warn("SHF: the gradient of this batch is zero; no step is taken", stacklevel=_CALLER_OF_STEP)
            return Update(None, 0.0, model.value, 0.0, self.damping, 0, "zero_gradient")
        damping, start, iterations, settings, scale = (
            self.damping,
            self._start(model.gradient),
            0,
            self.settings,
            self._step_scale,
        )
        if self._adapts_tolerance:
            settings = replace(
                settings, progress_tolerance=min(settings.progress_tolerance / scale, _LOOSEST_TOLERANCE)
            )
        for _ in range(1 + _RETRIES):
            with self._timed("precondition"):
                scaling = preconditioner.at(damping)
            with self._timed("solve"):
                solution = solve(
                    model,
                    settings,
                    damping=damping,
                    start=start,
                    preconditioner=scaling,
                    maxiter=self._maxiter_for(model),
                    validation=self._validation,
                )
            iterations += solution.iterations
            solution = shortened(solution, scale)
            with self._timed("line_search"):
                update = update_along(model, settings, solution, damping=damping, iterations=iterations)
            if update is not None:
                return update
            # The paper goes on with whatever direction it has; one that started from d0 != 0 need not be of descent.
            tried, damping, start = damping, self._raised(damping), None
        warnings.warn(
            f"SHF: no step along {1 + _RETRIES} directions lowers the loss {model.value:.6g} of this batch, the last one "
            f"with damping {tried:.3g}; the weights stay. If it goes on, the limit of the precision is reached: use "
            "float64 or stop",
            stacklevel=_CALLER_OF_STEP,
        )
        return Update(None, 0.0, model.value, 0.0, self._raised(self.damping), iterations, "line_search")

    def _start(self, like: Tensor) -> Tensor | None:
        """d0 = γ d of the last step (section 4.5); None for zero."""
        decay, direction = self.param_groups[0]["warm_start"], self._memory["direction"]
        if direction is None or decay == 0.0:
            return None
        return direction.to(like) * decay  # a loaded direction may come from another device or dtype

    def _maxiter_for(self, model: BatchModel) -> int:
        """maxiter <- ⌈n_next/n · maxiter⌉ (section 4.5)."""
        maxiter, largest = self.param_groups[0]["maxiter"], self._memory["largest_batch"]
        grows = self.settings.scale_maxiter and largest and model.n > largest
        return math.ceil(model.n / largest * maxiter) if grows else maxiter

    def _raised(self, damping: float) -> float:
        return min(damping * _RETRY_DAMPING, self.settings.max_damping)

    def _move(self, model: BatchModel, update: Update) -> None:
        """w <- w + s d."""
        if update.solution is not None:
            for name, change in model.weights.unflat(update.solution.direction * update.step_length).items():
                model.weights.by_name[name].add_(change)

    def _adapt(self, model: BatchModel, preconditioner: StepPreconditioner, update: Update) -> None:
        """λ by the Levenberg-Marquardt rule (section 4.2), γ and maxiter (section 4.5), and the memory of the step."""
        settings, group, memory = self.settings, self.param_groups[0], self._memory
        group["maxiter"] = self._maxiter_for(model)
        group["warm_start"] = min(group["warm_start"] * settings.warm_start_growth, settings.max_warm_start)
        self.damping = update.damping
        if self.drop is not None:
            adapted = settings.adapted_damping(update.damping, update.reduction_ratio, self.drop)
            # The next batch decides about a fall of λ, where the rule is so.
            self.damping = adapted if settings.damping_rule == "levenberg_marquardt" else max(adapted, update.damping)
        measured: dict[str, Any] = {}
        if settings.damping_rule == "next_batch":
            measured = {
                "step_scale": self._step_scale,
                "average_changes": memory.get("average_changes", (0.0, 0.0)),
                "ratio": memory.get("ratio"),
                "change": None if update.solution is None else update.solution.direction * update.step_length,
                "own_change": update.loss - model.value,
            }
        if "first_damping" in memory:
            measured["first_damping"] = memory["first_damping"]
        # A new dict, since a state_dict() taken before, and an optimizer loaded from one, hold the old one.
        self.state["shf"] = {  # type: ignore[index]
            "steps": memory["steps"] + 1,
            "largest_batch": max(model.n, memory["largest_batch"]),
            "direction": None if update.solution is None else update.solution.last,
            "factors": preconditioner.factors,
            "factor_damping": preconditioner.factor_damping,
            **measured,
        }

    def _report(self, model: BatchModel, update: Update) -> StepReport:
        """The report of a step, with the merit at the new weights and n̂ (Algorithm 2)."""
        settings, predicted = self.settings, None
        with self._timed("merit"):
            merit = None if self._validation is None else merit_after(model, update, self._validation)
        if model.variance is not None and model.gradient_squared > 0.0:
            predicted = required_batch_size(
                model.variance, model.gradient_squared, settings.dataset_size, settings.theta
            )
        self.report = StepReport(
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
            predicted_batch_size=predicted,
            seconds=self._timed.seconds,
            step_scale=self._step_scale,
            next_batch_ratio=self._memory.get("ratio"),
        )
        return self.report

    @property
    def damping(self) -> float:
        """λ of the next step; None where the first step has still to choose it."""
        return self.param_groups[0]["damping"]

    @damping.setter
    def damping(self, value: float) -> None:
        check_damping(value)
        self.param_groups[0]["damping"] = float(value)

    @property
    def drop(self) -> float | None:
        """Factor of the Levenberg-Marquardt rule; None leaves λ to somebody else."""
        return self.param_groups[0]["drop"]

    @drop.setter
    def drop(self, value: float | None) -> None:
        self.settings.check_drop(value)
        self.param_groups[0]["drop"] = value

    def set_validation(self, batches: Batches | None) -> None:
        """Give the validation data whose loss is the merit that ends LSMR (equation (20)), or take it away with None.

        Args:
            batches: this process's share as (inputs, targets), on the module's device. The module is in eval mode while
                it is evaluated, and the sums are reduced over processes. With residuals (``loss="least_squares"``) nothing
                is done: their solvers need no merit.

        Raises:
            ValueError: no samples on any process.
        """
        if batches is None or self._residual_steps is not None:
            self._validation = None
            return
        self._validation = list(batches)
        samples = torch.tensor(
            [sum(len(targets) for _, targets in self._validation)], device=self.param_groups[0]["params"][0].device
        )
        if all_reduce(samples).item() == 0:
            self._validation = None
            raise ValueError("the validation data has no samples: give a validation set, or None to do without")

    def summary(self) -> str:
        """A table of the Kronecker preconditioner: the form that each parameter has, and its memory.

        Raises:
            ValueError: the preconditioner is another.
        """
        if self._kronecker is None:
            raise ValueError(f"only preconditioner='kronecker' has a summary, not {self.settings.preconditioner!r}")
        return self._kronecker.summary()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: the module's parameters are one.

        Raises:
            ValueError: a second group.
        """
        if self.param_groups:
            raise ValueError("SHF trains all parameters of the module in one group; freeze what it must leave alone")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return state_without_hooks(self)

    @property
    def _memory(self) -> dict[str, Any]:
        """State that a resumed run needs beside the values of the group. It is under a string key: torch casts the state of
        a parameter to that parameter's dtype when it is loaded."""
        return self.state.setdefault("shf", {"steps": 0, "largest_batch": 0, "direction": None})  # type: ignore[call-overload]

    @property
    def _step_scale(self) -> float:
        """σ of the rule of the next batch."""
        return self._memory.get("step_scale", 1.0)

    def _seed(self, purpose: str) -> int:
        """Seed for ``purpose`` in this step. 32 bits: the CPU generator ignores the rest."""
        return random.Random(f"{self.settings.seed} {self._memory['steps']} {purpose}").getrandbits(32)


def _check_parameters(named: dict[str, nn.Parameter]) -> None:
    if not named:
        raise ValueError("the module has no parameter that requires a gradient")
    dtypes = {p.dtype for p in named.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            f"SHF needs all weights in float32 or all in float64, got {', '.join(sorted(map(str, dtypes)))}; for lower "
            "precision keep float32 weights and use autocast to bfloat16 (bf16-mixed)"
        )
    if len({p.device for p in named.values()}) > 1:
        raise ValueError("SHF needs all weights on one device")
