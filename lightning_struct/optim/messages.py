"""What optimizers say once: shown where nobody has set up logging, as Lightning shows its own messages."""

from __future__ import annotations

import logging
import os
import sys


def tell(logger: logging.Logger, message: str) -> None:
    """Log a message at level INFO; or write it to standard error if logging has neither handlers nor levels.

    Of the processes that Lightning starts on a machine, only the first one writes to standard error.
    """
    if logger.hasHandlers() or _has_level(logger):
        logger.info(message)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


def _has_level(logger: logging.Logger) -> bool:
    """Whether a level was set for the logger or one above it; the root logger has one from the start."""
    levels, parent = [logger.level], logger.parent
    while parent is not None and parent.parent is not None:
        levels.append(parent.level)
        parent = parent.parent
    return any(levels)
