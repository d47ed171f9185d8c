"""The settings of SHF that nobody gave, chosen from sizes, layers and data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from lightning_struct.functional.randomness import normal_numbers
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.batch_model import BatchModel
from lightning_struct.optim.shf.complete_settings import OutputSettings
from lightning_struct.optim.shf.kronecker import KroneckerFactors
from lightning_struct.optim.shf.settings import AUTO, PAPER, Settings

# Samples of a batch, for the sizes of what is done once per step and once per sample.
_TYPICAL_BATCH = 128
# A factor of more rows is kept as its diagonal: Cholesky factors of 4,096 rows take seconds on a CPU.
_LARGEST_FACTOR = 4096
# λ₁ in units of the square root of the largest eigenvalue of the Gauss-Newton matrix: the first step is shorter than
# the longest stable step of gradient descent in all directions, since longer first steps saturate logistic units.
_FIRST_DAMPING = 1.5
_POWER_ITERATIONS = 12


def chosen_settings(
    settings: Settings, module: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> tuple[OutputSettings, KroneckerFactors | None]:
    """The settings with values for all that was left, but for λ₁ and its bounds, and the Kronecker factors, if any.

    With λ₁ given, the rest is the paper's. Else it is chosen: conjugate gradients with Kronecker factors, few
    iterations, and the damping rule of the next batch.

    Args:
        settings: as given.
        module: the network.
        parameters: name -> parameter, those that are trained.
    """
    if settings.damping is not None:
        settings = settings.filled(PAPER)
        return OutputSettings.of(settings), _factors(settings, module, parameters)
    of_y = settings.damping_space == "y"  # impossible with CG and with Kronecker factors
    settings = settings.filled(
        {"preconditioner": "diagonal" if of_y else "kronecker", "solver": "lsmr" if of_y else "cg"}
    )
    factors = _factors(settings, module, parameters)
    chosen = OutputSettings.of(
        settings.filled(
            {
                "drop": 0.85,
                "damping_rule": "next_batch",
                "warm_start": 0.9,
                "warm_start_growth": 1.0,
                "maxiter": 50 if factors is None else 20,
                "scale_maxiter": False,
                "progress_tolerance": 0.05,
                "progress_window": 1,
                "factor_interval": 1 if factors is None else _factor_interval(factors, parameters),
                "max_factor_size": None if factors is None else factors.max_size,
                "single_samples": False,
            }
        )
    )
    return chosen, factors


def with_first_damping(settings: OutputSettings, damping: float, dtype: torch.dtype) -> OutputSettings:
    """The settings with λ₁ and the bounds that follow from it, where they were left.

    Below λ₁ √ε rounding is larger than what the damping adds; above 1,000 λ₁ nothing moves.
    """
    smallest, largest = settings.min_damping, settings.max_damping
    return replace(
        settings,
        damping=damping,
        min_damping=damping * math.sqrt(torch.finfo(dtype).eps) if smallest is None else smallest,
        max_damping=1e3 * damping if largest is None else largest,
    )


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


def _factors(settings: Settings, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> KroneckerFactors | None:
    """The Kronecker factors, if the settings ask for them; where their largest size is left, halved until they fit."""
    if not (isinstance(settings.preconditioner, str) and settings.preconditioner == "kronecker"):
        return None
    given = settings.max_factor_size
    size = _LARGEST_FACTOR if given == AUTO else given
    while True:
        try:
            return KroneckerFactors(
                module,
                parameters,
                max_size=size,
                exclude=settings.exclude_factors,
                inverted=settings.solver == "cg",
            )
        except MemoryError:
            if given != AUTO or size is None or size == 1:
                raise
            size //= 2


def _factor_interval(factors: KroneckerFactors, parameters: Mapping[str, nn.Parameter]) -> int:
    """Steps from one factorisation to the next, at most ten, for which these take about a fifth of the operations."""
    factorisation = 1.5 * factors.cubed_rows
    # Forward and backward of 6 operations a weight and sample, and three products with the curvature of 8.
    step = 30.0 * _TYPICAL_BATCH * sum(p.numel() for p in parameters.values())
    return min(max(math.ceil(factorisation / (0.2 * step)), 1), 10)
