"""Optimizers of the models, as the command line configures them."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler


def optimizer_and_scheduler(
    parameters: Iterable[Any], optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable | None
) -> OptimizerLRScheduler:
    """What ``configure_optimizers`` returns.

    Args:
        parameters: or groups of them.
        optimizer: makes the optimizer from them.
        lr_scheduler: makes the learning-rate scheduler from the optimizer; it is stepped after each epoch, and one that
            needs a metric gets ``val_loss``. None: there is none.
    """
    made = optimizer(parameters)
    if lr_scheduler is None:
        return made
    return {"optimizer": made, "lr_scheduler": {"scheduler": lr_scheduler(made), "monitor": "val_loss"}}
