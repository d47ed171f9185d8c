"""Checks of values that a user gives."""

import math
from numbers import Integral, Real

from lightning_struct.utilities.namespaces import MisconfigurationException


def check(name: str, value: object, holds: bool, takes: str) -> None:
    """Raise for an argument that is not what it must be.

    Args:
        name: of the argument.
        value: given for it.
        holds: whether the value is right.
        takes: what the argument takes.

    Raises:
        MisconfigurationException: names all three.

    Example:
        >>> check("mode", "min", "min" in ("min", "max"), "'min' or 'max'")
    """
    if not holds:
        raise MisconfigurationException(f"{name} must be {takes}, but is {value!r}")


def check_counts(least: int = 1, /, **numbers: object) -> None:
    """Check whole numbers that are to be at least ``least``, by their names.

    Raises:
        MisconfigurationException: names the first that is not.

    Example:
        >>> check_counts(0, epoch=0)
    """
    for name, number in numbers.items():
        check(name, number, is_count(number, -math.inf), f"a whole number >= {least}")
        check(name, number, is_count(number, least), f"at least {least}")


def check_positive(**numbers: int | None) -> None:
    """Check whole numbers that are to be at least 1, by their names; None is right.

    Raises:
        MisconfigurationException: names the first that is not.

    Example:
        >>> check_positive(batch_size=8, train_size=None)
    """
    check_counts(**{name: number for name, number in numbers.items() if number is not None})


def is_count(value: object, least: float = 1) -> bool:
    """Whether a value is a whole number from ``least`` on; True and False are none.

    Example:
        >>> [is_count(value) for value in (3, 0, 2.0, True, "3", None)]
        [True, False, False, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> bool:
    """Whether a value is a real number; NaN, True and False are none.

    Example:
        >>> [is_number(value) for value in (3, 0.5, math.inf, math.nan, True, "3", None)]
        [True, True, True, False, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
