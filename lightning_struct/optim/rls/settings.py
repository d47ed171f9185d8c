"""Settings of RLS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import is_real
from lightning_struct.functional.layers.registry import plain_name, plain_named_modules
from lightning_struct.optim.rls.forms import FormName, FormOfP, form_of_p


def _number(expected: str, holds: Callable[[Any], bool], *, may_be_none: bool = False) -> Any:
    """A field that takes finite numbers for which ``holds``; ``expected`` is the range in words."""
    return field(metadata={"expected": expected, "holds": holds, "may_be_none": may_be_none})


def _positive(*, may_be_none: bool = False) -> Any:
    return _number("> 0", lambda value: value > 0, may_be_none=may_be_none)


def _not_negative() -> Any:
    return _number(">= 0", lambda value: value >= 0)


@dataclass(frozen=True)
class Settings:
    """Settings of :class:`~lightning_struct.optim.RLS`, which documents them.

    Raises:
        ValueError: a number is out of its range or no number, there is no such form of P, or weight decay would leave
            nothing of the weights.
    """

    form: FormName | FormOfP | None
    ratio: float = _positive()
    forgetting: float = _number("in (0, 1]", lambda value: 0 < value <= 1)
    gradient_scale: float | Mapping[str, float] = _positive()
    momentum: float = _number("in [0, 1)", lambda value: 0 <= value < 1)
    l1: float = _not_negative()
    max_grad_norm: float | None = _positive(may_be_none=True)
    max_gain: float | None = _positive(may_be_none=True)
    weight_decay: float = _not_negative()
    lr: float = _not_negative()

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            by_name = option.name == "gradient_scale" and isinstance(value, Mapping)
            for number in value.values() if by_name else [value]:
                _check_number(option.name, number, **option.metadata)
        form_of_p(self.form, self.forgetting, 0)
        check_decay(self.lr, self.weight_decay)

    def form_of(self, features: int) -> FormOfP:
        """Form of the P of a weight with so many inputs, not counting biases."""
        return form_of_p(self.form, self.forgetting, features)

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
            raise ValueError(
                f"gradient_scale names {', '.join(map(repr, sorted(unknown)))}, which are neither modules nor "
                "parameters"
            )

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


def check_positive(name: str, value: Any) -> None:
    """Raise unless this is a finite number above 0.

    Raises:
        ValueError: it is not; the message has its name.
    """
    _check_number(name, value, **_positive().metadata)


def _check_number(
    name: str, value: Any, expected: str = "", holds: Callable[[Any], bool] | None = None, may_be_none: bool = False
) -> None:
    if holds is None or (value is None and may_be_none):
        return
    if isinstance(value, Tensor):  # torch's optimizers take a rate in a tensor
        is_number = value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    else:
        is_number = is_real(value)
    is_finite = is_number and math.isfinite(value)
    if not (is_finite and holds(value)):
        takes = ("" if is_finite else "a finite number ") + expected + (", or None" if may_be_none else "")
        raise ValueError(f"{name} must be {takes}, got {value!r}")
