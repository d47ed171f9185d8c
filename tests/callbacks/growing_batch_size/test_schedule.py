"""Batch sizes set by hand, by the samples seen."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize, ValidationRule
from lightning_struct.callbacks.growing_batch_size.rules import SampleSchedule
from tests.callbacks.growing_batch_size.projects import Stream
from tests.callbacks.growing_batch_size.readers import WARNINGS_OF_READERS, Windows, checkpoints, fit, loader

pytestmark = WARNINGS_OF_READERS


@pytest.mark.parametrize(("samples", "size"), [(0, 32), (49_999, 32), (50_000, 128), (10**9, 16)])
def test_the_size_is_that_of_the_last_entry_reached(samples, size):
    assert SampleSchedule.parse("0:32 50_000:128\n200000:16").batch_size(samples) == size


def test_samples_may_be_given_in_thousands_to_trillions():
    entries = SampleSchedule.parse("0:32 250K:64 1.5M:128 0.25B:256 1T:512").entries
    assert entries == ((0, 32), (250_000, 64), (1_500_000, 128), (250_000_000, 256), (10**12, 512))


def test_before_the_first_entry_there_is_no_size():
    assert SampleSchedule.parse("100:32").batch_size(99) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:32 50000-128", r"entry 2, '50000-128' \(at character 6\), cannot be read: .*'0:32 50_000:128'"),
        ("0:32, 50_000:128", r"entry 1, '0:32,' .* cannot be read"),
        ("-1:32", "entry 1, '-1:32' .* cannot be read"),
        ("0:0", "entry 1, '0:0' .* a batch size below 1"),
        ("0:32 100:64 100:128", "entry 3, '100:128' .* does not come after the 100 samples before it"),
        ("0:32 100:129", "entry 2, '100:129' .* above max_batch_size=128: lower it"),
        (" ", "schedule=' ' is empty"),
        (3000032, "must be a string of .*, but is 3000032"),
    ],
)
def test_what_cannot_be_read_is_quoted_with_its_place(text, message):
    with pytest.raises(MisconfigurationException, match=message):
        SampleSchedule.parse(text, max_batch_size=128)


# In training


class Trained(Windows):
    """Without statistics of its own."""

    gradient_statistics = None


def scheduled(tmp_path, schedule, data=None, growing=None, **options):
    growing = growing or GrowingBatchSize(schedule=schedule)
    return fit(tmp_path, loader() if data is None else data, module=Trained(), growing=growing, **options)


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [("0:2 6:8 14:3", [2, 2, 2, 8] + 8 * [3] + [2]), ("7:16", [4, 4, 16, 16]), ("0:30", [30, 10])],
)
def test_a_size_holds_from_the_first_batch_after_so_many_samples(tmp_path, schedule, sizes):
    assert scheduled(tmp_path, schedule).sizes == sizes


@pytest.mark.parametrize("data", [loader(num_workers=1), DataLoader(Stream(range(40)), 4)], ids=["workers", "stream"])
def test_the_first_batch_has_the_first_size(tmp_path, data):
    assert scheduled(tmp_path, "0:10", data).sizes == [10, 10, 10, 10]


@pytest.mark.parametrize("options", [{"mode": "accumulate"}, {"max_device_batch_size": 4}])
def test_sizes_beyond_the_batches_are_accumulated(tmp_path, options):
    module = scheduled(tmp_path, None, loader(48), GrowingBatchSize(schedule="16:16", **options))
    assert [sum(size for size, _ in window) for window in module.windows][-2:] == [16, 16] and set(module.sizes) == {4}


def test_a_first_size_that_fits_the_device_takes_the_place_of_that_of_the_loader(tmp_path):
    growing = GrowingBatchSize(schedule="0:2 20:6", max_device_batch_size=2)
    module = scheduled(tmp_path, None, loader(48), growing)
    assert module.sizes[:10] == 10 * [2] and max(module.sizes) == 2
    assert {sum(size for size, _ in window) for window in module.windows} >= {2, 6}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_keeps_its_size_where_its_batches_are_scheduled(tmp_path, is_first):
    growing, batches = GrowingBatchSize(schedule="0:8"), GradientAccumulationScheduler({1: 2})
    first, second = (growing, batches) if is_first else (batches, growing)
    module = fit(tmp_path, loader(), module=Trained(), growing=first, callbacks=[second], max_epochs=2)
    assert [[size for size, _ in window] for window in module.windows[5:8]] == 3 * [[4, 4]]


def test_nothing_is_measured(tmp_path):
    growing = GrowingBatchSize(schedule="0:8")
    scheduled(tmp_path, None, growing=growing)
    assert growing.records[-1] == {"samples": 40, "batch_size": 8} and not growing.predictions


def test_a_resumed_run_goes_on_at_its_place(tmp_path):
    options = {"max_epochs": 2, "enable_checkpointing": True}
    whole = scheduled(tmp_path, "0:2 22:10 50:5", callbacks=[checkpoints(tmp_path)], **options)
    resumed = scheduled(tmp_path, "0:2 22:10 50:5", ckpt_path=tmp_path / "step=10.ckpt", **options)
    assert resumed.read == whole.read[10:] and {10, 5} <= set(resumed.sizes)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_another_schedule_holds_from_the_first_step_of_a_resumed_run(tmp_path):
    scheduled(tmp_path, "0:2 22:10", callbacks=[checkpoints(tmp_path)], enable_checkpointing=True)
    resumed = scheduled(tmp_path, "0:2 10:4", ckpt_path=tmp_path / "step=10.ckpt")
    assert resumed.sizes == [4] * 5 and resumed.read[0][0] == 20


@pytest.mark.parametrize("other", [{"theta": 1.0}, {"estimator": "layers"}, {"validation": ValidationRule("val_loss")}])
def test_another_rule_is_contradictory(other):
    with pytest.raises(
        MisconfigurationException, match=f"schedule='0:8' sets the sizes.*{next(iter(other))}=.*leave one"
    ):
        GrowingBatchSize(schedule="0:8", **other)
