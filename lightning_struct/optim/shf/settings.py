"""Options of SHF: the small values that tune it, and all that is in force as one value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import Tensor

from lightning_struct.functional.checks import is_extended, is_integer, is_real
from lightning_struct.functional.jacobian.gauss_newton import BACKENDS
from lightning_struct.functional.layers.gradient_norms import required_batch_size
from lightning_struct.functional.solvers.damping import MAX_DAMPING, reduction_ratio_rule
from lightning_struct.functional.solvers.least_squares import RightPreconditioner

if TYPE_CHECKING:
    from typing_extensions import Self

# Default of a field that is left to be chosen, if None has another meaning there.
AUTO: Final = "auto"
# γ grows no further (section 4.5).
_LARGEST_WARM_START = 0.95


def is_damping(value: Any) -> bool:
    """Whether a value is a λ: finite and positive."""
    is_number = isinstance(value, Tensor) and value.dim() < 2 and value.numel() == 1 and not value.is_meta
    value = value.item() if is_number else value
    return is_real(value) and value > 0


def _is_positive(value: Any) -> bool:
    return is_integer(value) and value >= 1


class Choice:
    """Base of the values that tune an option of SHF.

    A field whose default is None or ``"auto"`` is left to be chosen unless it is given. The base is no dataclass, so
    that LightningCLI writes the class of a value into its configurations (``class_path``).
    """

    def is_unset(self, name: str) -> bool:
        """Whether a field is not given, to be chosen."""
        default = getattr(type(self), name)
        return default in (None, AUTO) and getattr(self, name) == default

    def completed(self, other: Self) -> Self:
        """This value, with the fields of another one of its class for those that are left to be chosen.

        Example:
            >>> LSMR(maxiter=7).completed(LSMR(maxiter=150, scale_maxiter=True)).maxiter
            7
        """
        value: Any = self
        left = [field.name for field in fields(value) if self.is_unset(field.name)]
        return replace(value, **{name: getattr(other, name) for name in left})

    def _check(self, names: str, rule: str, holds: Callable[[Any], bool]) -> None:
        for name in names.split():
            value = getattr(self, name)
            if not self.is_unset(name) and not holds(value):
                raise ValueError(f"{type(self).__name__}: {name} must be {rule}, got {value!r}")


@dataclass(frozen=True)
class Damping(Choice):
    """Base of the damping rules: the fields that all of them have, see :class:`LevenbergMarquardt`."""

    initial: float | None = None
    drop: float | Literal["auto"] | None = AUTO
    lower: float = 0.25
    minimum: float | None = None
    maximum: float | None = None
    center: Literal["start", "origin"] = "start"

    def __post_init__(self) -> None:
        self._check("initial", "a finite number > 0", is_damping)
        self._check("drop", "a number in (0, 1], None or 'auto'", lambda v: v is None or (is_real(v) and 0 < v <= 1))
        self._check("lower", "a finite number", is_real)
        self._check("minimum", "a finite number >= 0", lambda v: is_real(v) and v >= 0)
        self._check("maximum", "a number > 0 and >= minimum", lambda v: is_extended(v) and 0 < v >= self.bounds[0])
        self._check("center", "'start' or 'origin'", lambda v: v in ("start", "origin"))

    @property
    def bounds(self) -> tuple[float, float]:
        """``minimum`` and ``maximum``; the widest ones if they are still to be chosen."""
        return self.minimum or 0.0, MAX_DAMPING if self.maximum is None else self.maximum

    def adapted(self, damping: float, reduction_ratio: float, drop: float) -> float:
        """λ of the next step."""
        smallest, largest = self.bounds
        return reduction_ratio_rule(
            damping,
            reduction_ratio,
            drop=drop,
            lower=self.lower,
            upper=getattr(self, "upper", math.inf),
            min_damping=smallest,
            max_damping=largest,
        )


@dataclass(frozen=True)
class LevenbergMarquardt(Damping):
    """Damping λ by ρ, the true reduction of the loss over the predicted one (the paper's rule, section 4.2).

    With residuals (``loss="least_squares"``) each step searches λ by factors from the one before, for the longest step
    with ρ >= .075, unless ``drop`` is None; ``lower``, ``upper`` and ``center`` have no meaning then.

    Args:
        initial: λ₁ > 0; the model is damped by λ². Chosen: 1.5 times the square root of the largest eigenvalue of the
            Gauss-Newton matrix of the first batch; with residuals a tenth of the largest singular value.
        drop: factor of λ if ρ > ``upper``, and divisor if ρ < ``lower``; in (0, 1]. None leaves λ alone. The paper's
            .99; chosen .85.
        lower: ρ below which λ rises.
        minimum: lower bound on λ. The paper's 0; chosen: λ₁ times the square root of the dtype's epsilon.
        maximum: upper bound on λ. 1e9 (the paper has no bound); chosen: 1,000 λ₁.
        center: ``"start"``: λ²‖d - d0‖² (Algorithm 6); ``"origin"``: λ²‖d‖² (equation (18)).
        upper: ρ above which λ falls.
        acceleration: with residuals, whether each step is corrected for their curvature.

    Raises:
        ValueError: a field of another type or out of range.

    Example:
        >>> LevenbergMarquardt(initial=0.0)
        Traceback (most recent call last):
        ...
        ValueError: LevenbergMarquardt: initial must be a finite number > 0, got 0.0
    """

    upper: float = 0.75
    acceleration: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("upper", "a number >= lower", lambda v: is_extended(v) and v >= self.lower)
        self._check("acceleration", "True or False", lambda v: isinstance(v, bool))


@dataclass(frozen=True)
class NextBatch(Damping):
    """Damping by how much of the gain of a step the next batch shows (not in the paper).

    See :func:`~lightning_struct.functional.solvers.damping.next_batch_rule`. Steps that fit the noise of their batch
    are shortened. λ falls if the next batch confirms full steps, or if short ones fit little of their own batch, and
    rises if these fit much of it, or if ρ < ``lower``. A step that raises the loss of the next batch by more than a
    tenth, and by more than it lowered its own, is taken back.

    Args:
        initial, lower, minimum, maximum, center: as for :class:`LevenbergMarquardt`.
        drop: the factor by which λ falls and rises, in (0, 1]. None leaves λ alone.

    Raises:
        ValueError: a field of another type or out of range.

    Example:
        >>> NextBatch(initial=2.0).bounds
        (0.0, 1000000000.0)
    """

    def adapted(self, damping: float, reduction_ratio: float, drop: float) -> float:
        """λ of the next step as far as ρ decides about it: the next batch decides about its fall."""
        return max(super().adapted(damping, reduction_ratio, drop), damping)


@dataclass(frozen=True)
class _Iterations(Choice):
    maxiter: int | None = None
    scale_maxiter: bool | None = None

    def __post_init__(self) -> None:
        self._check("maxiter", "an integer >= 1", _is_positive)
        self._check("scale_maxiter", "True or False", lambda v: isinstance(v, bool))


@dataclass(frozen=True)
class LSMR(_Iterations):
    """The solver of Algorithm 6. With residuals it has no other field than ``maxiter``.

    Args:
        maxiter: bound on the iterations. The paper's 150; chosen 20, without Kronecker factors 50.
        scale_maxiter: let ``maxiter`` grow in proportion to the batch size, rounded up in each step. The paper's: yes;
            chosen: no.
        atol: it stops when ‖Aᵀr‖ <= atol ‖A‖ ‖r‖.
        ftol: it stops when the validation loss (see :meth:`SHF.set_validation`) falls by less than this share of itself
            per iteration.
        miniter: first iteration at which the validation loss may end a solve.
        recover: number of iterations in which the validation loss may fall below its minimum again.
        damping_space: ``"y"``: the damping is on the preconditioned direction (Algorithm 6); ``"x"``: on the direction
            itself. If not given, ``"y"`` unless there is ``l2``, Kronecker factors, or a preconditioner object with
            damping around the origin, which allow ``"x"`` only.

    Raises:
        ValueError: a field of another type or out of range.

    Example:
        >>> LSMR(maxiter=20).maxiter
        20
    """

    atol: float = 1e-8
    ftol: float = 1e-7
    miniter: int = 50
    recover: int = 100
    damping_space: Literal["x", "y"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("atol ftol", "a finite number >= 0", lambda v: is_real(v) and v >= 0)
        self._check("miniter recover", "an integer >= 0", lambda v: is_integer(v) and v >= 0)
        self._check("damping_space", "'x', 'y' or None", lambda v: v in ("x", "y"))


@dataclass(frozen=True)
class CG(_Iterations):
    """Conjugate gradients with the stopping rule and the backtracking over iterates of Martens (2010).

    Not for residuals, whose LSMR has the same Krylov space for all λ.

    Args:
        maxiter, scale_maxiter: as for :class:`LSMR`.
        progress_tolerance: ε of the rule, see :func:`~lightning_struct.functional.conjugate_gradient`. With λ₁ given
            5e-4; chosen .05, and up to .3 when steps are shortened, since noise need not be fitted.
        progress_window: fewest iterations that the rule looks back. With λ₁ given 10; chosen 1.
        curvature_share: share of the samples of a batch, in (0, 1], on which the curvature is measured (its first
            ones): in the products with J, the preconditioner and the Kronecker factors. Loss and gradient use all
            samples (Byrd et al. 2011).

    Raises:
        ValueError: a field of another type or out of range.

    Example:
        >>> CG(maxiter=50).curvature_share
        1.0
    """

    progress_tolerance: float | None = None
    progress_window: int | None = None
    curvature_share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("progress_tolerance", "a finite number >= 0", lambda v: is_real(v) and v >= 0)
        self._check("progress_window", "an integer >= 1", _is_positive)
        self._check("curvature_share", "a number in (0, 1]", lambda v: is_real(v) and 0 < v <= 1)


@dataclass(frozen=True)
class Exact(Choice):
    """A dense factorisation of the shorter side of J, for ``loss="mse"`` and for residuals (``"least_squares"``).

    Its steps are corrected for the curvature of the residuals. Options without a meaning for these are refused.

    Example:
        >>> Exact() == Exact()
        True
    """


@dataclass(frozen=True)
class Kronecker(Choice):
    """The layers' Kronecker factors, averaged over steps and damped by μ² = λ² + l2 (not in the paper).

    :meth:`SHF.summary` lists them for each parameter.

    Args:
        decay: weight of the old value in the running average of the factors, in [0, 1).
        interval: steps from one update of the factors, and of their Cholesky factors, to the next; the Cholesky factors
            are also made anew if λ has grown by more than half. With λ₁ given 1; chosen from their sizes, to 10.
        max_size: a factor with more rows is kept as its diagonal; None: no bound, as with λ₁ given. Chosen: 4,096, or
            as many as fit into memory, and as in a state that is loaded.

    Raises:
        ValueError: a field of another type or out of range.

    Example:
        >>> Kronecker(interval=10).decay
        0.8
    """

    decay: float = 0.8
    interval: int | None = None
    max_size: int | Literal["auto"] | None = AUTO

    def __post_init__(self) -> None:
        self._check("decay", "a number in [0, 1)", lambda v: is_real(v) and 0 <= v < 1)
        self._check("interval", "an integer >= 1", _is_positive)
        self._check("max_size", "an integer >= 1, None or 'auto'", lambda v: v is None or _is_positive(v))


@dataclass(frozen=True)
class WarmStart(Choice):
    """Start of the solver at d0 = γ d of the last step (section 4.5).

    Args:
        initial: γ₁ in [0, 1); 0 starts the solver at zero. The paper's .7; chosen .9; with residuals 0.
        growth: γ is multiplied by it after each step, up to .95. The paper's 1.002; chosen 1, with residuals the
            paper's.

    Raises:
        ValueError: a field of another type or out of range.

    Example:
        >>> WarmStart(0.5, growth=1.5).grown(0.5)
        0.75
    """

    initial: float | None = None
    growth: float | None = None

    def __post_init__(self) -> None:
        self._check("initial", "a number in [0, 1)", lambda v: is_real(v) and 0 <= v < 1)
        self._check("growth", "a finite number >= 1", lambda v: is_real(v) and v >= 1)

    def grown(self, warm_start: float) -> float:
        """γ of the next step, for that of this one."""
        assert self.growth is not None
        # The paper's min(1.002 γ, .95) would lower a γ that was given above the bound, as SPRING has it, in the first
        # step. That one stays: the bound is where growth ends.
        return min(warm_start * self.growth, max(_LARGEST_WARM_START, warm_start))


DAMPINGS = {"levenberg_marquardt": LevenbergMarquardt, "next_batch": NextBatch}
SOLVERS = {"lsmr": LSMR, "cg": CG, "exact": Exact}
PRECONDITIONERS = ("diagonal", "diagonal_sum", "fisher")


def _by_class(*values: Choice) -> dict[type, Any]:
    return {type(value): value for value in values}


# The paper's settings by their classes; with λ₁ they take the place of all that is not given.
PAPER: Final = _by_class(
    LevenbergMarquardt(drop=0.99, minimum=0.0, maximum=MAX_DAMPING),
    NextBatch(drop=0.99, minimum=0.0, maximum=MAX_DAMPING),
    LSMR(maxiter=150, scale_maxiter=True),
    CG(maxiter=150, scale_maxiter=True, progress_tolerance=5e-4, progress_window=10),
    Exact(),
    Kronecker(interval=1, max_size=None),
    WarmStart(initial=0.7, growth=1.002),
)


def _chosen(maxiter: int) -> dict[type, Any]:
    """The settings that take the place of the paper's without λ₁."""
    return _by_class(
        LevenbergMarquardt(drop=0.85),
        NextBatch(drop=0.85),
        LSMR(maxiter=maxiter, scale_maxiter=False),
        CG(maxiter=maxiter, scale_maxiter=False, progress_tolerance=0.05, progress_window=1),
        Kronecker(),
        WarmStart(initial=0.9, growth=1.0),
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of an SHF as values, see there; with :meth:`for_outputs` and :meth:`for_residuals` all that is in force.

    Raises:
        ValueError: an option of another type or out of range, or two that exclude each other.
    """

    damping: LevenbergMarquardt | NextBatch
    solver: LSMR | CG | Exact | None
    preconditioner: str | Kronecker | RightPreconditioner | None
    warm_start: WarmStart
    l2: float
    theta: float
    dataset_size: int | None
    backend: str | None
    chunk_size: int | None
    seed: int

    def __post_init__(self) -> None:
        names = _listed(AUTO, *PRECONDITIONERS, "kronecker")
        takes = f"one of {names}, a Kronecker, None, or an object with solve and solve_transpose"
        self._check("preconditioner", takes, _is_preconditioner)
        self._check("l2", "a finite number >= 0", lambda v: is_real(v) and v >= 0)
        self._check("theta", "a number > 0", lambda v: is_extended(v) and v > 0)
        self._check("dataset_size chunk_size", "an integer >= 1, or None", lambda v: v is None or _is_positive(v))
        self._check("backend", f"one of {_listed(*BACKENDS, None)}", lambda v: v in (None, *BACKENDS))
        self._check("seed", "an integer", is_integer)
        if isinstance(self.solver, LSMR) and self.solver.damping_space == "y" and self._damps_x_only:
            raise ValueError(
                "damping_space='y' is possible without l2 only, not with Kronecker factors, and with a preconditioner "
                "object only around the start; leave it out"
            )

    def _check(self, names: str, rule: str, holds: Callable[[Any], bool]) -> None:
        for name in names.split():
            if not holds(getattr(self, name)):
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    @property
    def is_of_paper(self) -> bool:
        """Whether omitted settings are the paper's: λ₁ is given."""
        return self.damping.initial is not None

    @property
    def is_unset(self) -> bool:
        """Whether all that decides about the steps of a loss of outputs is left to be chosen."""
        others = (self.damping, self.solver, self.warm_start)
        return not self._of_outputs and others == (NextBatch(), None, WarmStart())

    @property
    def _of_outputs(self) -> dict[str, Any]:
        """Options that are given and have no meaning for residuals."""
        defaults = {"preconditioner": AUTO, "l2": 0.0, "backend": None, "chunk_size": None}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    @property
    def maxiter(self) -> int:
        """Bound on the solver's iterations in the first step; the paper's if the solver is not chosen or has none."""
        solver: Any = self.solver
        return PAPER[LSMR].maxiter if solver is None or isinstance(solver, Exact) else solver.maxiter

    @property
    def damping_space(self) -> str:
        """Space of the damping with LSMR: the given one, or the one that the other options allow."""
        given = self.solver.damping_space if isinstance(self.solver, LSMR) else None
        return given or ("x" if self._damps_x_only else "y")

    @property
    def _damps_x_only(self) -> bool:
        # Damping on y around another point than the start needs C itself; an object has only its inverse.
        given = self.preconditioner
        is_object = given is not None and not isinstance(given, str | Kronecker)
        off_start = self.damping.center == "origin" and is_object
        return self.l2 > 0 or off_start or isinstance(given, Kronecker)

    def for_outputs(self) -> Settings:
        """These settings for a loss of outputs, completed but for λ₁, its bounds and sizes of the Kronecker factors.

        With λ₁ given, omitted settings are the paper's. Else it is chosen: conjugate gradients with Kronecker
        factors, few iterations, and the damping rule of the next batch.

        Raises:
            ValueError: the solver is for residuals.
        """
        solver: Any = self.solver or (LSMR() if self.is_of_paper else CG())
        if isinstance(solver, Exact):
            raise ValueError(  # noqa: TRY004
                "solver='exact' is for loss='mse', and for loss='least_squares', a module that returns residuals; "
                "choose 'lsmr' or 'cg'"
            )
        preconditioner: Any = self.preconditioner
        if isinstance(preconditioner, str) and preconditioner == AUTO:
            of_y = isinstance(solver, LSMR) and solver.damping_space == "y"  # impossible with Kronecker factors
            preconditioner = "diagonal" if self.is_of_paper or of_y else Kronecker()
        maxiter = 20 if isinstance(preconditioner, Kronecker) else 50
        defaults = PAPER if self.is_of_paper else _chosen(maxiter)
        damping: Any = self.damping
        return replace(
            self,
            damping=damping.completed(defaults[type(damping)]),
            solver=solver.completed(defaults[type(solver)]),
            preconditioner=(
                preconditioner.completed(defaults[Kronecker])
                if isinstance(preconditioner, Kronecker)
                else preconditioner
            ),
            warm_start=self.warm_start.completed(defaults[WarmStart]),
        )

    def with_first_damping(self, damping: float, epsilon: float) -> Settings:
        """These settings with λ₁ and the bounds that follow from it, if they were not given.

        Below λ₁ √ε rounding is larger than the addition of the damping; above 1,000 λ₁ nothing moves.
        """
        rule: Any = self.damping
        chosen = type(rule)(damping, minimum=damping * math.sqrt(epsilon), maximum=1e3 * damping)
        return replace(self, damping=rule.completed(chosen))

    def for_residuals(self) -> Settings:
        """These settings for a module that returns residuals, completed but for λ₁ and the solver.

        Raises:
            ValueError: an option that has no meaning there.
        """
        damping = self.damping
        remedies = {
            "l2": "return √l2 times the weights as a block of one row, torch.cat([...])[None]",
            "solver": "choose 'lsmr' or 'exact', or leave it out",
        }
        refused = self._of_outputs
        if isinstance(damping, NextBatch):
            refused["damping"] = damping
        if isinstance(self.solver, CG):
            refused["solver"] = "cg"
        meaningful = ("initial", "drop", "minimum", "maximum", "acceleration", "maxiter")
        for value in (damping, self.solver or Exact()):
            for field in fields(value):
                if field.name not in meaningful and getattr(value, field.name) != field.default:
                    refused[f"{type(value).__name__}.{field.name}"] = getattr(value, field.name)
        for name, given in refused.items():
            remedy = remedies.get(name, "leave it out")
            beside = "loss='least_squares' or solver='exact'"
            raise ValueError(f"{name}={given!r} has no meaning beside {beside}; {remedy}")
        return replace(
            self,
            damping=damping.completed(PAPER[LevenbergMarquardt]),
            solver=None if self.solver is None else self.solver.completed(PAPER[type(self.solver)]),
            preconditioner=None,
            warm_start=self.warm_start.completed(WarmStart(0.0, PAPER[WarmStart].growth)),
        )

    def predicted_batch_size(self, variance: float | None, gradient_squared: float) -> int | None:
        """n̂ of the norm test, equation (14); None if the variance is, or if the gradient is zero."""
        if variance is None or not gradient_squared > 0.0:
            return None
        return required_batch_size(variance, gradient_squared, self.dataset_size, self.theta)


def damping_value(given: Any, default: LevenbergMarquardt | NextBatch) -> LevenbergMarquardt | NextBatch:
    """The value for ``damping``: a number is λ₁ of Levenberg and Marquardt's rule; ``default`` for None.

    Raises:
        ValueError: neither a number nor a name or a value of a rule.
    """
    if is_real(given) or isinstance(given, Tensor):
        return LevenbergMarquardt(initial=float(given))
    return _value(given, "damping", DAMPINGS, "a number, ") or default


def solver_value(given: Any) -> LSMR | CG | Exact | None:
    """The value for ``solver``.

    Raises:
        ValueError: neither a name nor a value of a solver.
    """
    return _value(given, "solver", SOLVERS)


def preconditioner_value(given: Any) -> Any:
    """The value for ``preconditioner``, which :class:`Settings` checks."""
    return Kronecker() if isinstance(given, str) and given == "kronecker" else given


def warm_start_value(given: Any) -> WarmStart:
    """The value for ``warm_start``: a number is γ₁.

    Raises:
        ValueError: neither a number nor a WarmStart.
    """
    if given is None or is_real(given):
        return WarmStart(initial=given)
    return _value(given, "warm_start", {}, "a number, a WarmStart, ", WarmStart)


def name_of(value: LevenbergMarquardt | NextBatch | LSMR | CG | Exact | None) -> str:
    """The string that chooses a rule of the damping or a solver."""
    return next(name for name, kind in (DAMPINGS | SOLVERS).items() if type(value) is kind)


def _value(given: Any, option: str, classes: dict[str, Any], numbers: str = "", *others: type) -> Any:
    if given is None or isinstance(given, (*classes.values(), *others)):
        return given
    if isinstance(given, str) and given in classes:
        return classes[given]()
    values = "".join(f"{name!r}, {kind.__name__}(...), " for name, kind in classes.items())
    raise ValueError(f"{option} must be one of: {numbers}{values}None; got {given!r}")


def _is_preconditioner(given: Any) -> bool:
    if isinstance(given, str):
        return given in (*PRECONDITIONERS, AUTO)
    is_object = hasattr(given, "solve") and hasattr(given, "solve_transpose")
    return given is None or isinstance(given, Kronecker) or is_object


def _listed(*values: Any) -> str:
    return ", ".join(map(repr, values))
