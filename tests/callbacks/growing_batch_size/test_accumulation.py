"""Optimizer steps of several batches: where the loaders stay as they are, and where they would outgrow the device."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from tests.callbacks.growing_batch_size.projects import Stream
from tests.callbacks.growing_batch_size.readers import (
    WARNINGS_OF_READERS,
    Batches,
    Growing,
    Reader,
    Windows,
    fit,
    loader,
)

pytestmark = WARNINGS_OF_READERS

# Loaders that stay as they are


def test_accumulation_grows_at_boundaries_where_the_scale_is_right(tmp_path):
    module = Windows()
    fit(tmp_path, loader(96), module=module, growing=Growing([4, 8, 8, 20, 20], mode="accumulate"))
    windows = [len(window) for window in module.windows]
    assert windows == [1, 1, 2, 2, 3, 3, 4, 4, 4] and module.sizes == 24 * [4]
    assert all(len(window) == scale for window in module.windows[:-1] for _, scale in window)


def test_at_the_start_of_an_epoch_any_number_is_accumulated(tmp_path):
    module = Windows()
    fit(tmp_path, loader(40), module=module, growing=Growing(12 * [20], mode="accumulate"), max_epochs=2)
    assert [len(window) for window in module.windows][-2:] == [5, 5]


class Plain(Windows):
    """Has no statistics of its own."""

    gradient_statistics = None


@pytest.mark.parametrize(
    ("data", "samples"),
    [(lambda: loader(40), 40), (lambda: {"a": loader(24), "b": loader(16)}, 40), (Batches, 32)],
    ids=["one loader", "two loaders", "no data set"],
)
def test_a_step_is_never_of_more_than_the_samples_of_an_epoch(tmp_path, data, samples):
    growing = GrowingBatchSize(mode="accumulate", theta=0.01)
    fit(tmp_path, data(), module=Windows(), growing=growing, max_epochs=4)
    assert growing.state_dict()["batch_size"] == samples


def test_a_schedule_begins_with_its_first_size(tmp_path):
    module = Plain()
    fit(tmp_path, loader(40), module=module, growing=GrowingBatchSize(mode="accumulate", schedule="0:8"))
    assert [len(window) for window in module.windows] == 5 * [2]


def test_steps_of_less_than_a_batch_are_said_to_be_impossible(tmp_path):
    growing = GrowingBatchSize(mode="accumulate", schedule="0:2")
    with pytest.warns(UserWarning, match="whole batches of 4, but is to make steps of 2 samples"):
        fit(tmp_path, loader(40), module=Plain(), growing=growing)


@pytest.mark.covering(1)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size, limit", [(10, None), (10, 3), (50, None)])
def test_the_last_batch_of_a_stream_that_accumulates_counts_as_it_is(tmp_path, batch_size, limit, workers):
    module, growing = Plain(), GrowingBatchSize(mode="accumulate", theta=math.inf)
    stream = DataLoader(Stream(range(45)), batch_size, num_workers=workers)
    fit(tmp_path, stream, module=module, growing=growing, max_epochs=2, limit_train_batches=limit)
    assert (
        growing.records[-1]["samples"] == sum(module.sizes)
        and [r["batch_size"] for r in growing.records] == module.sizes
    )


def test_the_last_batch_of_a_stream_that_does_not_show_its_size_counts_as_those_before(tmp_path):
    def collate(samples):  # three rows for each sample
        return torch.tensor(samples).repeat(3)

    growing = GrowingBatchSize(mode="accumulate", theta=math.inf)
    fit(tmp_path, DataLoader(Stream(range(40)), 10, collate_fn=collate), module=Plain(), growing=growing)
    assert [record["batch_size"] for record in growing.records] == 4 * [10]


# What is refused


def test_the_trainer_gets_its_accumulation_back_beside_a_scheduler_that_accumulates_nothing(tmp_path):
    module, growing, idle = Windows(), Growing(12 * [20], mode="accumulate"), GradientAccumulationScheduler({0: 1})
    fit(tmp_path, loader(40), module=module, growing=growing, callbacks=[idle], max_epochs=2)
    assert module.trainer.accumulate_grad_batches == 1 < max(map(len, module.windows))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"mode": "accumulate"}, "use mode='batch'"), ({"max_device_batch_size": 8}, "give max_batch_size")],
)
def test_accumulation_is_refused_under_manual_optimization(tmp_path, options, remedy):
    class Manual(Reader):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(MisconfigurationException, match=rf"Manual.training_step does itself: {remedy}"):
        fit(tmp_path, loader(), module=Manual(), growing=Growing(**options))


def test_two_who_set_the_accumulation_are_refused(tmp_path):
    scheduler = GradientAccumulationScheduler({0: 2})
    with pytest.raises(MisconfigurationException, match="both set accumulate_grad_batches: leave one of them out"):
        fit(tmp_path, loader(), growing=Growing(mode="accumulate"), callbacks=[scheduler])


def test_a_strategy_that_accumulates_by_itself_is_refused(tmp_path):
    class Accumulating(SingleDeviceStrategy):
        handles_gradient_accumulation = True

    with pytest.raises(MisconfigurationException, match="which Accumulating sets once for the whole training"):
        fit(tmp_path, loader(), growing=Growing(mode="accumulate"), strategy=Accumulating(torch.device("cpu")))
