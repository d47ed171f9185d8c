"""The validation data of a Trainer, shared out over its processes so that every sample is seen exactly once."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_struct.utilities.lightning_internals import prepare_batch, unwrapped_sampler, validation_loaders


def validation_batches(trainer: L.Trainer, samples: int | None = None, seed: int = 0) -> list[Any]:
    """This process's contiguous share of the validation data, as the validation step gets it: transferred to the device.

    Lightning's own distributed sampler repeats samples to even out the processes; here none is repeated. Of
    ``limit_val_batches`` the samples are those that one process would take. The random state is left as it was.

    Args:
        trainer: in fit, at the start of training or later.
        samples: take only so many of each loader, over all processes: a random choice, the same for the same seed.
        seed: of that choice.

    Returns:
        Batches of all validation loaders, one loader after another; empty where there is no validation.

    Raises:
        MisconfigurationException: ``samples`` with a loader that is not over single samples of a map-style data set.
    """
    loaders = validation_loaders(trainer)
    with isolate_rng():
        return [
            prepare_batch(trainer, batch)
            for loader, limit in zip(loaders, trainer.num_val_batches, strict=True)
            for batch in _share(loader, limit, trainer.global_rank, trainer.world_size, samples, seed)
        ]


def _share(loader: Any, limit: float, rank: int, processes: int, samples: int | None, seed: int) -> Iterable[Any]:
    plain = (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
    )
    if not plain:  # what such a loader gives to this process is its own affair
        if samples is not None:
            raise MisconfigurationException(
                f"Only {samples} validation samples are asked for, but they cannot be chosen from a {type(loader).__name__} "
                "over an iterable data set or with a batch sampler of its own: leave the number out"
            )
        return islice(loader, None if limit == float("inf") else int(limit))
    items = _items(loader)
    items = items[: int(limit) * (loader.batch_size or 1) * processes]
    if samples is not None:
        if loader.batch_size is None:
            raise MisconfigurationException(
                f"Only {samples} validation samples are asked for, but the loader's sampler yields whole batches: leave the "
                "number out"
            )
        chosen = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))[:samples]
        items = [items[position] for position in chosen.sort().values.tolist()]
    mine = torch.arange(len(items)).tensor_split(processes)[rank].tolist()
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=[items[position] for position in mine],
        collate_fn=loader.collate_fn,
    )


def _items(loader: DataLoader) -> Sequence[Any]:
    """What the loader's sampler yields over all processes, in the order of the data set where it shuffles."""
    sampler = unwrapped_sampler(loader)
    if isinstance(sampler, RandomSampler | DistributedSampler):
        return range(len(loader.dataset))  # type: ignore[arg-type]
    return list(sampler)
