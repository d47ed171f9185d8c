"""RLS: recursive least squares as a layer-wise adaptive optimizer."""

from lightning_struct.optim.rls.forms import FullP, LowRankP, RankOneP
from lightning_struct.optim.rls.optimizer import RLS

__all__ = ["RLS", "FullP", "LowRankP", "RankOneP"]
