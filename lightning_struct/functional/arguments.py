"""What kind of value a user has given for an argument."""

from __future__ import annotations

from numbers import Integral, Real


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
