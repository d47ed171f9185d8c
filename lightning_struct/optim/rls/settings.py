"""Ranges of the numbers that RLS is made with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_struct.functional.checks import is_integer, is_real

# Of an option: whether a number is in it, and its text.
_Range: TypeAlias = tuple[Callable[[Any], bool], str]


def check_options(gradient_scale: object, **options: object) -> None:
    """Raise unless the numbers that RLS is made with are numbers, and in their ranges.

    Raises:
        ValueError: one is not; it is named.
    """
    for scale in gradient_scale.values() if isinstance(gradient_scale, Mapping) else [gradient_scale]:
        _check_range("gradient_scale", scale, _POSITIVE)
    for name, value in options.items():
        if value is not None or name not in _OPTIONAL:
            _check_range(name, value, _RANGES[name])


def check_decay(lr: float, weight_decay: float) -> None:
    """Raise where weight decay alone would change the signs of all weights, or leave none.

    Raises:
        ValueError: it would.
    """
    if lr * weight_decay >= 1:
        raise ValueError(
            f"lr * weight_decay must be < 1, got lr={float(lr)} and weight_decay={float(weight_decay)}: each step "
            "multiplies the weights by 1 - lr * weight_decay. Lower one of them, or the rates of a scheduler"
        )


def _check_range(name: str, value: Any, taken: _Range) -> None:
    holds, expected = taken
    kind, is_of_kind = ("an integer ", is_integer) if name in _INTEGERS else ("a finite number ", _is_finite)
    right_kind = is_of_kind(value)
    if not (right_kind and holds(value)):
        takes = ("" if right_kind else kind) + expected + (", or None" if name in _OPTIONAL else "")
        raise ValueError(f"{name} must be {takes}, got {value!r}")


def _is_finite(value: Any) -> bool:
    """Whether this is a finite number, which may be in a tensor, as torch's optimizers take a rate."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    else:
        is_number = is_real(value)
    return is_number and math.isfinite(value)


_POSITIVE: _Range = (lambda value: value > 0, "> 0")
_NOT_NEGATIVE: _Range = (lambda value: value >= 0, ">= 0")
_AT_LEAST_ONE: _Range = (lambda value: value >= 1, ">= 1")
_OPTIONAL = {"max_grad_norm", "max_gain", "block_size", "max_size"}
_INTEGERS = {"interval", "rank", "block_size", "max_size"}
_RANGES: dict[str, _Range] = {
    "lr": _NOT_NEGATIVE,
    "ratio": _POSITIVE,
    "forgetting": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "momentum": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "l1": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _POSITIVE,
    "max_gain": _POSITIVE,
    "interval": _AT_LEAST_ONE,
    "rank": _AT_LEAST_ONE,
    "block_size": _POSITIVE,
    "max_size": _NOT_NEGATIVE,
    "regularization": _POSITIVE,
}
