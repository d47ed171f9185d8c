"""Training of the models: their optimizers, as the command line configures them, and the check of their losses."""

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lightning_struct.functional.checks import NotFinite
from lightning_struct.optim.requirements import TakesModule
from lightning_struct.utilities.namespaces import MisconfigurationException


def optimizer_and_scheduler(
    parameters: Iterable[Any], optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable | None
) -> OptimizerLRScheduler:
    """The return value of ``configure_optimizers``.

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


def check_train_loss(module: L.LightningModule, loss: Tensor, batch_idx: int) -> None:
    """Refuse a training loss, (), that is NaN or infinite.

    Raises:
        NotFinite: names the value and the batch.
    """
    if not loss.isfinite():
        raise NotFinite(
            f"train_loss is {loss.item()} in batch {batch_idx} of epoch {module.current_epoch}: lower the learning "
            "rate, and look for NaN and infinity in the data"
        )
