"""The accumulation of gradients over batches, as far as Lightning's loop allows to change it."""

from __future__ import annotations

import math
from typing import Any

from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.namespaces import MisconfigurationException, lightning_classes


def accumulated_batches(samples: float, limit: float, least: int, present: int, batches_done: int) -> int:
    """Number of batches that make an optimizer step of so many samples in batches of at most ``limit``.

    Lightning divides the loss by this number, and steps wherever it divides the number of batches of the epoch: from
    ``batches_done`` on it can become a divisor of that only. The fewest batches that are enough are taken, up to twice
    those needed; else the most that are not enough, until more batches are done.

    Args:
        samples: of a step, in this process.
        limit: samples of a batch, at most.
        least: number of batches that are accumulated in any case, where the epoch begins.
        present: number that is accumulated now, a divisor of ``batches_done``.
        batches_done: of this epoch, when the step begins.

    Example:
        >>> [accumulated_batches(100, limit=32, least=1, present=1, batches_done=done) for done in (0, 7, 8, 10)]
        [4, 7, 4, 5]
    """
    needed = max(least, math.ceil(samples / limit - 1e-9))
    enough = range(needed, max(2 * needed, present + 1))
    return next(k for k in (*enough, *range(needed - 1, 0, -1)) if batches_done % k == 0)


def is_scheduled(trainer: L.Trainer) -> bool:
    """Whether a ``GradientAccumulationScheduler`` sets the accumulation in each epoch."""
    return any(scheduler.going_to_accumulate_grad_batches() for scheduler in _schedulers(trainer))


def accumulate_as_scheduled(trainer: L.Trainer) -> None:
    """Set what a ``GradientAccumulationScheduler`` sets in this epoch, before it does so itself."""
    for scheduler in _schedulers(trainer):
        trainer.accumulate_grad_batches = scheduler.get_accumulate_grad_batches(trainer.current_epoch)


def _schedulers(trainer: L.Trainer) -> list[Any]:
    scheduling = lightning_classes("callbacks.GradientAccumulationScheduler")
    return [callback for callback in trainer.callbacks if isinstance(callback, scheduling)]  # type: ignore[attr-defined]


def check_accumulation(trainer: L.Trainer, argument: str, remedy: str) -> None:
    """Raise where the accumulation cannot be changed during training.

    Args:
        trainer: in ``Callback.setup``.
        argument: of GrowingBatchSize, which asks for it.
        remedy: under manual optimization.

    Raises:
        MisconfigurationException: manual optimization, a strategy that accumulates by itself, or another callback that
            schedules the accumulation.
    """
    module = type(trainer.lightning_module).__name__
    if not trainer.lightning_module.automatic_optimization:
        raise MisconfigurationException(
            f"GrowingBatchSize({argument}) accumulates gradients over batches, which under manual optimization "
            f"{module}.training_step does itself: {remedy}"
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"GrowingBatchSize({argument}) changes how many batches are accumulated, which "
            f"{type(trainer.strategy).__name__} sets once for the whole training: {remedy}"
        )
    if is_scheduled(trainer):
        raise MisconfigurationException(
            f"GrowingBatchSize({argument}) and GradientAccumulationScheduler both set accumulate_grad_batches: "
            "leave one of them out"
        )
