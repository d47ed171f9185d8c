"""Optimizers on torch alone: they work in a plain training loop."""

from lightning_struct.optim.rls import RLS
from lightning_struct.optim.shf import SHF, StepReport

__all__ = ["RLS", "SHF", "StepReport"]
