"""A batch sampler whose batches change size while it is being read, and which resumes within a pass."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from lightning_struct.utilities.random_states import (
    RandomStates,
    isolated_random_states,
    random_states,
    set_random_states,
)


class ResizableBatchSampler(Sampler[list[Any]]):
    """Batches of the units of another batch sampler, of a size that can be set at any time.

    Every unit is handed out exactly once in a pass, whatever the sizes: the single indices that a
    ``torch.utils.data.BatchSampler`` collects, or the whole batches of any other kind, so many of which become one.

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
        limit: units of a pass at most; None for all.
        splits_rest: whether one reader reads the whole pass, so that what is left of it is known.
        asked_for: samples of each batch that was handed out, until :class:`ResizableLoader` sees the batch delivered.
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
        self.asked_for: deque[int] = deque()
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
        self.asked_for.clear()

    def split(self, place: int, sizes: Iterable[int]) -> None:
        """Note that the batch at ``place`` of this pass was delivered as batches of other sizes, in units."""
        ends = list(accumulate(sizes, initial=self._end(place)))[1:]
        self.ends[place : place + 1] = ends
        self._handed += len(ends) - 1

    def __iter__(self) -> Iterator[list[Any]]:
        units = self._begin_units()
        while True:
            done = self._end(self._handed)
            size = self._next_size() if self._handed == len(self.ends) else self.ends[self._handed] - done
            batch = list(islice(units, size))
            if not batch or (self.drop_last and len(batch) < min(self.first_size, size)):
                return
            if self._handed == len(self.ends):
                self.ends.append(done + len(batch))
            self._handed += 1
            if self.merges:
                if len(self.ends) == 1:
                    self.samples_of_unit, self.knows_unit = len(batch[0]), True
                batch = [index for unit in batch for index in unit]
            self.asked_for.append(len(batch))
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
        if full and 0 < left < self.first_size < self.size and not self.drop_last:
            return full - 1, [math.ceil((self.size + left) / 2), (self.size + left) // 2]
        return full, [left] if left >= self._smallest else []

    @property
    def _smallest(self) -> int:
        """Units of the smallest batch that is handed out at the present size."""
        return min(self.first_size, self.size) if self.drop_last else 1

    def _end(self, batches: int) -> int:
        return self.ends[batches - 1] if batches else 0

    def _begin_units(self) -> Iterator[Any]:
        source: Any = self.source if self.merges else self.sampler
        passed_over = self._end(self._handed)
        bound = None if self.limit is None else max(self.limit - passed_over, 0)
        if self._resumed_from is None:
            self.started_from = random_states(self.generators())
            return islice(iter(source), bound)
        self.started_from, self._resumed_from = self._resumed_from, None
        with isolated_random_states():
            set_random_states(self.started_from, self.generators())
            units = iter(source)
            first = list(islice(units, passed_over, passed_over + 1))  # some samplers draw only when asked for one
        return islice(chain(first, units), bound)

    def generators(self) -> list[torch.Generator]:
        """The random generators owned by the samplers."""
        found = [getattr(holder, "generator", None) for holder in (self.source, self.sampler)]
        return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))
