"""The noise of a gradient: statistics of a step, reported by a module or measured, and their averages."""

import math
from dataclasses import dataclass

# Weight of the earlier measurements in the averages, in each measurement.
DECAY = 0.95


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of the last training step's batch, over all processes, for callbacks that choose the next batch.

    A LightningModule offers them by a method ``gradient_statistics() -> GradientStatistics | None`` (None before the
    first step); :class:`~lightning_struct.mixins.SHFOptimization` has it.

    Attributes:
        batch_size: samples in the batch.
        variance: ‖Var‖₁, the sample variance of the per-sample gradients summed over the weights; None if it is not
            defined (samples coupled by batch normalisation, or a batch of one).
        gradient_squared_norm: ‖ḡ‖² of the mean gradient.
        validation_value: validation loss at the new weights; None without validation data.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([[1.0, 2.0], [3.0, 2.0]])  # of two samples, in two weights
        >>> GradientStatistics(
        ...     batch_size=len(gradients),
        ...     variance=gradients.var(dim=0).sum().item(),
        ...     gradient_squared_norm=gradients.mean(dim=0).square().sum().item(),
        ...     validation_value=None,
        ... )
        GradientStatistics(batch_size=2, variance=2.0, gradient_squared_norm=8.0, validation_value=None)
    """

    batch_size: int
    variance: float | None
    gradient_squared_norm: float
    validation_value: float | None


def relative_variance(statistics: GradientStatistics) -> float:
    """‖Var‖₁/‖ḡ‖²; infinite if the gradient is zero and its variance is not."""
    variance, squared_norm = statistics.variance or 0.0, statistics.gradient_squared_norm
    return variance / squared_norm if squared_norm > 0 else math.inf * variance if variance else 0.0


def statistics_of_parts(of_part: float, of_whole: float, parts: int, samples: int) -> GradientStatistics:
    """Statistics from the gradients of equal parts of a batch and their mean (McCandlish et al. 2018, appendix A.1).

    Args:
        of_part: mean of ‖g_b‖² over the parts.
        of_whole: ‖g_B‖² of their mean.
        parts: B/b, two at least.
        samples: B, in all parts together.

    Example:
        >>> statistics_of_parts(of_part=6.0, of_whole=4.0, parts=2, samples=8)
        GradientStatistics(batch_size=8, variance=16.0, gradient_squared_norm=4.0, validation_value=None)
    """
    # E‖g_b‖² - E‖g_B‖² = tr Σ (1/b - 1/B); of parts that are alike, rounding may make it negative
    variance = max(of_part - of_whole, 0.0) * samples / (parts - 1)
    return GradientStatistics(samples, variance, of_whole, None)


@dataclass
class NoiseScale:
    """Exponential averages of tr Σ and ‖G‖², and their ratio, the gradient noise scale.

    Its fields are its state: the weight of the measurements so far, and both sums by these weights.

    Both are averaged, instead of their ratio, because noise biases the mean of ratios (McCandlish et al. 2018,
    appendix A.1). ‖G‖² of the loss is measured without bias by ‖ḡ‖² - tr Σ/n, where ḡ is the gradient of n samples.

    Example:
        >>> noise = NoiseScale()
        >>> noise.update(GradientStatistics(8, variance=16.0, gradient_squared_norm=4.0, validation_value=None))
        >>> noise.variance, noise.gradient_squared_norm, noise.value
        (16.0, 2.0, 8.0)
    """

    weight: float = 0.0
    variance_sum: float = 0.0
    squared_norm_sum: float = 0.0

    def update(self, statistics: GradientStatistics) -> None:
        """Take in the statistics of a step, which have a variance."""
        variance, squared_norm = statistics.variance, statistics.gradient_squared_norm
        assert variance is not None
        self.weight += (1 - DECAY) * (1 - self.weight)
        self.variance_sum += (1 - DECAY) * (variance - self.variance_sum)
        self.squared_norm_sum += (1 - DECAY) * (squared_norm - variance / statistics.batch_size - self.squared_norm_sum)

    @property
    def variance(self) -> float:
        """tr Σ, of the gradients of single samples; NaN before the first measurement."""
        return self.variance_sum / self.weight if self.weight else math.nan

    @property
    def gradient_squared_norm(self) -> float:
        """‖G‖² of the loss; 0 if noise makes it negative."""
        return max(self.squared_norm_sum / self.weight, 0.0) if self.weight else math.nan

    @property
    def value(self) -> float:
        """tr Σ/‖G‖², in samples; infinite if nothing but noise was measured."""
        return math.inf if self.gradient_squared_norm == 0 else self.variance / self.gradient_squared_norm

    def statistics(self, batch_size: int) -> GradientStatistics:
        """The averages, as if they had been measured in a gradient without noise."""
        return GradientStatistics(batch_size, self.variance, self.gradient_squared_norm, None)
