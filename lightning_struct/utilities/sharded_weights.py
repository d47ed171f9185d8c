"""Refusal of Lightning strategies that shard the weights."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def refuse_sharded_weights(trainer: L.Trainer, name: str) -> None:
    """Raise for a strategy that shards the weights, naming ``name`` as what needs them whole.

    Raises:
        MisconfigurationException: the strategy is FSDP, DeepSpeed, model parallel, or another that shards models.
    """
    strategy = type(trainer.strategy)
    if strategy.model_sharded_context is not Strategy.model_sharded_context or issubclass(
        strategy, ModelParallelStrategy
    ):
        raise MisconfigurationException(
            f"{name} needs all weights on each process, but {strategy.__name__} shards them. Use one device or "
            "strategy='ddp'"
        )
