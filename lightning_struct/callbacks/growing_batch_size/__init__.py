"""GrowingBatchSize: a mini-batch that grows while a Trainer runs."""

from lightning_struct.callbacks.growing_batch_size.callback import GrowingBatchSize, next_batch_size

__all__ = ["GrowingBatchSize", "next_batch_size"]
