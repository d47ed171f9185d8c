"""What optimizers say: once, where nobody has set up logging too, as Lightning shows its own messages; and warnings."""

from __future__ import annotations

import logging
import os
import sys
import warnings

# A warning points at none of these, but at what calls them.
_PACKAGES = ("lightning_struct", "torch", "lightning", "pytorch_lightning")


def tell(logger: logging.Logger, message: str) -> None:
    """Log a message at level INFO; or write it to standard error if logging has neither handlers nor levels.

    Of the processes that Lightning starts on a machine, only the first one writes to standard error.
    """
    if logger.hasHandlers() or _has_level(logger):
        logger.info(message)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _has_level(logger: logging.Logger) -> bool:
    """Whether a level was set for the logger or one above it; the root logger has one from the start."""
    levels, parent = [logger.level], logger.parent
    while parent is not None and parent.parent is not None:
        levels.append(parent.level)
        parent = parent.parent
    return any(levels)
