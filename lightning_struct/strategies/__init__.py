"""Manual optimization: mixins that say how a LightningModule is trained."""

from lightning_struct.strategies.rls import RLSOptimization
from lightning_struct.strategies.shf import SHFOptimization
from lightning_struct.utilities.gradient_statistics import GradientStatistics

__all__ = ["GradientStatistics", "RLSOptimization", "SHFOptimization"]
