"""More batches accumulated for each optimizer step, where larger ones would not fit in memory."""

from __future__ import annotations

import math
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_struct.callbacks.growing_batch_size.accumulation import check_accumulation
from lightning_struct.callbacks.growing_batch_size.growth import State
from lightning_struct.data.resizable import rounded_size
from lightning_struct.functional.torch_tools import tree_leaves
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import known_length
from lightning_struct.utilities.distributed import data_parallel_size
from lightning_struct.utilities.lightning_internals import cycles
from lightning_struct.utilities.namespaces import lightning_classes


def size_of_batch(place: int, samples: int, size: int, drops_last: bool, begins_again: bool) -> int:
    """Samples that a loader of so many, in batches of one size, gives as its batch at ``place``; 0 after its end.

    Example:
        >>> [size_of_batch(place, 10, 4, drops_last=False, begins_again=False) for place in range(5)]
        [4, 4, 2, 0, 0]
        >>> [size_of_batch(place, 10, 4, drops_last=True, begins_again=True) for place in range(5)]
        [4, 4, 4, 4, 4]
    """
    batches = samples // size if drops_last else math.ceil(samples / size)
    if begins_again and batches:
        place %= batches
    return min(samples - place * size, size) if place < batches else 0


class AccumulationGrowth:
    """Lets the effective batch grow by accumulating more batches for each step; the loaders stay as they are.

    The number of accumulated batches changes only where a step has been taken and as many batches of the epoch are done
    as the new number divides: elsewhere Lightning would scale the gradient of a window by the wrong number. Of the
    numbers up to the one decided, the largest that divides is taken; at the start of an epoch any does.

    Args:
        trainer: in ``Callback.setup``.
        batch_size: the samples of a step to begin with, if they are not those of the loaders.

    Raises:
        MisconfigurationException: see :func:`check_accumulation`.
    """

    def __init__(self, trainer: L.Trainer, batch_size: float | None = None) -> None:
        check_accumulation(trainer, "mode='accumulate'", "use mode='batch'")
        self._trainer, self._first, self._decided = trainer, trainer.accumulate_grad_batches, batch_size
        self._accumulated = self._first  # those of a resumed run, when it goes on: before, its steps may be asked for
        self._samples_of_batch: int | None = None
        self._told = False

    @property
    def batch_size(self) -> float:
        if self._decided is not None:
            return self._decided
        return self._trainer.accumulate_grad_batches * (self._samples_of_batch or 1)

    @property
    def dataset_size(self) -> int | None:
        sizes = [known_length(getattr(loader, "dataset", None)) for loader in self._loaders()]
        if None not in sizes:
            return sum(size for size in sizes if size is not None)
        batches = self._trainer.num_training_batches
        return None if batches == math.inf else int(batches) * (self._samples_of_batch or 1)

    @property
    def first_length(self) -> float:
        return self._trainer.num_training_batches

    @property
    def relative_size(self) -> float | None:
        return 1.0

    def expected_sizes(self) -> list[int]:
        sizes: list[int] = []
        loaders = self._loaders()
        begins_again = len(loaders) > 1 and cycles(self._trainer)
        for loader in loaders:
            size, samples = getattr(loader, "batch_size", None), known_length(getattr(loader, "sampler", None))
            if samples is None and getattr(loader, "num_workers", 0) < 2:  # of several, each ends with a smaller batch
                samples = known_length(getattr(loader, "dataset", None))  # a stream's
            if samples is None and len(loaders) == 1 and self._trainer.is_last_batch:
                return []  # the last batch of a stream may be smaller
            if not isinstance(size, int):
                continue
            if samples is None:
                sizes.append(size)
            else:
                drops_last = getattr(loader, "drop_last", False)
                of_batch = size_of_batch(self._trainer.fit_loop.batch_idx, samples, size, drops_last, begins_again)
                if of_batch or len(loaders) == 1:  # one alone is not at its end: its length is wrong
                    sizes.append(of_batch or size)
        return sizes

    def on_step(self, samples: int) -> None:
        # the last step of an epoch may have fewer batches, and its last batch fewer samples
        self._samples_of_batch = max(self._samples_of_batch or 1, samples // self._trainer.accumulate_grad_batches)

    def set_batch_size(self, batch_size: float) -> None:
        self._decided = batch_size
        self._tell_if_too_small()

    def on_train_start(self) -> None:
        self._trainer.accumulate_grad_batches = self._accumulated
        self._change(self._trainer.fit_loop.batch_idx + 1)  # the size may have been replaced since

    def on_train_epoch_start(self) -> None: ...

    def on_train_batch_start(self) -> None:
        if self._trainer.fit_loop.batch_idx == 0:
            if self._samples_of_batch is None:
                self._samples_of_batch = sum(self.expected_sizes()) * data_parallel_size(self._trainer) or None
                self._tell_if_too_small()
            # a run that is resumed at the end of an epoch is not told that the next one starts
            self._trainer.accumulate_grad_batches = self._wanted

    def on_train_batch_end(self) -> None:
        self._change(self._trainer.fit_loop.batch_idx + 1)

    def on_train_epoch_end(self) -> None: ...

    def state_dict(self) -> State:
        accumulated = self._trainer.accumulate_grad_batches
        return {"decided": self._decided, "accumulated": accumulated, "samples_of_batch": self._samples_of_batch}

    def load_state_dict(self, state: State) -> None:
        self._decided = state["decided"]
        if "samples_of_batch" in state:  # else it is that of LoaderGrowth
            self._samples_of_batch, self._accumulated = state["samples_of_batch"], state["accumulated"]
        elif any(of["delivered"] and len(of["sizes"]) > 1 for mine in state.get("positions", ()) for of in mine if of):
            rank_zero_warn(
                "The checkpoint was written in the middle of an epoch whose batches GrowingBatchSize had enlarged. Now "
                "it accumulates gradients over batches of the DataLoader's own size. Lightning counts as many of them "
                "as done, but reads the epoch from its beginning: some samples are trained on again, and others not. "
                "Resume with mode='batch', or from the end of an epoch"
            )

    def restore(self) -> None:
        self._trainer.accumulate_grad_batches = self._first

    def _change(self, done: int) -> None:
        """Set the number of accumulated batches, where a step has been taken after so many batches of the epoch."""
        if done % self._trainer.accumulate_grad_batches == 0:
            self._trainer.accumulate_grad_batches = next(k for k in range(self._wanted, 0, -1) if done % k == 0)

    @property
    def _wanted(self) -> int:
        if self._decided is None or self._samples_of_batch is None:
            return self._trainer.accumulate_grad_batches
        return rounded_size(self._decided / self._samples_of_batch)

    def _tell_if_too_small(self) -> None:
        """Warn once that a size was decided which is that of no batch."""
        if self._decided is None or self._samples_of_batch is None or self._told:
            return
        if rounded_size(self._decided) < self._samples_of_batch:
            self._told = True
            rank_zero_warn(
                f"GrowingBatchSize is to make steps of {self._decided:g} samples, and accumulates gradients over whole "
                f"batches, of which each has {self._samples_of_batch}: the steps are on one batch. For smaller ones, "
                "give the DataLoader a smaller batch_size"
            )

    def _loaders(self) -> list[Any]:
        loaders: Any = self._trainer.train_dataloader
        is_combined = isinstance(loaders, lightning_classes("utilities.CombinedLoader"))
        return loaders.flattened if is_combined else tree_leaves(loaders)
