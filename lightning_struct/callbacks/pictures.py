"""Figures of the callbacks that draw: panels and curves, the size of an image, and the files that are written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check, is_count, require
from lightning_struct.utilities.namespaces import MisconfigurationException

if TYPE_CHECKING:  # also for the callbacks that draw
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A curve of at most so many points shows each of them.
_FEW_POINTS = 20


def new_figure(panels: int, width: float, height: float, needed_by: str) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, each of this size in inches, and its axes.

    Raises:
        MisconfigurationException: matplotlib is missing, which ``needed_by`` needs.
    """
    require("matplotlib", needed_by)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panels * width, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def check_image_size(image_size: object) -> None:
    """Raise MisconfigurationException if a size is neither (height, width) nor None."""
    pair = isinstance(image_size, tuple | list) and len(image_size) == 2 and all(map(is_count, image_size))
    check("image_size", image_size, image_size is None or pair, "(height, width) in whole numbers >= 1, or None")


def height_and_width(count: int, image_size: tuple[int, int] | None, what: str) -> tuple[int, int]:
    """The size of an image of so many pixels: ``image_size``, or that of a square for None.

    Raises:
        MisconfigurationException: the pixels do not make such an image; ``what`` is their name in the plural.
    """
    height, width = image_size or (math.isqrt(count), math.isqrt(count))
    if height * width != count:
        raise MisconfigurationException(
            f"{count} {what} are no image of {height} x {width}: give image_size=(height, width)."
        )
    return height, width


def draw_curve(panel: Axes, records: Sequence[Mapping[str, float]], x: str, y: str, **style: Any) -> None:
    """Draw a value of the records over another one, for those that have it."""
    points = [(record[x], record[y]) for record in records if y in record]
    if points:
        panel.plot(*zip(*points, strict=True), marker="." if len(points) <= _FEW_POINTS else "", **style)


def log_directory(trainer: L.Trainer) -> Path:
    """The folder of a run's files; a collective call."""
    return Path(trainer.log_dir or trainer.default_root_dir).expanduser()  # as loggers read it


def directory_to_write(trainer: L.Trainer) -> Path | None:
    """The same in the process that writes; None in the others, and under ``fast_dev_run``.

    Ask for it at the start of fit, so that a folder that cannot be written to is found before the training.

    Raises:
        MisconfigurationException: files cannot be written there.
    """
    directory = log_directory(trainer)
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    present = next(folder for folder in (directory, *directory.absolute().parents) if os.path.exists(folder))
    if not present.is_dir() or not os.access(present, os.W_OK):
        problem = "may not be written to" if present.is_dir() else "is no folder"
        raise MisconfigurationException(
            f"Callbacks write to {directory}, but {present} {problem}: set Trainer(default_root_dir=...), or the logger"
        )
    return directory


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure to a file, whose folder need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def is_interruption(exception: BaseException) -> bool:
    """Whether Ctrl-C or SIGTERM ended a fit (Lightning turns SIGTERM into ``SystemExit``): no failure."""
    return isinstance(exception, KeyboardInterrupt | SystemExit)


def write_at_end_of_fit(trainer: L.Trainer, name: str, draw: Callable[[], Figure]) -> list[Path]:
    """Draw a trained module in all processes, which gather sharded weights together, and write it in the first one.

    Returns:
        The file; none in other processes, and under ``fast_dev_run``, where nothing is drawn.
    """
    directory = directory_to_write(trainer)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return []
    figure = draw()
    if directory is None:
        return []
    write_picture(figure, directory / name)
    return [directory / name]
