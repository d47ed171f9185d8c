"""Steps of optimizers of which Lightning does not know."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_struct.utilities import namespaces as L


class RawSteps:
    """Sees the steps of the Trainer's optimizers by their hooks.

    ``Trainer.global_step`` does not count those of ``self.optimizers(use_pl_optimizer=False)``, which a module may take
    under manual optimization.

    Args:
        trainer: in fit.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer, self._stepped = trainer, False
        by_hand = not trainer.lightning_module.automatic_optimization
        self._handle = register_optimizer_step_post_hook(self._note) if by_hand else None

    def end_batch(self) -> bool:
        """Whether there was one in the batch that ends."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _note(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped = self._stepped or optimizer in self._trainer.optimizers
