"""Armijo backtracking."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_struct.functional.checks import Measured, checked


@dataclass(frozen=True)
class LineSearchResult:
    """End of a line search.

    Attributes:
        step_length: s; 0 if no step was good enough.
        value: f(w + s d).
        evaluations: values looked at, a known ``first_value`` among them.
    """

    step_length: float
    value: float
    evaluations: int


@checked
def armijo(
    function: Callable[[float], float],
    value: float,
    slope: float,
    *,
    alpha: float = 1e-4,
    shrink: float = 0.5,
    max_backtracks: int = 30,
    first_value: Measured | None = None,
) -> LineSearchResult:
    """Backtrack from s = 1 until function(s) <= value + alpha s slope (Armijo; Algorithm 1 of the SHF paper).

    A value that is NaN or infinite is not good enough.

    Args:
        function: s -> f(w + s d).
        value: f(w).
        slope: d·∇f(w) < 0.
        alpha: in (0, 1), the share of the slope's promise that must be kept.
        shrink: in (0, 1), s is multiplied by it.
        max_backtracks: bound on the shrinkings; the paper has none.
        first_value: function(1), if it is known already.

    Returns:
        LineSearchResult: step length, value and the number of evaluations.

    Raises:
        ValueError: d is not a descent direction, or an argument is out of range.

    Example:
        >>> armijo(lambda s: (1 - 4 * s) ** 2, value=1.0, slope=-8.0)  # f(w) = w² from w = 1 along d = -4
        LineSearchResult(step_length=0.25, value=0.0, evaluations=3)
    """
    if not slope < 0:
        raise ValueError(f"the slope along the direction must be negative, got {slope}: it is no descent direction")
    if not (0 < alpha < 1 and 0 < shrink < 1 and max_backtracks >= 0):
        raise ValueError(
            f"alpha and shrink must be in (0, 1) and max_backtracks >= 0: {alpha}, {shrink}, {max_backtracks}"
        )
    step = 1.0
    for evaluation in range(1, max_backtracks + 2):
        trial = first_value if evaluation == 1 and first_value is not None else function(step)
        # f(w + s d) <= f(w) + α s d·∇f(w) (section 4, Algorithm 1)
        if math.isfinite(trial) and trial <= value + alpha * step * slope:
            return LineSearchResult(step, trial, evaluation)
        step *= shrink
    return LineSearchResult(0.0, value, max_backtracks + 1)
