"""The rules of size: the norm test and the validation rule of Algorithm 1, and sizes set by hand."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics
from lightning_struct.functional.checks import is_real
from lightning_struct.functional.layers.gradient_norms import required_batch_size
from lightning_struct.utilities.checks import check, is_count
from lightning_struct.utilities.namespaces import MisconfigurationException

# Steps after which a size is looked up again in any case.
LONGEST_WAIT = 100

FORM = "SAMPLES:SIZE entries with spaces between them, such as '0:32 50_000:128'"
# Samples may have a fraction before K, M, B (billion, 10⁹) or T (10¹²).
ENTRY = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+(?=[KMBT]))?)([KMBT]?):([0-9]+(?:_[0-9]+)*)")
_FACTORS = {"": 1, "K": 1_000, "M": 1_000_000, "B": 10**9, "T": 10**12}


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
        threshold: relative decrease below which validation stalls.
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
        check("threshold", self.threshold, is_real(self.threshold), "a finite number")
        check("growth", self.growth, is_real(self.growth) and self.growth >= 1, "a finite number >= 1")
        check("window", self.window, is_count(self.window), "a whole number >= 1")


def next_batch_size(
    batch_size: float,
    predictions: Sequence[int],
    validation_values: Sequence[float],
    *,
    max_batch_size: float,
    validation: ValidationRule | None = None,
) -> float:
    """Size of the next batch (Emirahmetoglu & Stewart, Algorithm 1).

    The mean of the last ``window`` predictions, rounded up, if that is larger than n; else ``growth`` times n, if the
    validation value has fallen by less than ``threshold`` of itself; else n.

    Args:
        batch_size: n >= 1, a real number: the loaders get a rounded size, the decided one is not rounded.
        predictions: n̂ of the checks so far, the last one last. There is no decision before there are more than
            ``window``.
        validation_values: f_val of the checks so far; the last one is compared with the one ``window`` before it, if
            there is one.
        max_batch_size: n_max. A batch that is larger already stays as it is.
        validation: window, threshold and growth; None: those of ``ValidationRule()``.

    Returns:
        At least n, and at most n_max or n, whichever is larger.

    Example:
        >>> next_batch_size(10, [12, 20, 30, 40, 50, 60], [], max_batch_size=100)
        40
        >>> stalls = [1.0] * 6
        >>> next_batch_size(16, [5] * 6, stalls, max_batch_size=1000, validation=ValidationRule(growth=1.03125))
        16.5
    """
    rule = validation or ValidationRule()
    if len(predictions) <= rule.window:
        return batch_size
    average = math.ceil(sum(predictions[-rule.window :]) / rule.window)
    stalls = False
    if len(validation_values) > rule.window:
        # The text of section 4.3 looks four values back, Algorithm 1 five: this is Algorithm 1. It divides by the last
        # value, which may be zero or negative; hence the product, and the absolute value.
        before, now = validation_values[-1 - rule.window], validation_values[-1]
        stalls = before - now < rule.threshold * abs(now)
    # Algorithm 1 rounds the product up. A small batch would then grow by a whole sample at each check, whatever the
    # factor.
    decided = average if average > batch_size else rule.growth * batch_size if stalls else batch_size
    return max(batch_size, min(decided, max_batch_size))


def predicted_batch_size(
    statistics: GradientStatistics, dataset_size: int | None, theta: float, max_batch_size: int | None
) -> int:
    """Batch size at which the norm test would hold, n̂ of equation 14; 1 without a variance.

    Args:
        statistics: of a step.
        dataset_size: N; None for a stream.
        theta: θ of the norm test.
        max_batch_size: the prediction if the gradient of a stream is zero, for which no batch is large enough; the
            batch size of the step if None.
    """
    if statistics.variance is None:
        return 1
    if statistics.gradient_squared_norm > 0 or dataset_size is not None:
        return required_batch_size(statistics.variance, statistics.gradient_squared_norm, dataset_size, theta)
    return max_batch_size or statistics.batch_size


@dataclass(frozen=True)
class SampleSchedule:
    """Batch sizes by the samples seen in training.

    Attributes:
        entries: pairs of samples seen and the batch size from there on, the samples increasing.

    Example:
        >>> schedule = SampleSchedule.parse("0:32 50_000:128")
        >>> schedule.batch_size(49_999), schedule.batch_size(50_000)
        (32, 128)
    """

    entries: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str, max_batch_size: int | None = None) -> SampleSchedule:
        """Read a schedule from its text, entries ``SAMPLES:SIZE`` with spaces between them.

        Args:
            text: such as ``"0:32 50_000:128"``, or ``"0:32 50K:128 1.5M:512"``, with K, M, B, T for thousands to 10¹².
            max_batch_size: largest size that is allowed.

        Raises:
            MisconfigurationException: an entry that cannot be read, a size below 1 or above ``max_batch_size``, samples
                that do not increase; the message quotes the entry and its place.
        """
        if not isinstance(text, str):
            raise MisconfigurationException(f"schedule must be a string of {FORM}, but is {text!r}")
        entries = []
        for number, word in enumerate(re.finditer(r"\S+", text), start=1):
            place = f"schedule={text!r}: entry {number}, {word[0]!r} (at character {word.start() + 1}),"
            match = ENTRY.fullmatch(word[0])
            if match is None:
                raise MisconfigurationException(f"{place} cannot be read: a schedule is {FORM}")
            samples, size = int(Decimal(match[1]) * _FACTORS[match[2]]), int(match[3])
            if size < 1:
                raise MisconfigurationException(f"{place} has a batch size below 1")
            if max_batch_size is not None and size > max_batch_size:
                raise MisconfigurationException(
                    f"{place} has a batch size above max_batch_size={max_batch_size}: lower it, or raise the limit"
                )
            entries.append((samples, size))
            if any(later[0] <= before[0] for before, later in pairwise(entries)):
                raise MisconfigurationException(f"{place} does not come after the {entries[-2][0]} samples before it")
        if not entries:
            raise MisconfigurationException(f"schedule={text!r} is empty: a schedule is {FORM}")
        return cls(tuple(entries))

    def batch_size(self, samples: int) -> int | None:
        """Size of a batch that begins after so many samples; None before the first entry."""
        number = bisect_right(self.entries, samples, key=lambda entry: entry[0])
        return self.entries[number - 1][1] if number else None

    def wait(self, samples: int, batch_size: float) -> float:
        """Steps after which the size is to be looked up again; infinite after the last entry.

        Args:
            samples: seen in training.
            batch_size: of a step. As long as those to come are not more than twice as large on average, the next entry
                is not missed; else it is seen at most ``LONGEST_WAIT`` steps late.

        Example:
            >>> schedule = SampleSchedule.parse("0:32 50_000:128")
            >>> [schedule.wait(samples, 32) for samples in (0, 48_000, 49_990, 50_000)]
            [100, 31, 1, inf]
        """
        number = bisect_right(self.entries, samples, key=lambda entry: entry[0])
        if number == len(self.entries):
            return math.inf
        return min(max(int((self.entries[number][0] - samples) / (2 * batch_size)), 1), LONGEST_WAIT)
