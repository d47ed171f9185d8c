"""Optimizers of the models, as the command line configures them."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from lightning_struct.optim.requirements import TakesModule
from lightning_struct.utilities.namespaces import MisconfigurationException


def optimizer_and_scheduler(
    parameters: Iterable[Any], optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable | None
) -> OptimizerLRScheduler:
    """What ``configure_optimizers`` returns.

    Args:
        parameters: or groups of them.
        optimizer: makes the optimizer from them.
        lr_scheduler: makes the learning-rate scheduler from the optimizer; it is stepped after each epoch, and one that
            needs a metric gets ``val_loss``. None: there is none.

    Raises:
        MisconfigurationException: for what takes no parameters, as RLS and SHF.
    """
    try:
        made = optimizer(parameters)
    except TakesModule as error:
        raise MisconfigurationException(
            "This model gives its optimizer the parameters; for RLS or SHF, which take the module, there are models of "
            f"their names, as RLSClassifier and SHFClassifier (--model=RLSClassifier). {error}"
        ) from error
    if lr_scheduler is None:
        return made
    return {"optimizer": made, "lr_scheduler": {"scheduler": lr_scheduler(made), "monitor": "val_loss"}}
