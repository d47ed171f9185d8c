"""RLS: recursive least squares as a layer-wise adaptive optimizer."""

from lightning_struct.optim.rls.optimizer import RLS
from lightning_struct.optim.rls.settings import LowRankP

__all__ = ["RLS", "LowRankP"]
