"""How a batch is made larger while a Trainer runs: by its loaders, or by accumulating gradients."""

import math
from typing import Any, Protocol

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._pytree import tree_leaves

from lightning_struct.data.resizable import Position, ResizableLoader
from lightning_struct.data.sampling import IndependentDraws
from lightning_struct.utilities.lightning_internals import TrainingLoaders

State = dict[str, Any]


class BatchGrowth(Protocol):
    """What sets the samples of an optimizer step, over all processes, loaders and accumulated batches together.

    The methods whose names begin with ``on_`` are called from the hooks of a callback that they are named after.
    """

    @property
    def batch_size(self) -> int:
        """Samples of the next step, as decided; those it has may be a few more, to be shared out evenly."""

    @property
    def dataset_size(self) -> int | None:
        """Samples of an epoch; None for a stream."""

    def expected_sizes(self) -> list[int]:
        """Samples that this process was to read of each loader for the batch under way; empty if that is not known."""

    def set_batch_size(self, batch_size: int) -> None:
        """Decide the samples of the next steps; what cannot be had at once comes as soon as it can."""

    def on_step(self, samples: int) -> None:
        """An optimizer step was taken on so many samples."""

    def on_train_epoch_start(self) -> None: ...

    def on_train_batch_start(self) -> None: ...

    def on_train_batch_end(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def state_dict(self) -> State:
        """What a resumed run needs; to be asked for in all processes."""

    def load_state_dict(self, state: State) -> None:
        """Go on as in the run that left the state; before Lightning prepares the loaders."""

    def restore(self) -> None:
        """Undo what was changed in the Trainer."""


class LoaderGrowth:
    """Lets the batches of the training loaders grow, within the running epoch.

    Several loaders grow in proportion. What Lightning derives from their lengths is kept true: the batches of the epoch;
    ``limit_train_batches``, of which a fraction, and ``overfit_batches``, keep meaning the same number of samples, and an
    int a number of batches; and how often ``val_check_interval`` validates: for a fraction as often in an epoch as before,
    after the same samples (but once per batch at most), for an int after so many batches, or at the end of an epoch that
    has become shorter than that.

    Args:
        trainer: in ``Callback.setup``.
        batch_size: the samples of a step to begin with, if they are not those of the loaders.

    Raises:
        MisconfigurationException: when Lightning prepares the loaders: one of them cannot be resized; or the run was
            stopped in the middle of an epoch with another number of processes or loaders.
    """

    def __init__(self, trainer: L.Trainer, batch_size: int | None = None) -> None:
        self._trainer, self._decided = trainer, batch_size
        self._state: State | None = None
        self._parts: list[_Resized | _Draws] = []
        self._epoch_done = 0
        self._loaders = TrainingLoaders(trainer, self._prepare, self._prepared)

    @property
    def batch_size(self) -> int:
        return self._present if self._decided is None else self._decided

    @property
    def dataset_size(self) -> int | None:
        sizes = [part.dataset_size for part in self._parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def expected_sizes(self) -> list[int]:
        return [size for part in self._parts for size in part.sizes_read(self._loaders.ahead)]

    def on_step(self, samples: int) -> None: ...

    def set_batch_size(self, batch_size: int) -> None:
        self._decided = batch_size
        if self._parts:
            self._resize()
            self._set_limits()

    def on_train_epoch_start(self) -> None:
        self._epoch_done = 0
        self._set_limits()
        self._plan_validation()

    def on_train_batch_start(self) -> None:
        if self._epoch_done:  # Lightning has compared it with the length by now
            self._epoch_done = 0
            self._set_limits()
            self._plan_validation()

    def on_train_batch_end(self) -> None:
        self._plan_validation()

    def on_train_epoch_end(self) -> None:
        for part in self._parts:
            part.begin_anew()

    def state_dict(self) -> State:
        loaders = self._loaders
        done = loaders.batches_done if loaders.epoch_done else 0
        mine = [part.position(loaders.unread, over=loaders.epoch_done) for part in self._parts]
        of_processes: list[Any] = [mine]
        if self._trainer.world_size > 1:
            of_processes = [None] * self._trainer.world_size
            torch.distributed.all_gather_object(of_processes, mine)
        due = self._trainer.val_check_batch
        return {"decided": self._decided, "positions": of_processes, "epoch_done": done, "val_check_batch": due}

    def load_state_dict(self, state: State) -> None:
        self._state, self._decided = state, state["decided"]

    def restore(self) -> None:
        self._loaders.restore()
        for part in self._parts:
            part.restore()
        self._parts = []

    @property
    def _present(self) -> int:
        return self._trainer.accumulate_grad_batches * sum(part.batch_size for part in self._parts)

    def _prepare(self, loader: Any, index: int) -> None:
        if index == 0:
            for part in self._parts:
                part.restore()
            self._parts = []
        draws = [
            s for name in ("sampler", "batch_sampler") if isinstance(s := getattr(loader, name, None), IndependentDraws)
        ]
        if draws:
            self._parts.append(_Draws(loader, draws[0]))
        else:
            limit = self._trainer.limit_train_batches
            limits_samples = self._loaders.overfits or (isinstance(limit, float) and limit < 1)
            self._parts.append(_Resized(loader, self._trainer.world_size, limit if limits_samples else None))

    def _prepared(self) -> None:
        if self._loaders.steps_fetch:
            raise MisconfigurationException(
                f"The size of batches cannot be changed where {type(self._trainer.lightning_module).__name__}."
                "training_step(dataloader_iter) fetches them itself: take the batch as argument"
            )
        self._nominal_limits, self._nominal_length = self._loaders.limits, self._loaders.length
        self._nominal_interval = self._trainer.val_check_batch
        self._main = self._loader_that_ends_the_epoch()
        for part in self._parts:
            part.end_preparation()
        if self._decided is not None:
            self._resize()
        state, self._state = self._state, None
        if state is not None:
            self._resume(state)
            if any(isinstance(part, _Resized) for part in self._parts):
                self._loaders.iterate_anew()  # workers may have been asked for batches already
        self._set_limits()
        if state is not None and (state["epoch_done"] or any(part.resumes for part in self._parts)):
            self._trainer.val_check_batch = state["val_check_batch"]
        if state is not None and state["epoch_done"]:
            self._epoch_done = self._loaders.length = state["epoch_done"]

    def _resume(self, state: State) -> None:
        positions, processes = state["positions"], self._trainer.world_size
        begun = any(position is not None and position["delivered"] for mine in positions for position in mine)
        if not begun and (len(positions) != processes or len(positions[0]) != len(self._parts)):
            return
        if len(positions) != processes:
            raise MisconfigurationException(
                f"The checkpoint was written in the middle of an epoch by {len(positions)} processes, but now there are "
                f"{processes}: which samples are left cannot be told. Resume with as many processes, or from a "
                "checkpoint at the end of an epoch"
            )
        mine = positions[self._trainer.global_rank]
        if len(mine) != len(self._parts):
            raise MisconfigurationException(
                f"The checkpoint was written in the middle of an epoch with {len(mine)} training loaders, but now there "
                f"are {len(self._parts)}: resume with the same loaders, or from a checkpoint at the end of an epoch"
            )
        for part, position in zip(self._parts, mine, strict=True):
            part.resume(position)

    def _loader_that_ends_the_epoch(self) -> int:
        limits = self._nominal_limits
        return limits.index(self._nominal_length) if self._nominal_length in limits else 0

    def _resize(self) -> None:
        first = sum(part.first_batch_size for part in self._parts)
        factor = self.batch_size / self._trainer.accumulate_grad_batches / first
        for part in self._parts:
            part.set_batch_size(math.ceil(factor * part.first_batch_size - 1e-9))

    def _set_limits(self) -> None:
        limit = self._trainer.limit_train_batches
        most = limit if isinstance(limit, int) and not self._loaders.overfits else math.inf
        self._loaders.limits = [
            nominal if part.length is None else min(part.length, most)
            for part, nominal in zip(self._parts, self._nominal_limits, strict=True)
        ]

    def _plan_validation(self) -> None:
        """Make the next batch at which validation is due the one that Lightning finds due."""
        trainer, length, interval = self._trainer, self._loaders.length, self._nominal_interval
        if interval is None or interval == math.inf or length == math.inf:
            return  # by time, or at the end of a stream
        if isinstance(trainer.val_check_interval, int):
            if trainer.check_val_every_n_epoch is not None:
                trainer.val_check_batch = min(trainer.val_check_interval, int(length))
            return
        done = max(self._loaders.batches_done - 1, 0)  # that of the batch under way is not decided yet
        part = self._parts[self._main]
        planned = self._nominal_length
        trainer.val_check_batch = int(length) + 1
        for due in range(1, int(planned // interval) + 1):
            batch = min(part.first_batch_beyond(due * interval / planned, int(length)), int(length))
            if batch > done:
                trainer.val_check_batch = batch
                return


class AccumulationGrowth:
    """Lets the effective batch grow by accumulating more batches for each step; the loaders stay as they are.

    The number of accumulated batches changes only where a step has been taken and as many batches of the epoch are done as
    the new number divides: elsewhere Lightning would scale the gradient of a window by the wrong number. Of the numbers up
    to the one decided, the largest that divides is taken; at the start of an epoch any does.

    Args:
        trainer: in ``Callback.setup``.
        batch_size: the samples of a step to begin with, if they are not those of the loaders.

    Raises:
        MisconfigurationException: manual optimization; or another callback that schedules the accumulation.
    """

    def __init__(self, trainer: L.Trainer, batch_size: int | None = None) -> None:
        if not trainer.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                "GrowingBatchSize(mode='accumulate') accumulates gradients over batches, which under manual optimization "
                f"{type(trainer.lightning_module).__name__}.training_step does itself: use mode='batch'"
            )
        others = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
        if any(scheduler.going_to_accumulate_grad_batches() for scheduler in others):
            raise MisconfigurationException(
                "GrowingBatchSize(mode='accumulate') and GradientAccumulationScheduler both set accumulate_grad_batches: "
                "leave one of them out"
            )
        self._trainer, self._first, self._decided = trainer, trainer.accumulate_grad_batches, batch_size
        self._samples_of_batch: int | None = None

    @property
    def batch_size(self) -> int:
        if self._decided is not None:
            return self._decided
        return self._trainer.accumulate_grad_batches * (self._samples_of_batch or 1)

    @property
    def dataset_size(self) -> int | None:
        sizes = [sized_len(getattr(loader, "dataset", None)) for loader in self._loaders()]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def expected_sizes(self) -> list[int]:
        sizes = []
        for loader in self._loaders():
            size, samples = getattr(loader, "batch_size", None), sized_len(getattr(loader, "sampler", None))
            if isinstance(size, int):
                left = size if samples is None else samples - self._trainer.fit_loop.batch_idx * size
                sizes.append(left if 0 < left < size else size)
        return sizes

    def on_step(self, samples: int) -> None:
        # the last step of an epoch may have fewer batches, and its last batch fewer samples
        self._samples_of_batch = max(self._samples_of_batch or 1, samples // self._trainer.accumulate_grad_batches)

    def set_batch_size(self, batch_size: int) -> None:
        self._decided = batch_size

    def on_train_epoch_start(self) -> None:
        self._trainer.accumulate_grad_batches = self._wanted

    def on_train_batch_start(self) -> None: ...

    def on_train_batch_end(self) -> None:
        done = self._trainer.fit_loop.batch_idx + 1
        if done % self._trainer.accumulate_grad_batches == 0:
            self._trainer.accumulate_grad_batches = next(k for k in range(self._wanted, 0, -1) if done % k == 0)

    def on_train_epoch_end(self) -> None: ...

    def state_dict(self) -> State:
        accumulated = self._trainer.accumulate_grad_batches
        return {"decided": self._decided, "accumulated": accumulated, "samples_of_batch": self._samples_of_batch}

    def load_state_dict(self, state: State) -> None:
        self._decided, self._samples_of_batch = state["decided"], state["samples_of_batch"]
        self._trainer.accumulate_grad_batches = state["accumulated"]

    def restore(self) -> None:
        self._trainer.accumulate_grad_batches = self._first

    @property
    def _wanted(self) -> int:
        if self._decided is None or self._samples_of_batch is None:
            return self._trainer.accumulate_grad_batches
        return max(1, math.ceil(self._decided / self._samples_of_batch))

    def _loaders(self) -> list[Any]:
        loaders = self._trainer.train_dataloader
        return loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)


class _Resized:
    """A training loader that is resized, with its sizes over all processes."""

    def __init__(self, loader: Any, processes: int, limit: float | None) -> None:
        """``limit``, in batches of the first size or as a fraction of them, bounds the samples of an epoch."""
        self._loader, self._processes = ResizableLoader(loader), processes
        self._loader.nominal = True  # until Lightning has checked its own settings against the length
        length = sized_len(loader)
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
        return sized_len(self._loader.loader)

    @property
    def resumes(self) -> bool:
        """Whether the pass goes on where another was left."""
        return self._loader.delivered > 0

    def set_batch_size(self, batch_size: int) -> None:
        self._loader.batch_size = math.ceil(batch_size / self._processes)

    def sizes_read(self, ahead: int) -> list[int]:
        """Samples of the last batch but ``ahead``; empty if there is none."""
        sampler, number = self._loader.sampler, self._loader.delivered - ahead
        if not 0 < number <= len(sampler.ends):
            return []
        start = sampler.ends[number - 2] if number > 1 else 0
        return [(sampler.ends[number - 1] - start) * sampler.samples_of_unit]

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        """The first batch at whose end that fraction of the epoch's samples is read; ``length`` is that of the epoch."""
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

    def resume(self, position: Position | None) -> None:
        if position is not None:
            self._loader.resume(position)

    def restore(self) -> None:
        self._loader.restore()


class _Draws:
    """A training loader over independent draws, which keeps its own position and whose epoch is a number of draws."""

    length = None
    resumes = False

    def __init__(self, loader: Any, sampler: IndependentDraws) -> None:
        if loader.num_workers:
            raise MisconfigurationException(
                f"GrowingBatchSize needs num_workers=0 with IndependentDraws, but got {loader.num_workers}: draws that "
                "workers fetch ahead would keep the old size, and be lost at a resume"
            )
        self._sampler = sampler
        self.first_batch_size = self._sampler.batch_size

    @property
    def batch_size(self) -> int:
        return self._sampler.batch_size

    @property
    def dataset_size(self) -> int:
        return len(self._sampler.dataset)  # type: ignore[arg-type]

    def set_batch_size(self, batch_size: int) -> None:
        self._sampler.batch_size = min(batch_size, self.dataset_size)

    def sizes_read(self, ahead: int) -> list[int]:
        return []

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        return math.ceil(fraction * length - 1e-9)

    def end_preparation(self) -> None: ...

    def begin_anew(self) -> None: ...

    def position(self, unread: int, over: bool) -> Position | None:
        return None

    def resume(self, position: Position | None) -> None: ...

    def restore(self) -> None: ...
