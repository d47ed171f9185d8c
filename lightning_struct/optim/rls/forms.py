"""Forms of P as values, which ``RLS(module, form=...)`` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from lightning_struct.functional.checks import is_integer
from lightning_struct.functional.curvature.recursive_least_squares import (
    FullInverse,
    InverseAutocorrelation,
    LowRankInverse,
    RankOneInverse,
    SquareRootInverse,
)

FormName: TypeAlias = Literal["full", "low_rank", "rank1"]

# By default a weight with more inputs has a P of low rank: a product with the full P would cost more than the rest of
# its step.
LARGEST_FULL = 512


class FormOfP(ABC):
    """Base of the forms of P.

    Attributes:
        interval: P is updated once in this many steps, by as much as in all of them.
        by_rows: P is updated by every row of the inputs, not by their mean, and before the step.
    """

    interval: int
    by_rows: ClassVar[bool] = False

    @abstractmethod
    def identity(self, groups: int, size: int, like: Tensor, forgetting: float) -> InverseAutocorrelation:
        """P₀ = I for ``size`` inputs in each group, in the dtype and on the device of ``like``; λ is ``forgetting``."""


@dataclass(frozen=True)
class FullP(FormOfP):
    """The paper's P: d² numbers for d inputs.

    Args:
        interval: P is updated once in this many steps, by as much as in all of them.

    Raises:
        ValueError: ``interval`` is no integer above 0.

    Example:
        >>> FullP(interval=10).interval
        10
    """

    interval: int = 1

    def __post_init__(self) -> None:
        _check_positive(interval=self.interval)

    def identity(self, groups: int, size: int, like: Tensor, forgetting: float) -> InverseAutocorrelation:
        if forgetting < 1:
            return SquareRootInverse.identity(groups, size, like, forgetting)
        return FullInverse.identity(groups, size, like)


@dataclass(frozen=True)
class LowRankP(FormOfP):
    """P of low rank, 2rd numbers for d inputs; it does not forget.

    See :class:`~lightning_struct.functional.curvature.recursive_least_squares.LowRankInverse`.

    Args:
        rank: r.
        interval: P is updated once in this many steps, by as much as in all of them.

    Raises:
        ValueError: ``rank`` or ``interval`` is no integer above 0.

    Example:
        >>> LowRankP(rank=16).rank
        16
    """

    rank: int = 32
    interval: int = 1

    def __post_init__(self) -> None:
        _check_positive(rank=self.rank, interval=self.interval)

    def identity(self, groups: int, size: int, like: Tensor, forgetting: float) -> InverseAutocorrelation:
        return LowRankInverse.identity(groups, size, like, self.rank)


@dataclass(frozen=True)
class RankOneP(FormOfP):
    """The cheapest P: d numbers for d inputs.

    See :class:`~lightning_struct.functional.curvature.recursive_least_squares.RankOneInverse`.

    Args:
        interval: P is updated once in this many steps, by as much as in all of them.

    Raises:
        ValueError: ``interval`` is no integer above 0.

    Example:
        >>> RankOneP().interval
        1
    """

    interval: int = 1

    def __post_init__(self) -> None:
        _check_positive(interval=self.interval)

    def identity(self, groups: int, size: int, like: Tensor, forgetting: float) -> InverseAutocorrelation:
        return RankOneInverse.identity(groups, size, like, forgetting)


class RowByRowP(FullP):
    """The full P of ``RLS.exact``: every row updates it, before the step."""

    by_rows = True


_BY_NAME: dict[str, type[FormOfP]] = {"full": FullP, "low_rank": LowRankP, "rank1": RankOneP}


def form_of_p(form: FormName | FormOfP | None, forgetting: float, features: int) -> FormOfP:
    """The form of P of one weight.

    Args:
        form: as :class:`~lightning_struct.optim.RLS` takes it; None: chosen by ``features``.
        forgetting: λ.
        features: number of inputs of the weight, not counting biases.

    Raises:
        ValueError: there is no such form, or it does not forget.
    """
    if form is None:
        form = "low_rank" if features > LARGEST_FULL and forgetting == 1 else "full"
    chosen = _BY_NAME[form]() if isinstance(form, str) and form in _BY_NAME else form
    if not isinstance(chosen, FormOfP):
        raise ValueError(  # noqa: TRY004, as for any other option
            f"form must be 'full', 'low_rank', 'rank1', FullP(...), LowRankP(...), RankOneP(...) or None, got {form!r}"
        )
    if isinstance(chosen, LowRankP) and forgetting < 1:
        raise ValueError("a P of low rank does not forget: use forgetting=1, or form='full' or 'rank1'")
    return chosen


def _check_positive(**fields: Any) -> None:
    for name, value in fields.items():
        if not is_integer(value):
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value!r}")
