"""Manual optimization: mixins that say how a LightningModule is trained."""

from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics
from lightning_struct.strategies.rls import RLSOptimization
from lightning_struct.strategies.shf import SHFOptimization

__all__ = ["GradientStatistics", "RLSOptimization", "SHFOptimization"]
