"""What was logged since the last look, which Lightning's dict of the last values does not tell."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_struct.utilities import namespaces as L


class NewlyLogged:
    """Tells metrics that were logged again from those whose last value is still there.

    Lightning keeps the tensor of each in ``Trainer.callback_metrics`` until the name is logged again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def since_last(self, trainer: L.Trainer, names: Iterable[str]) -> set[str]:
        """Those of the names that were logged since the last call; in the first call, those that were logged at all."""
        metrics = trainer.callback_metrics
        present = {name: metrics[name].detach() for name in names if name in metrics}
        seen, self._seen = self._seen, present
        return {
            name for name, value in present.items() if name not in seen or value.data_ptr() != seen[name].data_ptr()
        }
