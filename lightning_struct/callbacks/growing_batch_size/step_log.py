"""What the callback logs of steps, written when loggers write."""

from __future__ import annotations

from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.lightning_internals import logs_now

LOGGED = ("batch_size", "batch_size_predicted", "gradient_variance", "gradient_noise_scale", "learning_rate_scale")


class StepLog:
    """Values of the steps of a fit, kept until loggers write, since logging takes longer than checking.

    Attributes:
        values: by name, of ``LOGGED``, what is new since they were logged.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._names: tuple[str, ...] | None = None  # what the module does not log itself

    def end_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what is new, after the first step and when loggers write."""
        if trainer.barebones or not (self._names is None or logs_now(trainer)):
            return
        if self._names is None:
            self._names = tuple(name for name in LOGGED if name not in trainer.callback_metrics)
        for name in self._names:
            if name in self.values:
                pl_module.log(name, self.values[name], batch_size=int(self.values["batch_size"]))
        self.values = {}
