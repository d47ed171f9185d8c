"""The ways to change the samples of an optimizer step: their interface, and the accumulation of more batches.

The other way, larger batches, is in ``loader_growth``.
"""

import math
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_struct.data.resizable import rounded_size
from lightning_struct.functional.torch_tools import tree_leaves
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import known_length
from lightning_struct.utilities.distributed import data_parallel_size
from lightning_struct.utilities.lightning_internals import cycles
from lightning_struct.utilities.namespaces import MisconfigurationException, lightning_classes

State = dict[str, Any]


@dataclass
class StepSize:
    """The size that was decided on, in the only place where it stands.

    Attributes:
        decided: samples of an optimizer step, with a fraction; None as long as the loaders have their own sizes.
    """

    decided: float | None = None


class BatchGrowth:
    """A way to set the samples of an optimizer step, over all processes, loaders and accumulated batches together.

    Methods whose names begin with ``on_train_`` are called from the callback hooks of the same names.

    Args:
        trainer: in ``Callback.setup``.
        size: of a step, as decided; :meth:`set_batch_size` changes it.
        is_fixed: whether the samples of a step stay as they are, whatever was decided.

    Attributes:
        is_fixed: the same.
    """

    def __init__(self, trainer: L.Trainer, size: StepSize, is_fixed: bool = False) -> None:
        self._trainer, self._size, self.is_fixed = trainer, size, is_fixed
        self._first_accumulated = self._accumulated = trainer.accumulate_grad_batches

    @property
    def batch_size(self) -> float:
        """Samples of the next step, as decided. It gets a whole number near that, the same on all processes."""
        return self._present() if self._decided is None else self._decided

    @property
    def _decided(self) -> float | None:
        return None if self.is_fixed else self._size.decided

    def _present(self) -> int:
        """Samples of the next step, if none are decided."""
        raise NotImplementedError

    def dataset_size(self) -> int | None:
        """Samples of an epoch; None for a stream."""
        raise NotImplementedError

    def first_length(self) -> float:
        """Batches of an epoch of this process at their first size; infinite for a stream."""
        raise NotImplementedError

    def relative_size(self) -> float:
        """Size of the batch under way over the first size; 1 for a rest, if no size has changed, and for a draw."""
        raise NotImplementedError

    def expected_sizes(self) -> list[int]:
        """Samples that this process reads of each loader for the batch under way; empty if that is not known."""
        raise NotImplementedError

    def set_batch_size(self, batch_size: float) -> None:
        """Set the samples of the next steps; they change as soon as they can, which may be some batches later."""
        self._size.decided = batch_size

    def on_step(self, samples: int) -> None:
        """Take note of an optimizer step on so many samples."""

    def on_train_start(self) -> None:
        """Begin with the first batch."""

    def on_train_epoch_start(self) -> None:
        """Begin with an epoch."""

    def on_train_batch_start(self) -> None:
        """Begin with a batch that is trained on."""

    def on_train_batch_end(self) -> None:
        """Change the size between two batches, if that is possible."""

    def on_train_epoch_end(self) -> None:
        """End an epoch."""

    def state_dict(self) -> State:
        """State that a resumed run needs; a collective call of all processes."""
        raise NotImplementedError

    def load_state_dict(self, state: State) -> None:
        """Continue the run that saved the state; call it before Lightning prepares the loaders."""

    def restore(self) -> None:
        """Undo all changes of the Trainer."""


def is_scheduled(trainer: L.Trainer) -> bool:
    """Whether a ``GradientAccumulationScheduler`` sets the accumulation in each epoch."""
    return any(scheduler.going_to_accumulate_grad_batches() for scheduler in _schedulers(trainer))


def accumulate_as_scheduled(trainer: L.Trainer) -> None:
    """Set the number that a ``GradientAccumulationScheduler`` sets in this epoch, before it does so itself."""
    for scheduler in _schedulers(trainer):
        trainer.accumulate_grad_batches = scheduler.get_accumulate_grad_batches(trainer.current_epoch)


def _schedulers(trainer: L.Trainer) -> list[Any]:
    scheduling = lightning_classes("callbacks.GradientAccumulationScheduler")
    return [callback for callback in trainer.callbacks if isinstance(callback, scheduling)]  # type: ignore[attr-defined]


def check_accumulation(trainer: L.Trainer, argument: str, remedy: str) -> None:
    """Raise if the accumulation cannot be changed during training.

    Args:
        trainer: in ``Callback.setup``.
        argument: of GrowingBatchSize, which asks for it.
        remedy: under manual optimization.

    Raises:
        MisconfigurationException: manual optimization, a strategy that accumulates by itself, or another callback that
            schedules the accumulation.
    """
    module, problem = type(trainer.lightning_module).__name__, None
    if not trainer.lightning_module.automatic_optimization:
        problem = (
            f"accumulates gradients over batches, which under manual optimization {module}.training_step does itself"
        )
    elif trainer.strategy.handles_gradient_accumulation:
        strategy = type(trainer.strategy).__name__
        problem = f"changes how many batches are accumulated, which {strategy} sets once for the whole training"
    elif is_scheduled(trainer):
        problem, remedy = "and GradientAccumulationScheduler both set accumulate_grad_batches", "leave one of them out"
    if problem is not None:
        raise MisconfigurationException(f"GrowingBatchSize({argument}) {problem}: {remedy}")


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


class AccumulationGrowth(BatchGrowth):
    """Lets the effective batch grow by accumulating more batches for each step; the loaders stay as they are.

    The number of accumulated batches changes only if a step has been taken and as many batches of the epoch are done
    as the new number divides: elsewhere Lightning would scale the gradient of a window by the wrong number. Of the
    numbers up to the one decided, the largest that divides is taken; at the start of an epoch any does.

    Args:
        trainer: in ``Callback.setup``.
        size: of a step, as decided.
        is_fixed: whether the accumulation stays as it is, too.

    Raises:
        MisconfigurationException: see :func:`check_accumulation`.
    """

    def __init__(self, trainer: L.Trainer, size: StepSize, is_fixed: bool = False) -> None:
        if not is_fixed:
            check_accumulation(trainer, "mode='accumulate'", "use mode='batch'")
        super().__init__(trainer, size, is_fixed)
        self._samples_of_batch: int | None = None
        self._has_warned = False

    def _present(self) -> int:
        return self._trainer.accumulate_grad_batches * (self._samples_of_batch or 1)

    def dataset_size(self) -> int | None:
        sizes = [known_length(getattr(loader, "dataset", None)) for loader in self._loaders()]
        samples = math.inf if None in sizes else sum(size for size in sizes if size is not None)
        if None in sizes or self._samples_of_batch is not None:  # an epoch may have fewer batches than there are
            samples = min(samples, self._trainer.num_training_batches * (self._samples_of_batch or 1))
        return None if samples == math.inf else int(samples)

    def first_length(self) -> float:
        return self._trainer.num_training_batches

    def relative_size(self) -> float:
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
        super().set_batch_size(batch_size)
        self._warn_if_too_small()

    def on_train_start(self) -> None:
        if not self.is_fixed:
            self._trainer.accumulate_grad_batches = self._accumulated
            self._change(self._trainer.fit_loop.batch_idx + 1)  # the size may have been replaced since

    def on_train_batch_start(self) -> None:
        if self._trainer.fit_loop.batch_idx == 0:
            if self._samples_of_batch is None:
                self._samples_of_batch = sum(self.expected_sizes()) * data_parallel_size(self._trainer) or None
            self._warn_if_too_small()
            # a run that is resumed at the end of an epoch has no on_train_epoch_start
            self._trainer.accumulate_grad_batches = self._wanted

    def on_train_batch_end(self) -> None:
        if not self.is_fixed:
            self._change(self._trainer.fit_loop.batch_idx + 1)

    def state_dict(self) -> State:
        accumulated = self._trainer.accumulate_grad_batches
        return {"decided": self._size.decided, "accumulated": accumulated, "samples_of_batch": self._samples_of_batch}

    def load_state_dict(self, state: State) -> None:
        if "samples_of_batch" in state:  # otherwise the state is of LoaderGrowth
            self._samples_of_batch, self._accumulated = state["samples_of_batch"], state["accumulated"]

    def restore(self) -> None:
        if not self.is_fixed:
            self._trainer.accumulate_grad_batches = self._first_accumulated

    def _change(self, done: int) -> None:
        """Set the number of accumulated batches, if a step has been taken after so many batches of the epoch."""
        if done % self._trainer.accumulate_grad_batches == 0:
            self._trainer.accumulate_grad_batches = next(k for k in range(self._wanted, 0, -1) if done % k == 0)

    @property
    def _wanted(self) -> int:
        if self._decided is None or self._samples_of_batch is None:
            return self._trainer.accumulate_grad_batches
        return rounded_size(self._decided / self._samples_of_batch)

    def _warn_if_too_small(self) -> None:
        """Warn once that a size was decided which is that of no batch."""
        if self._decided is None or self._samples_of_batch is None or self._has_warned:
            return
        if rounded_size(self._decided) < self._samples_of_batch:
            self._has_warned = True
            rank_zero_warn(
                f"GrowingBatchSize accumulates gradients over whole batches of {self._samples_of_batch}, but is to "
                f"make steps of {self._decided:g} samples: give the DataLoader a smaller batch_size"
            )

    def _loaders(self) -> list[Any]:
        loaders: Any = self._trainer.train_dataloader
        is_combined = isinstance(loaders, lightning_classes("utilities.CombinedLoader"))
        return loaders.flattened if is_combined else tree_leaves(loaders)
