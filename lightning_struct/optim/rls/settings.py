"""Settings of RLS, and the forms of P as values, which ``RLS(module, form=...)`` takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from lightning_struct.functional.checks import Size, checked, is_real
from lightning_struct.functional.curvature.recursive_least_squares import (
    FullInverse,
    InverseAutocorrelation,
    LowRankInverse,
    RankOneInverse,
    SquareRootInverse,
)
from lightning_struct.functional.layers.registry import plain_name, plain_named_modules

FormName: TypeAlias = Literal["full", "low_rank", "rank1"]

# By default a weight with more inputs has a P of low rank: a product with the full P would cost more than the rest of
# its step.
LARGEST_FULL = 512


@checked
@dataclass(frozen=True)
class LowRankP:
    """P of low rank, 2rd numbers for d inputs; it does not forget.

    See :class:`~lightning_struct.functional.curvature.recursive_least_squares.LowRankInverse`.

    Args:
        rank: r.

    Raises:
        ValueError: ``rank`` is no integer above 0.

    Example:
        >>> LowRankP(rank=16).rank
        16
    """

    rank: Size = 32


Form: TypeAlias = FormName | LowRankP

_POSITIVE: tuple[str, Callable[[Any], bool]] = "> 0", lambda value: value > 0
_NOT_NEGATIVE: tuple[str, Callable[[Any], bool]] = ">= 0", lambda value: value >= 0
# The range of each number, in words and as a predicate.
_RANGES = {
    **dict.fromkeys(("ratio", "gradient_scale", "max_grad_norm", "max_gain"), _POSITIVE),
    **dict.fromkeys(("l1", "weight_decay", "lr"), _NOT_NEGATIVE),
    "forgetting": ("in (0, 1]", lambda value: 0 < value <= 1),
    "momentum": ("in [0, 1)", lambda value: 0 <= value < 1),
}


@dataclass(frozen=True)
class Settings:
    """Settings of :class:`~lightning_struct.optim.RLS`, which documents them.

    Raises:
        ValueError: a number is out of its range or no number, there is no such form of P, or weight decay would leave
            nothing of the weights.
    """

    form: Form | None
    ratio: float
    forgetting: float
    gradient_scale: float | Mapping[str, float]
    momentum: float
    l1: float
    max_grad_norm: float | None
    max_gain: float | None
    weight_decay: float
    lr: float

    def __post_init__(self) -> None:
        for name in (option.name for option in fields(self) if option.name != "form"):
            value = getattr(self, name)
            by_name = name == "gradient_scale" and isinstance(value, Mapping)
            for number in value.values() if by_name else [value]:
                check_number(name, number, may_be_none=name.startswith("max_"))
        self.form_of(0)
        check_decay(self.lr, self.weight_decay)

    def form_of(self, features: int) -> Form:
        """Form of the P of a weight with so many inputs, not counting biases.

        Raises:
            ValueError: there is no such form, or it does not forget.
        """
        by_size: FormName = "low_rank" if features > LARGEST_FULL and self.forgetting == 1 else "full"
        form = by_size if self.form is None else self.form
        if not (isinstance(form, LowRankP) or form in get_args(FormName)):
            raise ValueError(f"form must be 'full', 'low_rank', 'rank1', LowRankP(...) or None, got {form!r}")
        if form == "low_rank":
            form = LowRankP()
        if isinstance(form, LowRankP) and self.forgetting < 1:
            raise ValueError("a P of low rank does not forget: use forgetting=1, or form='full' or 'rank1'")
        return form

    def identity(self, features: int, groups: int, size: int, like: Tensor) -> InverseAutocorrelation:
        """P₀ = I of a weight with so many inputs, ``size`` with biases, in the dtype and on the device of ``like``."""
        form = self.form_of(features)
        if isinstance(form, LowRankP):
            return LowRankInverse.identity(groups, size, like, form.rank)
        if form == "rank1":
            return RankOneInverse.identity(groups, size, like, self.forgetting)
        if self.forgetting < 1:
            return SquareRootInverse.identity(groups, size, like, self.forgetting)
        return FullInverse.identity(groups, size, like)

    def scale_of(self, weight: str) -> float:
        """η of a weight by its name: the value of the longest name above it, or its own; without one 1."""
        if not isinstance(self.gradient_scale, Mapping):
            return float(self.gradient_scale)
        by_name = {plain_name(name): float(value) for name, value in self.gradient_scale.items()}
        parts = weight.split(".")
        above = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        return next((by_name[name] for name in above if name in by_name), 1.0)

    def check_names(self, module: nn.Module) -> None:
        """Raise unless the names of ``gradient_scale`` are modules or parameters of the module.

        Raises:
            ValueError: some are not; they are named.
        """
        names = map(plain_name, self.gradient_scale) if isinstance(self.gradient_scale, Mapping) else ()
        modules = {name for name, _ in plain_named_modules(module)}
        if unknown := {*names} - modules - {plain_name(name) for name, _ in module.named_parameters()}:
            listed = ", ".join(map(repr, sorted(unknown)))
            raise ValueError(f"gradient_scale names {listed}, which are neither modules nor parameters")

    def group_options(self) -> dict[str, Any]:
        """Options of a group of parameters, with η = 1."""
        names = ("lr", "ratio", "momentum", "l1", "weight_decay")
        return {"gradient_scale": 1.0, **{name: getattr(self, name) for name in names}}


def check_decay(lr: float, weight_decay: float) -> None:
    """Raise if weight decay alone would change the signs of all weights, or leave none.

    Raises:
        ValueError: it would.
    """
    if lr * weight_decay >= 1:
        raise ValueError(
            f"lr * weight_decay must be < 1, got lr={float(lr)} and weight_decay={float(weight_decay)}: each step "
            "multiplies the weights by 1 - lr * weight_decay. Lower one of them, or the rates of a scheduler"
        )


def check_number(name: str, value: Any, *, may_be_none: bool = False) -> None:
    """Raise unless the value of a setting is a finite number in the range of that setting.

    Raises:
        ValueError: it is not; the message has its name.
    """
    if value is None and may_be_none:
        return
    expected, holds = _RANGES[name]
    # torch's optimizers take a rate in a tensor
    is_finite = is_real(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
    if not (is_finite and holds(value)):
        takes = ("" if is_finite else "a finite number ") + expected + (", or None" if may_be_none else "")
        raise ValueError(f"{name} must be {takes}, got {value!r}")
