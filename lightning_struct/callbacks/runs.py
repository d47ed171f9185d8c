"""The run of a callback: whether another one begins, and the values logged in it since the last look."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_struct.utilities import namespaces as L


class Run:
    """Tells whether a fit belongs to the run that a callback has been in.

    It does if the same Trainer fits the same module again. With another Trainer, as for the next fold of a
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


class NewlyLogged:
    """Tells metrics that were logged again from those whose last value is still there.

    Lightning keeps the tensor of each in ``Trainer.callback_metrics`` until the name is logged again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def since_last(self, trainer: L.Trainer, names: Iterable[str]) -> set[str]:
        """The names that were logged since the last call; in the first call, all that were logged."""
        metrics = trainer.callback_metrics
        present = {name: metrics[name].detach() for name in names if name in metrics}
        seen, self._seen = self._seen, present
        return {
            name for name, value in present.items() if name not in seen or value.data_ptr() != seen[name].data_ptr()
        }
