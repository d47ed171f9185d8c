"""The gradient noise scale, averaged over measurements."""

import math

from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics

# Weight of what was measured before, in each measurement.
DECAY = 0.95


class NoiseScale:
    """Exponential averages of tr Σ and ‖G‖², and their ratio, the gradient noise scale.

    Averaged are both, and not the ratio, whose mean over noisy measurements is another (McCandlish et al. 2018,
    appendix A.1). ‖G‖² of the loss is measured without bias by ‖ḡ‖² - tr Σ/n, where ḡ is the gradient of n samples.

    Example:
        >>> noise = NoiseScale()
        >>> noise.update(GradientStatistics(8, variance=16.0, gradient_squared_norm=4.0, validation_value=None))
        >>> noise.variance, noise.gradient_squared_norm, noise.value
        (16.0, 2.0, 8.0)
    """

    def __init__(self) -> None:
        self._weight = self._variance = self._squared_norm = 0.0

    def update(self, statistics: GradientStatistics) -> None:
        """Take in the statistics of a step, which have a variance."""
        variance, squared_norm = statistics.variance, statistics.gradient_squared_norm
        assert variance is not None
        self._weight += (1 - DECAY) * (1 - self._weight)
        self._variance += (1 - DECAY) * (variance - self._variance)
        self._squared_norm += (1 - DECAY) * (squared_norm - variance / statistics.batch_size - self._squared_norm)

    @property
    def variance(self) -> float:
        """tr Σ, of the gradients of single samples; NaN before the first measurement."""
        return self._variance / self._weight if self._weight else math.nan

    @property
    def gradient_squared_norm(self) -> float:
        """‖G‖² of the loss; 0 where noise makes it negative."""
        return max(self._squared_norm / self._weight, 0.0) if self._weight else math.nan

    @property
    def value(self) -> float:
        """tr Σ/‖G‖², in samples; infinite where nothing but noise was measured."""
        if self.gradient_squared_norm == 0:
            return math.inf
        return self.variance / self.gradient_squared_norm

    def statistics(self, batch_size: int) -> GradientStatistics:
        """The averages, as if they had been measured in a gradient without noise."""
        return GradientStatistics(batch_size, self.variance, self.gradient_squared_norm, None)

    def state_dict(self) -> dict[str, float]:
        return {"weight": self._weight, "variance": self._variance, "squared_norm": self._squared_norm}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._weight, self._variance, self._squared_norm = state["weight"], state["variance"], state["squared_norm"]
