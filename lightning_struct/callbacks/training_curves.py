"""Losses, batch sizes and solver statistics over the seconds of training: recorded, written and drawn."""

from __future__ import annotations

import csv
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_struct.callbacks import pictures
from lightning_struct.callbacks.runs import NewlyLogged
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check_counts, require
from lightning_struct.utilities.namespaces import MisconfigurationException

RECORDED_IN_TRAINING = ("train_loss", "train_accuracy", "batch_size", "damping", "solver_iterations")
RECORDED_IN_VALIDATION = ("val_loss", "val_accuracy")
MOST_RECORDS = 4096
COLUMNS = ("seconds", "step", *RECORDED_IN_TRAINING, *RECORDED_IN_VALIDATION)
PANELS = {"loss": "loss", "accuracy": "accuracy", "batch_size": "samples in a batch"}  # part of a name -> axis

# Lightning's addition to the name of a metric if there are several loaders, before the number of the loader.
_OF_LOADER = "/dataloader_idx_"


class TrainingCurves(pictures.PictureWriter):
    """Records losses, batch sizes and solver statistics over the seconds of training, and draws them at the end.

    After a training step it records ``train_loss``, ``train_accuracy``, ``batch_size``, ``damping`` and
    ``solver_iterations``, if they were logged in it; after an epoch, values that are logged once in an epoch; after a
    validation, ``val_loss`` and ``val_accuracy``, for each loader if there are several, as
    ``val_loss/dataloader_idx_0``. When ``fit`` ends, or is interrupted by Ctrl-C or SIGTERM,
    ``training_curves.csv`` and ``training_curves.png`` are written to the log directory (by the first process, and not
    under ``fast_dev_run``). A resumed run continues the records and the clock of its checkpoint. With another Trainer
    or module, as for the next fold of a cross-validation, the callback begins anew.

    :class:`~lightning_struct.callbacks.GrowingBatchSize` logs its ``batch_size`` every ``log_every_n_steps`` steps of
    the Trainer: put it before this callback, and let ``every_n_steps`` divide that number. Of more than 4096 records
    the older ones are thinned, so that checkpoints stay small.

    The clock starts after the sanity check and runs through validations too. matplotlib is needed, from the start:
    ``pip install matplotlib``.

    Args:
        every_n_steps: training steps between two records; validations and ends of epochs are always recorded.

    Attributes:
        records: one dict for each record, with ``seconds``, ``step`` and the logged values.
        paths: files written, empty before.

    Raises:
        MisconfigurationException: if ``every_n_steps`` is no whole number >= 1; at the start of fit, if matplotlib is
            missing, or the log directory cannot be written to.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(callbacks=[TrainingCurves(every_n_steps=20)], logger=False, accelerator="cpu")
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        check_counts(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        super().__init__()

    def _begin(self) -> None:
        super()._begin()
        self._seconds_before = 0.0
        self._started_at: float | None = None
        self._last_step = -1
        self._newly_logged, self._newly_validated = NewlyLogged(), NewlyLogged()
        self._logged_in_step: set[str] = set()
        self._logged_in_steps_of_epoch: set[str] = set()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including those before a resume."""
        running = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return self._seconds_before + running

    def plot(self) -> tuple[pictures.Figure, list[pictures.Axes]]:
        """Draw the losses over the seconds of training and, if they were logged, accuracies and the batch size.

        Training is dotted, validation solid, as in figures 2 and 3 of Emirahmetoglu & Stewart. The axis of the losses
        is logarithmic, or linear if some are negative.

        Returns:
            The figure, and its axes: of the losses, of the accuracies, of the batch size.

        Raises:
            MisconfigurationException: if nothing has been recorded, or matplotlib is missing.
        """
        require("matplotlib", "TrainingCurves.plot")
        if not self.records:
            raise MisconfigurationException("TrainingCurves has no records: train, and log train_loss or val_loss.")
        drawn = {kind: [name for name in self._recorded if kind in name] for kind in PANELS}
        drawn = {kind: names for kind, names in drawn.items() if names or kind == "loss"}
        figure, axes = pictures.new_figure(len(drawn), 5.5, 4, "TrainingCurves.plot")
        last = self.records[-1]
        figure.suptitle(f"Training: {last['step']:,.0f} steps in {last['seconds']:,.0f} seconds")
        for panel, (kind, names) in zip(axes, drawn.items(), strict=True):
            validations = [name for name in names if name.startswith(RECORDED_IN_VALIDATION)]
            for name in sorted(names, key=lambda name: name.startswith(RECORDED_IN_VALIDATION)):
                style = {"linestyle": ":", "color": "C1", "label": "training"}
                if name in validations:
                    loader, number = name.partition(_OF_LOADER)[2], validations.index(name)
                    color = f"C{number + (number > 0)}"  # C1 is that of training
                    style = {"linestyle": "-", "color": color, "label": f"validation {loader}".rstrip()}
                if kind == "batch_size":
                    style = {"drawstyle": "steps-post"}
                pictures.draw_curve(panel, self.records, "seconds", name, **style)
            panel.set(ylabel=PANELS[kind], xlabel="seconds of training", xlim=(0, None))
            panel.locator_params(axis="x", nbins=6)
            panel.grid(alpha=0.25)
            if kind == "batch_size":
                panel.set_ylim(0, None)
            elif names:
                panel.legend()
        values = [record[name] for record in self.records for name in drawn["loss"] if name in record]
        if any(value > 0 for value in values) and not any(value < 0 for value in values):
            _set_log_scale(axes[0])
        return figure, axes

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._started_at, self._last_step = time.monotonic(), trainer.global_step
        self._newly_logged, self._newly_validated = NewlyLogged(), NewlyLogged()
        self._logged_in_step = set()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record_epoch(trainer)  # values that the module logged in its own on_train_epoch_end
        self._logged_in_steps_of_epoch = set()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._logged_in_step |= self._newly_logged.since_last(trainer, RECORDED_IN_TRAINING)
        self._logged_in_steps_of_epoch |= self._logged_in_step
        step = trainer.global_step
        if step == self._last_step:
            return
        if step % self.every_n_steps == 0:
            self._record(trainer, self._logged_in_step)
        self._last_step, self._logged_in_step = step, set()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record_epoch(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            names = [n for n in trainer.callback_metrics if n.partition(_OF_LOADER)[0] in RECORDED_IN_VALIDATION]
            self._record(trainer, self._newly_validated.since_last(trainer, names))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record_epoch(trainer)
        self._stop_clock()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._directory is not None and not self.records:
            reason = "neither train_loss nor val_loss is logged under these names"
            if trainer.barebones:
                reason = "with Trainer(barebones=True) nothing that is logged is kept"
            rank_zero_warn(f"TrainingCurves has recorded nothing, and writes nothing: {reason}")
        super().on_fit_end(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop_clock()
        super().on_exception(trainer, pl_module, exception)

    def state_dict(self) -> dict[str, Any]:
        return {"records": []} | super().state_dict() | {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._seconds_before = state_dict["seconds"]

    def _stop_clock(self) -> None:
        self._seconds_before, self._started_at = self.seconds, None

    @property
    def _recorded(self) -> list[str]:
        """Names of all recorded values, in the order of their first records."""
        return list(dict.fromkeys(name for record in self.records for name in record))

    def _record_epoch(self, trainer: L.Trainer) -> None:
        """Record the values that are logged once in an epoch, and not in its steps."""
        logged = self._newly_logged.since_last(trainer, RECORDED_IN_TRAINING)
        self._record(trainer, logged - self._logged_in_steps_of_epoch)

    def _record(self, trainer: L.Trainer, names: Collection[str]) -> None:
        values = {name: value.item() for name, value in trainer.callback_metrics.items() if name in names}
        if values:
            self.records.append({"seconds": self.seconds, "step": trainer.global_step, **values})
        while len(self.records) > MOST_RECORDS:
            self.records = _thinned(self.records)

    def figures(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterable[tuple[str, pictures.Figure]]:
        if self.records:
            yield "training_curves.png", self.plot()[0]

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super()._write(trainer, pl_module)
        if self._directory is not None and self.records:
            table = self._directory / "training_curves.csv"
            with table.open("w", newline="") as file:
                writer = csv.DictWriter(file, dict.fromkeys((*COLUMNS, *self._recorded)))
                writer.writeheader()
                writer.writerows(self.records)
            self.paths.append(table)


def _set_log_scale(losses: pictures.Axes) -> None:
    """Make the axis logarithmic, with ticks at 1, 2 and 5 of each decade; fewer or more if that suits the range."""
    from matplotlib.ticker import AutoLocator, LogLocator, StrMethodFormatter

    losses.set_yscale("log", nonpositive="mask")
    low, high = losses.get_ylim()
    for locator in (LogLocator(subs=(1, 2, 5)), LogLocator(), AutoLocator()):
        losses.yaxis.set_major_locator(locator)
        if 2 <= sum(low <= tick <= high for tick in losses.get_yticks()) <= 12:
            break
    losses.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    losses.yaxis.set_minor_formatter("")


def _thinned(records: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Records without half of the older ones of the larger kind: validations, or training.

    Of two neighbours that with more values stays.
    """
    kinds: dict[bool, list[int]] = {True: [], False: []}
    for place, record in enumerate(records):
        kinds[any(name.startswith(RECORDED_IN_VALIDATION) for name in record)].append(place)
    places = max(kinds.values(), key=len)
    older = places[: len(places) // 2]
    pairs = zip(older[::2], older[1::2], strict=False)
    dropped = {min(pair, key=lambda place: len(records[place])) for pair in pairs}
    return [record for place, record in enumerate(records) if place not in dropped]
