"""The end of a recipe that is run as a command: what its user can put right is one message, not a traceback."""

import errno
import os
import re
import sys
from collections.abc import Callable
from io import TextIOWrapper
from traceback import walk_tb
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from lightning_struct.utilities.namespaces import NAMESPACES

INTERRUPTED, TERMINATED = 130, 143  # exit statuses of SIGINT and SIGTERM, as shells have them
ELSEWHERE = "write elsewhere by --trainer.logger.init_args.save_dir=FOLDER"
REMEDIES = {
    errno.ENOSPC: f"Free some space there, or {ELSEWHERE}",
    errno.EDQUOT: f"Free some space there, or {ELSEWHERE}",
    errno.EROFS: f"Nothing can be written there: {ELSEWHERE}",
    errno.EACCES: f"Make it accessible; results can be written elsewhere: {ELSEWHERE}",
    errno.EPERM: f"Make it accessible; results can be written elsewhere: {ELSEWHERE}",
    errno.ENOTDIR: f"A file stands where a folder is needed: move it away, or {ELSEWHERE}",
    errno.EEXIST: f"A file stands where a folder is needed: move it away, or {ELSEWHERE}",
    errno.EISDIR: "A folder stands where a file is needed: move it away",
}
PARTS_OF_LIGHTNING = (
    *(
        f"{namespace}.{part}."
        for namespace in NAMESPACES
        for part in ("trainer", "callbacks", "loops", "strategies", "loggers", "plugins", "profilers", "accelerators")
    ),
    *("lightning.fabric.", "lightning_fabric."),
)
LAYERS = ("torch.nn.", "torch._tensor", "lightning_struct.nn.")  # the last frame of Unflatten is in the second
MISFIT = re.compile(r"\b(shapes?|sizes?|channels|dtype)\b")


def run_command(main: Callable[[], Any]) -> None:
    """Run ``main`` as a command.

    Errors that the user can put right, a training that diverges among them, end it with one message and exit status 1,
    and so does what the Trainer and Lightning's callbacks say of their arguments by a ValueError or a RuntimeError, and
    what a layer says of inputs of another shape or dtype;
    SIGINT (Ctrl-C) ends it with status 130 and SIGTERM with 143. All other errors are defects and keep their traceback.
    """
    sys.path.append("")  # what a user has in the working directory can be named in options, as under python -m
    if isinstance(sys.stdout, TextIOWrapper):  # no result of a run is lost for a sign that an encoding lacks
        sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except (MisconfigurationException, FloatingPointError) as error:  # the latter: NaN or infinity in a step
        sys.exit(f"error: {error}")
    except (ValueError, RuntimeError) as error:
        if _said_by(error, LAYERS) and MISFIT.search(str(error)):
            sys.exit(f"error: The network does not fit the data: {error}. Give it their sizes (--model.network...).")
        if not _said_by(error, PARTS_OF_LIGHTNING):
            raise
        sys.exit(f"error: {str(error).strip()}")
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        path = error.filename2 or error.filename  # of a copy, the place that it goes to
        place = f": {os.fspath(path)}" if isinstance(path, (str, os.PathLike)) else ""
        sys.exit(f"error: {os.strerror(error.errno)}{place}. {REMEDIES[error.errno]}.")
    except SIGTERMException:
        sys.exit(TERMINATED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning ends an interrupted run with status 1
            sys.exit(INTERRUPTED)
        raise


def _said_by(error: Exception, parts: tuple[str, ...]) -> bool:
    """Whether the error was raised by modules whose names begin with one of ``parts``, not by what they call."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return type(error) in (ValueError, RuntimeError) and frame.f_globals["__name__"].startswith(parts)
