"""The mixins of :mod:`lightning_struct.mixins`, under the name that users know."""

from lightning_struct.mixins import GradientStatistics, RLSOptimization, SHFOptimization

__all__ = ["GradientStatistics", "RLSOptimization", "SHFOptimization"]
