"""Batch sizes set by hand, by the samples seen."""

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.callbacks.growing_batch_size.schedule import SampleSchedule


@pytest.mark.parametrize(("samples", "size"), [(0, 32), (49_999, 32), (50_000, 128), (10**9, 16)])
def test_the_size_is_that_of_the_last_entry_reached(samples, size):
    assert SampleSchedule.parse("0:32 50_000:128\n200000:16").batch_size(samples) == size


def test_before_the_first_entry_there_is_no_size():
    assert SampleSchedule.parse("100:32").batch_size(99) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:32 50000-128", r"entry 2, '50000-128' \(at character 6\), cannot be read: .*'0:32 50_000:128'"),
        ("0:32, 50_000:128", r"entry 1, '0:32,' .* cannot be read"),
        ("0:3.5", "entry 1, '0:3.5' .* cannot be read"),
        ("-1:32", "entry 1, '-1:32' .* cannot be read"),
        ("1__0:32", "entry 1, '1__0:32' .* cannot be read"),
        ("0:0", "entry 1, '0:0' .* a batch size below 1"),
        ("0:32 100:64 100:128", "entry 3, '100:128' .* does not come after the 100 samples before it"),
        ("0:32 100:129", "entry 2, '100:129' .* above max_batch_size=128: lower the size"),
        (" ", "schedule=' ' is empty"),
        (3000032, "must be a string of .*, but is 3000032"),
    ],
)
def test_what_cannot_be_read_is_quoted_with_its_place(text, message):
    with pytest.raises(MisconfigurationException, match=message):
        SampleSchedule.parse(text, max_batch_size=128)
