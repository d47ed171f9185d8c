"""SHF: stochastic Hessian-free optimization with LSMR (Emirahmetoglu & Stewart, Algorithms 1 to 6)."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce, rank
from lightning_struct.functional.conjugate_gradient import conjugate_gradient
from lightning_struct.functional.damping import check_levenberg_marquardt, levenberg_marquardt
from lightning_struct.functional.gauss_newton import BACKENDS, batch_normalising_layer
from lightning_struct.functional.gradient_norms import required_batch_size
from lightning_struct.functional.least_squares import RightPreconditioner, lsmr, lsqr
from lightning_struct.functional.line_search import armijo as armijo_search
from lightning_struct.functional.losses import GaussNewtonLoss, get_loss
from lightning_struct.optim.shf.batch_model import Batches, BatchModel
from lightning_struct.optim.shf.kronecker import BlockPreconditioner, Factors, KroneckerFactors, averaged
from lightning_struct.optim.shf.merit import MeritStopping

SOLVERS = ("lsmr", "lsqr", "cg")
PRECONDITIONERS = ("diagonal", "diagonal_sum", "fisher", "kronecker")
# A step whose direction is no descent direction, or along which no step length will do, is solved anew from zero with
# the damping multiplied by this, so often. The paper has no such guard.
_RETRY_DAMPING, _RETRIES = 4.0, 5


@dataclass(frozen=True)
class StepReport:
    """What one iteration of Algorithm 1 did. Losses are means over the batch of all processes.

    Attributes:
        loss_before: f at the old weights.
        loss_after: f at the new weights, on the same batch.
        reduction_ratio: ρ of section 4.2, on the samples held out where there are any; 0 where no step was taken.
        step_length: s of the line search; 0 where no step was taken.
        damping: λ that the accepted direction was computed with.
        solver_iterations: iterations of the solver, all tries together.
        stop_reason: why the solver stopped, or ``"line_search"`` or ``"zero_gradient"`` where no step was taken.
        merits: (solver iteration, validation value) as evaluated during the solve.
        merit: the validation value at the new weights; None without validation data.
        gradient_norm: ‖∇f‖ at the old weights.
        gradient_variance: ‖Var‖₁ of the per-sample gradients; None where samples are coupled by batch normalisation,
            and for a batch of one.
        batch_size: samples over all processes, those held out among them.
        predicted_batch_size: n̂ of the norm test; None where the variance is, or where the gradient is zero.
        seconds: wall time by phase (``"linearize"``, with the gradient; ``"precondition"``; ``"solve"``, with the merit
            evaluated in it; ``"line_search"``; ``"merit"``, after the step).
    """

    loss_before: float
    loss_after: float
    reduction_ratio: float
    step_length: float
    damping: float
    solver_iterations: int
    stop_reason: str
    merits: tuple[tuple[int, float], ...]
    merit: float | None
    gradient_norm: float
    gradient_variance: float | None
    batch_size: int
    predicted_batch_size: int | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class _Solution:
    """``direction`` is what the step tries, ``last`` the solver's last iterate, from which the next solve starts; ``value``
    is f at the full step, where it is known."""

    direction: Tensor
    last: Tensor
    iterations: int
    stop_reason: str
    merits: tuple[tuple[int, float], ...]
    value: float | None = None


@dataclass(frozen=True)
class _Step:
    solution: _Solution | None
    length: float
    loss: float
    reduction_ratio: float
    damping: float
    iterations: int
    stop_reason: str


class SHF(torch.optim.Optimizer):
    """Stochastic Hessian-free optimization: each step solves a damped Gauss-Newton model of the batch.

    .. code-block:: python

        optimizer = SHF(model, "mse", damping=10.0)
        for inputs, targets in batches:          # drawn afresh for every step
            report = optimizer.step(inputs=inputs, targets=targets)

    It trains every parameter below ``module`` that requires a gradient. Under torch.distributed each process passes its
    own share of the batch, and all take the step of the whole. Batch-norm statistics are updated once per step.

    Args:
        module: called as ``module(inputs)`` (or ``module(*inputs)`` for a tuple); returns one tensor (n, ...).
            Its weights are float32 or float64.
        loss: ``"mse"``: ½‖outputs - targets‖² averaged over samples; ``"cross_entropy"``: of logits; or an object with
            the methods of :class:`~lightning_struct.functional.losses.GaussNewtonLoss`.
        damping: λ₁ > 0; the model is damped by λ².
        drop: the Levenberg-Marquardt rule multiplies λ by it where ρ > ``upper`` and divides where ρ < ``lower``;
            None leaves λ alone (``LevenbergMarquardtDamping`` sets it so and takes over).
        lower, upper, min_damping, max_damping: see :func:`~lightning_struct.functional.levenberg_marquardt`.
        solver: ``"lsmr"``, ``"lsqr"``, or ``"cg"`` with the stopping rule and the backtracking over iterates of
            Martens (2010), the paper's rival.
        preconditioner: ``"diagonal"`` (Algorithm 3); ``"diagonal_sum"`` (the formula in the text of section 4.4);
            ``"fisher"`` (Martens 2010); ``"kronecker"``, the layers' Kronecker factors, averaged over steps and damped by
            μ² = λ² + l2 (not in the paper; :meth:`summary` says what each parameter has); None; or an object with
            ``solve`` and ``solve_transpose`` on dicts of tensors by parameter name, and optionally
            ``update(linearization, loss, targets, damping)``, called in each step.
        damping_center: ``"start"``: λ²‖d - d0‖² (Algorithm 6); ``"origin"``: λ²‖d‖² (equation 18).
        damping_space: ``"y"``: the damping is on the preconditioned direction (Algorithm 6); ``"x"``: on the direction
            itself. If not given, ``"y"`` for LSMR and LSQR without ``l2``, else ``"x"``, the only one possible there, as
            it is for Kronecker factors, and for a preconditioner object with damping around the origin.
        warm_start: γ₁ in [0, 1): the solver starts at d0 = γ d of the last step; 0 starts it at zero.
        warm_start_growth: γ is multiplied by it after each step, up to ``max_warm_start``.
        max_warm_start: in [0, 1).
        maxiter: bound on the solver's iterations.
        scale_maxiter: let ``maxiter`` grow in the ratio of the batch size, rounded up in each step.
        miniter, recover, ftol: of the stop on validation data (see :meth:`set_validation`).
        atol: LSMR and LSQR stop when ‖Aᵀr‖ <= atol ‖A‖ ‖r‖.
        progress_tolerance, progress_window: of Martens' rule, for CG (see
            :func:`~lightning_struct.functional.conjugate_gradient`).
        return_best: take the iterate with the lowest validation value instead of the last (slower to make progress).
        armijo: α of the line search.
        l2: weight of ½‖w‖² added to the loss.
        theta: θ of the norm test behind ``predicted_batch_size``.
        dataset_size: N of the norm test; None for a stream.
        backend: of :func:`~lightning_struct.functional.linearize`. For few solver iterations on a model that is no
            chain of Linear layers ``"double_backward"`` is quicker than the default, whose set-up is dear.
        chunk_size: form products over chunks of so many samples, to save memory.
        factor_decay: weight of the old in the running average of the Kronecker factors, in [0, 1).
        factor_interval: steps from one update of the Kronecker factors, and of their Cholesky factors, to the next.
        max_factor_size: a Kronecker factor with more rows is kept as its diagonal.
        exclude_factors: layers, or their names, that have a diagonal instead of Kronecker factors.
        held_out: share of each batch, in [0, 1), that the model is not made of, and on which ρ is measured: its last
            samples, in eval mode. ρ on the batch itself stays near 1 while the batch is overfitted; this one falls, and
            the damping rises.
        curvature_share: share of the samples of a batch, in (0, 1], its first ones, that the curvature is measured on, in
            the products with J, the preconditioner and the Kronecker factors; loss and gradient are of all (Byrd et al.
            2011). For CG only.
        seed: of the random signs of the preconditioner and of what the network draws (dropout), with the step's number.

    Raises:
        ValueError: an argument out of range; weights that are neither float32 nor float64, or of mixed dtype.
        MemoryError: the Kronecker factors take more than is free.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: str | GaussNewtonLoss,
        *,
        damping: float,
        drop: float | None = 0.99,
        lower: float = 0.25,
        upper: float = 0.75,
        min_damping: float = 0.0,
        max_damping: float = math.inf,
        solver: str = "lsmr",
        preconditioner: str | Any | None = "diagonal",
        damping_center: str = "start",
        damping_space: str | None = None,
        warm_start: float = 0.7,
        warm_start_growth: float = 1.002,
        max_warm_start: float = 0.95,
        maxiter: int = 150,
        scale_maxiter: bool = True,
        miniter: int = 50,
        recover: int = 100,
        atol: float = 1e-8,
        ftol: float = 1e-7,
        progress_tolerance: float = 5e-4,
        progress_window: int = 10,
        return_best: bool = False,
        armijo: float = 1e-4,
        l2: float = 0.0,
        theta: float = 0.5,
        dataset_size: int | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
        factor_decay: float = 0.8,
        factor_interval: int = 1,
        max_factor_size: int | None = None,
        exclude_factors: Sequence[str | nn.Module] = (),
        held_out: float = 0.0,
        curvature_share: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not (damping > 0 and math.isfinite(damping)):
            raise ValueError(f"damping must be finite and > 0, got {damping}")
        check_levenberg_marquardt(1.0 if drop is None else drop, lower, upper, min_damping, max_damping)
        _one_of("solver", solver, SOLVERS)
        _one_of("damping_center", damping_center, ("start", "origin"))
        _one_of("damping_space", damping_space, (None, "y", "x"))
        _one_of("backend", backend, (None, *BACKENDS))
        if isinstance(preconditioner, str):
            _one_of("preconditioner", preconditioner, (*PRECONDITIONERS, None))
        elif preconditioner is not None and not (
            hasattr(preconditioner, "solve") and hasattr(preconditioner, "solve_transpose")
        ):
            raise ValueError(f"a preconditioner object needs solve and solve_transpose, got {preconditioner!r}")
        at_least_zero = {
            "l2": l2,
            "atol": atol,
            "ftol": ftol,
            "progress_tolerance": progress_tolerance,
            "miniter": miniter,
            "recover": recover,
        }
        for name, value in at_least_zero.items():
            if not value >= 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        counts = {"maxiter": maxiter, "factor_interval": factor_interval, "progress_window": progress_window}
        for name, number in counts.items():
            if not number >= 1:
                raise ValueError(f"{name} must be >= 1, got {number}")
        for name, share in (("factor_decay", factor_decay), ("held_out", held_out)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} must be in [0, 1), got {share}")
        sizes = {"dataset_size": dataset_size, "chunk_size": chunk_size, "max_factor_size": max_factor_size}
        for name, size in sizes.items():
            if size is not None and not size >= 1:
                raise ValueError(f"{name} must be >= 1 or None, got {size}")
        if not 0 < curvature_share <= 1:
            raise ValueError(f"curvature_share must be in (0, 1], got {curvature_share}")
        if curvature_share < 1 and solver != "cg":
            raise ValueError(
                f"curvature_share={curvature_share} needs solver='cg': {solver} solves a least-squares problem, in which "
                "gradient and curvature come from the same samples"
            )
        if not 0 < armijo < 1:
            raise ValueError(f"armijo must be in (0, 1), got {armijo}")
        if not theta > 0:
            raise ValueError(f"theta must be > 0, got {theta}")
        if not (0 <= warm_start < 1 and 0 <= max_warm_start < 1 and warm_start_growth >= 1):
            raise ValueError(
                f"warm_start and max_warm_start must be in [0, 1) and warm_start_growth >= 1, got {warm_start}, "
                f"{max_warm_start} and {warm_start_growth}"
            )
        # Damping on y around another point than the start needs C itself; an object has only its inverse.
        off_start = damping_center == "origin" and preconditioner is not None and not isinstance(preconditioner, str)
        only_on_x = solver == "cg" or l2 > 0 or off_start or preconditioner == "kronecker"
        if damping_space == "y" and only_on_x:
            raise ValueError(
                "damping_space='y' is possible with LSMR and LSQR only, without l2, not with Kronecker factors, and with a "
                "preconditioner object only around the start; leave it out"
            )

        self.module = module
        self.loss = get_loss(loss)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check_parameters(named)
        self._names = list(named)
        self._lower, self._upper, self._min_damping, self._max_damping = lower, upper, min_damping, max_damping
        self._solver, self._preconditioner, self._damping_center = solver, preconditioner, damping_center
        self._damping_space = damping_space or ("x" if only_on_x else "y")
        self._warm_start_growth, self._max_warm_start = warm_start_growth, max_warm_start
        self._scale_maxiter = scale_maxiter
        self._miniter, self._recover, self._atol, self._ftol = miniter, recover, atol, ftol
        self._progress_tolerance, self._progress_window = progress_tolerance, progress_window
        self._return_best = return_best
        self._armijo, self._l2, self._told_uncovered = armijo, l2, False
        self._theta, self._dataset_size = theta, dataset_size
        self._backend, self._chunk_size, self._seed = backend, chunk_size, seed
        self._factor_decay, self._factor_interval = factor_decay, factor_interval
        self._factors: KroneckerFactors | None = None
        if preconditioner == "kronecker":
            self._factors = KroneckerFactors(module, named, max_size=max_factor_size, exclude=exclude_factors)
        self._held_out, self._curvature_share = held_out, curvature_share
        self._factored: tuple[Factors, float, BlockPreconditioner] | None = None
        self._validation: Batches | None = None
        self.report: StepReport | None = None
        super().__init__(
            named.values(), {"damping": damping, "drop": drop, "warm_start": warm_start, "maxiter": maxiter}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One group only, that of the module's parameters.

        Raises:
            ValueError: a second group.
        """
        if self.param_groups:
            raise ValueError("SHF trains all parameters of the module in one group; freeze what it must leave alone")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but hooks. Torch's own leaves out what a subclass adds, and a copy could not step."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "step" and not name.startswith("_optimizer_")  # a scheduler puts its own step there
        } | {"_factored": None}

    @property
    def damping(self) -> float:
        """λ of the next step."""
        return self.param_groups[0]["damping"]

    @damping.setter
    def damping(self, value: float) -> None:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"damping must be finite and > 0, got {value}")
        self.param_groups[0]["damping"] = float(value)

    @property
    def drop(self) -> float | None:
        """Factor of the Levenberg-Marquardt rule; None leaves λ to somebody else."""
        return self.param_groups[0]["drop"]

    @drop.setter
    def drop(self, value: float | None) -> None:
        drop = 1.0 if value is None else value
        check_levenberg_marquardt(drop, self._lower, self._upper, self._min_damping, self._max_damping)
        self.param_groups[0]["drop"] = value

    def set_validation(self, batches: Batches | None) -> None:
        """Give the validation data whose loss is the merit that ends LSMR (equation 20), or take it away with None.

        Args:
            batches: this process's share as (inputs, targets), on the module's device. The module is in eval mode while
                it is evaluated, and the sums are reduced over processes.

        Raises:
            ValueError: no samples on any process.
        """
        if batches is None:
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
        """A table of what the Kronecker preconditioner does for each parameter, and of the memory that it takes.

        Raises:
            ValueError: the preconditioner is another.
        """
        if self._factors is None:
            raise ValueError(f"only preconditioner='kronecker' has a summary, not {self._preconditioner!r}")
        return self._factors.summary()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, inputs: Any = None, targets: Tensor | None = None
    ) -> StepReport:
        """One iteration of Algorithm 1 on a batch.

        Args:
            closure: called once before the step, its result unused (Lightning's hooks hang on it).
            inputs: this process's share of the batch: a tensor (n, ...), or a tuple of them for a module of several.
            targets: what the loss compares the outputs with; row i belongs to row i of the inputs.

        Returns:
            StepReport: also kept as ``report``.

        Raises:
            TypeError: inputs or targets are missing.
            ValueError: NaN or infinity in the data, the outputs or the loss; an empty batch; a preconditioner of gradients
                per sample beside batch normalisation. The weights are unchanged.
            FloatingPointError: NaN or infinity within the solve. The weights are unchanged.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        if inputs is None or targets is None:
            raise TypeError(
                "SHF.step needs the batch: step(inputs=..., targets=...). In Lightning put SHFOptimization before the "
                "LightningModule: automatic optimization gives an optimizer no batch"
            )
        self._check_preconditioner_applies()
        seconds: dict[str, float] = {}
        group, memory = self.param_groups[0], self._memory
        with (
            _timed(seconds, "linearize"),
            _seeded(self._seed_for(f"network on rank {rank()}"), group["params"][0].device),
        ):
            weights = {name: p.detach() for name, p in zip(self._names, group["params"], strict=True)}
            model = BatchModel(
                self.module,
                self.loss,
                weights,
                inputs,
                targets,
                l2=self._l2,
                backend=self._backend,
                chunk_size=self._chunk_size,
                held_out=self._held_out,
                curvature_share=self._curvature_share,
            )
        if model.uncovered is not None and not self._told_uncovered:
            self._told_uncovered = True
            warnings.warn(
                "SHF takes the variance from the gradients of single samples, which costs much more than from what each "
                f"layer reads. That does not do here: {model.uncovered}.",
                stacklevel=3,
            )
        largest, maxiter = memory["largest_batch"], group["maxiter"]
        if self._scale_maxiter and largest and model.n > largest:
            maxiter = math.ceil(model.n / largest * maxiter)

        with _timed(seconds, "precondition"):
            factors, factor_damping = self._factors_of(model)
        make_preconditioner: Callable[[float], Tensor | RightPreconditioner | None]
        if factors is None:
            make_preconditioner = partial(self._make_preconditioner, model)
        else:
            make_preconditioner = partial(self._make_kronecker, factors, factor_damping)
        taken = self._search(model, maxiter, make_preconditioner, seconds)
        if taken.solution is not None:
            for name, change in model.unflat(taken.solution.direction * taken.length).items():
                weights[name].add_(change)

        # A new dict, since a state_dict() taken before, and an optimizer loaded from one, hold the old one.
        self.state["shf"] = {  # type: ignore[index]
            "steps": memory["steps"] + 1,
            "largest_batch": max(model.n, largest),
            "direction": None if taken.solution is None else taken.solution.last,
            "factors": factors,
            "factor_damping": factor_damping,
        }
        group["maxiter"] = maxiter
        group["warm_start"] = min(group["warm_start"] * self._warm_start_growth, self._max_warm_start)
        self.damping = taken.damping
        if self.drop is not None:
            self.damping = levenberg_marquardt(
                taken.damping,
                taken.reduction_ratio,
                drop=self.drop,
                lower=self._lower,
                upper=self._upper,
                min_damping=self._min_damping,
                max_damping=self._max_damping,
            )
        with _timed(seconds, "merit"):
            merit = self._merit_after(model, taken)
        self.report = StepReport(
            loss_before=model.value,
            loss_after=taken.loss,
            reduction_ratio=taken.reduction_ratio,
            step_length=taken.length,
            damping=taken.damping,
            solver_iterations=taken.iterations,
            stop_reason=taken.stop_reason,
            merits=() if taken.solution is None else taken.solution.merits,
            merit=merit,
            gradient_norm=math.sqrt(model.gradient_squared),
            gradient_variance=model.variance,
            batch_size=model.samples,
            predicted_batch_size=self._predicted_batch_size(model),
            seconds=seconds,
        )
        return self.report

    def _factors_of(self, model: BatchModel) -> tuple[Factors | None, float]:
        """Averages of the Kronecker factors, and the λ that they are damped with; None with another preconditioner."""
        if self._factors is None:
            return None, self.damping
        memory = self._memory
        old = memory.get("factors")
        if old is not None:
            old = self._factors.taken_over(old, model.gradient)
            if memory["steps"] % self._factor_interval:
                return old, memory["factor_damping"]
        new = self._factors.measure(model, self._seed_for("signs"))
        return new if old is None else averaged(old, new, self._factor_decay), self.damping

    def _search(
        self,
        model: BatchModel,
        maxiter: int,
        make_preconditioner: Callable[[float], Tensor | RightPreconditioner | None],
        seconds: dict[str, float],
    ) -> _Step:
        """Solve the model and search along the direction, anew from zero with larger damping where that fails."""
        if model.gradient_squared == 0.0:
            warnings.warn("SHF: the gradient of this batch is zero; no step is taken", stacklevel=4)
            return _Step(None, 0.0, model.value, 0.0, self.damping, 0, "zero_gradient")
        decay, previous = self.param_groups[0]["warm_start"], self._memory["direction"]
        # A loaded direction may come from another device or dtype.
        start = previous.to(model.gradient) * decay if previous is not None and decay > 0.0 else None
        damping, iterations = self.damping, 0
        for _ in range(1 + _RETRIES):
            with _timed(seconds, "precondition"):
                preconditioner = make_preconditioner(damping)
            with _timed(seconds, "solve"):
                solution = self._solve(model, damping, start, preconditioner, maxiter)
            iterations += solution.iterations
            with _timed(seconds, "line_search"):
                direction = solution.direction
                slope, predicted = model.slope(direction), model.change(direction)
                if slope < 0.0 and predicted < 0.0:
                    full = model.value_at(direction) if solution.value is None else solution.value
                    found = armijo_search(
                        partial(model.value_at, direction), model.value, slope, alpha=self._armijo, first_value=full
                    )
                    if found.step_length > 0.0:
                        change = model.held_out_change(direction) if model.held_out else full - model.value
                        ratio = change / predicted if math.isfinite(change) else 0.0
                        return _Step(
                            solution, found.step_length, found.value, ratio, damping, iterations, solution.stop_reason
                        )
            # The paper goes on with whatever direction it has; one that started from d0 != 0 need not be of descent.
            tried, damping, start = damping, min(damping * _RETRY_DAMPING, self._max_damping), None
        warnings.warn(
            f"SHF: no step along {1 + _RETRIES} directions lowers the loss {model.value:.6g} of this batch, the last one "
            f"with damping {tried:.3g}; the weights stay. If it goes on, the limit of the precision is reached: use "
            "float64 or stop",
            stacklevel=4,
        )
        damping = min(self.damping * _RETRY_DAMPING, self._max_damping)
        return _Step(None, 0.0, model.value, 0.0, damping, iterations, "line_search")

    def _check_preconditioner_applies(self) -> None:
        per_sample = isinstance(self._preconditioner, str) and self._preconditioner != "kronecker"
        layer = batch_normalising_layer(self.module) if per_sample else None
        if layer is not None:
            raise ValueError(
                f"preconditioner={self._preconditioner!r} is made of gradients per sample, and the layer {layer} normalises "
                "over the batch, which leaves them undefined: use preconditioner=None or 'kronecker', or put the layer in eval mode"
            )

    def _seed_for(self, purpose: str) -> int:
        """Of this step; 32 bits, since a generator of the CPU reads no more of its seed."""
        return random.Random(f"{self._seed} {self._memory['steps']} {purpose}").getrandbits(32)

    def _make_preconditioner(self, model: BatchModel, damping: float) -> Tensor | RightPreconditioner | None:
        choice = self._preconditioner
        if choice is None:
            return None
        if isinstance(choice, str):
            return model.scaling(choice, damping, seed=self._seed_for("signs"))
        if hasattr(choice, "update"):
            choice.update(model.linearization, self.loss, model.targets, damping)
        return _FlatOperator(choice, model)

    def _make_kronecker(self, factors: Factors, factor_damping: float, damping: float) -> BlockPreconditioner:
        """``factor_damping`` is λ of the step that the factors were updated in; a step that is solved anew raises it."""
        assert self._factors is not None
        strength = math.sqrt(max(factor_damping, damping) ** 2 + self._l2)
        if self._factored is None or self._factored[0] is not factors or self._factored[1] != strength:
            self._factored = factors, strength, self._factors.preconditioner(factors, strength)
        return self._factored[2]

    def _solve(
        self,
        model: BatchModel,
        damping: float,
        start: Tensor | None,
        preconditioner: Tensor | RightPreconditioner | None,
        maxiter: int,
    ) -> _Solution:
        anchor = start if self._damping_center == "start" else None
        if self._solver == "cg":
            return self._solve_by_cg(model, damping, start, anchor, preconditioner, maxiter)
        stopping = self._merit_stopping(model, start, maxiter)
        strength, center = damping, self._damping_center
        if self._l2:
            strength, center = model.damping_center(damping, anchor)  # type: ignore[assignment]
        result = (lsmr if self._solver == "lsmr" else lsqr)(
            model.forward,
            model.backward,
            model.right_hand_side,
            damp=strength * math.sqrt(model.n),
            x0=start,
            damping_center=center,
            damping_space=self._damping_space,
            preconditioner=preconditioner,
            maxiter=maxiter,
            atol=self._atol,
            btol=0.0,
            callback=stopping,
            all_reduce=all_reduce,
        )
        best = stopping.best if stopping is not None and stopping.best is not None else result.x
        merits = () if stopping is None else tuple(stopping.values)
        return _Solution(best, result.x, result.iterations, result.stop_reason, merits)

    def _merit_stopping(self, model: BatchModel, start: Tensor | None, maxiter: int) -> MeritStopping | None:
        batches = self._validation
        if batches is None:
            return None
        return MeritStopping(
            lambda d: model.validation_value(d, batches),
            model.validation_value(torch.zeros_like(model.gradient) if start is None else start, batches),
            maxiter=maxiter,
            miniter=self._miniter,
            recover=self._recover,
            ftol=self._ftol,
            keep_best=self._return_best,
        )

    def _solve_by_cg(
        self,
        model: BatchModel,
        damping: float,
        start: Tensor | None,
        anchor: Tensor | None,
        preconditioner: Tensor | RightPreconditioner | None,
        maxiter: int,
    ) -> _Solution:
        """Martens (2010): CG on (AᵀA + μ²) d = -∇f + λ² d0, then back over stored iterates while f gets lower."""
        strength = damping**2 + self._l2
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
            progress_tolerance=self._progress_tolerance,
            progress_window=self._progress_window,
            callback=store,
        )
        best, value = result.x, model.value_at(result.x)
        earlier = [iterate for iteration, iterate in iterates if iteration < result.iterations]
        for iterate in reversed(earlier):
            trial = model.value_at(iterate)
            if trial > value:
                break
            best, value = iterate, trial
        return _Solution(best, result.x, result.iterations, result.stop_reason, (), value)

    def _merit_after(self, model: BatchModel, taken: _Step) -> float | None:
        if self._validation is None:
            return None
        solution = taken.solution
        if solution is None:
            return model.validation_value(torch.zeros_like(model.gradient), self._validation)
        last_is_known = bool(solution.merits) and solution.merits[-1][0] == solution.iterations
        if taken.length == 1.0 and solution.direction is solution.last and last_is_known:
            return solution.merits[-1][1]
        return model.validation_value(solution.direction * taken.length, self._validation)

    def _predicted_batch_size(self, model: BatchModel) -> int | None:
        if model.variance is None or model.gradient_squared == 0.0:
            return None
        return required_batch_size(model.variance, model.gradient_squared, self._dataset_size, self._theta)

    @property
    def _memory(self) -> dict[str, Any]:
        """What a resumed run needs beside the values of the group: under a string key, since torch casts the state of a
        parameter to that parameter's dtype when it is loaded."""
        return self.state.setdefault("shf", {"steps": 0, "largest_batch": 0, "direction": None})  # type: ignore[call-overload]


class _FlatOperator:
    """A user's preconditioner on dicts of tensors, for solvers on flat vectors."""

    def __init__(self, operator: RightPreconditioner, model: BatchModel) -> None:
        self._operator, self._model = operator, model

    def solve(self, y: Tensor) -> Tensor:
        return self._model.flat(self._operator.solve(self._model.unflat(y)))

    def solve_transpose(self, x: Tensor) -> Tensor:
        return self._model.flat(self._operator.solve_transpose(self._model.unflat(x)))


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


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


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout masks of this step alone, so that a resumed run has them too; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the other devices too
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin
