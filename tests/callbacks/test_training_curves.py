import csv
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pytest import approx
from torch.utils.data import DataLoader

from lightning_struct.callbacks import (
    GrowingBatchSize,
    TrainingCurves,
    training_curves,
)
from tests.mixins.helpers import make_trainer


class Descent(L.LightningModule):
    """One weight that halves in each step, and logs itself."""

    def __init__(self, logged=("train_loss", "batch_size", "val_loss")):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(64.0))
        self.logged = logged
        self.fail_at = None

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise KeyboardInterrupt
        for name in {"train_loss", "batch_size", "unheard_of"} & set(self.logged):
            self.log(name, self.weight.detach() if name == "train_loss" else float(len(batch)))
        return 0.25 * self.weight.square()

    def validation_step(self, batch, batch_idx):
        if "val_loss" in self.logged:
            self.log("val_loss", self.weight.detach())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return DataLoader(torch.zeros(12), batch_size=4)

    def val_dataloader(self):
        return DataLoader(torch.zeros(4))


def fit(directory, callback, module=None, *, ckpt_path=None, callbacks=(), **arguments):
    defaults = {"callbacks": [callback, *callbacks], "enable_checkpointing": bool(callbacks)}
    trainer = make_trainer(directory, **(defaults | arguments))
    trainer.fit(module or Descent(), ckpt_path=ckpt_path)
    return trainer


def column(callback, name):
    return [(record["step"], record[name]) for record in callback.records if name in record]


@pytest.mark.parametrize("other_trainer", [True, False])
def test_another_run_begins_with_no_records(tmp_path, other_trainer):
    curves = TrainingCurves()
    trainer = fit(tmp_path, curves)
    first, seconds = len(curves.records), curves.seconds
    if other_trainer:
        fit(tmp_path, curves)
    else:
        trainer.fit_loop.max_epochs *= 2
        trainer.fit(Descent())
    assert len(curves.records) == first and curves.records[0]["seconds"] < seconds


def test_files_are_written_beside_those_of_a_logger_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fit(
        tmp_path,
        TrainingCurves(),
        logger=CSVLogger("~/runs", name="curves", version=0),
        max_steps=1,
        log_every_n_steps=1,
    )
    assert {"metrics.csv", "training_curves.csv"} <= {
        path.name for path in (tmp_path / "runs/curves/version_0").iterdir()
    }
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_found_before_training(tmp_path, folder):
    (tmp_path / "file").touch()
    module = Descent()
    with pytest.raises(MisconfigurationException, match=f"write to .*{folder}, but .*file is no folder: set"):
        make_trainer(tmp_path / folder, callbacks=[TrainingCurves()], num_sanity_val_steps=0).fit(module)
    assert module.weight == 64


def test_a_warning_says_that_nothing_was_logged(tmp_path):
    with pytest.warns(UserWarning, match="TrainingCurves has recorded nothing"):
        fit(tmp_path, TrainingCurves(), Descent(logged=()))


class EpochMean(Descent):
    """Logs the mean of an epoch, and nothing in its steps."""

    def training_step(self, batch, batch_idx):
        self.log("train_loss", self.weight.detach(), on_step=False, on_epoch=True)
        return 0.25 * self.weight.square()


class LoggedAtTheEnd(Descent):
    def training_step(self, batch, batch_idx):
        return 0.25 * self.weight.square()

    def on_train_epoch_end(self):
        self.log("train_loss", self.weight.detach())


class StepsAndMean(Descent):
    def training_step(self, batch, batch_idx):
        self.log("train_loss", self.weight.detach(), on_step=True, on_epoch=True)
        return 0.25 * self.weight.square()


class Seldom(Descent):
    """Logs every other step."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if self.global_step % 2 else 0.25 * self.weight.square()


MEANS = [(64 + 32 + 16) / 3 / 8**epoch for epoch in range(3)]


@pytest.mark.parametrize(
    ("module", "epochs", "every_n_steps", "name", "recorded"),
    [
        (Descent, 2, 1, "train_loss", [(1, 64), (2, 32), (3, 16), (4, 8), (5, 4), (6, 2)]),
        (Descent, 2, 1, "val_loss", [(3, 8), (6, 1)]),
        (EpochMean, 3, 2, "train_loss", [(3 * epoch, approx(mean)) for epoch, mean in enumerate(MEANS, start=1)]),
        (LoggedAtTheEnd, 2, 1, "train_loss", [(3, 8), (6, 1)]),  # of that epoch
        (StepsAndMean, 2, 2, "train_loss", [(2, 32), (4, 8), (6, 2)]),  # the mean is left out
        (Seldom, 2, 1, "train_loss", [(2, 32), (4, 8), (6, 2)]),  # no value is repeated
    ],
)
def test_what_is_logged_is_recorded_once(tmp_path, module, epochs, every_n_steps, name, recorded):
    curves = TrainingCurves(every_n_steps)
    fit(tmp_path, curves, module(), max_epochs=epochs)
    assert column(curves, name) == recorded


class CountingSizes(Descent):
    def __init__(self):
        super().__init__(logged=())
        self.sizes = []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch))
        return super().training_step(batch, batch_idx)


def test_sizes_of_growing_batches_are_those_of_their_steps(tmp_path):
    module, curves, growing = CountingSizes(), TrainingCurves(), GrowingBatchSize(schedule="0:4 12:6")
    trainer = make_trainer(tmp_path, callbacks=[growing, curves], log_every_n_steps=3, max_epochs=3)
    trainer.fit(module)
    recorded = column(curves, "batch_size")
    assert {size for _, size in recorded} == {4, 6} and recorded == [(n, module.sizes[n - 1]) for n, _ in recorded]


def test_older_records_of_training_are_thinned_and_validations_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(training_curves, "MOST_RECORDS", 12)
    curves = TrainingCurves()
    fit(tmp_path, curves, max_epochs=5)
    steps = [step for step, _ in column(curves, "train_loss")]
    assert steps[-3:] == [13, 14, 15] and len(curves.records) <= 12
    assert [step for step, _ in column(curves, "val_loss")] == [3, 6, 9, 12, 15]


def test_validation_outside_of_fit_is_not_recorded(tmp_path):
    curves = TrainingCurves()
    trainer = fit(tmp_path, curves)
    before = len(curves.records)
    trainer.validate(Descent(), verbose=False)
    assert len(curves.records) == before


def test_resumed_run_goes_on_with_records_and_clock(tmp_path):
    first = TrainingCurves()
    fit(tmp_path, first, callbacks=[ModelCheckpoint(tmp_path, save_last=True)])
    resumed = TrainingCurves()
    fit(tmp_path, resumed, max_epochs=3, ckpt_path=tmp_path / "last.ckpt", callbacks=[ModelCheckpoint(tmp_path / "2")])
    assert [step for step, _ in column(resumed, "train_loss")] == list(range(1, 10))
    assert resumed.records[: len(first.records)] == first.records
    assert resumed.records[len(first.records)]["seconds"] >= first.records[-1]["seconds"]


def test_fast_dev_run_writes_nothing(tmp_path):
    fit(tmp_path, TrainingCurves(), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def test_plot_draws_training_dotted_validation_solid_and_batch_sizes(tmp_path):
    curves = TrainingCurves()
    fit(tmp_path, curves)
    _, (errors, sizes) = curves.plot()
    styles = {line.get_label(): (line.get_linestyle(), list(line.get_ydata())) for line in errors.lines}
    assert styles == {"training": (":", [64, 32, 16, 8, 4, 2]), "validation": ("-", [8, 1])}
    assert list(sizes.lines[0].get_ydata()) == [4] * 6 and errors.get_yscale() == "log"


class Accurate(Descent):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_accuracy", 1 / (1 + self.weight.detach()))


def test_accuracies_have_a_panel_of_their_own_below_a_title(tmp_path):
    curves = TrainingCurves()
    fit(tmp_path, curves, Accurate())
    figure, panels = curves.plot()
    assert figure.get_suptitle().startswith("Training: 6 steps in ")
    assert [panel.get_ylabel() for panel in panels] == ["loss", "accuracy", "samples in a batch"]
    assert list(panels[1].lines[0].get_ydata()) == [approx(1 / 9), approx(1 / 2)]


class TwoValidations(Descent):
    """The same with two validation loaders."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("val_loss", (1 + dataloader_idx) * self.weight.detach())
        self.log("val_loss_of_something_else", self.weight.detach())

    def val_dataloader(self):
        return [DataLoader(torch.zeros(4)), DataLoader(torch.zeros(4))]


def test_each_validation_loader_has_a_curve_and_a_column(tmp_path):
    curves = TrainingCurves()
    fit(tmp_path, curves, TwoValidations())
    _, (losses, _) = curves.plot()
    drawn = {line.get_label(): list(line.get_ydata()) for line in losses.lines}
    assert drawn == {"training": [64, 32, 16, 8, 4, 2], "validation 0": [8, 1], "validation 1": [16, 2]}
    assert len({line.get_color() for line in losses.lines}) == 3
    with (tmp_path / "training_curves.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert [name for name, value in last.items() if value] == [
        *("seconds", "step", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1")
    ]


@pytest.mark.parametrize(
    ("losses", "ticks"),
    [
        ([84.1, 81.2, 79.9], ["80", "81", "82", "83", "84"]),
        ([300.0, 4.0], ["5", "10", "20", "50", "100", "200"]),
        ([1.0, 1e-6], None),
    ],
)
def test_ticks_of_losses_are_round_numbers(losses, ticks):
    curves = TrainingCurves()
    curves.records = [{"seconds": 0.1 * step, "step": step, "train_loss": loss} for step, loss in enumerate(losses)]
    figure, (axes,) = curves.plot()
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    labels = axes.yaxis.get_majorticklabels()
    drawn = [label.get_text() for label in labels if low <= label.get_position()[1] <= high]
    assert drawn == ticks or ticks is None and 2 <= len(drawn) <= 12


@pytest.mark.parametrize(("losses", "scale"), [((2.0, -3.0), "linear"), ((-1.0, -3.0), "linear"), ((2.0, 0.0), "log")])
def test_losses_of_which_some_are_negative_have_a_linear_axis(losses, scale):
    curves = TrainingCurves()
    curves.records = [{"seconds": 0.1 * step, "step": step, "val_loss": loss} for step, loss in enumerate(losses)]
    assert curves.plot()[1][0].get_yscale() == scale


def test_steps_between_records_must_be_a_positive_number():
    with pytest.raises(MisconfigurationException, match="every_n_steps must be at least 1, but is 0"):
        TrainingCurves(every_n_steps=0)


def test_a_plot_without_records_is_refused():
    with pytest.raises(MisconfigurationException, match="no records"):
        TrainingCurves().plot()


@pytest.mark.usefixtures("pictures")
def test_the_clock_runs_in_training_alone_and_both_files_are_written(tmp_path):
    curves = TrainingCurves(every_n_steps=3)
    fit(tmp_path, curves, Descent(("train_loss", "unheard_of", "val_loss")))
    seconds, stopped = [record["seconds"] for record in curves.records], curves.seconds
    time.sleep(0.01)
    assert seconds == sorted(seconds) and 0 < seconds[0] and seconds[-1] <= stopped == curves.seconds
    assert {name for record in curves.records for name in record} == {"seconds", "step", "train_loss", "val_loss"}
    assert [step for step, _ in column(curves, "train_loss")] == [3, 6]
    assert curves.paths == [tmp_path / "training_curves.png", tmp_path / "training_curves.csv"]
    assert curves.paths[0].read_bytes().startswith(b"\x89PNG")
    with curves.paths[1].open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in rows if row["val_loss"]] == [8, 1] and len(rows) == len(curves.records)
    (panel,) = curves.plot()[1]  # no batch size was logged
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("seconds of training", "loss")


def test_an_interrupted_run_is_written_and_its_clock_stands_still(tmp_path):
    module, curves = Descent(), TrainingCurves()
    module.fail_at = 4
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, curves, module)
    seconds = curves.seconds
    assert curves.seconds == seconds >= curves.records[-1]["seconds"] > 0
    assert (tmp_path / "training_curves.csv").exists()
