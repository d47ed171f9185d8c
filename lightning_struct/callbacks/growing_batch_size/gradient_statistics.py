"""Gradient statistics of a training step, as a module reports them or as they are measured."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of the last training step's batch, over all processes, for callbacks that choose the next batch.

    A LightningModule offers them by a method ``gradient_statistics() -> GradientStatistics | None`` (None before the
    first step); :class:`~lightning_struct.strategies.SHFOptimization` has it.

    Attributes:
        batch_size: samples in the batch.
        variance: ‖Var‖₁, the sample variance of the per-sample gradients summed over the weights; None where it is not
            defined (samples coupled by batch normalisation, or a batch of one).
        gradient_squared_norm: ‖ḡ‖² of the mean gradient.
        validation_value: validation loss at the new weights; None without validation data.
    """

    batch_size: int
    variance: float | None
    gradient_squared_norm: float
    validation_value: float | None


def relative_variance(statistics: GradientStatistics) -> float:
    """‖Var‖₁/‖ḡ‖²; infinite where the gradient is zero and its variance is not."""
    variance, squared_norm = statistics.variance or 0.0, statistics.gradient_squared_norm
    return variance / squared_norm if squared_norm > 0 else math.inf * variance if variance else 0.0
