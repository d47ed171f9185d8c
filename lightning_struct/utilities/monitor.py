"""Reading a logged metric that a callback depends on."""

import math

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def monitored_value(trainer: L.Trainer, monitor: str, who: str) -> float:
    """The last logged value of a metric, the first process's in all processes.

    Args:
        trainer: in training.
        monitor: name of the metric.
        who: asks, for the error.

    Raises:
        MisconfigurationException: the metric was never logged, or is NaN or infinite.
    """
    metrics = trainer.callback_metrics
    if monitor not in metrics:
        logged = ", ".join(sorted(metrics)) or "nothing"
        raise MisconfigurationException(
            f"{who} monitors {monitor!r}, which is not logged; logged are: {logged}. Log it in validation_step, or name "
            "one of these"
        )
    value = trainer.strategy.broadcast(float(metrics[monitor]))
    if not math.isfinite(value):
        raise MisconfigurationException(
            f"{who} monitors {monitor!r}, which is {value} after step {trainer.global_step}: training has diverged, or the "
            "validation data is damaged"
        )
    return value
