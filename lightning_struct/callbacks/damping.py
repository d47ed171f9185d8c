"""The Levenberg-Marquardt rule as a callback."""

import math
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.functional.damping import check_levenberg_marquardt, levenberg_marquardt


class LevenbergMarquardtDamping(L.Callback):
    """Adapts the damping of an optimizer to how well its model predicted the reduction of the loss (section 4.2). ::

        Trainer(callbacks=[LevenbergMarquardtDamping(drop=0.98)])

    After each training step it sets ``damping`` of every optimizer that has it and a ``report`` with ``reduction_ratio``,
    by :meth:`decide`, in the first process for all. It takes over from a rule of the optimizer's own: SHF's ``drop``
    becomes None, and is put back at the end of ``fit``. The damping is part of the optimizer's state, so the callback
    has none.

    Args:
        drop: λ is multiplied by it where ρ > ``upper``, and divided by it where ρ < ``lower``; in (0, 1].
        lower: bound for ρ below which the damping rises.
        upper: bound for ρ above which the damping falls.
        min_damping: λ is never set below it.
        max_damping: λ is never set above it.

    Raises:
        MisconfigurationException: an argument out of range; at the start of training no optimizer with a damping.
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
        self._last_step = 0
        self._drops: list[tuple[Any, float]] = []

    def decide(self, damping: float, reduction_ratio: float) -> float:
        """The damping of the next step; override it for another rule."""
        return levenberg_marquardt(
            damping,
            reduction_ratio,
            drop=self.drop,
            lower=self.lower,
            upper=self.upper,
            min_damping=self.min_damping,
            max_damping=self.max_damping,
        )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not _damped(trainer):
            given = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise MisconfigurationException(
                "LevenbergMarquardtDamping needs an optimizer with `damping` and `report.reduction_ratio`, as SHF has them, "
                f"but got {given}: return SHF from configure_optimizers, or leave the callback out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # not earlier: a checkpoint brings the optimizer's drop with it
        self._drops = [(o, o.drop) for o in _damped(trainer) if getattr(o, "drop", None) is not None]
        for optimizer, _ in self._drops:
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
                damping = self.decide(optimizer.damping, optimizer.report.reduction_ratio)
                optimizer.damping = trainer.strategy.broadcast(damping)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for optimizer, drop in self._drops:
            optimizer.drop = drop
        self._drops = []


def _damped(trainer: L.Trainer) -> list[Any]:
    return [
        optimizer for optimizer in trainer.optimizers if hasattr(optimizer, "damping") and hasattr(optimizer, "report")
    ]
