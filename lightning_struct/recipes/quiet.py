"""Messages of other packages that say nothing to whoever runs a recipe, kept out of its output."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_struct.utilities.namespaces import NAMESPACES

WARNINGS = (
    r"The '.*_dataloader' does not have many workers",  # data in memory: workers would only be slower
    r"The number of training batches .* is smaller than the logging interval",
    r"The dirpath has changed",  # a resumed run has a folder of its own
    r".isinstance\(treespec, LeafSpec\). is deprecated",  # inside Lightning
    r"Checkpoint directory .* exists and is not empty",  # the second ModelCheckpoint of a run
    r"The `srun` command is available on your system",
    r"Couldn't infer the batch indices fetched from your dataloader",  # PredictionWriter says what that means
)
LOG_MESSAGES = (
    r"💡 Tip: ",  # Lightning's advice to install other packages
    r"TPU available: False",
    r"HPU available: False",
)
# messages go to that of the one imported last
LOGGERS = tuple(f"{namespace}.utilities.rank_zero" for namespace in NAMESPACES)


@contextmanager
def noise_filtered() -> Iterator[None]:
    """Within it, the messages above are not shown; all others are."""

    def tells(record: logging.LogRecord) -> bool:
        return not any(re.match(pattern, record.getMessage()) for pattern in LOG_MESSAGES)

    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(tells)
    try:
        with warnings.catch_warnings():
            for pattern in WARNINGS:
                warnings.filterwarnings("ignore", pattern)
            # what jsonargparse deprecates and LightningCLI calls
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"lightning\.pytorch\.cli")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(tells)
