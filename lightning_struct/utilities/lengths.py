"""Lengths of what may have none."""

from typing import Any


def known_length(sized: Any) -> int | None:
    """``len(sized)``, or None where there is no length.

    Example:
        >>> known_length([1, 2]), known_length(iter([1, 2]))
        (2, None)
    """
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
