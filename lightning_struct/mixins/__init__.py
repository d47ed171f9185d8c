"""Mixins for manual optimization: put before a LightningModule, one says how the module is trained.

They have nothing to do with Lightning's ``Strategy`` (ddp, fsdp, ...), which says where a Trainer runs: both mixins
work on one device and under ddp.
"""

from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics
from lightning_struct.mixins.rls import RLSOptimization
from lightning_struct.mixins.shf import SHFOptimization

__all__ = ["GradientStatistics", "RLSOptimization", "SHFOptimization"]
