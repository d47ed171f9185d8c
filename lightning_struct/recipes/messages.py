"""Messages of a recipe that is run as a command: an error of its user is one message, not a traceback.

Messages of other packages that say nothing to its user are kept out of the output. If that is no terminal, the progress
of a fit is printed in lines.
"""

import errno
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from traceback import walk_tb
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from lightning_struct.utilities.namespaces import NAMESPACES

INTERRUPTED, TERMINATED = 130, 143  # exit statuses of SIGINT and SIGTERM, as shells have them
LONGEST_SILENCE = 60.0  # seconds between two lines of an epoch
ELSEWHERE = "Make room for it there, or write elsewhere by --trainer.logger.init_args.save_dir=FOLDER"
OF_PLACES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
)
PARTS_OF_LIGHTNING = (
    *(f"{space}.{part}." for space in NAMESPACES for part in ("trainer", "callbacks", "loops", "strategies")),
    *(f"{space}.{part}." for space in NAMESPACES for part in ("loggers", "plugins", "profilers", "accelerators")),
    *("lightning.fabric.", "lightning_fabric."),
)
LAYERS = ("torch.nn.", "torch._tensor", "lightning_struct.nn.")  # the last frame of Unflatten is in the second
NOISE_IN_WARNINGS = (
    r"The '.*_dataloader' does not have many workers",  # data in memory: workers would only be slower
    r"The number of training batches .* is smaller than the logging interval",
    r"The dirpath has changed",  # a resumed run has a folder of its own
    r".isinstance\(treespec, LeafSpec\). is deprecated",  # inside Lightning
    r"Checkpoint directory .* exists and is not empty",  # the second ModelCheckpoint of a run
    r"The `srun` command is available on your system",
    r"Couldn't infer the batch indices fetched from your dataloader",  # PredictionWriter explains it
)
NOISE_IN_LOGS = re.compile(r"💡 Tip: |(TPU|HPU) available: False")  # the first is advice to install other packages
MISFIT = re.compile(r"\b(shapes?|sizes?|channels|dtype)\b")


def run_command(main: Callable[[], Any]) -> None:
    """Run ``main`` as a command.

    Errors that the user can put right, a training that diverges among them, end it with one message and exit status 1,
    and so do a ValueError or a RuntimeError of the Trainer and Lightning's callbacks about their arguments, and errors
    of layers about inputs of another shape or dtype; SIGINT (Ctrl-C) ends it with status 130 and SIGTERM with 143. All
    other errors are defects and keep their traceback.
    """
    sys.path.append("")  # modules of the working directory can be named in options, as under python -m
    if isinstance(sys.stdout, TextIOWrapper):  # no result of a run is lost for a sign that an encoding lacks
        sys.stdout.reconfigure(errors="replace", line_buffering=True)  # a log file is read while it grows
    try:
        main()
    except (MisconfigurationException, FloatingPointError) as error:  # FloatingPointError: NaN or infinity in a step
        sys.exit(f"error: {error}")
    except (ValueError, RuntimeError) as error:
        if type(error) not in (ValueError, RuntimeError):
            raise
        if _raised_in(error, LAYERS) and MISFIT.search(str(error)):
            sys.exit(f"error: The network does not fit the data: {error}. Give it their sizes (--model.network...).")
        if not _raised_in(error, PARTS_OF_LIGHTNING):
            raise
        sys.exit(f"error: {str(error).strip()}")
    except OSError as error:
        if error.errno not in OF_PLACES:
            raise
        path = error.filename2 or error.filename  # of a copy, its target
        place = f": {os.fspath(path)}" if isinstance(path, (str, os.PathLike)) else ""
        limit = ". ulimit -f sets the largest size of a file" if error.errno == errno.EFBIG else ""
        sys.exit(f"error: {os.strerror(error.errno)}{place}{limit}. {ELSEWHERE}.")
    except SIGTERMException:
        sys.exit(TERMINATED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning ends an interrupted run with status 1
            sys.exit(INTERRUPTED)
        raise


def raise_message_of_a_class(error: ValueError) -> None:
    """Raise the message that a model, a data module or a callback has of its arguments, or of a missing package.

    If an argument may be of several types, as ``Optional[Classifier]``, jsonargparse makes a long error of all of them:
    the error that the class has raised is a cause of it.
    """
    of_arguments = _raised_in(error, ("jsonargparse.",))
    cause: BaseException | None = error
    while cause is not None:
        said = isinstance(cause, MisconfigurationException | ImportError)
        if said or (of_arguments and _raised_in(cause, ("lightning_struct.",))):
            raise MisconfigurationException(str(cause)) from cause
        cause = cause.__cause__


def _raised_in(error: BaseException, parts: tuple[str, ...]) -> bool:
    """Whether an error was raised by modules whose names begin with one of ``parts``, not by their callees."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals["__name__"].startswith(parts)


@contextmanager
def noise_filtered() -> Iterator[None]:
    """Within it, the warnings and log messages listed above are not shown; all others are."""

    def passes(record: logging.LogRecord) -> bool:
        return NOISE_IN_LOGS.match(record.getMessage()) is None

    loggers = [logging.getLogger(f"{namespace}.utilities.rank_zero") for namespace in NAMESPACES]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        with warnings.catch_warnings():
            for pattern in NOISE_IN_WARNINGS:
                warnings.filterwarnings("ignore", pattern)
            # deprecated functions of jsonargparse that LightningCLI calls
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"lightning\.pytorch\.cli")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


class EpochLines(ProgressBar):
    """Lines for outputs in which no progress bar can be drawn: one after the first step, each epoch and each minute.

    A line has the epoch, the step, the values of progress bars (losses among them), the samples of a training
    step, and the seconds since the training began.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._began = self._due = 0.0

    def disable(self) -> None:
        """Print nothing from now on, as Lightning asks of all processes but the first."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = self._due = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if time.monotonic() >= self._due:
            self._print_line(f"batch {batch_idx + 1} of {self.total_train_batches}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print_line()

    def _print_line(self, *place: str) -> None:
        now = time.monotonic()
        self._due = now + LONGEST_SILENCE
        if self._enabled:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            batch_size = data.batch_size if hasattr(data, "batch_size") else sum(data.counts.values())
            batch_size = self.trainer.callback_metrics.get("batch_size", batch_size)
            metrics = {**self.trainer.progress_bar_metrics, "batch_size": batch_size}
            values = (f"{name} {float(value):.5g}" for name, value in metrics.items())
            parts = (*place, f"step {self.trainer.global_step}", *values, f"{now - self._began:.1f} s")
            self.print(f"Epoch {self.trainer.current_epoch}: {', '.join(parts)}", flush=True)
