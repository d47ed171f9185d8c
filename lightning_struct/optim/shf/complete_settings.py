"""Settings of SHF with values for what was left to be chosen: those that mean something with a loss, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from torch import nn

from lightning_struct.functional.layers.gradient_norms import required_batch_size
from lightning_struct.functional.solvers.damping import MAX_DAMPING, levenberg_marquardt
from lightning_struct.functional.solvers.least_squares import RightPreconditioner
from lightning_struct.optim.shf.settings import Settings, damped_space

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class CompleteSettings:
    """What SHF has with every loss; each is described there.

    ``damping``, ``drop``, ``warm_start`` and ``maxiter`` are those of the first step: from then on they are in the
    optimizer's parameter group.

    Raises:
        ValueError: as :class:`Settings`.
    """

    damping: float | None
    drop: float | None
    warm_start: float
    warm_start_growth: float
    max_warm_start: float
    maxiter: int
    theta: float
    dataset_size: int | None
    seed: int

    def __post_init__(self) -> None:
        Settings(**vars(self))  # the same as it could be given, which checks it

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Those of the settings that have a field here; the others have no meaning with the loss."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def predicted_batch_size(self, variance: float | None, gradient_squared: float) -> int | None:
        """n̂ of the norm test, equation (14); None where the variance is, or where the gradient is zero."""
        if variance is None or not gradient_squared > 0.0:
            return None
        return required_batch_size(variance, gradient_squared, self.dataset_size, self.theta)

    def grown_warm_start(self, warm_start: float) -> float:
        """γ of the next step (section 4.5), for that of this one."""
        # The paper's min(1.002 γ, .95) would lower a γ that was given above the bound, as SPRING has it, in the first
        # step. That one stays: the bound is where growth ends.
        return min(warm_start * self.warm_start_growth, max(self.max_warm_start, warm_start))


@dataclass(frozen=True, kw_only=True)
class OutputSettings(CompleteSettings):
    """Settings of SHF for a loss of a module's outputs.

    ``damping`` and its bounds are None where the first step has still to choose them.

    Example:
        >>> from lightning_struct.optim import SHF
        >>> settings = SHF.paper(nn.Linear(2, 2), "mse").settings
        >>> settings.damping, settings.solver, settings.preconditioner
        (10.0, 'lsmr', 'diagonal')
    """

    min_damping: float | None
    max_damping: float | None
    lower: float
    upper: float
    damping_rule: str
    damping_center: str
    damping_space: str | None
    solver: str
    preconditioner: str | RightPreconditioner | None
    scale_maxiter: bool
    miniter: int
    recover: int
    atol: float
    ftol: float
    progress_tolerance: float
    progress_window: int
    return_best: bool
    armijo: float
    l2: float
    backend: str | None
    chunk_size: int | None
    factor_decay: float
    factor_interval: int
    max_factor_size: int | None
    exclude_factors: Sequence[str | nn.Module]
    held_out: float
    curvature_share: float
    single_samples: bool

    @property
    def damped_space(self) -> str:
        """``damping_space``, or where it is not given the one that the other settings allow."""
        return damped_space(self.damping_space, self.solver, self.preconditioner, self.damping_center, self.l2)

    @property
    def damping_bounds(self) -> tuple[float, float]:
        """``min_damping`` and ``max_damping``; where they are still to be chosen, the widest ones."""
        return (
            0.0 if self.min_damping is None else self.min_damping,
            MAX_DAMPING if self.max_damping is None else self.max_damping,
        )

    def adapted_damping(self, damping: float, reduction_ratio: float, drop: float) -> float:
        """λ of the next step by the Levenberg-Marquardt rule (section 4.2)."""
        smallest, largest = self.damping_bounds
        return levenberg_marquardt(
            damping,
            reduction_ratio,
            drop=drop,
            lower=self.lower,
            upper=self.upper,
            min_damping=smallest,
            max_damping=largest,
        )


@dataclass(frozen=True, kw_only=True)
class ResidualSettings(CompleteSettings):
    """Settings of SHF for a module that returns residuals (``loss="least_squares"``).

    ``damping`` is None where the first batch decides about it, and ``solver`` where each batch does. ``drop`` is no
    factor here: None leaves λ alone, and with a number several are tried in each step. ``warm_start_growth`` and
    ``max_warm_start`` belong to a ``warm_start`` that was given; else γ follows what new samples show.

    Example:
        >>> from lightning_struct.optim import SHF
        >>> SHF(nn.Linear(2, 2), "least_squares", maxiter=20).settings.maxiter
        20
    """

    min_damping: float
    max_damping: float
    solver: str | None
    geodesic_acceleration: bool


def check_settings_of_residuals(settings: Settings) -> None:
    """Raise ValueError for settings that have no meaning where a module returns residuals."""
    meaningful = {field.name for field in fields(ResidualSettings)}
    for field in fields(Settings):
        given = getattr(settings, field.name)
        given = tuple(given) if isinstance(given, list) else given  # a command line makes lists of tuples
        if field.name not in meaningful and given != field.default:
            remedy = "leave it out"
            if field.name == "l2":
                remedy = "return √l2 times the weights as a block of one row, torch.cat([...])[None]"
            raise ValueError(f"{field.name}={given!r} has no meaning beside loss='least_squares'; {remedy}")


def check_settings_of_outputs(settings: Settings) -> None:
    """Raise ValueError for settings that another loss than ``"least_squares"`` cannot have."""
    refused = {"solver": ("exact", "choose 'lsmr', 'lsqr' or 'cg'"), "geodesic_acceleration": (True, "leave it out")}
    for name, (value, remedy) in refused.items():
        if getattr(settings, name) == value:
            raise ValueError(f"{name}={value!r} is for loss='least_squares', a module that returns residuals; {remedy}")
