"""The Levenberg-Marquardt rule as a callback."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.functional.damping import check_levenberg_marquardt, levenberg_marquardt


class LevenbergMarquardtDamping(L.Callback):
    """Adapts the damping of an optimizer to how well its model predicted the reduction of the loss (section 4.2). ::

        Trainer(callbacks=[LevenbergMarquardtDamping(drop=0.98)])

    After each training step it reads ``report.reduction_ratio`` of the optimizer and sets ``damping``, on every optimizer
    that has both. It takes over from a rule of the optimizer's own (SHF's ``drop`` becomes None). It has no state: the
    damping is part of the optimizer's.

    Args:
        drop: λ is multiplied by it where ρ > ``upper``, and divided where ρ < ``lower``; in (0, 1].
        lower, upper: bounds for ρ.
        min_damping, max_damping: bounds for λ.

    Raises:
        MisconfigurationException: an argument out of range; at the start of fit, no optimizer with a damping.
    """

    def __init__(
        self,
        drop: float = 0.99,
        lower: float = 0.25,
        upper: float = 0.75,
        min_damping: float = 0.0,
        max_damping: float = math.inf,
    ) -> None:
        try:
            check_levenberg_marquardt(drop, lower, upper, min_damping, max_damping)
        except ValueError as error:
            raise MisconfigurationException(f"LevenbergMarquardtDamping: {error}") from error
        self.drop, self.lower, self.upper = drop, lower, upper
        self.min_damping, self.max_damping = min_damping, max_damping
        self._last_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        optimizers = _damped(trainer)
        if not optimizers:
            given = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise MisconfigurationException(
                f"LevenbergMarquardtDamping needs an optimizer with `damping` and `report.reduction_ratio`, such as SHF, "
                f"but got {given}: use SHF, or leave the callback out"
            )
        for optimizer in optimizers:
            if getattr(optimizer, "drop", None) is not None:
                optimizer.drop = None
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        for optimizer in _damped(trainer):
            if optimizer.report is not None:
                optimizer.damping = levenberg_marquardt(
                    optimizer.damping,
                    optimizer.report.reduction_ratio,
                    drop=self.drop,
                    lower=self.lower,
                    upper=self.upper,
                    min_damping=self.min_damping,
                    max_damping=self.max_damping,
                )


def _damped(trainer: L.Trainer) -> list[Any]:
    return [o for o in trainer.optimizers if hasattr(o, "damping") and hasattr(o, "report")]
