"""Reading a logged metric that a callback depends on."""

import math

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def monitored_value(trainer: L.Trainer, monitor: str, who: str) -> float:
    """The last logged value of a metric, the same in all processes: the mean over those that logged it.

    Where the module logs with ``sync_dist=True`` that is what each of them has. All processes must ask.

    Args:
        trainer: in training.
        monitor: name of the metric.
        who: asks, for the error.

    Raises:
        MisconfigurationException: the metric was never logged, or is NaN or infinite; in all processes alike.
    """
    metrics = trainer.callback_metrics
    mine = [float(metrics[monitor]), 1.0] if monitor in metrics else [0.0, 0.0]
    device = trainer.strategy.root_device if trainer.world_size > 1 else "cpu"  # some devices have no float64
    total, processes = trainer.strategy.reduce(
        torch.tensor(mine, dtype=torch.float64, device=device), reduce_op="sum"
    ).tolist()
    if not processes:
        logged = ", ".join(sorted(metrics)) or "nothing"
        raise MisconfigurationException(
            f"{who} monitors {monitor!r}, which is not logged; logged are: {logged}. Log it in validation_step, or name "
            "one of these"
        )
    value = total / processes
    if not math.isfinite(value):
        raise MisconfigurationException(
            f"{who} monitors {monitor!r}, which is {value} after step {trainer.global_step}: training has diverged, or the "
            "validation data is damaged"
        )
    return value
