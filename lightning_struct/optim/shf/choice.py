"""The settings of SHF that nobody gave, chosen from sizes, layers and data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_struct.functional.randomness import normal_numbers
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.batch_model import BatchModel
from lightning_struct.optim.shf.kronecker import KroneckerFactors
from lightning_struct.optim.shf.settings import (
    AUTO,
    CG,
    LSMR,
    LSQR,
    PAPER,
    Exact,
    Kronecker,
    LevenbergMarquardt,
    NextBatch,
    Settings,
    WarmStart,
)

# Samples of a batch, for the sizes of what is done once per step and once per sample.
_TYPICAL_BATCH = 128
# A factor of more rows is kept as its diagonal: Cholesky factors of 4,096 rows take seconds on a CPU.
_LARGEST_FACTOR = 4096
# λ₁ in units of the square root of the largest eigenvalue of the Gauss-Newton matrix: the first step is shorter than
# the longest stable step of gradient descent in all directions, since longer first steps saturate logistic units.
_FIRST_DAMPING = 1.5
_POWER_ITERATIONS = 12


def chosen_settings(
    given: Settings, module: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> tuple[Settings, KroneckerFactors | None]:
    """The settings with values for all that was left, but for λ₁ and its bounds, and the Kronecker factors, if any.

    With λ₁ given, the rest is the paper's. Else it is chosen: conjugate gradients with Kronecker factors, few
    iterations, and the damping rule of the next batch.

    Args:
        given: as given.
        module: the network.
        parameters: name -> parameter, those that are trained.

    Raises:
        ValueError: the solver is for residuals.
        MemoryError: the Kronecker factors take more than is free.
    """
    if isinstance(given.solver, Exact):
        raise ValueError(  # noqa: TRY004
            "solver='exact' is for loss='least_squares', a module that returns residuals; choose 'lsmr', 'lsqr' or 'cg'"
        )
    paper = given.is_of_paper
    damping: Any = given.damping
    solver: Any = given.solver or (LSMR() if paper else CG())
    preconditioner: Any = given.preconditioner
    if isinstance(preconditioner, str) and preconditioner == AUTO:
        of_y = isinstance(solver, LSMR) and solver.damping_space == "y"  # impossible with Kronecker factors
        preconditioner = "diagonal" if paper or of_y else Kronecker()
    factors: KroneckerFactors | None = None
    if isinstance(preconditioner, Kronecker):
        preconditioner = preconditioner.completed(Kronecker(max_size=None) if paper else Kronecker())
        factors = _factors(preconditioner.max_size, module, parameters, inverted=isinstance(solver, CG))
        interval = 1 if paper else _factor_interval(factors, parameters)
        preconditioner = replace(preconditioner.completed(Kronecker(interval=interval)), max_size=factors.max_size)
    defaults = PAPER if paper else _chosen(maxiter=50 if factors is None else 20)
    settings = replace(
        given,
        damping=damping.completed(defaults[type(damping)]),
        solver=solver.completed(defaults[type(solver)]),
        preconditioner=preconditioner,
        warm_start=given.warm_start.completed(defaults[WarmStart]),
    )
    return settings, factors


def _chosen(maxiter: int) -> dict[type, Any]:
    values: tuple[Any, ...] = (
        LevenbergMarquardt(drop=0.85),
        NextBatch(drop=0.85),
        LSMR(maxiter=maxiter, scale_maxiter=False),
        LSQR(maxiter=maxiter, scale_maxiter=False),
        CG(maxiter=maxiter, scale_maxiter=False, progress_tolerance=0.05, progress_window=1),
        WarmStart(initial=0.9, growth=1.0),
    )
    return {type(value): value for value in values}


def with_first_damping(settings: Settings, damping: float, dtype: torch.dtype) -> Settings:
    """The settings with λ₁ and the bounds that follow from it, if they were left.

    Below λ₁ √ε rounding is larger than what the damping adds; above 1,000 λ₁ nothing moves.
    """
    rule: Any = settings.damping
    values = type(rule)(damping, minimum=damping * math.sqrt(torch.finfo(dtype).eps), maximum=1e3 * damping)
    return replace(settings, damping=rule.completed(values))


def first_damping(model: BatchModel, seed: int) -> float:
    """λ₁ = 1.5 times the root of the largest eigenvalue of AᵀA/m on the first batch, by power iteration.

    Args:
        model: the model of the first batch.
        seed: seed of the vector that the iteration starts from.
    """
    generator, like = torch.Generator().manual_seed(seed), model.gradient
    vector = normal_numbers(*like.shape, like=like, dtype=like.dtype, generator=generator)
    largest = 0.0
    for _ in range(_POWER_ITERATIONS):
        length = math.sqrt(inner(vector, vector).item())
        if length == 0.0:
            break
        vector = vector.div_(length)
        product = model.curvature(vector)
        largest, vector = inner(vector, product).item(), product
    return _FIRST_DAMPING * math.sqrt(largest) if largest > 0.0 and math.isfinite(largest) else 1.0


def _factors(
    max_size: int | str | None, module: nn.Module, parameters: Mapping[str, nn.Parameter], inverted: bool
) -> KroneckerFactors:
    """The Kronecker factors; if their largest size is left, it is halved until they fit."""
    size = _LARGEST_FACTOR if isinstance(max_size, str) else max_size
    while True:
        try:
            return KroneckerFactors(module, parameters, max_size=size, inverted=inverted)
        except MemoryError:
            if max_size != AUTO or size is None or size == 1:
                raise
            size //= 2


def _factor_interval(factors: KroneckerFactors, parameters: Mapping[str, nn.Parameter]) -> int:
    """Steps from one factorisation to the next, at most ten, for which these take about a fifth of the operations."""
    factorisation = 1.5 * factors.cubed_rows
    # Forward and backward of 6 operations a weight and sample, and three products with the curvature of 8.
    step = 30.0 * _TYPICAL_BATCH * sum(p.numel() for p in parameters.values())
    return min(max(math.ceil(factorisation / (0.2 * step)), 1), 10)
