"""Optimizers on torch alone: they work in a plain training loop."""

from lightning_struct.optim.rls import RLS, FullP, LowRankP, RankOneP
from lightning_struct.optim.shf import (
    CG,
    LSMR,
    LSQR,
    SHF,
    Exact,
    Kronecker,
    LevenbergMarquardt,
    NextBatch,
    StepReport,
    WarmStart,
)

__all__ = [
    "CG",
    "LSMR",
    "LSQR",
    "RLS",
    "SHF",
    "Exact",
    "FullP",
    "Kronecker",
    "LevenbergMarquardt",
    "LowRankP",
    "NextBatch",
    "RankOneP",
    "StepReport",
    "WarmStart",
]
