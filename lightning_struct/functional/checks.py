"""Checks of values at a boundary, the errors that they raise, and warnings."""

from __future__ import annotations

import sys
import warnings
from numbers import Integral, Real

# A warning points at the first caller outside of these.
_PACKAGES = ("lightning_struct", "torch", "lightning", "pytorch_lightning", "contextlib")


class NotFinite(ValueError, FloatingPointError):
    """NaN or infinity in data, weights, outputs or a loss: training has diverged, or something is damaged.

    It is a ``ValueError``, as other refusals of a step are, and a ``FloatingPointError``, as what solvers find amidst
    their products is: by that the command line of the recipes tells it from a defect.
    """


def is_integer(value: object) -> bool:
    """Whether a value is an integer, also one of NumPy; True and False are none.

    Example:
        >>> [is_integer(value) for value in (3, -1, 2.0, True, "3", None)]
        [True, True, False, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a real number, NaN and infinity among them; True and False are none.

    Example:
        >>> [is_real(value) for value in (3, 0.5, float("nan"), True, "3", None)]
        [True, True, True, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def first_line(error: Exception) -> str:
    """Type and message of an error, which may go on for pages."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
