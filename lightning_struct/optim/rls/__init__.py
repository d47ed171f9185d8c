"""RLS: recursive least squares as a layer-wise adaptive optimizer."""

from lightning_struct.optim.rls.optimizer import RLS
from lightning_struct.optim.rls.settings import FullP, LowRankP, RankOneP

__all__ = ["RLS", "FullP", "LowRankP", "RankOneP"]
