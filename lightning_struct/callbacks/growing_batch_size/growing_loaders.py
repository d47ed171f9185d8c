"""One training loader as LoaderGrowth handles it: its sizes over all processes, and its position in the epoch."""

import math
from typing import Any

from lightning_struct.data.resizable import Position, ResizableLoader, rounded_size
from lightning_struct.data.sampling import IndependentDraws
from lightning_struct.utilities.checks import known_length
from lightning_struct.utilities.namespaces import MisconfigurationException


class GrowingLoader(ResizableLoader):
    """A training loader that is resized, with its sizes over all processes.

    Args:
        loader: of single samples.
        processes: number of those that read different batches.
        limit: bound of the samples of an epoch, in batches of the first size or as a fraction of them.
    """

    def __init__(self, loader: Any, processes: int, limit: float | None) -> None:
        super().__init__(loader)
        self._processes = processes
        self.nominal = True  # until Lightning has checked its own settings against the length
        length = known_length(loader)
        if isinstance(limit, int):
            self.limit(limit)
        elif limit is not None and length is not None:
            self.limit(int(limit * length))

    @property
    def size(self) -> int:
        return self.batch_size * self._processes

    @property
    def first_size(self) -> int:
        return self.first_batch_size * self._processes

    @property
    def dataset_size(self) -> int | None:
        return None if self.samples is None else self.samples * self._processes

    @property
    def batches(self) -> int | None:
        """Batches of the whole pass; None if that is not known."""
        return known_length(self.loader)

    @property
    def knows_size(self) -> bool:
        """Whether it is known how many samples a batch has: of a foreign batch sampler only when one was read."""
        return self.sampler.knows_unit

    @property
    def merged(self) -> str | None:
        """The batch sampler whose whole batches are put together now; None if there is none."""
        merges = self.sampler.merges and self.sampler.size > 1
        return type(self.sampler.source).__name__ if merges else None

    def set_size(self, size: float, most: float = math.inf, accumulated: int = 1) -> None:
        """Set the size, which is rounded.

        Args:
            size: over all processes.
            most: bound of the rounded size, if no single unit of the sampler is larger.
            accumulated: batches of an optimizer step, see :class:`ResizableBatchSampler`.
        """
        self.batch_size = size / self._processes
        if self.size > most:
            self.sampler.size = max(int(most / self._processes / self.sampler.samples_of_unit), 1)
        self.sampler.accumulated = accumulated

    def last_sizes(self, ahead: int) -> list[int]:
        """Samples of the last batch read but ``ahead``; empty if there is none, as for a negative number."""
        return [self.sizes_read[-1 - ahead]] if 0 <= ahead < len(self.sizes_read) else []

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        """Number of the first batch at whose end this fraction of the epoch's samples is read.

        Args:
            fraction: in (0, 1].
            length: batches of the epoch.
        """
        units = self.sampler.units
        if units is None or length != self.batches:
            return math.ceil(fraction * length - 1e-9)
        return self.sampler.first_beyond(fraction * units - 1e-6)

    def first_sizes(self, position: Position | None) -> tuple[int, int]:
        """``DataLoader(batch_size=...)`` in the run that saved the position, and now."""
        size = self.sampler.first_size
        return (size if position is None else position["first_size"]), size


class GrowingDraws:
    """A training loader over independent draws, which keeps its own position and whose epoch is a number of draws."""

    batches = None
    delivered = 0
    asked = None
    knows_size = True
    merged = None
    nominal = False

    def __init__(self, loader: Any, sampler: IndependentDraws) -> None:
        if loader.num_workers:
            raise MisconfigurationException(
                f"GrowingBatchSize needs num_workers=0 with IndependentDraws, but got {loader.num_workers}: draws that "
                "workers fetch ahead would keep the old size, and be lost at a resume"
            )
        self.loader, self._sampler = loader, sampler
        self.first_size = self._sampler.batch_size

    @property
    def size(self) -> int:
        return self._sampler.batch_size

    @property
    def dataset_size(self) -> int | None:
        return self._sampler.samples

    def set_size(self, size: float, most: float = math.inf, accumulated: int = 1) -> None:
        samples = math.inf if self.dataset_size is None else self.dataset_size
        whole = max(int(min(rounded_size(size), most)), self._sampler.num_replicas)
        self._sampler.batch_size = int(min(whole, samples))

    def last_sizes(self, ahead: int) -> list[int]:
        return []

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        return math.ceil(fraction * length - 1e-9)

    def begin_anew(self) -> None: ...

    def position(self, unread: int, over: bool) -> Position | None:
        return None

    def first_sizes(self, position: Position | None) -> tuple[int, int]:
        return self.first_size, self.first_size

    def pass_over(self, batches: int) -> None: ...

    def resume(self, position: Position | None, keeps_sizes: bool = True) -> None: ...

    def restore(self) -> None: ...
