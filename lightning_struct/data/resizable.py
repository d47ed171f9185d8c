"""A ``DataLoader``, and its batch sampler, whose batches change size while it is read, and which resume in a pass."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, groupby, islice, pairwise
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from lightning_struct.data.sampling import ResumedLoader, ShuffledPasses
from lightning_struct.utilities.checks import known_length
from lightning_struct.utilities.namespaces import MisconfigurationException
from lightning_struct.utilities.random_states import (
    RandomStates,
    isolated_random_states,
    random_states,
    set_random_states,
)

# Plain values and tensors only, so that a checkpoint that holds it can be loaded with weights_only=True.
Position: TypeAlias = dict[str, Any]

# Batches that a reader of a loader fetches ahead, at most: Lightning fetches one.
MOST_AHEAD = 16


class ResizableBatchSampler(Sampler[list[Any]]):
    """Batches of the units of another batch sampler, of a size that can be set at any time.

    Every unit is handed out exactly once in a pass, whatever the sizes: the single indices that a
    ``torch.utils.data.BatchSampler`` collects, or the whole batches of any other kind, several of them as one.

    ``drop_last`` leaves out a last batch only if it is smaller than the batches were at first: a large batch at the end
    is not lost. Without it, growth makes no last batch of a few samples, which batch normalisation may not be able to
    train on: if less would be left than batches had at first, the last two share their samples.

    Args:
        source: the batch sampler.
        units: how many units a pass has; None if that is not known.

    Attributes:
        size: units of the next batch, at least 1.
        ends: units after each batch of this pass that was handed out (or, after :meth:`begin`, will be before ``size``
            is looked at).
        limit: units of a pass at most; None for all. Of several readers the one that puts their batches together stops.
        splits_rest: whether one reader reads the whole pass, so that the rest of it is known.
        changed: whether a batch of this pass had another size than at first, or the next one will.
        asked_for: samples of each batch that was handed out, and its part of a batch of the first size, until
            :class:`ResizableLoader` sees the batch delivered. The rest at the end of a pass is a whole batch here if
            the others are of the first size.
        samples_of_unit: 1, or the samples in the first whole batch of ``source`` (1 as long as none was seen).
        knows_unit: whether ``samples_of_unit`` is known, so that a size in samples can be set.
    """

    def __init__(self, source: Iterable[Any], units: int | None) -> None:
        self.source = source
        self.sampler = getattr(source, "sampler", None)  # where Lightning looks for set_epoch
        self.merges = type(source) is not BatchSampler
        self.first_size = 1 if self.merges else source.batch_size  # type: ignore[attr-defined]
        self.size, self.splits_rest = self.first_size, True
        self.drop_last = not self.merges and source.drop_last  # type: ignore[attr-defined]
        self.ends: list[int] = []
        self.limit: int | None = None
        self.asked_for: deque[tuple[int, float]] = deque()
        self._has_changed = False
        unit: int | None = 1
        if self.merges:
            listed = isinstance(source, Sequence) and source
            unit = len(source[0]) if listed else getattr(source, "batch_size", None)  # type: ignore[index]
        self.samples_of_unit, self.knows_unit = unit or 1, bool(unit)
        self.started_from: RandomStates | None = None
        self._units, self._handed = units, 0
        self._resumed_from: RandomStates | None = None

    @property
    def units(self) -> int | None:
        """Units of a pass, at most ``limit``; None if that is not known."""
        if self._units is None or self.limit is None:
            return self.limit if self._units is None else self._units
        return min(self._units, self.limit)

    @property
    def changed(self) -> bool:
        return self._has_changed or self.size != self.first_size

    @property
    def batch_size(self) -> int:
        """Samples of the next batch."""
        return self.size * self.samples_of_unit

    def sizes(self) -> list[int]:
        """Units of each batch of this pass so far."""
        return [end - start for start, end in pairwise([0, *self.ends])]

    def begin(self, sizes: Iterable[int] = (), handed: int = 0, states: RandomStates | None = None) -> None:
        """Make the next iteration a new pass, or one that continues an interrupted pass.

        Args:
            sizes: sizes, in units, of the batches that the interrupted pass had handed out.
            handed: number of these batches that are skipped; the rest come first.
            states: states of the random generators when the interrupted pass began.
        """
        self.ends, self._handed, self._resumed_from = list(accumulate(sizes)), handed, states
        self._has_changed = any(size != self.first_size for size in self.sizes()[:-1])
        self.asked_for.clear()

    def __iter__(self) -> Iterator[list[Any]]:
        units = self._begin_units()
        while True:
            done, is_new = self._end(self._handed), self._handed == len(self.ends)
            size = self._next_size() if is_new else self.ends[self._handed] - done
            asked = self.size if is_new else size
            batch = list(islice(units, size))
            if not batch or (self.drop_last and len(batch) < min(self.first_size, size)):
                return
            if is_new:
                self.ends.append(done + len(batch))
            self._handed += 1
            self._has_changed |= asked != self.first_size
            part = 1.0 if asked == self.first_size else len(batch) / self.first_size
            if self.merges:
                if len(self.ends) == 1:
                    self.samples_of_unit, self.knows_unit = len(batch[0]), True
                batch = [index for unit in batch for index in unit]
            self.asked_for.append((len(batch), part))
            yield batch

    def __len__(self) -> int:
        """Batches of the whole pass: those handed out, and those that the rest makes at the present size."""
        if self.units is None:
            raise TypeError(f"{type(self.source).__name__} has no length")
        handed = len(self.ends)
        if not self.splits_rest:
            return handed + self.batches(self.units - self._end(handed))
        full, rest = self._layout(self.units - self._end(handed))
        return handed + full + len(rest)

    def batches(self, units: int) -> int:
        """Number of batches of the present size that so many units make."""
        full, rest = divmod(max(units, 0), self.size)
        return full + (rest >= self._smallest)

    def first_beyond(self, units: float) -> int:
        """Number, counted from 1, of the first batch that ends at so many units or more."""
        handed = len(self.ends)
        known = bisect_left(self.ends, units)
        if known < handed:
            return known + 1
        wanted = units - self._end(handed)
        full, rest = (math.inf, []) if self.units is None else self._layout(self.units - self._end(handed))
        if wanted > full * self.size:
            ends = list(accumulate(rest, initial=full * self.size))
            return handed + int(full) + min(bisect_left(ends, wanted), len(rest))
        return handed + max(math.ceil(wanted / self.size), 1)

    def _next_size(self) -> int:
        """Units of the next batch."""
        if self.units is None or not self.splits_rest:
            return self.size
        full, rest = self._layout(self.units - self._end(self._handed))
        return rest[0] if rest and not full else self.size

    def _layout(self, units: int) -> tuple[int, list[int]]:
        """Batches into which the last units of a pass go.

        Returns:
            How many there are of ``size``, and the sizes of the others, which come after them.
        """
        full, left = divmod(max(units, 0), self.size)
        if full and self._smallest <= left < self.first_size < self.size:
            return full - 1, [math.ceil((self.size + left) / 2), (self.size + left) // 2]
        return full, [left] if left >= self._smallest else []

    @property
    def _smallest(self) -> int:
        """Units of the smallest batch that is handed out at the present size.

        A stream need not have all units of its limit: the last batch of the first size may have been smaller.
        """
        return min(self.first_size, self.size) if self.drop_last or self._units is None else 1

    def _end(self, batches: int) -> int:
        return self.ends[batches - 1] if batches else 0

    def _begin_units(self) -> Iterator[Any]:
        source: Any = self.source if self.merges else self.sampler
        passed_over = self._end(self._handed)
        if isinstance(self.sampler, ShuffledPasses):
            self.sampler.begin_anew()
        bound = None if self.limit is None or not self.splits_rest else max(self.limit - passed_over, 0)
        if self._resumed_from is None:
            self.started_from = random_states(self.generators())
            return islice(iter(source), bound)
        self.started_from, self._resumed_from = self._resumed_from, None
        if type(source).__module__ == Sampler.__module__:
            next(iter(source), None)  # a shuffle draws from the global generator: later passes find it unchanged
        with isolated_random_states():
            set_random_states(self.started_from, self.generators())
            units = iter(source)
            first = list(islice(units, passed_over, passed_over + 1))  # some samplers draw only when asked for one
        return islice(chain(first, units), bound)

    def generators(self) -> list[torch.Generator]:
        """The random generators owned by the samplers."""
        found = [getattr(holder, "generator", None) for holder in (self.source, self.sampler)]
        return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))


class ResizableLoader:
    """A resizable form of a ``DataLoader``, until :meth:`restore`; the loader itself stays as it is.

    The resizable one, ``self.loader``, is of a subclass of the loader's class and shares its attributes, among them the
    data set, the samplers and their random generators; but it has its own batch sampler, length and workers, and a pass
    over it can be resumed. It is for one reader: any other reads the loader itself, in batches of the first size, and
    moves no position. The length counts the batches that were read and those to come. Batches that workers have been
    asked for keep their size: a change shows ``num_workers * prefetch_factor`` batches later.

    A resumed pass over a map-style data set goes on at the very next sample without reading those before it. Over an
    iterable data set the batches before it are read again and thrown away. That the samples are the same needs what
    shuffles to draw at the beginning of a pass, or from a generator of its own.

    Args:
        loader: of single samples, which it puts into batches.
        processes: number of those that read different batches. Sizes are those of all of them together.
        limit: bound of the samples of a pass, in batches of the first size, or a fraction of them; None: all.

    Attributes:
        loader: the resizable one.
        delivered: batches that were read in this pass.
        sizes_read: samples of the last few of them. A stream's are counted as they are collated, unless the loader's
            class has its own ``__iter__``: then they are those that were asked for.
        nominal: while it is true, ``len(loader)`` is the same as before a size was changed. So it is for passes without
            a change, too.

    Raises:
        MisconfigurationException: the loader cannot be resized; the message says why and what to do.
    """

    def __init__(self, loader: DataLoader, processes: int = 1, limit: float | None = None) -> None:
        if (refusal := why_not_resizable(loader)) is not None:
            problem, remedy = refusal
            raise MisconfigurationException(
                f"The size of batches cannot be changed in {problem}: {remedy}, or GrowingBatchSize(mode='accumulate')"
            )
        self.delivered, self.nominal, self._processes = 0, False, processes
        self.iterable = isinstance(loader.dataset, IterableDataset)
        source: Any = loader.batch_sampler
        self._class = type(loader)
        self._counts = self.iterable and type(loader).__iter__ is DataLoader.__iter__
        self.sizes_read: deque[int] = deque(maxlen=MOST_AHEAD)
        self._parts_read: deque[float] = deque(maxlen=MOST_AHEAD)
        if self.iterable:
            units = known_length(loader.dataset)
        else:
            units = known_length(source.sampler if type(source) is BatchSampler else source)
        self.sampler = ResizableBatchSampler(source, units)
        if isinstance(limit, float):
            length = known_length(loader)
            limit = None if length is None else int(limit * length)
        self.sampler.limit = None if limit is None else int(limit) * self.sampler.first_size
        self.sampler.splits_rest = not (self.iterable and loader.num_workers > 1)
        self._resume: Position | None = None
        self._began_from: RandomStates | None = None
        self._workers: Any = None
        members: dict[str, Any] = {"_resizable": self, "collate_fn": property(self._collate)}
        self.loader: DataLoader = object.__new__(type(self._class.__name__, (_Resizable, self._class), members))
        self.loader.__dict__ = loader.__dict__

    @property
    def batch_size(self) -> int:
        """Samples of the next batch. Setting it rounds to whole samples, or batches of a sampler not torch's."""
        return self.sampler.batch_size * self._processes

    @batch_size.setter
    def batch_size(self, batch_size: float) -> None:
        self.sampler.size = rounded_size(batch_size / self._processes / self.sampler.samples_of_unit)

    @property
    def first_batch_size(self) -> int:
        """Samples of a batch before any change."""
        return self.sampler.first_size * self.sampler.samples_of_unit * self._processes

    @property
    def samples(self) -> int | None:
        """Samples of a pass; None if that is not known."""
        units = self.sampler.units
        return None if units is None else units * self.sampler.samples_of_unit * self._processes

    @property
    def batches(self) -> int | None:
        """Batches of the whole pass; None if that is not known."""
        return known_length(self.loader)

    @property
    def knows_size(self) -> bool:
        """Whether it is known how many samples a batch has: of a foreign batch sampler only when one was read."""
        return self.sampler.knows_unit

    @property
    def changed(self) -> bool:
        """Whether this pass has, or will have, batches of another size than at first."""
        return self.sampler.changed

    def relative_size(self, ahead: int) -> float:
        """Size of the batch that was read ``ahead`` batches before the last one, in batches of the first size."""
        return self._parts_read[-1 - ahead] if ahead < len(self._parts_read) else 1.0

    def last_sizes(self, ahead: int) -> list[int]:
        """Samples of the batch that was read ``ahead`` batches before the last one; empty if there is none."""
        return [self.sizes_read[-1 - ahead]] if 0 <= ahead < len(self.sizes_read) else []

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        """Number of the first batch at whose end this fraction of the epoch's samples is read.

        Args:
            fraction: in (0, 1].
            length: batches of the epoch.
        """
        units = self.sampler.units
        if units is None or not self.changed or length != self.batches:
            return math.ceil(fraction * length - 1e-9)
        return self.sampler.first_beyond(fraction * units - 1e-6)

    def begin_anew(self) -> None:
        """Forget the pass under way: the next one begins at the first sample."""
        self._resume, self.delivered = None, 0
        self.sizes_read.clear()
        self._parts_read.clear()
        self.sampler.begin()

    def position(self, unread: int = 0, over: bool = False) -> Position:
        """Position in the pass, for :meth:`resume`.

        Args:
            unread: batches that were delivered but not used.
            over: the pass is over, and it is the next one that is to come.
        """
        sizes = [] if over else self.sampler.sizes()
        return {
            "sizes": [[size, len(list(run))] for size, run in groupby(sizes)],
            "delivered": 0 if over else self.delivered - unread,
            "size": self.sampler.size,
            "first_size": self.sampler.first_size,
            "samples_of_unit": self.sampler.samples_of_unit,
            "workers": self.loader.num_workers,
            "random_states": self._began_from if self._replays_workers else self.sampler.started_from,
            "generators": [generator.get_state() for generator in self._all_generators()],
        }

    def pass_over(self, batches: int) -> None:
        """Make the next pass begin after so many batches of the first size, if a run kept no position.

        Its order is that of the interrupted pass if the present state of the random generators does not matter.
        """
        position = self.position()
        states = position["random_states"]
        if states is None:
            states = random_states(self._generators() if self._replays_workers else self.sampler.generators())
        sizes = [[self.sampler.first_size, batches]]
        self.resume(position | {"sizes": sizes, "delivered": batches, "random_states": states})

    def resume(self, position: Position, keeps_sizes: bool = True) -> None:
        """Make the next pass continue from ``position``.

        Args:
            position: of the interrupted pass.
            keeps_sizes: whether batches that workers had been asked for, but that were not delivered, keep their size.

        Raises:
            MisconfigurationException: the data set is iterable and the number of workers another one, so that the
                samples would come in another order; or the loader has more or fewer random generators.
        """
        before, now = len(position["generators"]), len(self._all_generators())
        if before != now:
            raise MisconfigurationException(
                f"The checkpoint has the states of {before} random generators of the training loader and its sampler, "
                f"but these have {now}: make the loader with generator=... if it had one in the run that is "
                "resumed, and without where it had none"
            )
        if self.iterable and position["delivered"] and position["workers"] != self.loader.num_workers:
            raise MisconfigurationException(
                "The checkpoint was written in the middle of an epoch over an iterable data set with "
                f"num_workers={position['workers']}, but the loader has {self.loader.num_workers}: the samples would "
                "come in another order. Resume with as many workers, or from a checkpoint at the end of an epoch"
            )
        if not keeps_sizes:
            position = position | {"sizes": [[size, 1] for size in _sizes(position)[: position["delivered"]]]}
        self._resume = position
        self.sampler.size = position["size"]
        self.sampler.samples_of_unit = position["samples_of_unit"]
        self.sampler.knows_unit |= bool(position["sizes"])
        self.sampler.begin(_sizes(position))
        self.delivered = position["delivered"]

    def length(self) -> int:
        """Batches of the whole pass.

        Raises:
            TypeError: it is not known.
        """
        sampler, workers = self.sampler, self.loader.num_workers
        if not self.iterable or workers < 2:
            return len(sampler)
        limited = math.inf if sampler.limit is None else len(sampler)
        units = known_length(self.loader.dataset)
        if units is None:
            if sampler.limit is None:
                raise TypeError(f"{type(self.loader.dataset).__name__} has no length")
            return int(limited)
        # Each worker ends with a smaller batch: the count assumes that they share the samples evenly.
        share = math.ceil(units / workers)
        whole = (
            self._batches_of_worker(worker, min(share, max(units - worker * share, 0))) for worker in range(workers)
        )
        return int(min(sum(whole), limited))

    def restore(self) -> None:
        """Make the loader an ordinary one again, and give its workers up."""
        self._workers = None
        self.loader.__class__ = self._class

    @property
    def _replays_workers(self) -> bool:
        return self.iterable and self.loader.num_workers > 0

    def _batches_of_worker(self, worker: int, share: int) -> int:
        batches = 0
        for size in self.sampler.sizes()[worker :: self.loader.num_workers]:
            if share <= 0:
                return batches
            batches, share = batches + 1, share - size
        return batches + self.sampler.batches(share)

    def _begin(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass by calling ``begin``, the loader's own ``__iter__``."""
        position = self._resume
        # the first batch of a pass may have been handed out, but not trained on: its order is drawn already
        if position is None or not (position["delivered"] or (position["sizes"] and not self.iterable)):
            if position is not None:
                for generator, state in zip(self._all_generators(), position["generators"], strict=True):
                    generator.set_state(state)
            self.delivered = 0
            self.sampler.begin()
            self._began_from = random_states(self._generators()) if self._replays_workers else None
            return self._deliver(begin())
        if not self.iterable:
            self.sampler.begin(_sizes(position), position["delivered"], position["random_states"])
            self.delivered = position["delivered"]
            return self._deliver(begin())
        self.sampler.begin(_sizes(position))
        self._began_from = position["random_states"]
        with isolated_random_states():
            # workers are seeded when the pass begins; without them the data set draws at its first sample
            if self._replays_workers:
                set_random_states(position["random_states"], self._generators())
            iterator = begin()
            if not self._replays_workers:
                set_random_states(position["random_states"], self.sampler.generators())
            for _ in range(position["delivered"]):
                next(iterator)
        self.delivered = position["delivered"]
        return self._deliver(iterator)

    def _collate(self, loader: DataLoader) -> Callable[[list[Any]], Any]:
        collate = vars(loader)["collate_fn"]
        return partial(_counted, collate) if self._counts else collate

    def _deliver(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._resume = None
            samples, part = self.sampler.asked_for.popleft() if self.sampler.asked_for else (0, 1.0)
            self.delivered += 1
            if self._counts:
                samples, batch = batch
                part = part if part == 1 else samples / self.sampler.first_size
            self.sizes_read.append(samples)
            self._parts_read.append(part)
            yield batch
        self._resume = None

    def _generators(self) -> list[torch.Generator]:
        return [g for g in (self.loader.generator,) if isinstance(g, torch.Generator)]

    def _all_generators(self) -> list[torch.Generator]:
        return list(dict.fromkeys([*self._generators(), *self.sampler.generators()]))


def _counted(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, Any]:
    """A batch and the number of its samples, which the workers that read a stream alone know."""
    return len(samples), collate_fn(samples)


class _Resizable(DataLoader):
    """First base of the class of a resizable loader, with all that it does not share."""

    _resizable: ResizableLoader

    @property
    def batch_sampler(self) -> ResizableBatchSampler:  # type: ignore[override]
        return self._resizable.sampler

    @property
    def _iterator(self) -> Any:  # persistent workers
        return self._resizable._workers

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._resizable._workers = iterator

    def __iter__(self) -> Any:
        return self._resizable._begin(super().__iter__)

    def __len__(self) -> int:
        resizable = self._resizable
        if resizable.changed and not resizable.nominal:
            return resizable.length()
        return super().__len__() if resizable.iterable else len(resizable.sampler.source)  # type: ignore[arg-type]


def why_not_resizable(loader: Any) -> tuple[str, str] | None:
    """The loader with the reason why its batches cannot change size, and the remedy; None if they can."""
    name = type(loader).__name__
    name = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
    if not isinstance(loader, DataLoader):
        problem = f"{name}, which is not a torch DataLoader"
        remedy = "give Trainer.fit a DataLoader"
    elif loader.batch_sampler is None:
        problem = f"{name} with batch_size=None, whose data set or sampler makes the batches"
        remedy = "let the DataLoader make the batches of single samples"
    elif hasattr(loader, "load_state_dict") and not isinstance(loader, ResumedLoader):
        problem = f"{name}, which keeps its own position (state_dict) and would lose it when batches change size"
        remedy = "use torch's DataLoader, which is resumed from the callback's state"
    elif not getattr(loader, "in_order", True):
        problem = f"{name} with in_order=False, whose batches cannot be told apart at a resume"
        remedy = "leave in_order out"
    elif type(loader).__len__ is not DataLoader.__len__:
        problem = f"{name}, whose class counts its batches itself (__len__), by their first size"
        remedy = "use torch's DataLoader, with persistent_workers=True to keep workers, and the length in the data set"
    else:
        return None
    return problem, remedy


def rounded_size(size: float) -> int:
    """Whole number nearest to ``size``, halves up, 1 at least."""
    return max(1, math.floor(size + 0.5))


def _sizes(position: Position) -> list[int]:
    return [size for size, count in position["sizes"] for _ in range(count)]
