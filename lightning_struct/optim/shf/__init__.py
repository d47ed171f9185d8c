"""SHF: stochastic Hessian-free optimization with LSMR.

`optimizer` is Algorithm 1, `settings` its arguments as a value that checks itself, `complete_settings` the same with
values for what was left to be chosen, `batch_model` and `objective` the least-squares model of a batch and the true
objective, `solve` the subproblem, `merit` the end of a solve by validation data, `preconditioner` and `kronecker` what
the solve is preconditioned with, `report` what a step reports, `unreached` a warning of layers that are called without
gradients.
"""

from lightning_struct.optim.shf.optimizer import SHF
from lightning_struct.optim.shf.report import StepReport
from lightning_struct.optim.shf.settings import (
    CG,
    LSMR,
    LSQR,
    Exact,
    Kronecker,
    LevenbergMarquardt,
    NextBatch,
    Settings,
    WarmStart,
)

__all__ = [
    "CG",
    "LSMR",
    "LSQR",
    "SHF",
    "Exact",
    "Kronecker",
    "LevenbergMarquardt",
    "NextBatch",
    "Settings",
    "StepReport",
    "WarmStart",
]
