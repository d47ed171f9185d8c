"""What must hold for a Trainer before training starts."""

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_weights_are_whole(trainer: L.Trainer, who: str) -> None:
    """Refuse a strategy under which a process does not hold all weights.

    Args:
        trainer: with its strategy.
        who: needs them, for the error.

    Raises:
        MisconfigurationException: naming the strategy.
    """
    strategy = trainer.strategy
    whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if not whole:
        raise MisconfigurationException(
            f"{who} needs all weights in each process, which {type(strategy).__name__} does not give: train on one device, "
            "or with Trainer(strategy='ddp')"
        )
