"""Optimizers on torch alone: they work in a plain training loop."""

from lightning_struct.optim.shf import SHF, StepReport

__all__ = ["SHF", "StepReport"]
