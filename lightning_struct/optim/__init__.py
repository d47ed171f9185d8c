"""Optimizers on torch alone: they work in a plain training loop."""

from lightning_struct.optim.rls import RLS, LowRankP
from lightning_struct.optim.shf import SHF, StepReport
from lightning_struct.optim.shf.settings import (
    CG,
    LSMR,
    Exact,
    Kronecker,
    LevenbergMarquardt,
    NextBatch,
    WarmStart,
)

__all__ = [
    "CG",
    "LSMR",
    "RLS",
    "SHF",
    "Exact",
    "Kronecker",
    "LevenbergMarquardt",
    "LowRankP",
    "NextBatch",
    "StepReport",
    "WarmStart",
]
