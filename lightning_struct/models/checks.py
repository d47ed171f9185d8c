"""Checks that the models share: of the sizes of networks, and of training losses."""

import lightning as L
from torch import Tensor

from lightning_struct.functional.finite import NotFinite
from lightning_struct.utilities.namespaces import MisconfigurationException


def check_positive(**sizes: int) -> None:
    """Refuse a size below 1.

    Raises:
        MisconfigurationException: names the first that is.
    """
    for name, size in sizes.items():
        if size < 1:
            raise MisconfigurationException(f"{name} must be at least 1, but is {size}")


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
