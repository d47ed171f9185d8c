"""Training of the models: the base of their classes, their optimizers, and the check of their losses."""

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lightning_struct.functional.checks import NotFinite, check_types
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
        MisconfigurationException: for optimizers that take no parameters, as RLS and SHF.
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


class Task(L.LightningModule):
    """Base of the models: trained by any optimizer, and validated and tested alike.

    Args:
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes the learning-rate scheduler from the optimizer, see :func:`optimizer_and_scheduler`.
    """

    def __init__(self, optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable | None) -> None:
        super().__init__()
        check_types(Task.__init__, locals())
        self.make_optimizer, self.make_lr_scheduler = optimizer, lr_scheduler

    def evaluate(self, batch: Any, batch_idx: int, stage: str) -> None:
        """Log losses and scores of a batch, with the name of the stage, ``"val"`` or ``"test"``, before theirs."""
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, batch_idx, "test")

    def configure_optimizers(self) -> Any:  # the class of an optimizer, in models that have but one
        return optimizer_and_scheduler(self.parameters(), self.make_optimizer, self.make_lr_scheduler)


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
