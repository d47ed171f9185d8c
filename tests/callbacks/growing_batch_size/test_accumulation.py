"""Optimizer steps of several batches: where the loaders stay as they are, and where they would outgrow the device."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from lightning_struct.callbacks.growing_batch_size.growth import accumulated_batches
from tests.callbacks.growing_batch_size.projects import SizedStream, Stream
from tests.callbacks.growing_batch_size.readers import (
    WARNINGS_OF_READERS,
    Batches,
    Growing,
    Reader,
    Windows,
    checkpoints,
    fit,
    loader,
)

pytestmark = WARNINGS_OF_READERS

# The number of batches


@pytest.mark.parametrize(
    ("samples", "least", "present", "done", "batches"),
    [
        (96, 1, 1, 0, 3),
        (96.1, 1, 1, 0, 4),
        (96 * (1 + 1e-12), 1, 1, 0, 3),  # rounding
        (32, 2, 2, 2, 2),  # what the user accumulates
        (60, 1, 7, 35, 5),  # fewer than now, as 2 to 4 divide no 35
        (60, 1, 1, 5, 1),  # more than twice those needed are too many
    ],
)
def test_the_fewest_batches_that_are_enough_and_can_begin_here(samples, least, present, done, batches):
    found = accumulated_batches(samples, limit=32, least=least, present=present, batches_done=done)
    assert found == batches


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


def test_accumulation_takes_any_loader(tmp_path):
    module = Windows()
    fit(tmp_path, Batches(), module=module, growing=Growing(8 * [8], mode="accumulate"))
    assert [len(window) for window in module.windows] == [1, 1, 2, 2, 2]


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
    with pytest.warns(UserWarning, match="steps of 2 samples.* of which each has 4: the steps are on one batch"):
        fit(tmp_path, loader(40), module=Plain(), growing=growing)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size, limit", [(10, None), (10, 3), (8, None), (50, None)])
def test_the_last_batch_of_a_stream_that_accumulates_counts_as_it_is(tmp_path, batch_size, limit, workers):
    module, growing = Plain(), GrowingBatchSize(mode="accumulate", theta=math.inf)
    stream = DataLoader(Stream(range(45)), batch_size, num_workers=workers)
    fit(tmp_path, stream, module=module, growing=growing, max_epochs=2, limit_train_batches=limit)
    assert growing._samples == sum(module.sizes) and [r["batch_size"] for r in growing.records] == module.sizes


def test_the_last_batch_of_a_stream_that_does_not_show_its_size_counts_as_those_before(tmp_path):
    def collate(samples):  # three rows for each sample
        return torch.tensor(samples).repeat(3)

    growing = GrowingBatchSize(mode="accumulate", theta=math.inf)
    fit(tmp_path, DataLoader(Stream(range(40)), 10, collate_fn=collate), module=Plain(), growing=growing)
    assert [record["batch_size"] for record in growing.records] == 4 * [10]


def test_accumulation_resumes(tmp_path):
    def run(directory, ckpt_path=None):
        module = Windows()
        growing, options = Growing([4, 8, 8, 20], mode="accumulate"), {"max_epochs": 2, "enable_checkpointing": True}
        fit(directory, loader(96), module=module, growing=growing, callbacks=[checkpoints(directory)],
            ckpt_path=ckpt_path, **options)  # fmt: skip
        return module

    whole, resumed = run(tmp_path / "a"), run(tmp_path / "b", tmp_path / "a" / "step=9.ckpt")
    assert resumed.windows == whole.windows[9:] and len(resumed.windows[0]) == 5


def test_larger_batches_that_are_accumulated_from_a_checkpoint_on_are_warned_of(tmp_path):
    fit(tmp_path, loader(40), [4, 8, 8], callbacks=[checkpoints(tmp_path)], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="Resume with mode='batch', or from the end of an epoch"):
        fit(tmp_path, loader(40), growing=Growing(mode="accumulate"), ckpt_path=tmp_path / "step=4.ckpt")


def test_a_checkpoint_at_the_end_of_an_epoch_begins_the_next_with_as_many_batches(tmp_path):
    whole, resumed = Windows(), Windows()
    for module, path in ((whole, None), (resumed, tmp_path / "step=6.ckpt")):
        fit(tmp_path, loader(40), module=module, growing=Growing(5 * [12], mode="accumulate"), ckpt_path=path,
            callbacks=[checkpoints(tmp_path)], max_epochs=2, enable_checkpointing=True)  # fmt: skip
    assert len(whole.windows) == 10 and resumed.windows == whole.windows[6:]


# Loaders that grow up to a limit

SCRIPT = [4, 6, 8, 10, 12, 12, 16, 16, 18, 20, 24, 24, 24]
LOADERS = {
    "in order": lambda: loader(100),
    "drop last": lambda: loader(103, drop_last=True),
    "workers": lambda: loader(100, num_workers=2),
    "sized stream": lambda: DataLoader(SizedStream(range(100)), 4),
    "stream": lambda: DataLoader(Stream(range(100)), 4),
    "merged": lambda: DataLoader(range(100), batch_sampler=[[i, i + 1] for i in range(0, 100, 2)]),
}


def limited(tmp_path, data, sizes=SCRIPT, limit=8, **options):
    module = Windows()
    return fit(
        tmp_path, data, module=module, growing=Growing(sizes, max_device_batch_size=limit, mode="batch"), **options
    )


def sizes_of(windows):
    return [[size for size, _ in window] for window in windows]


def test_batches_grow_to_the_limit_and_are_accumulated_beyond(tmp_path):
    module = limited(tmp_path, loader(100), [4, 8, 12, 15, 24, 24, 24])
    assert sizes_of(module.windows) == [[4], [4], [8], [4] * 3, [8] * 2, [6] * 4, [6, 5, 5], [6, 5, 5]]


@pytest.mark.parametrize("kind", list(LOADERS))
def test_all_batches_of_a_step_have_the_weight_that_their_samples_deserve(tmp_path, kind):
    module = limited(tmp_path, LOADERS[kind](), max_epochs=2)
    windows, unit = module.windows, 2 if kind == "merged" else 1
    if kind in ("stream", "drop last"):  # where the end of the epoch may be a part of a step, as it is without growth
        windows = [window for window in windows if len(window) == window[0][1]]
    assert all(len(window) == scale for window in windows for _, scale in window)
    assert kind == "stream" or all(max(sizes) - min(sizes) <= unit for sizes in sizes_of(windows[:-1]))
    assert max(module.sizes) == 8 and 200 <= sum(module.sizes) <= 206


def test_a_loader_whose_batches_are_at_the_limit_is_accumulated_at_once(tmp_path):
    module = limited(tmp_path, loader(24), [8], limit=4)
    assert sizes_of(module.windows) == [[4], [4], [4] * 2, [4] * 2]


def test_batch_normalisation_trains_on_all_batches_that_are_accumulated(tmp_path):
    module = Windows()
    module.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)).double()
    growing = GrowingBatchSize(schedule="0:4 12:8", max_device_batch_size=4)
    fit(tmp_path, loader(30), module=module, growing=growing)  # batches of four leave two samples over
    assert sizes_of(module.windows) == [[4], [4], [4], [3] * 3, [3, 2], [2, 2]]


def test_the_limit_changes_nothing_but_rounding(tmp_path):
    sizes = [8, 16, 16, 24, 24, 24]
    whole, parts = Reader(), Windows()
    for module in (whole, parts):
        module.layer = torch.nn.Linear(1, 1, dtype=torch.float64)
        torch.nn.init.ones_(module.layer.weight), torch.nn.init.zeros_(module.layer.bias)
    fit(tmp_path, loader(116), sizes, whole)
    fit(tmp_path, loader(116), module=parts, growing=Growing(sizes, max_device_batch_size=8))
    assert [sum(window) for window in sizes_of(parts.windows)] == whole.sizes == [4, 8, 16, 16, 24, 24, 24]
    assert (parts.layer.weight - whole.layer.weight).abs() < 1e-14 < abs(whole.layer.weight - 1)


def test_several_loaders_share_the_limit(tmp_path):
    module = Reader()
    growing = Growing(24 * [30], max_device_batch_size=10)
    fit(tmp_path, {"a": loader(96, 4), "b": loader(48, 2)}, growing=growing, module=module)
    sizes = [tuple(map(len, batch)) for batch in module.read]
    assert sizes[:4] == [(4, 2), (6, 3), (6, 3), (6, 3)] and max(map(sum, sizes)) == 9


def test_what_the_user_accumulates_is_the_least(tmp_path):
    module = limited(tmp_path, loader(64), [8, 12, 12, 24], accumulate_grad_batches=2)
    assert sizes_of(module.windows) == [[4] * 2, [4] * 2, [6] * 2, [6] * 2, [6] * 4]


@pytest.mark.parametrize("kind", ["in order", "workers", "stream"])
def test_a_resumed_run_accumulates_as_the_whole_run_does(tmp_path, kind):
    options = {"max_epochs": 2, "enable_checkpointing": True}
    whole = limited(tmp_path, LOADERS[kind](), callbacks=[checkpoints(tmp_path)], **options)
    over = next(step for step in range(1, 20) if sum(map(sum, sizes_of(whole.windows[:step]))) == 100)
    for step in (5, over):
        resumed = limited(tmp_path, LOADERS[kind](), ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert resumed.windows == whole.windows[step:] and torch.equal(resumed.layer.weight, whole.layer.weight), step


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "limit", "largest"), [(None, 6, 6), (12, 6, 6), (4, 8, 6), (6, None, 12)])
def test_another_limit_holds_at_once_in_a_resumed_run(tmp_path, before, limit, largest, workers):
    def run(limit, ckpt_path=None, callbacks=()):
        module, growing = Windows(), GrowingBatchSize(schedule="0:4 16:12", max_device_batch_size=limit)
        data, options = loader(120, num_workers=workers), {"callbacks": callbacks, "ckpt_path": ckpt_path}
        return fit(tmp_path, data, module=module, growing=growing, enable_checkpointing=True, **options)

    whole = run(before, callbacks=[checkpoints(tmp_path)])
    step = next(i for i, window in enumerate(whole.windows, start=1) if sum(size for size, _ in window) == 12)
    resumed = run(limit, tmp_path / f"step={step}.ckpt")
    first = sum(size for window in whole.windows[:step] for size, _ in window)
    assert [number for batch in resumed.read for number in batch] == list(range(first, 120))
    assert max(resumed.sizes) == largest
    assert all(len(window) == scale for window in resumed.windows for _, scale in window)


def test_a_loader_whose_batches_are_beyond_the_limit_is_refused(tmp_path):
    message = (
        r"Batches of 4 on one device are larger than GrowingBatchSize\(max_device_batch_size=3\): give the DataLoader"
    )
    with pytest.raises(MisconfigurationException, match=message):
        limited(tmp_path, loader(), limit=3)


# Both

OPTIONS = [{"mode": "accumulate"}, {"max_device_batch_size": 8}]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_trainer_gets_its_accumulation_back_beside_a_scheduler_that_accumulates_nothing(tmp_path, options):
    module, growing, idle = Windows(), Growing(12 * [20], **options), GradientAccumulationScheduler({0: 1})
    fit(tmp_path, loader(40), module=module, growing=growing, callbacks=[idle], max_epochs=2)
    assert module.trainer.accumulate_grad_batches == 1 < max(map(len, module.windows))


@pytest.mark.parametrize(
    ("options", "remedy"), list(zip(OPTIONS, ["use mode='batch'", "use max_batch_size=8 instead"], strict=True))
)
def test_accumulation_is_refused_under_manual_optimization(tmp_path, options, remedy):
    class Manual(Reader):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(MisconfigurationException, match=rf"Manual.training_step does itself: {remedy}"):
        fit(tmp_path, loader(), module=Manual(), growing=Growing(**options))


@pytest.mark.parametrize("options", OPTIONS)
def test_two_who_set_the_accumulation_are_refused(tmp_path, options):
    scheduler = GradientAccumulationScheduler({0: 2})
    with pytest.raises(MisconfigurationException, match="both set accumulate_grad_batches: leave one of them out"):
        fit(tmp_path, loader(), growing=Growing(**options), callbacks=[scheduler])


def test_a_strategy_that_accumulates_by_itself_is_refused(tmp_path):
    class Accumulating(SingleDeviceStrategy):
        handles_gradient_accumulation = True

    with pytest.raises(MisconfigurationException, match="which Accumulating sets once for the whole training"):
        fit(tmp_path, loader(), growing=Growing(mode="accumulate"), strategy=Accumulating(torch.device("cpu")))


def test_a_limit_of_batches_that_do_not_grow_is_refused():
    with pytest.raises(MisconfigurationException, match="max_device_batch_size=8 lets them grow so far: leave one"):
        GrowingBatchSize(mode="accumulate", max_device_batch_size=8)
