"""Where the run of a callback ends and another one begins."""

from __future__ import annotations

import weakref
from typing import Any

from lightning_struct.utilities import namespaces as L


class Run:
    """Tells whether a fit belongs to the run that a callback has been in.

    It does where the same Trainer fits the same module again. With another Trainer, as for the next fold of a
    cross-validation, or another module, another run begins.
    """

    def __init__(self) -> None:
        self._has_trained = False
        self._module: weakref.ref[L.LightningModule] | None = None

    def begins_anew(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Whether another run begins. To be asked in ``Callback.setup``, before the state of a checkpoint is loaded."""
        other_module = self._module is not None and self._module() is not pl_module
        return self._has_trained and (trainer.fit_loop.total_batch_idx < 0 or other_module)

    def on_train_start(self, pl_module: L.LightningModule) -> None:
        self._has_trained, self._module = True, weakref.ref(pl_module)

    def __getstate__(self) -> dict[str, Any]:
        return {"_has_trained": self._has_trained, "_module": None}  # a weak reference cannot be pickled
