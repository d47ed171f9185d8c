"""Gradients that are no numbers."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.lightning_internals import loss_scale


def is_finite(value: float, trainer: L.Trainer, optimizer: Optimizer) -> bool:
    """Whether a norm of the gradient by which ``optimizer`` is about to step is finite.

    Raises:
        ValueError: it is not, and there is no GradScaler, which skips such steps.
    """
    if math.isfinite(value):
        return True
    if loss_scale(trainer) is None:
        raise ValueError(
            f"The gradient of batch {trainer.fit_loop.batch_idx} in epoch {trainer.current_epoch} is NaN or infinite, "
            f"and {type(optimizer).__name__} is about to step by it. Trainer(detect_anomaly=True) shows where it comes "
            f"from"
        )
    return False
