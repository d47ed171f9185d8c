"""The rules of size: the batch size that the norm test asks for, and the size of the next batch (Algorithm 1)."""

import math
from collections.abc import Sequence

from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics
from lightning_struct.callbacks.growing_batch_size.settings import ValidationRule
from lightning_struct.functional.layers.gradient_norms import required_batch_size


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
    decided: float
    if average > batch_size:
        decided = average
    elif validation_stalls(validation_values, rule.window, rule.threshold):
        # Algorithm 1 rounds this up. A small batch would then grow by a whole sample at each check, whatever the
        # factor.
        decided = rule.growth * batch_size
    else:
        return batch_size
    return max(batch_size, min(decided, max_batch_size))


def validation_stalls(values: Sequence[float], window: int, threshold: float) -> bool:
    """Whether the last value is not smaller than the one ``window`` before it by ``threshold`` of itself."""
    if threshold == math.inf:
        return True
    if len(values) <= window:
        return False
    # The text of section 4.3 looks four values back, Algorithm 1 five: this is Algorithm 1. It divides by the last
    # value, which may be zero or negative; hence the product, and the absolute value.
    before, now = values[-1 - window], values[-1]
    return before - now < threshold * abs(now)


def predicted_batch_size(
    statistics: GradientStatistics, dataset_size: int | None, theta: float, max_batch_size: int | None
) -> int:
    """Batch size at which the norm test would hold, n̂ of equation 14; 1 without a variance.

    Args:
        statistics: of a step.
        dataset_size: N; None for a stream.
        theta: θ of the norm test.
        max_batch_size: the prediction where the gradient of a stream is zero, for which no batch is large enough; the
            batch size of the step if None.
    """
    if statistics.variance is None:
        return 1
    if statistics.gradient_squared_norm > 0 or dataset_size is not None:
        return required_batch_size(statistics.variance, statistics.gradient_squared_norm, dataset_size, theta)
    return max_batch_size or statistics.batch_size
