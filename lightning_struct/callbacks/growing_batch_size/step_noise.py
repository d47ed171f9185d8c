"""Whether a larger batch has made the steps quieter, as it does unless the loss is summed over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics

# Measurements on either side of a change of size that are compared, by their medians.
MEASUREMENTS = 5

# Smaller factors of the size are lost in the noise of the measurements.
SMALLEST_FACTOR = 1.5


class StepNoise:
    """Compares the noise of the steps, tr Σ/n, before and after the batch has grown.

    If the loss is an average over the n samples, k times as large a batch divides tr Σ/n by k. If it is a sum, the
    gradient grows with the batch, and tr Σ/n is multiplied by k: such growth makes longer steps, and not quieter ones.
    The limit is between the two: that the noise does not fall.

    Example:
        >>> noise = StepNoise()
        >>> for size in (8, 16):
        ...     noise.restart()
        ...     for _ in range(MEASUREMENTS):
        ...         noise.update(GradientStatistics(size, float(size**2), 1.0, None))
        >>> noise.sums, noise.before
        (True, 8)
    """

    def __init__(self) -> None:
        self._before: list[tuple[int, float]] = []
        self._now: list[tuple[int, float]] = []

    @property
    def before(self) -> int | None:
        """The size before the last change; None where too little was measured then."""
        return _medians(self._before)[0] if self._before else None

    @property
    def sums(self) -> bool:
        """Whether the last growth has enlarged the gradients."""
        if not self._before or len(self._now) < MEASUREMENTS:
            return False
        (size, noise), (larger, noise_now) = _medians(self._before), _medians(self._now)
        return larger >= SMALLEST_FACTOR * size and noise_now > noise > 0

    def update(self, statistics: GradientStatistics) -> None:
        """Take in the statistics of a step, which have a variance."""
        assert statistics.variance is not None
        of_step = (statistics.batch_size, statistics.variance / statistics.batch_size)
        self._now = [*self._now, of_step][-MEASUREMENTS:]

    def restart(self) -> None:
        """The batch has another size from now on."""
        if self._now:  # else it was told already, before a checkpoint
            self._before, self._now = (self._now if len(self._now) == MEASUREMENTS else []), []

    def state_dict(self) -> dict[str, Any]:
        return {"before": list(self._before), "now": list(self._now)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._now = list(state["before"]), list(state["now"])


def _medians(measured: Sequence[tuple[int, float]]) -> tuple[int, float]:
    sizes, noises = zip(*measured, strict=True)
    return int(median(sizes)), median(noises)
