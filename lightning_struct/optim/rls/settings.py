"""Settings of RLS: the ranges of its numbers, and η by the names of modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import nn

from lightning_struct.functional.layers import plain_name, plain_named_modules
from lightning_struct.optim.rls.weights import TrainedWeight

# Of an option: whether a number is in it, and its text.
_Range: TypeAlias = tuple[Callable[[float], bool], str]


def check_options(gradient_scale: float | Mapping[str, float], **options: float | None) -> None:
    """Raise unless the numbers that RLS is made with are in their ranges.

    Raises:
        ValueError: one is not; it is named.
    """
    for scale in gradient_scale.values() if isinstance(gradient_scale, Mapping) else [gradient_scale]:
        _check_range("gradient_scale", scale, scale > 0, "> 0")
    for name, value in options.items():
        holds, expected = _RANGES[name]
        if value is None and name in _OPTIONAL:
            continue
        assert value is not None
        _check_range(name, value, holds(value), expected + (", or None" if name in _OPTIONAL else ""))


def _check_range(name: str, value: float, holds: bool, expected: str) -> None:
    if not (holds and math.isfinite(value)):
        raise ValueError(f"{name} must be {expected}, got {value}")


_POSITIVE: _Range = (lambda value: value > 0, "> 0")
_NOT_NEGATIVE: _Range = (lambda value: value >= 0, ">= 0")
_AT_LEAST_ONE: _Range = (lambda value: value >= 1, ">= 1")
_OPTIONAL = {"max_grad_norm", "max_gain", "block_size", "max_size"}
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


class GradientScales:
    """η by the names of modules and weights.

    Args:
        scale: of all, or a dict of it by the names of modules or weights.
        module: of which they are the names.

    Raises:
        ValueError: a name is none of them.
    """

    def __init__(self, scale: float | Mapping[str, float], module: nn.Module) -> None:
        self._all = None if isinstance(scale, Mapping) else float(scale)
        self._by_name = (
            {plain_name(name): float(value) for name, value in scale.items()} if isinstance(scale, Mapping) else {}
        )
        modules = {name for name, _ in plain_named_modules(module)}
        parameters = {plain_name(name) for name, _ in module.named_parameters()}
        if unknown := self._by_name.keys() - modules - parameters:
            raise ValueError(
                f"gradient_scale names {', '.join(map(repr, sorted(unknown)))}, which are neither modules nor "
                "parameters"
            )

    def of(self, weight: TrainedWeight) -> float:
        """η of a weight: that of the longest name that is above it, or its own."""
        if self._all is not None:
            return self._all
        parts = weight.name.split(".")
        above = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        return next((self._by_name[name] for name in above if name in self._by_name), 1.0)
