"""The check of training losses that the models share."""

import lightning as L
from torch import Tensor

from lightning_struct.functional.checks import NotFinite


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
