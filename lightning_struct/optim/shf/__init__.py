"""SHF: stochastic Hessian-free optimization with LSMR."""

from lightning_struct.optim.shf.optimizer import SHF, StepReport

__all__ = ["SHF", "StepReport"]
