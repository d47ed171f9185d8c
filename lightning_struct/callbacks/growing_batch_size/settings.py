"""The arguments of GrowingBatchSize that are values of their own, and the check of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_struct.utilities.checks import check, is_count, is_number

ESTIMATORS = ("auto", "layers", "parts", "steps")


@dataclass(frozen=True)
class ValidationRule:
    """The validation rule of GrowingBatchSize: a batch that grows by a factor while validation stalls.

    It is the second rule of Algorithm 1 in Emirahmetoglu & Stewart (section 4.3). A check that finds the norm test
    satisfied compares the last validation value with the one ``window`` checks before, and multiplies the batch size by
    ``growth`` if the value has fallen by less than ``threshold`` of itself.

    Args:
        monitor: a logged metric, to be minimised; the rule is then applied once after each validation. None: the
            validation value in the module's own statistics, applied in each step; without such values the rule does
            nothing.
        threshold: relative decrease below which validation stalls. Infinite: the batch grows in each check, whatever
            validation says; with an infinite ``theta`` of GrowingBatchSize that is a growth by a constant factor.
        growth: factor of the batch size, finite and at least 1.
        window: checks that the rule looks back, and predictions that the norm test averages: Algorithm 1 has one number
            for both. No size is decided before there are more checks.

    Raises:
        MisconfigurationException: a field is out of range; the message names it.

    Example:
        >>> ValidationRule(monitor="val_loss", growth=1.1)
        ValidationRule(monitor='val_loss', threshold=0.005, growth=1.1, window=5)
    """

    monitor: str | None = None
    threshold: float = 0.005
    growth: float = 1.005
    window: int = 5

    def __post_init__(self) -> None:
        named = self.monitor is None or (isinstance(self.monitor, str) and self.monitor != "")
        check("monitor", self.monitor, named, "the name of a metric, or None")
        check("threshold", self.threshold, is_number(self.threshold), "a number")
        grows = is_number(self.growth) and 1 <= self.growth < math.inf
        check("growth", self.growth, grows, "a finite number >= 1")
        check("window", self.window, is_count(self.window), "a whole number >= 1")


@dataclass(frozen=True)
class NoiseEstimator:
    """The way in which GrowingBatchSize measures the noise of the gradients.

    Args:
        kind: ``"layers"`` by hooks on the layers, ``"parts"`` by differences between the parts of a step (its backward
            passes, of several processes or accumulated batches), ``"steps"`` by differences between consecutive steps;
            ``"auto"`` chooses.
        every_n_steps: optimizer steps between two checks; None: as the ``max_overhead`` of GrowingBatchSize allows, and
            each step if nothing has to be measured.
        probes: of ``"layers"``: number of random projections that estimate, without bias, the gradient norms of layers
            whose exact ones would be expensive: convolutions, and layers of sequences with many positions. None: all
            exact.

    Raises:
        MisconfigurationException: a field is out of range; the message names it.

    Example:
        >>> NoiseEstimator("layers", probes=None)
        NoiseEstimator(kind='layers', every_n_steps=None, probes=None)
    """

    kind: Literal["auto", "layers", "parts", "steps"] = "auto"
    every_n_steps: int | None = None
    probes: int | None = 8

    def __post_init__(self) -> None:
        check_choice("estimator", self.kind, ESTIMATORS)
        check_optional_count("every_n_steps", self.every_n_steps)
        check_optional_count("probes", self.probes)


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Raise MisconfigurationException for an argument that is none of its choices."""
    check(name, value, any(value is c or value == c for c in choices), f"one of {', '.join(map(repr, choices))}")


def check_optional_count(name: str, value: object) -> None:
    """Raise MisconfigurationException for an argument that is neither a whole number from 1 on nor None."""
    check(name, value, value is None or is_count(value), "a whole number >= 1, or None")
