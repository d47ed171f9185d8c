"""The Levenberg-Marquardt rule for the damping."""

from __future__ import annotations

import math


def levenberg_marquardt(
    damping: float,
    reduction_ratio: float,
    *,
    drop: float = 0.99,
    lower: float = 0.25,
    upper: float = 0.75,
    min_damping: float = 0.0,
    max_damping: float = math.inf,
) -> float:
    """The next λ (SHF paper, section 4.2 and Algorithm 1): λ/drop where ρ < lower, drop·λ where ρ > upper, else λ.

    Args:
        damping: λ > 0.
        reduction_ratio: ρ, the reduction of the loss over the one that the quadratic model predicted; NaN counts as a
            model that failed.
        drop: in (0, 1].
        lower: below it the model is trusted less.
        upper: above it the model is trusted more; lower <= upper.
        min_damping: λ is never set below it.
        max_damping: λ is never set above it.

    Example:
        >>> [levenberg_marquardt(10.0, ratio, drop=0.5) for ratio in (0.1, 0.5, 0.9)]
        [20.0, 10.0, 5.0]
    """
    # λ <- λ/drop if ρ < 1/4, drop·λ if ρ > 3/4 (section 4.2)
    if math.isnan(reduction_ratio) or reduction_ratio < lower:
        damping = damping / drop
    elif reduction_ratio > upper:
        damping = damping * drop
    return min(max(damping, min_damping), max_damping)


def check_levenberg_marquardt(drop: float, lower: float, upper: float, min_damping: float, max_damping: float) -> None:
    """Raise ValueError for settings that :func:`levenberg_marquardt` has no meaning for."""
    if not 0.0 < drop <= 1.0:
        raise ValueError(f"drop must be in (0, 1], got {drop}")
    if not lower <= upper:
        raise ValueError(f"lower must be <= upper, got {lower} and {upper}")
    if not (0.0 <= min_damping <= max_damping and max_damping > 0.0):
        raise ValueError(f"0 <= min_damping <= max_damping > 0 must hold, got {min_damping} and {max_damping}")
