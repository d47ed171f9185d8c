"""SHF: stochastic Hessian-free optimization with LSMR (Emirahmetoglu & Stewart, Algorithms 1 to 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.hub import tqdm

from lightning_struct.collective import refuse_unlike_batches
from lightning_struct.functional.checks import Positive, Size, checked, warn
from lightning_struct.functional.jacobian.losses import GaussNewtonLoss, SquaredError, get_loss
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.functional.solvers.least_squares import RightPreconditioner
from lightning_struct.optim.requirements import check_module, refuse_replaced, state_without_hooks
from lightning_struct.optim.shf.diagnostics import check_parameters
from lightning_struct.optim.shf.outputs.steps import OutputSteps
from lightning_struct.optim.shf.regression import RegressionSteps
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.residuals.steps import ResidualSteps
from lightning_struct.optim.shf.samples import Batches
from lightning_struct.optim.shf.settings import (
    CG,
    LSMR,
    Exact,
    Kronecker,
    LevenbergMarquardt,
    NextBatch,
    Settings,
    WarmStart,
    damping_value,
    preconditioner_value,
    solver_value,
    warm_start_value,
)
from lightning_struct.optim.shf.step_state import StepState, check_state
from lightning_struct.optim.shf.steps import Steps


class SHF(torch.optim.Optimizer):
    """Stochastic Hessian-free optimization: each step solves a damped Gauss-Newton model of the batch.

    ``SHF(module, loss)`` is enough. Without ``damping``, all settings that are not given are chosen from sizes, layers
    and data, and adapted during training; the log names the choices. With ``damping``, or with :meth:`paper`, they are
    the paper's. Below, "chosen" and "the paper's" name these two defaults.

    It trains every parameter below ``module`` that requires a gradient when the optimizer is made. There is no backward
    pass: :meth:`step` takes the data, drawn afresh for each step. Under torch.distributed each process passes its own
    share of the batch, and all take the step of the whole batch. Buffers that a forward writes, such as batch-norm
    statistics, are updated once per step.

    Args:
        module: called as ``module(inputs)`` (or ``module(*inputs)`` for a tuple or list); returns one tensor (n, ...).
            Its weights are float32 or float64.
        loss: ``"mse"``: ½‖outputs - targets‖², averaged over samples; without settings, a batch that stays is trained
            on by the exact solver, up to about a thousand parameters or residuals; ``"cross_entropy"``: of logits;
            ``"binary_cross_entropy"``: of logits, one for each of two classes, labels or pixels; an object with the
            methods of :class:`~lightning_struct.functional.jacobian.losses.GaussNewtonLoss`; or ``"least_squares"``,
            for a module that returns residuals, or a :class:`~lightning_struct.functional.LeastSquares` with weights of
            their blocks. With residuals, arguments without a meaning are refused; ``settings`` has the others.
        damping: λ₁ > 0, damped by Levenberg and Marquardt's rule; or the rule, ``"levenberg_marquardt"`` or
            ``"next_batch"``; or a :class:`LevenbergMarquardt` or a :class:`NextBatch`. The paper and
            residuals take Levenberg and Marquardt's rule; other losses take the next batch's if it is not given.
        solver: ``"lsmr"``, ``"cg"``, or with ``"mse"`` ``"exact"``; with residuals ``"lsmr"`` or ``"exact"``; or an
            :class:`LSMR`, :class:`CG` or :class:`Exact`. The paper's LSMR; chosen CG, with residuals from the sizes.
        preconditioner: ``"diagonal"`` (Algorithm 3); ``"diagonal_sum"`` (the formula in the text of section 4.4);
            ``"fisher"`` (Martens 2010); ``"kronecker"`` or a :class:`Kronecker`; None; or an object with ``solve`` and
            ``solve_transpose`` on dicts of tensors by parameter name, and optionally ``solve_normal``, both at once for
            CG, and ``update(linearization, loss, targets, damping)``, called in each step. The paper's ``"diagonal"``;
            chosen Kronecker factors.
        warm_start: γ₁ in [0, 1): the solver starts at d0 = γ d of the last step; or a :class:`WarmStart`.
        l2: weight of ½‖w‖² added to the loss.
        theta: θ of the norm test behind ``predicted_batch_size``.
        dataset_size: N of the norm test; None for a stream.
        backend: passed to :func:`~lightning_struct.functional.linearize`. If not given, ``"layer_rules"`` for chains of
            Linear and elementwise layers, else ``"double_backward"``.
        chunk_size: form products over chunks of this many samples, to save memory.
        seed: seed, together with the number of the step, of the preconditioner's random signs and of the network's own
            draws (dropout).

    Attributes:
        settings: the arguments above, given or chosen, as one :class:`Settings` of values; λ₁ and its bounds are None
            until the first step has chosen them, and with residuals the solver if each batch chooses it. The current λ
            (None until the first step has chosen it), ``drop``, γ and ``maxiter`` are in ``param_groups[0]``.
        report: the :class:`StepReport` of the last step; None before the first.

    Raises:
        ValueError: an argument of another type, out of range, or without meaning with the loss; no parameter requires a
            gradient; weights are neither float32 nor float64, of mixed dtype, on several devices, or spread over
            processes (FSDP2), or with sparse gradients.
        TypeError: ``module`` is not a module (for instance a list of parameters); a loss lacks methods.
        MemoryError: the Kronecker factors do not fit into the free memory.

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
        damping: (float | Literal["levenberg_marquardt", "next_batch"] | LevenbergMarquardt | NextBatch | None) = None,
        solver: Literal["lsmr", "cg", "exact"] | LSMR | CG | Exact | None = None,
        preconditioner: (
            Literal["auto", "diagonal", "diagonal_sum", "fisher", "kronecker"] | Kronecker | RightPreconditioner | None
        ) = "auto",
        warm_start: float | WarmStart | None = None,
        l2: float = 0.0,
        theta: float = 0.5,
        dataset_size: int | None = None,
        backend: Literal["layer_rules", "double_backward"] | None = None,
        chunk_size: int | None = None,
        seed: int = 0,
    ) -> None:
        check_module(module, "SHF", "which it calls itself")
        objective, asked = get_loss(loss), isinstance(solver_value(solver), Exact)
        of_residuals = asked or isinstance(objective, LeastSquares)
        given = Settings(
            damping=damping_value(damping, LevenbergMarquardt() if of_residuals else NextBatch()),
            solver=solver_value(solver),
            preconditioner=preconditioner_value(preconditioner),
            warm_start=warm_start_value(warm_start),
            l2=l2,
            theta=theta,
            dataset_size=dataset_size,
            backend=backend,
            chunk_size=chunk_size,
            seed=seed,
        )
        self.module = module
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        check_parameters(module, named)
        self._names = list(named)
        self._steps: Steps
        if isinstance(objective, LeastSquares):
            self._steps = ResidualSteps(module, objective, given)
        elif type(objective) is SquaredError and (asked or given.is_unset):
            self._steps = RegressionSteps(module, given, named, asked=asked)
        else:
            self._steps = OutputSteps(module, objective, given, named)
        self.report: StepReport | None = None
        self._warned_of_new = False
        in_force = self.settings
        super().__init__(
            named.values(),
            {
                "damping": in_force.damping.initial,
                "drop": in_force.damping.drop,
                "warm_start": in_force.warm_start.initial,
                "maxiter": in_force.maxiter,
            },
        )

    @classmethod
    def paper(cls, module: nn.Module, loss: str | GaussNewtonLoss | LeastSquares, **overrides: Any) -> SHF:
        """SHF with the paper's settings: LSMR, the diagonal preconditioner, Levenberg and Marquardt's rule, λ₁ = 10.

        Args:
            module, loss: as for SHF.
            **overrides: other arguments of SHF; fields of their values that are not given are the paper's. The paper's
                λ₁ is 5 to 12, by the task.

        Example:
            >>> SHF.paper(nn.Linear(2, 2), "mse", solver=LSMR(atol=1e-6)).settings.solver.maxiter
            150
        """
        damping = damping_value(overrides.pop("damping", None), LevenbergMarquardt())
        return cls(module, loss, damping=replace(damping, initial=damping.initial or 10.0), **overrides)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *unnamed: Any, inputs: Any = None, targets: Tensor | None = None
    ) -> StepReport:
        """One iteration of Algorithm 1 on a batch.

        Args:
            closure: called once before the step, its result unused (Lightning's hooks hang on it).
            inputs: this process's share of the batch: a tensor (n, ...), or a tuple or list of tensors for a module of
                several arguments. A dict, or a packed sequence, is one argument; entries with n rows have one row for
                each sample.
            targets: of the outputs, as the loss takes them; row i belongs to row i of the inputs.

        Returns:
            StepReport: also kept as ``report``.

        Raises:
            TypeError: inputs or targets are missing or given without their names, targets are no tensor, or the forward
                of the module does not take so many inputs.
            ValueError: NaN or infinity in the data, the outputs or the loss; an empty batch; a forward that changes its
                inputs in place; a preconditioner of gradients per sample beside batch normalisation; weights that were
                frozen, replaced or made half precision since SHF was made. The weights are unchanged.
            FloatingPointError: NaN or infinity within the solve. The weights are unchanged.
            RuntimeError: the step is taken within ``torch.inference_mode()``.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "SHF.step differentiates the module, which torch.inference_mode() does not allow: take the step "
                "outside of it (torch.no_grad() does no harm)"
            )
        if torch.compiler.is_compiling():  # to trace all that a step does takes a minute, and gains nothing
            return torch.compiler.disable(self.step)(closure, *unnamed, inputs=inputs, targets=targets)
        if unnamed or not (closure is None or callable(closure)):
            raise TypeError(
                "SHF.step takes the batch by name, step(inputs=x, targets=y); the argument without a name is a "
                f"closure, got {', '.join(type(value).__name__ for value in (closure, *unnamed))}"
            )
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._check_trained()
        refuse_unlike_batches(inputs, targets, self.param_groups[0]["params"][0].device)
        now, steps = self._now, self._steps
        # Algorithm 1 on a batch that the caller has drawn; λ, γ and maxiter are in the parameter group
        model = steps.linearize(now, inputs, targets)  # A and b at w (Algorithms 4 and 5), ∇f, ‖Var‖₁ (section 4.3)
        steps = steps.of(model)  # those on residuals, if the batch of a squared error stays
        steps.choose_damping(now, model)  # λ₁, in the first step
        if steps.adapt_to_next_batch(now, model):  # σ and λ by how much of the last step's gain this batch shows
            steps.take_back(now, model)  # w <- w - s d of the last step, which did harm
            model = steps.linearize(now, inputs, targets)
        solver = steps.solver(now, model)  # its preconditioner c (Algorithm 3)
        update = steps.search(now, model, solver)  # d by LSMR (Algorithm 6), s by Armijo's rule, ρ (section 4.2)
        steps.move(model, update)  # w <- w + s d
        steps.adapt(now, model, solver, update)  # λ (section 4.2), γ and maxiter (section 4.5)
        self.report = self._steps.report(now, model, update)  # n̂ of the norm test (equation (14))
        return self.report

    @checked
    def fit(
        self, inputs: Any, *, max_steps: Size = 100, tolerance: Positive = 1e-10, progress: bool = False
    ) -> StepReport:
        """Take steps on one batch of residuals (``loss="least_squares"``) until they have converged.

        Args:
            inputs: as for :meth:`step`.
            max_steps: bound on the steps.
            tolerance: relative; the fit ends when a number in :attr:`StepReport.convergence` is within it.
            progress: whether to show a bar of the steps with the loss.

        Returns:
            StepReport: of the last step; ``reason_within(tolerance)`` is None if ``max_steps`` ended the fit.

        Raises:
            ValueError: the loss is of outputs, or ``max_steps`` or ``tolerance`` is not positive.
        """
        self._residual_steps("fit")
        with tqdm(total=max_steps, unit="step", disable=not progress) as bar:
            for _ in range(max_steps):
                report = self.step(inputs=inputs)
                bar.update()
                bar.set_postfix(loss=f"{report.loss_after:.3g}")
                if report.reason_within(tolerance) is not None:
                    break
        return report

    @torch.no_grad()
    def covariance(self, inputs: Any) -> Tensor:
        """Covariance of the trained parameters, s² (JᵀJ)⁻¹ with s² = ‖r‖²/(N - P), after a fit of residuals.

        Args:
            inputs: as for :meth:`step`.

        Returns:
            (P, P), in the order of ``module.parameters()``, each flat. The roots of its diagonal are standard errors.

        Raises:
            ValueError: the loss is of outputs; there are not more residuals than parameters; or J is singular.
        """
        return self._residual_steps("covariance").covariance(self._now, inputs)

    def _residual_steps(self, method: str) -> ResidualSteps:
        if not isinstance(self._steps, ResidualSteps):
            raise ValueError(  # noqa: TRY004
                f"SHF.{method} is for residuals: SHF(module, 'least_squares'), with a module that returns them"
            )
        return self._steps

    @property
    def loss(self) -> GaussNewtonLoss | LeastSquares:
        """The loss that is minimised; another one of its kind, or its name, may take its place.

        Raises:
            ValueError: an unknown name, or a loss of the other kind (outputs, residuals).
            TypeError: an object that lacks methods of a loss.
        """
        return self._steps.loss

    @loss.setter
    def loss(self, value: str | GaussNewtonLoss | LeastSquares) -> None:
        new = get_loss(value)
        of_residuals = [isinstance(loss, LeastSquares) for loss in (new, self.loss)]
        if of_residuals[0] != of_residuals[1]:
            raise ValueError(
                f"{type(new).__name__} cannot take the place of {type(self.loss).__name__}: one is of a module's "
                "outputs and targets, the other of residuals, with other settings. Make a new SHF"
            )
        self._steps.loss = new

    @property
    def settings(self) -> Settings:
        """The arguments, given or chosen, as one value."""
        return self._steps.settings

    @property
    def damping(self) -> float | None:
        """λ of the next step; None if the first step has still to choose it, from its batch."""
        return self.param_groups[0]["damping"]

    @damping.setter
    def damping(self, value: float) -> None:
        self._now.damping = value

    @property
    def drop(self) -> float | None:
        """Factor of the Levenberg-Marquardt rule; None: the rule does not change λ."""
        return self.param_groups[0]["drop"]

    @drop.setter
    def drop(self, value: float | None) -> None:
        replace(self.settings.damping, drop=value)  # raises ValueError for a factor out of range
        self.param_groups[0]["drop"] = value

    @property
    def exact_variance(self) -> bool:
        """Whether the variance is that of the gradients of single samples, from the inputs of each layer.

        That takes another pass through the network in each step, if this is no chain of Linear and elementwise
        layers. If not, the variance is estimated from the two halves of the batch, and scatters more. True with
        the paper's settings and with residuals. :class:`~lightning_struct.mixins.SHFOptimization` sets it beside
        ``GrowingBatchSize``, which decides by the variance.
        """
        return self._steps.exact_variance

    @exact_variance.setter
    def exact_variance(self, value: bool) -> None:
        self._steps.exact_variance = value

    def set_validation(self, batches: Batches | None) -> None:
        """Give the validation data whose loss is the merit that ends LSMR (equation (20)), or take it away with None.

        Args:
            batches: this process's share as (inputs, targets), on the module's device. The module is in eval mode while
                it is evaluated, and the sums are reduced over processes.

        Raises:
            ValueError: no samples on any process; or a module that returns residuals, whose solvers need no merit.
        """
        if not isinstance(self._steps, OutputSteps):
            raise ValueError(  # noqa: TRY004
                "loss='least_squares' takes no validation data: its solvers need no merit"
            )
        self._steps.set_validation(batches, self.param_groups[0]["params"][0].device)

    def summary(self) -> str:
        """A table of the Kronecker preconditioner: the form that each parameter has, and its memory.

        Raises:
            ValueError: the preconditioner is another, or the module returns residuals, whose solvers have none.
        """
        if not isinstance(self._steps, OutputSteps) or self._steps.kronecker is None:
            raise ValueError(
                f"only preconditioner='kronecker' has a summary, not {self.settings.preconditioner!r}; solvers of "
                "residuals (loss='least_squares') have no preconditioner"
            )
        return self._steps.kronecker.summary()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: the module's parameters are one.

        Raises:
            ValueError: a second group.
        """
        if self.param_groups:
            raise ValueError("SHF trains all parameters of the module in one group; freeze those that shall stay")
        super().add_param_group(_Group(param_group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: the values of the parameter group, and the memory of the next step.

        Raises:
            ValueError: it is of another optimizer, or of a module with other parameters. Nothing has changed.
        """
        check_state(state_dict, self.defaults, sum(p.numel() for p in self.param_groups[0]["params"]))
        super().load_state_dict(state_dict)
        self.param_groups[:] = map(_Group, self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        return state_without_hooks(self)

    def _check_trained(self) -> None:
        """Raise ValueError if the module has other weights than when SHF was made, which a step would not move."""
        trained = dict(zip(self._names, self.param_groups[0]["params"], strict=True))
        check_parameters(self.module, trained)
        refuse_replaced([name for name, p in trained.items() if _parameter(self.module, name) is not p], "SHF")
        if frozen := [name for name, p in trained.items() if not p.requires_grad]:
            raise ValueError(
                f"SHF trains {', '.join(frozen[:3])}, frozen since it was made. It trains the parameters that require "
                "a gradient when it is made: make a new SHF after layers are frozen or unfrozen"
            )
        new = [name for name, p in self.module.named_parameters() if p.requires_grad and name not in trained]
        if new and not self._warned_of_new:
            self._warned_of_new = True
            warn(f"SHF does not train {', '.join(new[:3])}, added or unfrozen since it was made: make a new SHF")

    @property
    def _now(self) -> StepState:
        return StepState(self.state, self.param_groups[0], self._names, self.settings.seed)


class _Group(dict[str, Any]):
    """The parameter group, which refuses schedulers of a learning rate."""

    def __missing__(self, name: str) -> Any:
        if name in ("lr", "initial_lr"):
            raise ValueError(
                "SHF has no learning rate for a scheduler: its line search chooses the length of each step, and the "
                "damping its size. Leave the scheduler out"
            )
        raise KeyError(name)


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    try:
        return module.get_parameter(name)
    except AttributeError:
        return None
