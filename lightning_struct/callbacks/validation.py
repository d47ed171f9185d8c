"""Validation for callbacks: the monitored value, the validations that count, and each process's share of the data."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_struct.callbacks.runs import NewlyLogged
from lightning_struct.utilities import lightning_internals
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.namespaces import MisconfigurationException
from lightning_struct.utilities.random_states import isolated_random_states


class MonitoredValue:
    """The values of a metric, for a callback that takes each of them once.

    Args:
        monitor: name of the metric.
        who: name of the callback, for the error.
    """

    def __init__(self, monitor: str, who: str) -> None:
        self._monitor, self._who = monitor, who
        self._newly_logged = NewlyLogged()

    def logged(self, trainer: L.Trainer, *, required: bool) -> float | None:
        """The value logged since the last call, the mean over the processes that logged it; the same in all of them.

        With ``sync_dist=True`` that is the value that each process logged. It is a collective call.

        Args:
            trainer: a Trainer in fit.
            required: whether there must be one, and a finite one; else it is None if there is none.

        Raises:
            MisconfigurationException: there is none, or it is not finite, in all processes alike.
        """
        is_new = self._monitor in self._newly_logged.since_last(trainer, [self._monitor])
        value = _mean_over_processes(trainer, trainer.callback_metrics[self._monitor] if is_new else None)
        if value is None and required:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise MisconfigurationException(
                f"{self._who} monitors {self._monitor!r}, which is not logged; logged are: {logged}"
            )
        if required and value is not None and not math.isfinite(value):
            raise MisconfigurationException(self.not_finite(trainer, value))
        return value

    def not_finite(self, trainer: L.Trainer, value: float) -> str:
        """The message about a value that is NaN or infinite."""
        where = f"which is {value} after step {trainer.global_step}"
        return f"{self._who} monitors {self._monitor!r}, {where}: training has diverged"


def _mean_over_processes(trainer: L.Trainer, value: Tensor | None) -> float | None:
    """Mean over the processes that have a value, the same in all of them; None if none has. A collective call."""
    mine = [0.0, 0.0] if value is None else [float(value), 1.0]
    device = trainer.strategy.root_device if trainer.world_size > 1 else "cpu"  # some devices have no float64
    total, processes = trainer.strategy.reduce(
        torch.tensor(mine, dtype=torch.float64, device=device), reduce_op="sum"
    ).tolist()
    return total / processes if processes else None


class DueValidation:
    """The validations of a fit, each counted once, for a callback that counts them.

    A checkpoint can be written between a training batch and the validation that is due after it (by
    ``ModelCheckpoint(every_n_train_steps=...)``). Lightning skips that validation when the run is resumed. Here it is
    run then, so that the resumed run equals the uninterrupted one. Call the methods from the hooks of the same names.
    """

    def __init__(self) -> None:
        self._due = False
        self._last_batch: int | None = None

    def on_train_start(self, trainer: L.Trainer) -> None:
        """Run the validation that was due when the run was stopped."""
        if self._due:
            self._due = False
            lightning_internals.validate_now(trainer)

    def on_train_batch_end(self, trainer: L.Trainer) -> None:
        self._due = lightning_internals.validation_follows(trainer)

    def on_validation_end(self, trainer: L.Trainer) -> bool:
        """Count this validation, and tell whether it counts: see :meth:`counts`."""
        if not self.counts(trainer):
            return False
        self._due, self._last_batch = False, trainer.fit_loop.total_batch_idx
        return True

    def counts(self, trainer: L.Trainer) -> bool:
        """Whether the running validation is one of a fit: not a sanity check, nor a second one after the same batch.

        Validations are told apart by batches: Lightning does not count the steps of an optimizer that it does not wrap.
        """
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        return fitting and trainer.fit_loop.total_batch_idx != self._last_batch

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due, "last_batch": self._last_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due, self._last_batch = state_dict["due"], state_dict["last_batch"]


def validation_batches(trainer: L.Trainer, samples: int | None = None) -> list[Any]:
    """Contiguous share of the validation data for this process, transferred to the device as for a validation step.

    Lightning's own distributed sampler repeats samples to even out the processes; here none is repeated.
    With ``Trainer(use_distributed_sampler=False)`` and no ``DistributedSampler`` a process has all that its own loader
    gives it. ``limit_val_batches`` selects the samples that it selects for one process. The random state is left as it
    was.

    Args:
        trainer: a Trainer in fit, at the start of training or later.
        samples: size of a random choice from each loader, always the same, over all processes; None takes all.

    Returns:
        Batches of all validation loaders, one loader after another; empty if there is no validation.

    Raises:
        MisconfigurationException: ``samples`` with a loader that is not over single samples of a map-style data set.
    """
    loaders = lightning_internals.validation_loaders(trainer)
    with isolated_random_states(), torch.random.fork_rng(range(torch.cuda.device_count())):
        return [
            lightning_internals.prepare_batch(trainer, batch, number)
            for number, (loader, limit) in enumerate(zip(loaders, trainer.num_val_batches, strict=True))
            for batch in _share(loader, limit, trainer.global_rank, trainer.world_size, samples)
        ]


def _share(loader: Any, limit: float, rank: int, processes: int, samples: int | None) -> Iterable[Any]:
    """Batches of a loader for the process ``rank`` of so many; ``limit`` is in batches of one process."""
    batches = None if limit == math.inf else int(limit)
    plain = (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
    )
    if not plain:  # such a loader itself decides on the share of this process
        if samples is not None:
            raise MisconfigurationException(
                f"{samples} validation samples cannot be chosen from a {type(loader).__name__} over an iterable data "
                "set or with its own batch sampler: leave the number out"
            )
        return islice(loader, batches)
    made: Any = loader.batch_sampler
    sampler, batch_size = (loader.sampler, None) if made is None else (made.sampler, made.batch_size)
    if processes > 1 and not isinstance(sampler, DistributedSampler):  # the share of this process is made already
        samples = None if samples is None else math.ceil(samples / processes)
        rank, processes = 0, 1
    items = _items(loader.dataset, sampler)
    if batches is not None:
        items = items[: batches * (batch_size or 1) * processes]
    if samples is not None:
        if batch_size is None:
            raise MisconfigurationException(
                f"{samples} validation samples cannot be chosen from a sampler of whole batches: leave the number out"
            )
        chosen = torch.randperm(len(items), generator=torch.Generator().manual_seed(0))[:samples]
        items = [items[position] for position in chosen.sort().values.tolist()]
    mine = [items[position] for position in torch.arange(len(items)).tensor_split(processes)[rank].tolist()]
    return DataLoader(loader.dataset, batch_size, sampler=mine, collate_fn=loader.collate_fn)


def _items(dataset: Any, sampler: Any) -> Sequence[Any]:
    """Items of a loader's sampler over all processes; in the order of the data set if the sampler shuffles."""
    sampler = lightning_internals.unwrapped_sampler(sampler)
    if isinstance(sampler, RandomSampler | DistributedSampler):
        return range(len(dataset))
    return list(sampler)
