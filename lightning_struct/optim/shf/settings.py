"""Settings of SHF as they are given: a value that checks itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch import Tensor, nn

from lightning_struct.functional.checks import is_integer, is_real
from lightning_struct.functional.jacobian.gauss_newton import BACKENDS
from lightning_struct.functional.solvers.damping import MAX_DAMPING, check_levenberg_marquardt
from lightning_struct.functional.solvers.least_squares import RightPreconditioner

SOLVERS = ("lsmr", "lsqr", "cg", "exact")
PRECONDITIONERS = ("diagonal", "diagonal_sum", "fisher", "kronecker")
DAMPING_RULES = ("levenberg_marquardt", "next_batch")
# What says that a setting is left to be chosen where None has a meaning of its own; elsewhere None says so.
AUTO: Final = "auto"
# The paper's settings, with which all goes on as it is described there; what is not given is taken from here once λ₁
# is.
PAPER: dict[str, Any] = {
    "drop": 0.99,
    "min_damping": 0.0,
    "max_damping": MAX_DAMPING,  # the paper has no bound
    "damping_rule": "levenberg_marquardt",
    "solver": "lsmr",
    "preconditioner": "diagonal",
    "warm_start": 0.7,
    "warm_start_growth": 1.002,
    "maxiter": 150,
    "scale_maxiter": True,
    "progress_tolerance": 5e-4,
    "progress_window": 10,
    "factor_interval": 1,
    "max_factor_size": None,
    "single_samples": True,
}
_INTEGERS = (
    *("maxiter", "miniter", "recover", "progress_window", "dataset_size", "chunk_size", "factor_interval"),
    *("max_factor_size", "seed"),
)
_NUMBERS = (
    *("damping", "drop", "lower", "upper", "min_damping", "max_damping", "warm_start", "warm_start_growth"),
    *("max_warm_start", "atol", "ftol", "progress_tolerance", "armijo", "l2", "theta", "factor_decay", "held_out"),
    "curvature_share",
)
_SWITCHES = ("scale_maxiter", "return_best", "single_samples", "geodesic_acceleration")
# Those that take None, although it is not their default.
_MAY_BE_NONE = ("drop", "max_factor_size")


@dataclass(frozen=True)
class Settings:
    """What :class:`~lightning_struct.optim.SHF` is given: its keyword arguments, which are described there.

    Those that are None or ``"auto"`` by default are left to be chosen. With values for them, and without those that
    have no meaning with its loss, they are an optimizer's ``settings``: :class:`OutputSettings` or
    :class:`ResidualSettings`.

    Raises:
        ValueError: a setting of another type or out of range, or two that exclude each other. The message names them.

    Example:
        >>> Settings(damping=10.0).is_left("solver")
        True
        >>> Settings(damping=0.0)
        Traceback (most recent call last):
        ...
        ValueError: damping must be finite and > 0, got 0.0
    """

    damping: float | None = None
    drop: float | Literal["auto"] | None = "auto"
    lower: float = 0.25
    upper: float = 0.75
    min_damping: float | None = None
    max_damping: float | None = None
    damping_rule: Literal["levenberg_marquardt", "next_batch"] | None = None
    solver: Literal["lsmr", "lsqr", "cg", "exact"] | None = None
    preconditioner: Literal["auto", "diagonal", "diagonal_sum", "fisher", "kronecker"] | RightPreconditioner | None = (
        "auto"
    )
    damping_center: Literal["start", "origin"] = "start"
    damping_space: Literal["x", "y"] | None = None
    warm_start: float | None = None
    warm_start_growth: float | None = None
    max_warm_start: float = 0.95
    maxiter: int | None = None
    scale_maxiter: bool | None = None
    miniter: int = 50
    recover: int = 100
    atol: float = 1e-8
    ftol: float = 1e-7
    progress_tolerance: float | None = None
    progress_window: int | None = None
    return_best: bool = False
    armijo: float = 1e-4
    l2: float = 0.0
    theta: float = 0.5
    dataset_size: int | None = None
    backend: Literal["layer_rules", "linearize", "double_backward"] | None = None
    chunk_size: int | None = None
    factor_decay: float = 0.8
    factor_interval: int | None = None
    max_factor_size: int | Literal["auto"] | None = "auto"
    exclude_factors: Sequence[str | nn.Module] = ()
    held_out: float = 0.0
    curvature_share: float = 1.0
    single_samples: bool | None = None
    seed: int = 0
    geodesic_acceleration: bool | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.damping is not None:
            check_damping(self.damping)
        self._check_choices()
        self._check_ranges()
        self._check_combinations()

    def is_left(self, name: str) -> bool:
        """Whether a setting is left to be chosen."""
        value = getattr(self, name)
        return isinstance(value, str) and value == AUTO if getattr(Settings, name) == AUTO else value is None

    def filled(self, values: Mapping[str, Any]) -> Settings:
        """These settings, with those of the values that are left to be chosen.

        Example:
            >>> Settings(solver="cg").filled({"solver": "lsmr", "maxiter": 7}).maxiter
            7
        """
        return replace(self, **{name: value for name, value in values.items() if self.is_left(name)})

    def _check_types(self) -> None:
        for name in (*_INTEGERS, *_NUMBERS, *_SWITCHES):
            self._check_type(name, getattr(self, name))

    def _check_type(self, name: str, value: Any) -> None:
        default = getattr(Settings, name)
        takes: list[str | None] = [AUTO] if default == AUTO else []
        if default is None or name in _MAY_BE_NONE:
            takes.append(None)
        if value is None or isinstance(value, str):
            holds = value in takes
        elif name in _SWITCHES:
            holds = isinstance(value, bool)
        else:
            holds = is_integer(value) if name in _INTEGERS else is_real(value) or isinstance(value, Tensor)
        if not holds:
            kind = "True or False" if name in _SWITCHES else "an integer" if name in _INTEGERS else "a number"
            raise ValueError(f"{name} must be {' or '.join([kind, *map(repr, takes)])}, got {value!r}")

    def _check_choices(self) -> None:
        _check_choice("solver", self.solver, (*SOLVERS, None))
        _check_choice("damping_rule", self.damping_rule, (*DAMPING_RULES, None))
        _check_choice("damping_center", self.damping_center, ("start", "origin"))
        _check_choice("damping_space", self.damping_space, (None, "y", "x"))
        _check_choice("backend", self.backend, (None, *BACKENDS))
        given = self.preconditioner
        if isinstance(given, str):
            _check_choice("preconditioner", given, (*PRECONDITIONERS, AUTO, None))
        elif given is not None and not (hasattr(given, "solve") and hasattr(given, "solve_transpose")):
            raise ValueError(f"a preconditioner object needs solve and solve_transpose, got {given!r}")

    def _check_ranges(self) -> None:
        check_levenberg_marquardt(
            1.0 if self.drop is None or self.drop == AUTO else self.drop,
            self.lower,
            self.upper,
            0.0 if self.min_damping is None else self.min_damping,
            MAX_DAMPING if self.max_damping is None else self.max_damping,
        )
        self._check("l2 atol ftol miniter recover", ">= 0", lambda value: value >= 0)
        self._check("progress_tolerance", ">= 0", lambda value: value is None or value >= 0)
        self._check("maxiter factor_interval progress_window", ">= 1", lambda value: value is None or value >= 1)
        self._check("factor_decay held_out", "in [0, 1)", lambda value: 0 <= value < 1)
        self._check(
            "dataset_size chunk_size max_factor_size", ">= 1 or None", lambda value: value in (None, AUTO) or value >= 1
        )
        self._check("curvature_share", "in (0, 1]", lambda value: 0 < value <= 1)
        self._check("armijo", "in (0, 1)", lambda value: 0 < value < 1)
        self._check("theta", "> 0", lambda value: value > 0)

    def _check(self, names: str, rule: str, holds: Callable[[Any], bool]) -> None:
        for name in names.split():
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{name} must be {rule}, got {value}")

    def _check_combinations(self) -> None:
        if self.curvature_share < 1 and self.solver not in (None, "cg"):
            raise ValueError(
                f"curvature_share={self.curvature_share} needs solver='cg': {self.solver} solves a least-squares "
                "problem, in which gradient and curvature come from the same samples"
            )
        warm_start = 0.0 if self.warm_start is None else self.warm_start
        growth = 1.0 if self.warm_start_growth is None else self.warm_start_growth
        if not (0 <= warm_start < 1 and 0 <= self.max_warm_start < 1 and growth >= 1):
            raise ValueError(
                "warm_start and max_warm_start must be in [0, 1) and warm_start_growth >= 1, got "
                f"{self.warm_start}, {self.max_warm_start} and {self.warm_start_growth}"
            )
        damped_space(self.damping_space, self.solver, self.preconditioner, self.damping_center, self.l2)


def damped_space(given: str | None, solver: str | None, preconditioner: Any, damping_center: str, l2: float) -> str:
    """``damping_space``, or where it is not given the one that the other settings allow.

    Raises:
        ValueError: it is given, and they do not allow it.
    """
    # Damping on y around another point than the start needs C itself; an object has only its inverse.
    is_object = preconditioner is not None and not isinstance(preconditioner, str)
    off_start = damping_center == "origin" and is_object
    x_only = solver == "cg" or l2 > 0 or off_start or preconditioner == "kronecker"
    if given == "y" and x_only:
        raise ValueError(
            "damping_space='y' is possible with LSMR and LSQR only, without l2, not with Kronecker factors, and "
            "with a preconditioner object only around the start; leave it out"
        )
    return given or ("x" if x_only else "y")


def check_damping(damping: float) -> None:
    """Raise ValueError for a λ that is not finite and positive."""
    if not (damping > 0 and math.isfinite(damping)):
        raise ValueError(f"damping must be finite and > 0, got {damping}")


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
