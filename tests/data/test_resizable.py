import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_struct.data.resizable import ResizableBatchSampler, ResizableLoader

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=12)


class Stream(IterableDataset):
    """Counts to ``samples``; workers take every other number."""

    def __init__(self, samples, shuffle=False):
        self.samples, self.shuffle = samples, shuffle

    def __iter__(self):
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = torch.randperm(self.samples).tolist() if self.shuffle else range(self.samples)
        yield from order[start :: 1 if self.shuffle and worker is None else step]


class SizedStream(Stream):
    def __len__(self):
        return self.samples


def batches(loader, sizes=(), resizable=None):
    """The batches of a pass; ``sizes[i]`` is set after batch i was read."""
    read = []
    for i, batch in enumerate(loader):
        read.append(batch.tolist())
        if i < len(sizes):
            resizable.batch_size = sizes[i]
    return read


def numbers(batches):
    return [number for batch in batches for number in batch]


def resizable(*arguments, **options):
    sizes = ResizableLoader(DataLoader(*arguments, **options))
    return sizes.loader, sizes


# Sizes


@pytest.mark.parametrize(
    ("samples", "first", "options", "set_to", "expected"),
    [
        (20, 2, {}, [2, 5, 7], [2, 2, 5, 7, 4]),  # from the next batch on
        (23, 4, {}, [4.49, 4.5, 5.4999], [4, 4, 5, 5, 5]),  # rounded
        (40, 4, {}, [11], [4, 11, 11, 7, 7]),  # the last two share what is left
        (40, 2, {"num_workers": 2, "prefetch_factor": 1}, [6], [2, 2, 2, 6, 6, 6, 6, 6, 4]),  # those asked for stay
    ],
)
def test_sizes_hold_from_the_next_batch_on(samples, first, options, set_to, expected):
    loader, sizes = resizable(range(samples), batch_size=first, **options)
    assert [len(batch) for batch in batches(loader, set_to, sizes)] == expected


@given(SIZES, st.integers(1, 60), st.integers(1, 8), st.booleans(), st.floats(0, 1))
def test_what_is_told_at_any_time_is_true_if_nothing_changes_any_more(sizes, samples, first, drop_last, fraction):
    sampler = ResizableBatchSampler(BatchSampler(range(samples), first, drop_last), samples)
    iterator = iter(sampler)
    for size in sizes:
        if next(iterator, None) is None:
            break
        sampler.size = size
    told, beyond = len(sampler), sampler.first_beyond(fraction * samples)
    read = sum(map(len, iterator))
    assert len(sampler.ends) == told == len(sampler) and read <= samples
    if sampler.ends and fraction * samples <= sampler.ends[-1]:
        assert beyond == next(i for i, end in enumerate(sampler.ends, start=1) if end >= fraction * samples)


@given(SIZES, st.integers(1, 60), st.integers(1, 8))
def test_drop_last_leaves_out_less_than_a_batch_of_the_first_size(sizes, samples, first):
    loader, sized = resizable(range(samples), batch_size=first, drop_last=True)
    read = batches(loader, [max(size, first) for size in sizes], sized)
    assert samples - first < len(numbers(read)) <= samples and all(len(batch) >= first for batch in read)


def test_a_loader_that_nobody_resizes_is_as_it_was():
    options = {"batch_size": 3, "shuffle": True}
    torch.manual_seed(0)
    untouched = batches(DataLoader(range(20), **options))
    torch.manual_seed(0)
    loader, _ = resizable(range(20), **options)
    assert batches(loader) == untouched and len(loader) == 7


# Other readers


def test_another_reader_of_the_loader_does_not_use_up_a_resumed_position():
    loader = DataLoader(range(12), batch_size=2)
    sizes = ResizableLoader(loader)
    sizes.pass_over(2)
    batches(loader)
    assert batches(sizes.loader)[0] == [4, 5]


# Foreign batch samplers


class Buckets(Sampler):
    """Whole batches of different sizes."""

    def __init__(self, sized=True):
        self.groups = [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9, 10], [11, 12]]
        self.sized = sized

    def __iter__(self):
        yield from self.groups

    def __len__(self):
        if not self.sized:
            raise TypeError
        return len(self.groups)


def test_whole_batches_of_a_foreign_sampler_are_merged():
    loader, sizes = resizable(range(13), batch_sampler=Buckets())
    read = batches(loader, [5], sizes)
    assert read == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11, 12]] and len(loader) == 3


def test_a_subclass_of_the_batch_sampler_keeps_its_own_batches():
    class Reversed(BatchSampler):
        def __iter__(self):
            return (batch[::-1] for batch in super().__iter__())

    loader, sizes = resizable(range(6), batch_sampler=Reversed(SequentialSampler(range(6)), 2, drop_last=False))
    assert batches(loader, [4], sizes) == [[1, 0], [3, 2, 5, 4]]


# Streams


class Doubling(DataLoader):
    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


@pytest.mark.parametrize(
    ("make", "sizes_read"),
    [
        (lambda: DataLoader(Stream(10), batch_size=4, collate_fn=sum), [4, 4, 2]),  # the batch does not tell it
        (lambda: Doubling(Stream(10), batch_size=4), [4, 4, 4]),  # as was asked for
        (lambda: DataLoader(range(13), batch_sampler=Buckets()), [3, 2, 3, 3, 2]),
    ],
)
def test_the_samples_of_each_batch_are_counted(make, sizes_read):
    sizes = ResizableLoader(make())
    assert [sizes.sizes_read[-1] for _ in sizes.loader] == sizes_read


def test_the_length_of_a_sized_stream_follows_the_size():
    loader, sizes = resizable(SizedStream(50), batch_size=5)
    lengths = []
    for i, _ in enumerate(loader):
        sizes.batch_size = 10 if i < 2 else 20
        lengths.append(len(loader))
    assert lengths == [6, 6, 5, 5, 5]


@pytest.mark.parametrize("samples", [17, 18, 20, 31])
def test_the_length_of_a_stream_shared_by_workers_counts_the_last_batch_of_each(samples):
    loader, sizes = resizable(SizedStream(samples), batch_size=2, num_workers=2)
    sizes.batch_size = 4
    told = len(loader)
    assert told == len(batches(loader)) == len(loader)


# Resuming


def resumed(make, sizes, read):
    """The batches after ``read`` ones, of a pass that another loader goes on with, and of the whole pass."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    first = ResizableLoader(make())
    whole, position = [], None
    for i, batch in enumerate(first.loader):
        whole.append(batch.tolist())
        if i < len(sizes):
            first.batch_size = sizes[i]
        if i + 1 == read:
            position = first.position()
    if position is None:  # the pass has fewer batches
        return [], []
    torch.manual_seed(77)
    random.seed(77)
    np.random.seed(77)
    second = ResizableLoader(make())
    second.resume(position)
    rest = []
    for i, batch in enumerate(second.loader, start=read):
        rest.append(batch.tolist())
        if i < len(sizes):
            second.batch_size = sizes[i]
    return rest, whole[read:]


class Global(Sampler):
    """Shuffles by the generators of Python and NumPy."""

    def __iter__(self):
        order = np.random.permutation(30).tolist()
        random.shuffle(order)
        yield from order

    def __len__(self):
        return 30


def weighted():
    return WeightedRandomSampler([1.0, 2.0] * 15, 30, generator=torch.Generator().manual_seed(5))


LOADERS = {
    "in order": lambda: DataLoader(range(30), batch_size=2),
    "shuffled": lambda: DataLoader(range(30), batch_size=2, shuffle=True),
    "seeded": lambda: DataLoader(range(30), 2, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "weighted": lambda: DataLoader(range(30), batch_size=2, sampler=weighted()),
    "global generators": lambda: DataLoader(range(30), batch_size=2, sampler=Global()),
    "drop last": lambda: DataLoader(range(31), batch_size=2, shuffle=True, drop_last=True),
    "foreign batches": lambda: DataLoader(range(30), batch_sampler=[[i, i + 1] for i in range(0, 30, 2)]),
    "batches drawn": lambda: DataLoader(
        range(30), batch_sampler=list(BatchSampler(RandomSampler(range(30), generator=torch.Generator()), 2, False))
    ),
    "workers": lambda: DataLoader(range(30), batch_size=2, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(30), batch_size=2),
    "shuffled stream": lambda: DataLoader(SizedStream(30, shuffle=True), batch_size=2),
    "stream of workers": lambda: DataLoader(SizedStream(30), batch_size=2, num_workers=2),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("loader", list(LOADERS))
@pytest.mark.parametrize("read", [1, 3])
def test_a_resumed_pass_goes_on_at_the_very_next_sample(loader, read):
    rest, expected = resumed(LOADERS[loader], [2, 4, 4, 6], read)
    assert rest == expected and rest


@settings(max_examples=50)
@given(SIZES, st.integers(1, 5), st.integers(1, 12))
def test_a_pass_left_anywhere_goes_on_there(sizes, first, read):
    rest, expected = resumed(lambda: DataLoader(range(60), first, shuffle=True), sizes, read)
    assume(expected)
    assert rest == expected


def test_a_resumed_pass_reads_no_sample_before_its_position():
    class Counting(list):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    loader, sizes = resizable(range(20), batch_size=4)
    next(iter(loader))
    data = Counting(range(20))
    another, resumed = resizable(data, batch_size=4)
    resumed.resume(sizes.position())
    assert batches(another)[0] == [4, 5, 6, 7] and data.read == 16


@pytest.mark.parametrize(
    ("read", "position", "resume", "expected"),
    [
        (1, {}, {}, [4, 5, 6, 7]),
        (2, {"unread": 1}, {}, [4, 5, 6, 7]),  # what was fetched but not used is read again
        (2, {"unread": 1}, {"keeps_sizes": False}, [4, 5]),  # in another size, too
        (5, {"over": True}, {}, [0, 1, 2, 3]),  # after a pass comes the first sample of the next
    ],
)
def test_a_pass_is_resumed_at_the_first_sample_that_was_not_used(read, position, resume, expected):
    loader, sizes = resizable(range(20), batch_size=4)
    iterator = iter(loader)
    assert len([next(iterator) for _ in range(read)]) == read
    assert read < 5 or next(iterator, None) is None
    another, resumed = resizable(range(20), batch_size=4)
    resumed.resume(sizes.position(**position), **resume)
    if resume:
        resumed.batch_size = 2
    assert batches(another)[0] == expected


def test_a_resumed_pass_draws_from_the_global_generator_as_any_other():
    loader, sizes = resizable(range(20), batch_size=4, shuffle=True)
    next(iter(loader))
    states = []
    for position in (None, sizes.position()):
        another, second = resizable(range(20), batch_size=4, shuffle=True)
        if position is not None:
            second.resume(position)
        torch.manual_seed(0)
        next(iter(another))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# Restoring and refusing


@pytest.mark.parametrize(
    ("data", "options", "changed", "message"),
    [
        (range(9), {"shuffle": True}, {"generator": torch.Generator()}, "states of 0 random gene.* have 1: make the"),
        (Stream(10), {}, {"num_workers": 2}, "num_workers=0, but the loader has 2"),
    ],
)
def test_a_pass_cannot_be_gone_on_with_by_another_loader(data, options, changed, message):
    loader, sizes = resizable(data, batch_size=2, **options)
    next(iter(loader))
    _, other = resizable(data, batch_size=2, **options, **changed)
    with pytest.raises(MisconfigurationException, match=message):
        other.resume(sizes.position())
