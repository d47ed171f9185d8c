"""Larger batches from the training loaders, within the running epoch."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler

from lightning_struct.callbacks.growing_batch_size.growth import (
    BatchGrowth,
    State,
    StepSize,
    accumulate_as_scheduled,
)
from lightning_struct.collective import all_gather_objects
from lightning_struct.data.resizable import Position, ResizableLoader, rounded_size, why_not_resizable
from lightning_struct.data.sampling import IndependentDraws
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import data_parallel_size
from lightning_struct.utilities.lightning_internals import TrainingLoaders, cycles, skips_backward
from lightning_struct.utilities.namespaces import MisconfigurationException


def why_left_alone(loader: Any) -> tuple[str, str, bool] | None:
    """The loader with the reason why its batches keep their size, the remedy, and whether they could grow."""
    if (refusal := why_not_resizable(loader)) is not None:
        return *refusal, False
    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler:
        return f"the batches that {type(sampler).__name__} puts together", "set mode='batch'", True
    if sampler.batch_size == 1:
        return "batches of one sample, as samples of different shapes need", "set mode='batch'", True
    return None


OnRefusal: TypeAlias = Callable[[str, str, bool], None]


class GrowingDraws:
    """A training loader over independent draws, which keeps its own position and whose epoch is a number of draws."""

    batches = None
    changed = False
    delivered = 0
    knows_size = True
    nominal = False

    def __init__(self, loader: Any, sampler: IndependentDraws) -> None:
        self.loader, self._sampler = loader, sampler
        self.first_batch_size, self.samples = sampler.batch_size, sampler.samples

    @property
    def batch_size(self) -> int:
        return self._sampler.batch_size

    @batch_size.setter
    def batch_size(self, size: float) -> None:
        whole = max(rounded_size(size), self._sampler.num_replicas)
        self._sampler.batch_size = whole if self.samples is None else min(whole, self.samples)

    def relative_size(self, ahead: int) -> float:
        return 1.0  # whatever its size: an epoch is a number of draws

    def last_sizes(self, ahead: int) -> list[int]:
        return []

    def first_batch_beyond(self, fraction: float, length: int) -> int:
        return math.ceil(fraction * length - 1e-9)

    def begin_anew(self) -> None: ...

    def position(self, unread: int, over: bool) -> Position | None:
        return None

    def restore(self) -> None: ...


class LoaderGrowth(BatchGrowth):
    """Lets the batches of the training loaders grow, within the running epoch.

    Several loaders grow in proportion. Numbers that Lightning derives from their lengths stay true: the batches of the
    epoch; ``limit_train_batches`` and ``overfit_batches``, which keep meaning the same number of samples; and how often
    ``val_check_interval`` validates: as often in an epoch as before, after the same samples (but once per batch at
    most). Without epochs it remains a number of batches. In an epoch without a change all are as Lightning has them.

    Args:
        trainer: in ``Callback.setup``.
        size: of a step, as decided.
        on_refusal: called as on_refusal(reason, remedy, can_resize) after all loaders are restored: the loader that is
            not resized and why, what would help, and whether its batches could be made larger nevertheless. None:
            another loader is an error.

    Raises:
        MisconfigurationException: the accumulation cannot be changed; or, when Lightning prepares the loaders: one of
            them cannot be resized, or is larger than ``max_device_batch_size`` if no size is decided; or the run was
            stopped in the middle of an epoch with another number of processes or loaders.
    """

    def __init__(self, trainer: L.Trainer, size: StepSize, on_refusal: OnRefusal | None) -> None:
        super().__init__(trainer, size)
        self._on_refusal = on_refusal
        self._state: State | None = None
        self._resumed: State | None = None
        self._begun = self._waits = False  # it waits for the first batch of a loader, whose size is not known before
        self._replans = True  # validation, since the lengths that it was planned by have changed
        self._nominal_interval: float | None = None
        self._refusal: tuple[str, str, bool] | None = None  # the loader that is not resized, and why
        self._loaders: list[ResizableLoader | GrowingDraws] = []
        self._epoch_done = 0
        self._trainer_loaders = TrainingLoaders(trainer, self._prepare, self._prepared)

    def dataset_size(self) -> int | None:
        sizes = [size for loader in self._loaders if (size := loader.samples) is not None]
        return sum(sizes) if len(sizes) == len(self._loaders) else None

    def first_length(self) -> float:
        return self._nominal_length

    def relative_size(self) -> float:
        return self._loaders[self._main].relative_size(self._trainer_loaders.ahead)

    def expected_sizes(self) -> list[int]:
        ahead, done = self._trainer_loaders.ahead, self._trainer.fit_loop.batch_idx + 1
        return [size for loader in self._loaders for size in loader.last_sizes(self._beyond(loader, done, ahead))]

    def set_batch_size(self, batch_size: float) -> None:
        super().set_batch_size(batch_size)
        if self._loaders:
            self._resize()
            self._set_limits()

    def on_train_start(self) -> None:
        self._begun = True
        state, self._resumed = self._resumed, None
        if state is None and self._trainer_loaders.resumes_within_epoch:
            self._pass_over(self._trainer_loaders.batches_done)
        self._begin(state)

    def on_train_epoch_start(self) -> None:
        self._epoch_done = 0
        passes_over = skips_backward(self._trainer)
        if not passes_over:
            accumulate_as_scheduled(self._trainer)  # the first batch is read before the callbacks after this one
            self._resize()
        self._set_limits()
        self._plan_validation()
        if passes_over:  # the numbers set before for that epoch were by the length of the last one
            self._trainer_loaders.length += 1
            self._trainer.accumulate_grad_batches = int(self._trainer_loaders.length)

    def on_train_batch_start(self) -> None:
        is_first = self._trainer.fit_loop.batch_idx == 0
        # a callback that stands after this one may have set the accumulation now
        resized = (self._waits or is_first) and self._resize()
        if resized or self._epoch_done:  # Lightning has compared the batches done with the length by now
            self._epoch_done = 0
            self._set_limits()
            self._plan_validation()

    def on_train_batch_end(self) -> None:
        planned = self._trainer.val_check_batch
        if self._replans or (planned is not None and self._trainer_loaders.batches_done > planned):
            self._plan_validation()
            self._replans = False

    def on_train_epoch_end(self) -> None:
        for loader in self._loaders:
            loader.begin_anew()

    def state_dict(self) -> State:
        epoch = self._trainer_loaders
        done = epoch.batches_done if epoch.epoch_done else 0
        unread = [max(self._beyond(loader, epoch.batches_done, epoch.unread), 0) for loader in self._loaders]
        ends = zip(self._loaders, unread, strict=True)
        mine = [loader.position(beyond, over=epoch.epoch_done) for loader, beyond in ends]
        return {
            "decided": self._decided,
            "positions": all_gather_objects(mine),
            "epoch_done": done,
            "val_check_batch": self._trainer.val_check_batch,
        }

    def load_state_dict(self, state: State) -> None:
        self._state = state if "positions" in state else None  # otherwise of AccumulationGrowth

    def restore(self) -> None:
        if self._nominal_interval is not None:
            self._trainer.val_check_batch = self._nominal_interval
        self._trainer_loaders.restore()
        self._give_up_loaders()

    def _give_up_loaders(self) -> None:
        for loader in self._loaders:
            loader.restore()
        self._loaders = []

    def _present(self) -> int:
        return self._trainer.accumulate_grad_batches * sum(loader.batch_size for loader in self._loaders)

    def _beyond(self, loader: ResizableLoader | GrowingDraws, batches: int, ahead: int) -> int:
        """Batches read of a loader beyond so many of the epoch: ``ahead``, but fewer of one that is at its end.

        Negative of one that was so before; if loaders begin again at their end, there is none.
        """
        return ahead if cycles(self._trainer) else min(ahead, loader.delivered - batches)

    def _prepare(self, dataloader: Any, index: int) -> Any:
        if index == 0:
            self._give_up_loaders()
            self._refusal = None
        samplers = (getattr(dataloader, name, None) for name in ("sampler", "batch_sampler"))
        draws = [sampler for sampler in samplers if isinstance(sampler, IndependentDraws)]
        if self._on_refusal is not None and self._refusal is None and not draws:
            self._refusal = why_left_alone(dataloader)
        if self._refusal is not None:
            self._give_up_loaders()  # earlier loaders, too: Lightning reads them next
            return dataloader
        if draws:
            self._loaders.append(GrowingDraws(dataloader, draws[0]))
        else:
            limit = self._trainer.limit_train_batches
            limits_samples = self._trainer_loaders.overfits or isinstance(limit, int) or limit < 1
            processes = data_parallel_size(self._trainer)
            loader = ResizableLoader(dataloader, processes, limit if limits_samples else None)
            loader.nominal = True  # until Lightning has checked its own settings against the length
            self._loaders.append(loader)
        self._main = 0
        # workers are asked for batches before all is prepared; loaders that come yet change the proportions
        self._resize()
        return self._loaders[-1].loader

    def _prepared(self) -> None:
        refusal, fetches = self._refusal, self._trainer_loaders.steps_fetch
        if refusal is None and fetches:
            module = type(self._trainer.lightning_module).__name__
            refusal = (
                f"{module}.training_step(dataloader_iter), which fetches them itself",
                "take the batch as argument",
                False,
            )
        if refusal is not None:
            if self._on_refusal is None:
                raise MisconfigurationException("The size of batches cannot be changed in {}: {}".format(*refusal))
            self.restore()
            if fetches:
                self._trainer_loaders.iterate_anew()
            self._on_refusal(*refusal)
            return
        self._nominal_limits, self._nominal_length = self._trainer_loaders.limits, self._trainer_loaders.length
        self._nominal_interval = self._trainer.val_check_batch
        limits = self._nominal_limits
        self._main = limits.index(self._nominal_length) if self._nominal_length in limits else 0  # it ends the epoch
        for loader in self._loaders:
            loader.nominal = False
        state, self._state = self._state, None
        if state is not None:
            self._resume(state)
        if self._begun:
            self._begin(state)
        else:  # Trainer.estimated_stepping_batches may be asked for: it counts with the first size
            self._resumed = state

    def _begin(self, state: State | None) -> None:
        """Begin the epoch of a resumed run anew, and set the numbers that Lightning derives from the lengths."""
        if state is not None and any(isinstance(loader, ResizableLoader) for loader in self._loaders):
            self._trainer_loaders.iterate_anew()  # workers may have been asked for batches, of another epoch's order
        self._set_limits()
        if state is not None and (state["epoch_done"] or any(loader.delivered for loader in self._loaders)):
            self._trainer.val_check_batch = state["val_check_batch"]
        if state is not None and state["epoch_done"]:
            self._epoch_done = self._trainer_loaders.length = state["epoch_done"]

    def _resume(self, state: State) -> None:
        positions, processes = state["positions"], self._trainer.world_size
        begun = any(position and position["delivered"] for mine in positions for position in mine)
        if not begun and (len(positions) != processes or len(positions[0]) != len(self._loaders)):
            return
        if len(positions) != processes:
            raise MisconfigurationException(
                f"The checkpoint was written in the middle of an epoch by {len(positions)} processes, and now there "
                f"are {processes}: resume with as many, or from a checkpoint at the end of an epoch"
            )
        mine = positions[self._trainer.global_rank]
        if len(mine) != len(self._loaders):
            raise MisconfigurationException(
                f"The checkpoint was written in the middle of an epoch with {len(mine)} training loaders, and there "
                f"are {len(self._loaders)}: resume with as many, or from a checkpoint at the end of an epoch"
            )
        resizable = [
            (loader, position)
            for loader, position in zip(self._loaders, mine, strict=True)
            if isinstance(loader, ResizableLoader)
        ]
        sizes = [(position["first_size"], loader.sampler.first_size) for loader, position in resizable]
        differs = any(before != now for before, now in sizes)
        for loader, position in resizable:
            loader.resume(position, keeps_sizes=self._decided == state["decided"] and not differs)
            if differs and self._decided is None:
                loader.batch_size = loader.first_batch_size
        if differs:
            before, now = (" and ".join(map(str, of_run)) for of_run in zip(*sizes, strict=True))
            continues = f"the {now}, as it had not decided on a size yet"
            if self._decided is not None:
                continues = (
                    f"the steps of {self._decided:g} samples that it had decided on. For smaller ones, lower "
                    "max_batch_size"
                )
            rank_zero_warn(
                f"The checkpoint was written with DataLoader(batch_size={before}), and now it is {now}: "
                f"GrowingBatchSize goes on with {continues}"
            )
        self._resize()

    def _pass_over(self, batches: int) -> None:
        """Begin after the batches of this epoch that were trained on by a run that kept no position."""
        if not any(isinstance(loader, ResizableLoader) for loader in self._loaders):
            return
        for loader, length in zip(self._loaders, self._nominal_limits, strict=True):
            if isinstance(loader, ResizableLoader):
                loader.pass_over(int(batches % length if cycles(self._trainer) else min(batches, length)))
        self._resize()
        self._trainer_loaders.iterate_anew()
        rank_zero_warn(
            f"The checkpoint was written after {batches} batches of an epoch by a run that kept no position in it: "
            "without GrowingBatchSize, or with mode='accumulate'. GrowingBatchSize passes over as many batches of the "
            "DataLoader's own size. Where their order follows from the epoch or is fixed, the samples trained on are "
            "those that were left; if it is drawn from the global random state, they are others, but as many"
        )

    def _resize(self) -> bool:
        """Ask the loaders for the decided size; returns whether that is new."""
        if self._decided is None:
            return False
        self._waits = not all(loader.knows_size for loader in self._loaders)
        if self._waits:
            return False
        before = [loader.batch_size for loader in self._loaders]
        first = sum(loader.first_batch_size for loader in self._loaders)
        for loader in self._loaders:
            of_batch = self._decided / self._trainer.accumulate_grad_batches
            loader.batch_size = of_batch * loader.first_batch_size / first
        return before != [loader.batch_size for loader in self._loaders]

    def _set_limits(self) -> None:
        self._trainer_loaders.limits = [
            loader.batches if loader.changed and loader.batches is not None else nominal
            for loader, nominal in zip(self._loaders, self._nominal_limits, strict=True)
        ]
        self._replans = True

    def _plan_validation(self) -> None:
        """Set ``Trainer.val_check_batch`` to the next batch after which validation is due."""
        trainer, length, interval = self._trainer, self._trainer_loaders.length, self._nominal_interval
        if interval is None or interval == math.inf or length == math.inf:
            return  # by time, or at the end of a stream
        if trainer.check_val_every_n_epoch is None:
            return  # after so many batches, whatever the epochs
        done = max(self._trainer_loaders.batches_done - 1, 0)  # the validation after this batch is not decided yet
        loader = self._loaders[self._main]
        planned = self._nominal_length
        trainer.val_check_batch = int(length) + 1
        for due in range(1, int(planned // interval) + 1):
            batch = min(loader.first_batch_beyond(due * interval / planned, int(length)), int(length))
            if batch > done:
                trainer.val_check_batch = batch
                return
