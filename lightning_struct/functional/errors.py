"""How errors of others are told."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """Type and message of an error, which may go on for pages."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
