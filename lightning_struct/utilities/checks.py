"""Checks of arguments, of packages that come with an extra of this one, and of lengths."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lightning_struct.functional.checks import is_integer
from lightning_struct.utilities.namespaces import MisconfigurationException

EXTRA_OF = {**dict.fromkeys(("jsonargparse", "matplotlib", "rich", "torchvision"), "recipes"), "torchtext": "text"}


def check(name: str, value: object, holds: bool, takes: str) -> None:
    """Raise for a wrong argument.

    Args:
        name: of the argument.
        value: given for it.
        holds: whether the value is right.
        takes: right values of the argument, in words.

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
    for name, number in numbers.items():
        if number is not None:
            check_counts(**{name: number})
            check(name, number, number < 2**31, "below 2³¹")


def is_count(value: object, least: float = 1) -> bool:
    """Whether a value is a whole number from ``least`` on; True and False are none.

    Example:
        >>> [is_count(value) for value in (3, 0, 2.0, True, "3", None)]
        [True, False, False, False, False, False]
    """
    return is_integer(value) and int(value) >= least  # type: ignore[call-overload]


def known_length(sized: Any) -> int | None:
    """``len(sized)``, or None if there is no length.

    Example:
        >>> known_length([1, 2]), known_length(iter([1, 2]))
        (2, None)
    """
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def install_command(package: str) -> str:
    """How one of ``EXTRA_OF`` is installed, in the version that is needed.

    Example:
        >>> install_command("rich")
        "pip install 'lightning-struct[recipes]' (in a checkout: pip install '.[recipes]')"
    """
    extra = EXTRA_OF[package]
    return f"pip install 'lightning-struct[{extra}]' (in a checkout: pip install '.[{extra}]')"


def require(package: str, needed_by: str, remedies: Sequence[str] = ()) -> None:
    """Import an optional package, or raise an error that says how to get it.

    Call it as soon as the need is known, which may be long before the package is used, and just before each import
    statement::

        require("matplotlib", "TrainingCurves")
        from matplotlib.figure import Figure

    Args:
        package: one of ``EXTRA_OF``.
        needed_by: subject of the error message, as the user knows it.
        remedies: other ways out than installing the extra.

    Raises:
        MisconfigurationException: the package is missing, or breaks while it is imported.

    Example:
        >>> require("matplotlib", "TrainingCurves")
    """
    try:
        import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # the last two: built for another version of torch
        ways = [install_command(package), *remedies]
        raise MisconfigurationException(
            f"{needed_by} needs {package}, which cannot be imported ({type(error).__name__}: {error}). "
            + (f"Remedy: {ways[0]}" if len(ways) == 1 else "\n  - ".join(["Remedies:", *ways]))
        ) from error
