"""Batches that change size within a running epoch, in all the ways in which a Trainer reads them."""

import logging
from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, DistributedSampler

from lightning_struct import GrowingBatchSize
from tests.callbacks.growing_batch_size.projects import SizedStream, Stream, arguments
from tests.callbacks.growing_batch_size.readers import (
    WARNINGS_OF_READERS,
    Batches,
    Growing,
    Reader,
    Windows,
    checkpoints,
    fit,
    loader,
    numbers,
)
from tests.mixins.helpers import make_trainer

pytestmark = WARNINGS_OF_READERS


# The epoch


class Normalized(Reader):
    def __init__(self):
        super().__init__()
        self.normalization = torch.nn.BatchNorm1d(1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"max_device_batch_size": 5}, {"mode": "accumulate"}])
def test_the_pass_for_averaged_batch_normalisation_trains_nothing(tmp_path, is_first, options):
    class Counting(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            steps.append(trainer.global_step)

    steps, averaging = [], StochasticWeightAveraging(1e-6, swa_epoch_start=1)
    growing = Growing([20] * 99, **options)
    callbacks = [growing, averaging] if is_first else [averaging, growing]
    trainer = make_trainer(tmp_path, callbacks=[*callbacks, Counting()], max_epochs=2, num_sanity_val_steps=0)
    module = Normalized()
    trainer.fit(module, loader())
    assert numbers(module.epochs[-1]) == list(range(40))
    assert trainer.global_step - steps[-1] == 1  # Lightning's own, with its last batch
    assert trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_progress_bar_ends_where_the_epoch_ends(tmp_path, bar):
    class Looking(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            shown = trainer.progress_bar_callback
            total = shown.train_progress_bar.total
            totals.append(total)

    totals = []
    fit(tmp_path, loader(), [4, 8, 16], callbacks=[bar(), Looking()], enable_progress_bar=True, max_epochs=2)
    assert totals == [10, 6, 5, 5, 5, 3, 3, 3]


@pytest.mark.parametrize(
    ("script", "sizes", "lengths"),
    [
        ([4, 8, 16], [4, 4, 8, 16, 8, 16, 16, 8], [10, 10, 6, 5, 5, 3, 3, 3]),
        ([20], [4, 20, 16, 20, 20], [10, 3, 3, 2, 2]),
        ([2], [4] + 18 * [2] + 20 * [2], [10] + 18 * [19] + 20 * [20]),
    ],
)
def test_the_size_changes_within_the_epoch_and_every_sample_is_read_once(tmp_path, script, sizes, lengths):
    module = fit(tmp_path, loader(), script, max_epochs=2)
    assert module.sizes == sizes and module.lengths == lengths
    assert numbers(module.read) == 2 * list(range(40))


def test_a_second_fit_begins_with_the_grown_size(tmp_path):
    trainer, module = make_trainer(tmp_path, callbacks=[Growing([20])], max_epochs=1), Reader()
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert module.sizes == [4, 20, 16, 20, 20]


def test_another_trainer_begins_with_the_first_size(tmp_path):
    """As with the next fold of a cross-validation."""
    growing = Growing([20])
    first = fit(tmp_path, loader(), growing=growing)
    assert fit(tmp_path, loader(), growing=growing).sizes == first.sizes == [4, 20, 16]
    assert [record["samples"] for record in growing.records] == [4, 24, 40]


@pytest.mark.parametrize("schedule", [None, "0:4 12:8"])
def test_a_checkpoint_goes_before_what_a_callback_has_seen(tmp_path, schedule):
    options = {"schedule": "0:4 12:8"} if schedule else arguments(theta=0.1, every_n_steps=1, window=2)
    once = fit(tmp_path, loader(), growing=GrowingBatchSize(**options), max_epochs=2).sizes
    growing = GrowingBatchSize(**options)
    trainer = make_trainer(tmp_path, callbacks=[growing], max_epochs=1)
    trainer.fit(Reader(), loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = fit(tmp_path, loader(), growing=growing, max_epochs=2, ckpt_path=tmp_path / "half.ckpt").sizes
    assert again == once[-len(again) :] and again


# Validation


@pytest.mark.parametrize(
    ("interval", "sizes", "after"),
    [
        (1.0, [4, 8, 16], [40]),
        (0.5, [], [20, 40]),
        (0.5, [20], [24, 40]),
        (0.25, [8, 8, 16], [12, 20, 36, 40]),
        (0.25, [36], [40]),
        (0.3, [], [12, 24, 36]),
        (0.3, [10], [14, 24, 40]),
        (5, [4, 8, 8], [24, 40]),
        (2, [4, 8, 8], [8, 16, 24, 32, 40]),
        (10, [16], [40]),
    ],
)
def test_validation_runs_after_the_samples_it_was_asked_for_and_is_put_back(tmp_path, interval, sizes, after):
    module = fit(tmp_path, loader(), sizes, validation=loader(4), val_check_interval=interval)
    assert module.validated_after == after
    assert module.trainer.val_check_batch == (interval if isinstance(interval, int) else int(interval * 10))


def test_validation_runs_as_often_in_later_epochs(tmp_path):
    options = {"val_check_interval": 0.5, "max_epochs": 3, "validation": loader(4)}
    assert fit(tmp_path, loader(), [4, 10], **options).validated_after == [28, 40, 20, 40, 20, 40]


def test_validation_counted_in_batches_of_all_epochs_is_left_alone(tmp_path):
    options = {"val_check_interval": 7, "check_val_every_n_epoch": None, "max_epochs": 3, "validation": loader(4)}
    module = fit(tmp_path, loader(), [20], **options)
    assert module.sizes == [4, 20, 16, 20, 20, 20, 20] and module.validated_after == [40]


def test_validation_by_time_is_left_alone(tmp_path):
    options = {"val_check_interval": timedelta(hours=1), "validation": loader(4)}
    module = fit(tmp_path, loader(), [8, 16], **options)
    assert module.sizes == [4, 8, 16, 12] and not module.validated_after


# Limits


@pytest.mark.parametrize(
    ("options", "samples", "sizes"),
    [
        ({"limit_train_batches": 3}, 12, [4, 8]),
        ({"limit_train_batches": 1.0}, 40, [4, 8, 20, 8]),
        ({"limit_train_batches": 0.5}, 20, [4, 8, 8]),
        ({"overfit_batches": 5}, 20, [4, 8, 8]),
        ({"overfit_batches": 0.5}, 20, [4, 8, 8]),
        ({"max_steps": 2}, 12, [4, 8]),
        ({"fast_dev_run": True}, 4, [4]),
        ({"fast_dev_run": 3}, 12, [4, 8]),
    ],
)
def test_limits_keep_their_meaning(tmp_path, options, samples, sizes):
    module = fit(tmp_path, loader(), [8, 20], **options)
    assert module.sizes == sizes and numbers(module.read) == list(range(samples))


@pytest.mark.parametrize("options", [{"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"overfit_batches": 2}])
def test_limits_hold_in_later_epochs(tmp_path, options):
    module = fit(tmp_path, loader(), [8], max_epochs=3, **options)
    expected = {3: [12, 12], 0.5: [20, 20], 2: [8, 8]}[next(iter(options.values()))]
    assert [sum(len(batch) for batch in epoch) for epoch in module.epochs[1:]] == expected


def test_a_reloaded_loader_has_the_grown_size(tmp_path):
    class Reloading(Reader):
        def train_dataloader(self):
            return loader(batch_size=2)

    options = {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 5, "validation": loader(4)}
    module = fit(tmp_path, None, [20], Reloading(), max_epochs=3, **options)
    assert module.sizes == [2, 20, 18, 20, 20, 20, 20] and module.validated_after == [22, 40, 20, 40, 20, 40]


# Loaders


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_workers_read_every_sample_once(tmp_path, options):
    module = fit(tmp_path, loader(60, num_workers=2, **options), [4, 8, 8, 8, 8, 8], max_epochs=2)
    assert [sorted(numbers(epoch)) for epoch in module.epochs] == 2 * [list(range(60))]
    assert module.sizes[0] == 4 and 8 in module.sizes and module.lengths[-1] == len(module.epochs[-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_a_stream_are_counted_to_the_last(tmp_path, workers):
    class Measured(Reader):
        gradient_statistics = None

    growing = GrowingBatchSize(schedule="13:26")
    fit(tmp_path, DataLoader(Stream(range(181)), 13, num_workers=workers), growing=growing, module=Measured())
    assert growing.records[-1]["samples"] == 181


@pytest.mark.parametrize(
    ("data", "left"),
    [
        (lambda: DataLoader(range(24), batch_sampler=Pairs()), "the batches that Pairs puts together"),
        (lambda: DataLoader(range(12)), "batches of one sample"),
    ],
)
def test_batches_that_may_not_fit_together_are_accumulated_and_said_to_be(tmp_path, caplog, data, left):
    with caplog.at_level(logging.INFO):
        module = fit(tmp_path, data(), growing=Growing([4, 8], theta=1.0))
    (said,) = [line for line in caplog.messages if left in line]
    assert f"leaves {left}" in said and "mode='batch'" in said and len(set(module.sizes)) == 1
    assert module.trainer.global_step < len(module.sizes)


class Pairs(torch.utils.data.Sampler):
    """Whole batches, of which nothing is known before the first is read."""

    def __iter__(self):
        return iter([[i, i + 1] for i in range(0, 24, 2)])

    def __len__(self):
        return 12


def test_a_size_that_is_set_first_waits_for_the_first_batch_of_a_foreign_sampler(tmp_path):
    growing = GrowingBatchSize(schedule="0:4", mode="batch")
    loader = DataLoader(range(24), batch_sampler=Pairs(), num_workers=1, prefetch_factor=1)
    module = fit(tmp_path, loader, growing=growing, validation=DataLoader(range(4), 4), max_epochs=2)
    assert module.sizes == [2, *[4] * 5, 2] + [4] * 6
    assert sorted(numbers(module.epochs[0])) == sorted(numbers(module.epochs[1])) == list(range(24))
    assert module.lengths[-1] == 6 and module.validated_after == [24, 24]


@pytest.mark.parametrize(
    ("mode", "first", "second"), [("min_size", 24, 12), ("max_size", 48, 12), ("max_size_cycle", 48, 24)]
)
def test_several_loaders_grow_in_proportion(tmp_path, mode, first, second):
    loaders = CombinedLoader({"a": loader(48, 4), "b": loader(12, 2)}, mode)
    module = fit(tmp_path, loaders, [6, 12])
    sizes = [[len(part) for part in batch] for batch in module.read]
    assert sizes[:3] == [[4, 2], [4, 2], [8, 4]]
    a, b = (sum(batch[i] for batch in sizes if len(batch) > i) for i in (0, 1))
    assert a == first and (b >= second if mode == "max_size_cycle" else b == second)
    assert module.lengths[-1] == len(module.read)


def test_accumulated_batches_count_as_one(tmp_path):
    module = fit(tmp_path, loader(), [16], accumulate_grad_batches=2)
    assert module.sizes == [4, 4, 8, 8, 8, 8]


# Other readers of the training loader


class WholeSet(Reader):
    """Reads the training set at each validation, as a nearest-neighbour score does."""

    def on_validation_epoch_start(self):
        self.set = numbers(batch.tolist() for batch in self.trainer.train_dataloader)


class Validated(Reader):
    def __init__(self):
        super().__init__()
        self.validated = []

    def on_validation_epoch_start(self):
        self.validated.append([])

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.validated[-1].append(batch.tolist())


class AtEpochStart(Reader):
    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        next(iter(self.trainer.train_dataloader))


READERS = [WholeSet, Validated, AtEpochStart]


def fit_read(tmp_path, reader):
    """Train on a loader that ``reader`` reads, too, at five validations in an epoch; ``Validated`` validates on it."""
    data = loader(shuffle=True, generator=torch.Generator().manual_seed(0))
    options = {"validation": data if reader is Validated else loader(4), "val_check_interval": 0.2, "max_epochs": 2}
    return fit(tmp_path, data, [4, 8, 8, 6], reader(), **options)


@pytest.mark.parametrize("reader", READERS)
def test_another_reader_takes_no_sample_from_the_training_and_delays_no_validation(tmp_path, reader):
    module, every = fit_read(tmp_path, reader), list(range(40))
    assert [sorted(numbers(epoch)) for epoch in module.epochs] == 2 * [every]
    assert module.validated_after == fit_read(tmp_path, Reader).validated_after
    assert len(module.validated_after) == 10 and max(module.sizes) == 8
    if reader is WholeSet:
        assert sorted(module.set) == every
    if reader is Validated:
        assert [[len(batch) for batch in epoch] for epoch in module.validated] == 10 * [10 * [4]]
        assert [sorted(numbers(epoch)) for epoch in module.validated] == 10 * [every]


def test_the_same_loader_in_two_places_grows_in_each(tmp_path):
    data = loader()
    module = fit(tmp_path, {"a": data, "b": data}, [16])
    assert [len(part) for batch in module.read for part in batch] == [4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4]


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
def test_the_order_after_a_search_of_the_learning_rate_is_that_without_the_callback(tmp_path):
    class Searched(Reader):
        lr = 1e-6

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train(*callbacks):
        torch.manual_seed(0)
        module, finder = Searched(), LearningRateFinder(num_training_steps=5, update_attr=False)
        trainer = make_trainer(tmp_path, callbacks=[*callbacks, finder], max_epochs=2)
        trainer.fit(module, loader(shuffle=True, num_workers=1))
        return module.epochs[-2:]

    assert train(Growing()) == train()


# Resuming


class EpochSampler(DistributedSampler):
    """Shuffles by the epoch that Lightning tells it, as Lightning's own sampler does with several processes."""

    def __init__(self, data):
        super().__init__(data, num_replicas=1, rank=0)


MAKERS = {
    "workers": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=2),
    "shuffled by epoch, with workers": lambda: loader(sampler=EpochSampler(range(40)), num_workers=2),
    "stream of workers": lambda: DataLoader(SizedStream(range(40)), 4, num_workers=2),
    "dict": lambda: {"a": loader(40, 4), "b": loader(14, 2)},
}
SCRIPT = [4, 6, 6, 8, 10, 12, 12, 14, 20]


def test_epochs_after_a_resumed_one_are_shuffled_as_without_the_stop(tmp_path):
    def read(**options):
        torch.manual_seed(0)
        options |= {"max_epochs": 3, "enable_checkpointing": True}
        return fit(tmp_path, loader(shuffle=True), SCRIPT, callbacks=[checkpoints(tmp_path)], **options).read

    assert read()[2:] == read(ckpt_path=tmp_path / "step=2.ckpt")


@pytest.mark.parametrize("interval", [0.5, 2])
def test_a_resumed_run_validates_where_the_whole_run_does(tmp_path, interval):
    options = {"max_epochs": 2, "enable_checkpointing": True, "validation": loader(4), "val_check_interval": interval}
    whole, steps = Reader(), []
    whole.on_validation_end = lambda: steps.append(whole.trainer.global_step)
    fit(tmp_path, loader(), SCRIPT, whole, callbacks=[checkpoints(tmp_path)], **options)
    for step in range(1, len(whole.read), 2):
        if step in steps:
            continue  # Lightning passes over a validation that was due at the checkpoint
        resumed, again = Reader(), []
        resumed.epochs.append([])
        resumed.on_validation_end = lambda: again.append(resumed.trainer.global_step)  # noqa: B023
        fit(tmp_path, loader(), SCRIPT, resumed, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert again == [s for s in steps if s > step], step


@pytest.mark.parametrize("options", [{"save_on_train_epoch_end": True}, {"save_on_train_epoch_end": False}])
def test_a_checkpoint_at_the_end_of_an_epoch_begins_the_next(tmp_path, options):
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=1, **options)
    settings = {"enable_checkpointing": True, "validation": loader(4)}
    whole = fit(tmp_path, loader(), SCRIPT, callbacks=[saving], max_epochs=3, **settings)
    resumed = Reader()
    resumed.epochs.append([])
    fit(tmp_path, loader(), SCRIPT, resumed, ckpt_path=tmp_path / "epoch=0.ckpt", max_epochs=3, **settings)
    assert resumed.read == numbers(whole.epochs[1:])


def test_other_loaders_in_mid_epoch_are_refused(tmp_path):
    fit(tmp_path, loader(), SCRIPT, callbacks=[checkpoints(tmp_path)], enable_checkpointing=True)
    with pytest.raises(MisconfigurationException, match="with 1 training loaders, and there are 2"):
        fit(tmp_path, {"a": loader(), "b": loader()}, SCRIPT, ckpt_path=tmp_path / "step=2.ckpt")


@pytest.mark.parametrize(
    ("sizes", "then", "workers", "ended"),
    [([4, 4, 16], 16, 2, False), ([4, 4, 16], 16, 0, True), ([], 8, 0, False)],
)
def test_another_batch_size_of_the_loader_is_told_once(tmp_path, sizes, then, workers, ended):
    options = {"enable_checkpointing": True, "max_epochs": 2}
    whole = fit(tmp_path, loader(96, num_workers=workers), sizes, callbacks=[checkpoints(tmp_path)], **options)
    step = len(whole.epochs[0]) if ended else 9 if workers else 4
    path = tmp_path / f"step={step}.ckpt"
    with pytest.warns(UserWarning, match="DataLoader") as warned:
        resumed = fit(tmp_path, loader(96, batch_size=8, num_workers=workers), ckpt_path=path, **options)
    (told,) = [str(warning.message) for warning in warned if "The checkpoint was written" in str(warning.message)]
    assert "DataLoader(batch_size=4), and now it is 8" in told
    assert ("goes on with the steps of 16 samples" if sizes else "goes on with the 8,") in told
    assert resumed.sizes[0] == then and sorted(numbers(resumed.read)) == sorted(numbers(whole.read[step:]))


def test_a_batch_that_is_passed_over_is_not_counted_in_a_checkpoint(tmp_path):
    class Stopping(Reader):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

        def on_train_epoch_end(self):
            self.trainer.save_checkpoint(tmp_path / "stopped.ckpt")

    fit(tmp_path, loader(), module=Stopping(), growing=GrowingBatchSize(schedule="0:4"))
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=True)["callbacks"]["GrowingBatchSize"]["samples"] == 8


def train_without(tmp_path, data, step, **options):
    """Train with batches of one size, and keep a checkpoint of a step."""
    module = Reader()
    trainer = make_trainer(tmp_path, callbacks=[checkpoints(tmp_path, step)], enable_checkpointing=True, **options)
    trainer.fit(module, data)
    return module


# the order of "workers" in later epochs depends on what was drawn before
@pytest.mark.parametrize(
    ("maker", "step"),
    [
        *((maker, 4) for maker in ("workers", "stream of workers", "dict")),
        *((maker, 14) for maker in ("shuffled by epoch, with workers", "dict")),
    ],
)
def test_added_in_mid_epoch_it_trains_on_the_samples_that_were_left(tmp_path, maker, step):
    whole = train_without(tmp_path, MAKERS[maker](), step, max_epochs=2)
    with pytest.warns(UserWarning, match=f"written after {step % len(whole.epochs[0])} batches of an epoch .*no pos"):
        resumed = fit(tmp_path, MAKERS[maker](), [8], ckpt_path=tmp_path / f"step={step}.ckpt", max_epochs=2)
    end = 10 if step < 10 else 20
    of_whole, of_resumed = (
        [batch[0] for batch in read] if maker == "dict" else read for read in (whole.read[step:end], resumed.read)
    )
    left = sorted(numbers(of_whole))
    assert left and sorted(numbers(of_resumed)[: len(left)]) == left


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 0.5}])
def test_a_size_that_is_given_when_it_is_added_in_mid_epoch_holds_at_once(tmp_path, options):
    train_without(tmp_path, loader(80), 4, max_epochs=1, **options)
    windows, growing = Windows(), GrowingBatchSize(schedule="0:8")
    windows.gradient_statistics = None
    with pytest.warns(UserWarning, match="after 4 batches of an epoch"):
        fit(tmp_path, loader(80), module=windows, growing=growing, ckpt_path=tmp_path / "step=4.ckpt", **options)
    steps = 3 if options else 8
    assert windows.windows == steps * [[(8, 1)]] and numbers(windows.read) == list(range(16, 16 + 8 * steps))


def test_a_run_that_accumulated_goes_on_with_larger_batches(tmp_path):
    options = {"max_epochs": 1, "enable_checkpointing": True}
    growing = Growing([8, 8, 8], mode="accumulate")
    fit(tmp_path, loader(), growing=growing, callbacks=[checkpoints(tmp_path)], **options)
    with pytest.warns(UserWarning, match="after 4 batches of an epoch"):
        resumed = fit(tmp_path, loader(), [8, 8, 8], ckpt_path=tmp_path / "step=3.ckpt", **options)
    assert resumed.read == [list(range(start, start + 8)) for start in range(16, 40, 8)]


LIMITED = {"batch": ({}, {}), "workers": ({"num_workers": 2}, {}), "accumulate": ({}, {"mode": "accumulate"})}


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", LIMITED)
@pytest.mark.parametrize("ended", [False, True])
def test_a_grown_batch_goes_on_at_a_lower_limit(tmp_path, caplog, way, ended):
    def run(growing, module=None, ckpt_path=None, max_epochs=1):
        callbacks, options = [checkpoints(tmp_path)], {"enable_checkpointing": True, "max_epochs": max_epochs}
        growing = Growing(growing, scale_lr="sqrt", max_batch_size=8 if ckpt_path else 16, **of_growing)
        fit(tmp_path, loader(100, **of_loader), (), module, callbacks, None, ckpt_path, growing, **options)
        return growing

    of_loader, of_growing = LIMITED[way]
    whole, windows = Reader(), Windows()
    run([4, 4, 16], whole)
    step = whole.trainer.global_step if ended else 8 if way == "workers" else 4
    with caplog.at_level("INFO"):
        growing = run([], windows, tmp_path / f"step={step}.ckpt", max_epochs=1 + ended)
    assert caplog.messages.count("The checkpoint's batch of 16 becomes one of max_batch_size=8") == 1
    sizes = [sum(size for size, _ in window) for window in windows.windows]
    assert set(sizes[:-2]) == {8} and max(sizes[-2:]) <= 8  # the last two may share
    assert all(len(window) == scale for window in windows.windows[:-1] for _, scale in window)
    assert growing.state_dict()["learning_rate"]["batch_size"] == 8


# Refusals


def test_after_a_refusal_the_trainer_and_its_loader_are_as_they_were(tmp_path):
    good = loader()
    with pytest.raises(MisconfigurationException):
        fit(tmp_path, {"a": good, "b": Batches()}, growing=Growing(mode="batch"))
    assert type(good) is DataLoader
