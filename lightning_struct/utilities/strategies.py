"""Which of Lightning's strategies keep all weights on each process."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def refuse_sharded_weights(trainer: L.Trainer, name: str) -> None:
    """Raise for a strategy that shards the weights, naming ``name`` as what needs them whole.

    Raises:
        MisconfigurationException: the strategy is neither one device nor a kind of DDP.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} needs all weights on each process, but {type(strategy).__name__} shards them. Use one device or "
            "strategy='ddp'"
        )
