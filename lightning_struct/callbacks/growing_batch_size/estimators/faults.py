"""What keeps an estimator from measuring. None of it ends a training."""

import math


class Unmeasurable(Exception):
    """An estimator cannot measure the gradients of this run. It is raised in all processes alike."""


class NotFinite(Exception):
    """A gradient is NaN or infinite, and the step is not measured. It is raised in all processes alike."""


def check_finite(value: float) -> None:
    """Check a norm of a gradient, before it is used.

    Raises:
        NotFinite: it is NaN or infinite.
    """
    if not math.isfinite(value):
        raise NotFinite
