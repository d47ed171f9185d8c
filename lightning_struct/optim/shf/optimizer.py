"""SHF: stochastic Hessian-free optimization with LSMR (Emirahmetoglu & Stewart, Algorithms 1 to 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_struct.functional.jacobian.losses import GaussNewtonLoss, get_loss
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.functional.solvers.least_squares import RightPreconditioner
from lightning_struct.optim.requirements import (
    LOWER_PRECISION,
    check_module,
    refuse_distributed_tensors,
    refuse_lazy,
    refuse_replaced,
    state_without_hooks,
    warn,
)
from lightning_struct.optim.shf.complete_settings import OutputSettings, ResidualSettings
from lightning_struct.optim.shf.objective import Batches
from lightning_struct.optim.shf.output_steps import OutputSteps
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.residual_steps import ResidualSteps
from lightning_struct.optim.shf.settings import Settings
from lightning_struct.optim.shf.step_state import StepState, check_state


class SHF(torch.optim.Optimizer):
    """Stochastic Hessian-free optimization: each step solves a damped Gauss-Newton model of the batch.

    ``SHF(module, loss)`` is enough. Without ``damping``, all settings that are not given are chosen from sizes, layers
    and data, and adapted during training; the log says at the first step what was chosen. With ``damping``, or with
    :meth:`paper`, they are the paper's. Below, "chosen" and "the paper's" name these two defaults.

    It trains every parameter below ``module`` that requires a gradient when the optimizer is made. There is no backward
    pass: :meth:`step` takes the data, drawn afresh for each step. Under torch.distributed each process passes its own
    share of the batch, and all take the step of the whole batch. Buffers that a forward writes, such as batch-norm
    statistics, are updated once per step.

    Args:
        module: called as ``module(inputs)`` (or ``module(*inputs)`` for a tuple or list); returns one tensor (n, ...).
            Its weights are float32 or float64.
        loss: ``"mse"``: ½‖outputs - targets‖², averaged over samples; ``"cross_entropy"``: of logits;
            ``"binary_cross_entropy"``: of logits, one for each of two classes, labels or pixels; an object with the
            methods of :class:`~lightning_struct.functional.jacobian.losses.GaussNewtonLoss`; or ``"least_squares"``,
            for a module that returns residuals, or a :class:`~lightning_struct.functional.LeastSquares` with weights of
            their blocks. With residuals, arguments without a meaning are refused; ``settings`` has the others.
        damping: λ₁ > 0; the model is damped by λ². Chosen: 1.5 times the square root of the largest eigenvalue of the
            Gauss-Newton matrix of the first batch; with residuals a tenth of the largest singular value.
        drop: factor of λ if ρ > ``upper``, and divisor if ρ < ``lower``, where ρ is the true reduction of the loss over
            the predicted one; None leaves λ alone. The paper's .99; chosen .85, with residuals the paper's, where any
            number lets each step search λ by factors of 2.
        lower: ρ below which λ rises.
        upper: ρ above which λ falls.
        min_damping: lower bound on λ. The paper's 0; chosen: λ₁ times the square root of the dtype's epsilon.
        max_damping: upper bound on λ. 1e9 (the paper has no bound); chosen: 1,000 λ₁.
        damping_rule: ``"levenberg_marquardt"``: by ρ (the paper's); ``"next_batch"`` (chosen): by how much of the gain
            of a step the next batch shows, see :func:`~lightning_struct.functional.solvers.damping.next_batch_rule`.
            Steps that fit the noise of their batch are shortened. λ falls if the next batch confirms full steps, or if
            short ones fit little of their own batch, and rises if these fit much of it, or if ρ < ``lower``. A step
            that raises the loss of the next batch by more than a tenth, and by more than it lowered its own, is taken
            back.
        solver: ``"lsmr"``, ``"lsqr"``, or ``"cg"`` with the stopping rule and the backtracking over iterates of Martens
            (2010), the paper's rival; with residuals ``"exact"``, by a dense factorisation of the shorter side of J.
            The paper's ``"lsmr"``; chosen ``"cg"``, with residuals from the sizes.
        preconditioner: ``"diagonal"`` (Algorithm 3); ``"diagonal_sum"`` (the formula in the text of section 4.4);
            ``"fisher"`` (Martens 2010); ``"kronecker"``, the layers' Kronecker factors, averaged over steps and damped
            by μ² = λ² + l2 (not in the paper; :meth:`summary` says what each parameter has); None; or an object with
            ``solve`` and ``solve_transpose`` on dicts of tensors by parameter name, and optionally ``solve_normal``,
            both at once for CG, and ``update(linearization, loss, targets, damping)``, called in each step. The paper's
            ``"diagonal"``; chosen ``"kronecker"``.
        damping_center: ``"start"``: λ²‖d - d0‖² (Algorithm 6); ``"origin"``: λ²‖d‖² (equation (18)).
        damping_space: ``"y"``: the damping is on the preconditioned direction (Algorithm 6); ``"x"``: on the direction
            itself. If not given, ``"y"`` for LSMR and LSQR without ``l2``, else ``"x"``, the only one possible there,
            as it is for Kronecker factors, and for a preconditioner object with damping around the origin.
        warm_start: γ₁ in [0, 1): the solver starts at d0 = γ d of the last step; 0 starts it at zero. The paper's .7;
            chosen .9; with residuals 0, which rises to at most .7 if new samples show that the steps fitted the noise
            of the old ones.
        warm_start_growth: γ is multiplied by it after each step, up to ``max_warm_start``. The paper's 1.002; chosen 1,
            with residuals the paper's.
        max_warm_start: bound on the growth of γ, in [0, 1); a ``warm_start`` that is given above it stays.
        maxiter: bound on the solver's iterations. The paper's 150; chosen 20, without Kronecker factors 50, with
            residuals the paper's.
        scale_maxiter: let ``maxiter`` grow in proportion to the batch size, rounded up in each step. The paper's: yes;
            chosen: no.
        miniter: first iteration at which the validation data (see :meth:`set_validation`) may end a solve.
        recover: number of iterations in which the validation loss may fall below its minimum again.
        atol: LSMR and LSQR stop when ‖Aᵀr‖ <= atol ‖A‖ ‖r‖.
        ftol: a solve ends when the validation loss falls by less than this share of itself per iteration.
        progress_tolerance: ε of Martens' rule for CG (see :func:`~lightning_struct.functional.conjugate_gradient`).
            5e-4; chosen .05, and up to .3 when steps are shortened, since noise need not be fitted.
        progress_window: fewest iterations that this rule looks back. 10; chosen 1.
        return_best: take the iterate with the lowest validation value instead of the last (slower to make progress).
        armijo: α of the line search.
        l2: weight of ½‖w‖² added to the loss.
        theta: θ of the norm test behind ``predicted_batch_size``.
        dataset_size: N of the norm test; None for a stream.
        backend: passed to :func:`~lightning_struct.functional.linearize`. If not given, ``"layer_rules"`` for chains of
            Linear and elementwise layers, else ``"double_backward"`` if possible.
        chunk_size: form products over chunks of this many samples, to save memory.
        factor_decay: weight of the old value in the running average of the Kronecker factors, in [0, 1).
        factor_interval: steps from one update of the Kronecker factors, and of their Cholesky factors, to the next; the
            latter are made anew before if λ has become larger by more than half. 1; chosen from their sizes, to 10.
        max_factor_size: a Kronecker factor with more rows is kept as its diagonal; None: no bound. Chosen: 4,096, or as
            many as fit into memory, and as in a state that is loaded.
        exclude_factors: layers, or their names, that have a diagonal instead of Kronecker factors.
        held_out: share of each batch, in [0, 1), that is left out of the model and used to measure ρ: its last samples,
            in eval mode. ρ on the batch itself stays near 1 while the batch is overfitted; this one falls, and the
            damping rises.
        curvature_share: share of the samples of a batch, in (0, 1], on which the curvature is measured (its first
            ones): in the products with J, the preconditioner and the Kronecker factors. Loss and gradient use all
            samples (Byrd et al. 2011). For CG only.
        single_samples: whether to form the gradients of single samples for their variance if layers do not show them.
            The paper's: yes, which can cost tens of gradients per step; chosen: no, the variance is then estimated from
            the two halves of the batch, unless it is shown in passing, or :attr:`exact_variance` is set.
        seed: seed, together with the number of the step, of the preconditioner's random signs and of the network's own
            draws (dropout).
        geodesic_acceleration: with residuals, also try steps with a second-order correction (Transtrum & Sethna 2012);
            if not given, they are tried.

    Attributes:
        settings: the arguments above that apply to the loss, given or chosen, as one value; λ₁ and its bounds are None
            until the first step has chosen them. With residuals, ``damping`` and ``solver`` stay None if they are left
            to the batches. The current λ (None until the first step has chosen it), ``drop``, γ and ``maxiter`` are in
            ``param_groups[0]``.
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
        damping: float | None = None,
        drop: float | Literal["auto"] | None = "auto",
        lower: float = 0.25,
        upper: float = 0.75,
        min_damping: float | None = None,
        max_damping: float | None = None,
        damping_rule: Literal["levenberg_marquardt", "next_batch"] | None = None,
        solver: Literal["lsmr", "lsqr", "cg", "exact"] | None = None,
        preconditioner: (
            Literal["auto", "diagonal", "diagonal_sum", "fisher", "kronecker"] | RightPreconditioner | None
        ) = "auto",
        damping_center: Literal["start", "origin"] = "start",
        damping_space: Literal["x", "y"] | None = None,
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
        backend: Literal["layer_rules", "linearize", "double_backward"] | None = None,
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
        check_module(module, "SHF", "which it calls itself")
        objective = get_loss(loss)
        given = Settings(
            damping=damping, drop=drop, lower=lower, upper=upper, min_damping=min_damping, max_damping=max_damping,
            damping_rule=damping_rule, solver=solver, preconditioner=preconditioner, damping_center=damping_center,
            damping_space=damping_space, warm_start=warm_start, warm_start_growth=warm_start_growth,
            max_warm_start=max_warm_start, maxiter=maxiter, scale_maxiter=scale_maxiter, miniter=miniter,
            recover=recover, atol=atol, ftol=ftol, progress_tolerance=progress_tolerance,
            progress_window=progress_window, return_best=return_best, armijo=armijo, l2=l2, theta=theta,
            dataset_size=dataset_size, backend=backend, chunk_size=chunk_size, factor_decay=factor_decay,
            factor_interval=factor_interval, max_factor_size=max_factor_size, exclude_factors=exclude_factors,
            held_out=held_out, curvature_share=curvature_share, single_samples=single_samples, seed=seed,
            geodesic_acceleration=geodesic_acceleration,
        )  # fmt: skip
        self.module = module
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check_parameters(module, named)
        self._names = list(named)
        self._steps: ResidualSteps | OutputSteps
        if isinstance(objective, LeastSquares):
            self._steps = ResidualSteps(module, objective, given)
        else:
            self._steps = OutputSteps(module, objective, given, named)
        self.report: StepReport | None = None
        self._told_of_new = False
        in_group = ("damping", "drop", "warm_start", "maxiter")
        super().__init__(named.values(), {name: getattr(self.settings, name) for name in in_group})

    @classmethod
    def paper(cls, module: nn.Module, loss: str | GaussNewtonLoss | LeastSquares, **overrides: Any) -> SHF:
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
            inputs: this process's share of the batch: a tensor (n, ...), or a tuple or list of tensors for a module of
                several arguments. A dict, or a packed sequence, is one argument; entries with n rows have one row for
                each sample.
            targets: what the loss compares the outputs with; row i belongs to row i of the inputs.

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
            return torch.compiler.disable(self.step)(closure, inputs=inputs, targets=targets)
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    "SHF.step takes the batch by name, step(inputs=..., targets=...); the argument without a name is a "
                    f"closure, got {type(closure).__name__}"
                )
            with torch.enable_grad():
                closure()
        self._check_trained()
        self.report = self._steps.take(self._now, inputs, targets)
        return self.report

    @property
    def loss(self) -> GaussNewtonLoss | LeastSquares:
        """What is minimised; another one of its kind, or its name, may take its place.

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
    def settings(self) -> OutputSettings | ResidualSettings:
        """The arguments that mean something with the loss, as one value, with what was chosen."""
        return self._steps.settings

    @property
    def damping(self) -> float | None:
        """λ of the next step; None where the first step has still to choose it, from its batch."""
        return self.param_groups[0]["damping"]

    @damping.setter
    def damping(self, value: float) -> None:
        self._now.damping = value

    @property
    def drop(self) -> float | None:
        """Factor of the Levenberg-Marquardt rule; None leaves λ to somebody else."""
        return self.param_groups[0]["drop"]

    @drop.setter
    def drop(self, value: float | None) -> None:
        replace(self.settings, drop=value)  # raises ValueError for a factor out of range
        self.param_groups[0]["drop"] = value

    @property
    def exact_variance(self) -> bool:
        """Whether the variance is that of the gradients of single samples, as what each layer reads shows them.

        That takes another pass through the network in each step, where this is no chain of Linear and elementwise
        layers. If not, the variance is estimated from the two halves of the batch, and scatters more. True with
        ``single_samples`` and with residuals. :class:`~lightning_struct.mixins.SHFOptimization` sets it beside
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
                it is evaluated, and the sums are reduced over processes. With residuals (``loss="least_squares"``)
                nothing is done: their solvers need no merit.

        Raises:
            ValueError: no samples on any process.
        """
        self._steps.set_validation(batches, self.param_groups[0]["params"][0].device)

    def summary(self) -> str:
        """A table of the Kronecker preconditioner: the form that each parameter has, and its memory.

        Raises:
            ValueError: the preconditioner is another, or the module returns residuals, whose solvers have none.
        """
        return self._steps.summary()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: the module's parameters are one.

        Raises:
            ValueError: a second group.
        """
        if self.param_groups:
            raise ValueError("SHF trains all parameters of the module in one group; freeze what it must leave alone")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: the values of the parameter group, and what the next step must know.

        Raises:
            ValueError: it is of another optimizer, or of a module with other parameters. Nothing has changed.
        """
        check_state(state_dict, self.defaults, sum(p.numel() for p in self.param_groups[0]["params"]))
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return state_without_hooks(self)

    def _check_trained(self) -> None:
        """Raise ValueError where the module has other weights than when SHF was made, which a step would not move."""
        trained = dict(zip(self._names, self.param_groups[0]["params"], strict=True))
        _check_parameters(self.module, trained)
        refuse_replaced([name for name, p in trained.items() if _parameter(self.module, name) is not p], "SHF")
        if frozen := [name for name, p in trained.items() if not p.requires_grad]:
            raise ValueError(
                f"SHF trains {', '.join(frozen[:3])}, frozen since it was made. It trains what requires a gradient "
                "when it is made: make a new SHF after layers are frozen or unfrozen"
            )
        new = [name for name, p in self.module.named_parameters() if p.requires_grad and name not in trained]
        if new and not self._told_of_new:
            self._told_of_new = True
            warn(f"SHF does not train {', '.join(new[:3])}, added or unfrozen since it was made: make a new SHF")

    @property
    def _now(self) -> StepState:
        return StepState(self.state, self.param_groups[0], self._names, self.settings.seed)


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    try:
        return module.get_parameter(name)
    except AttributeError:
        return None


def _check_parameters(module: nn.Module, named: dict[str, nn.Parameter]) -> None:
    scripted = [
        name or "the module" for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)
    ]
    if scripted:
        raise ValueError(
            f"SHF calls the module with other weights, which TorchScript does not allow: {scripted[0]} is scripted or "
            "traced. Give SHF the module as it is in Python; script it once it is trained"
        )
    refuse_lazy(named, "SHF")
    if not named:
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient: give SHF the module that it is to "
            "train, or unfreeze the weights by requires_grad_()"
        )
    sparse = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]
    if sparse:
        raise ValueError(
            f"SHF needs dense gradients, and {', '.join(sparse)} have sparse ones: make them with sparse=False, or "
            "freeze them"
        )
    refuse_distributed_tensors(named, "the factors and the Jacobian products need")
    if numbers := [name for name, p in named.items() if p.is_complex()]:
        raise ValueError(
            f"SHF needs real weights, and these are complex: {', '.join(numbers[:3])}. Hold real and "
            "imaginary parts in a real parameter (..., 2), and make the complex one of it by torch.view_as_complex"
        )
    dtypes = {p.dtype for p in named.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            f"SHF needs all weights in float32 or all in float64, got {', '.join(sorted(map(str, dtypes)))}; "
            f"{LOWER_PRECISION}"
        )
    if len({p.device for p in named.values()}) > 1:
        places = ", ".join(f"{name} -> {p.device}" for name, p in named.items())
        raise ValueError(f"SHF needs all weights on one device, got {places}; move the module by module.to(device)")
