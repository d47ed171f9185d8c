"""One training loader as LoaderGrowth handles it: its sizes over all processes, and its position in the epoch."""

import math
from typing import Any

from lightning_struct.data.resizable import Position, ResizableLoader, rounded_size
from lightning_struct.data.sampling import IndependentDraws
from lightning_struct.utilities.checks import known_length
from lightning_struct.utilities.namespaces import MisconfigurationException


class GrowingLoader:
    """A training loader in a form that is resized, with its sizes over all processes.

    Attributes:
        loader: the resizable one, which Lightning is to read.
    """

    def __init__(self, loader: Any, processes: int, limit: float | None) -> None:
        """``limit``, in batches of the first size or as a fraction of them, bounds the samples of an epoch."""
        self._loader, self._processes = ResizableLoader(loader), processes
        self.loader: Any = self._loader.loader
        self._loader.nominal = True  # until Lightning has checked its own settings against the length
        length = known_length(loader)
        if isinstance(limit, int):
            self._loader.limit(limit)
        elif limit is not None and length is not None:
            self._loader.limit(int(limit * length))

    @property
    def batch_size(self) -> int:
        return self._loader.batch_size * self._processes

    @property
    def first_batch_size(self) -> int:
        return self._loader.first_batch_size * self._processes

    @property
    def dataset_size(self) -> int | None:
        samples = self._loader.samples
        return None if samples is None else samples * self._processes

    @property
    def length(self) -> int | None:
        return known_length(self.loader)

    @property
    def knows_size(self) -> bool:
        """Whether it is known how many samples a batch has: of a foreign batch sampler only when one was read."""
        return self._loader.sampler.knows_unit

    @property
    def merged(self) -> str | None:
        """The batch sampler whose whole batches are put together now; None if there is none."""
        sampler = self._loader.sampler
        return type(sampler.source).__name__ if sampler.merges and sampler.size > 1 else None

    @property
    def resumes(self) -> bool:
        """Whether the pass goes on where another was left."""
        return self._loader.delivered > 0

    @property
    def delivered(self) -> int:
        """Batches of this pass that were read."""
        return self._loader.delivered

    @property
    def asked(self) -> int:
        """Batches of this pass whose size is settled."""
        return self._loader.asked

    def set_batch_size(self, batch_size: float, most: float = math.inf, accumulated: int = 1) -> None:
        """Set the size, which is rounded.

        Args:
            batch_size: over all processes.
            most: bound of what it is rounded to, if no single unit of the sampler is larger.
            accumulated: batches of an optimizer step, see :class:`ResizableBatchSampler`.
        """
        sampler = self._loader.sampler
        self._loader.batch_size = batch_size / self._processes
        if self._loader.batch_size * self._processes > most:
            sampler.size = max(int(most / self._processes / sampler.samples_of_unit), 1)
        sampler.accumulated = accumulated

    def sizes_read(self, ahead: int) -> list[int]:
        """Samples of the last batch read but ``ahead``; empty if there is none, as for a negative number."""
        sizes = self._loader.sizes_read
        return [sizes[-1 - ahead]] if 0 <= ahead < len(sizes) else []

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        """Number of the first batch at whose end this fraction of the epoch's samples is read.

        Args:
            fraction: in (0, 1].
            length: batches of the epoch.
        """
        units = self._loader.sampler.units
        if units is None or length != self.length:
            return math.ceil(fraction * length - 1e-9)
        return self._loader.sampler.first_beyond(fraction * units - 1e-6)

    def end_preparation(self) -> None:
        self._loader.nominal = False

    def begin_anew(self) -> None:
        self._loader.begin_anew()

    def position(self, unread: int, over: bool) -> Position | None:
        return self._loader.position(unread, over)

    def first_sizes(self, position: Position | None) -> tuple[int, int]:
        """``DataLoader(batch_size=...)`` in the run that saved the position, and now."""
        size = self._loader.sampler.first_size
        return (size if position is None else position.get("first_size", size)), size  # none in version 0.2

    def pass_over(self, batches: int) -> None:
        self._loader.pass_over(batches)

    def resume(self, position: Position | None, keeps_sizes: bool = True) -> None:
        if position is not None:
            self._loader.resume(position, keeps_sizes)

    def restore(self) -> None:
        self._loader.restore()


class GrowingDraws:
    """A training loader over independent draws, which keeps its own position and whose epoch is a number of draws."""

    length = None
    delivered = 0
    asked = None
    resumes = False
    knows_size = True
    merged = None

    def __init__(self, loader: Any, sampler: IndependentDraws) -> None:
        if loader.num_workers:
            raise MisconfigurationException(
                f"GrowingBatchSize needs num_workers=0 with IndependentDraws, but got {loader.num_workers}: draws that "
                "workers fetch ahead would keep the old size, and be lost at a resume"
            )
        self.loader, self._sampler = loader, sampler
        self.first_batch_size = self._sampler.batch_size

    @property
    def batch_size(self) -> int:
        return self._sampler.batch_size

    @property
    def dataset_size(self) -> int | None:
        return self._sampler.samples

    def set_batch_size(self, batch_size: float, most: float = math.inf, accumulated: int = 1) -> None:
        samples = math.inf if self.dataset_size is None else self.dataset_size
        size = max(int(min(rounded_size(batch_size), most)), self._sampler.num_replicas)
        self._sampler.batch_size = int(min(size, samples))

    def sizes_read(self, ahead: int) -> list[int]:
        return []

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        return math.ceil(fraction * length - 1e-9)

    def end_preparation(self) -> None: ...

    def begin_anew(self) -> None: ...

    def position(self, unread: int, over: bool) -> Position | None:
        return None

    def first_sizes(self, position: Position | None) -> tuple[int, int]:
        return self.first_batch_size, self.first_batch_size

    def pass_over(self, batches: int) -> None: ...

    def resume(self, position: Position | None, keeps_sizes: bool = True) -> None: ...

    def restore(self) -> None: ...
