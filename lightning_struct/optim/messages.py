"""What optimizers say: shown where nobody has set up logging, as Lightning shows its own messages."""

from __future__ import annotations

import logging
import os


def show_messages(logger: logging.Logger) -> None:
    """Write the messages of a logger to standard error, from level INFO on, as long as the root logger has no handlers.

    Of the processes that Lightning starts on a machine, only the first one writes.
    """
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not logging.getLogger().handlers and os.environ.get("LOCAL_RANK", "0") == "0")
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
