"""The base of the callbacks that draw, and parts of figures: panels, curves, and the size of an image."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_struct.callbacks.runs import Run
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check, is_count, require
from lightning_struct.utilities.namespaces import Callback, MisconfigurationException

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


class PictureWriter(Callback):
    """Base of the callbacks that draw the module or the course of a fit, and write the pictures when it ends.

    They are written to the log directory by the first process, and not under ``fast_dev_run``: when ``fit`` ends, and,
    unless all processes have to draw together, when Ctrl-C or SIGTERM interrupts it. With another Trainer or module, as
    for the next fold of a cross-validation, the callback starts anew.

    Attributes:
        records: one dict for each record, of a callback that records something; a resumed run continues them.
        paths: files written, empty before.

    Raises:
        MisconfigurationException: at the start of fit, if matplotlib is missing or the log directory cannot be written
            to.
    """

    draws_together = False
    """Whether all processes have to draw, as for a forward pass of sharded weights."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing recorded."""
        self._run = Run()
        self.records: list[dict[str, float]] = []
        self.paths: list[Path] = []
        self._directory: Path | None = None

    def figures(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterable[tuple[str, Figure]]:
        """Names of files and their figures, drawn one by one."""
        raise NotImplementedError

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            require("matplotlib", type(self).__name__)
            if self._run.begins_anew(trainer, pl_module):
                self._begin()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find a folder that cannot be written to before the training; a collective call."""
        directory = log_directory(trainer)
        self._directory = None
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        present = next(folder for folder in (directory, *directory.absolute().parents) if os.path.exists(folder))
        if not present.is_dir() or not os.access(present, os.W_OK):
            problem = "may not be written to" if present.is_dir() else "is no folder"
            raise MisconfigurationException(
                f"Callbacks write to {directory}, but {present} {problem}: set Trainer(default_root_dir=...), or the "
                "logger"
            )
        self._directory = directory

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._run.on_train_start(pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Lightning turns SIGTERM into SystemExit
        if isinstance(exception, KeyboardInterrupt | SystemExit) and not self.draws_together:
            self._write(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"records": [dict(record) for record in self.records]} if self.records else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.records = [dict(record) for record in state_dict["records"]]

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run or not (self._directory or self.draws_together):  # type: ignore[attr-defined]
            return
        self.paths = []
        for name, figure in self.figures(trainer, pl_module):
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
                figure.savefig(self._directory / name, dpi=150)
                self.paths.append(self._directory / name)
