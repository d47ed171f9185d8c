"""The part of Algorithm 6 that ends a solve when the validation value of its iterates stops falling."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor


class MeritStopping:
    """A solver callback that evaluates a merit function over growing intervals of iterations (section 5).

    It stops at iteration k when k > ``miniter`` and either the merit is the lowest so far but fell by less than
    ``ftol`` of itself per iteration since the last evaluation, or it is not the lowest and was lowest more than
    ``recover`` iterations ago.

    Args:
        merit: x -> φ(x).
        start: φ at the start of the solve.
        maxiter: bound on the solver's iterations; the last iterate is always evaluated.
        miniter: no stop before it.
        recover: iterations that the merit is given to fall below its minimum again.
        ftol: relative decrease per iteration.

    Attributes:
        values: (iteration, φ) of each evaluation, the start included.
    """

    def __init__(
        self,
        merit: Callable[[Tensor], float],
        start: float,
        *,
        maxiter: int,
        miniter: int = 50,
        recover: int = 100,
        ftol: float = 1e-7,
    ) -> None:
        self._merit, self._maxiter, self._miniter = merit, maxiter, miniter
        self._recover, self._ftol = recover, ftol
        self._next, self._previous, self._previous_value = min(5, maxiter), 0, start
        self._lowest, self._lowest_at = math.inf, 0
        self.values: list[tuple[int, float]] = [(0, start)]

    def __call__(self, iteration: int, solution: Callable[[], Tensor]) -> bool:
        if iteration != self._next:
            return False
        value = self._merit(solution())
        self.values.append((iteration, value))
        if value < self._lowest:
            self._lowest, self._lowest_at = value, iteration
        lowest = value == self._lowest
        # Algorithm 6 divides by an undefined f_val here; the text of section 5 has f_k, the value of this iteration.
        # (f_prev - f_k)/f_k < (k - k_prev) ftol, and k > k_min + recover (section 5)
        stagnates = lowest and self._previous_value - value < (iteration - self._previous) * self._ftol * value
        rises = not lowest and iteration > self._lowest_at + self._recover
        self._next = min(math.ceil(1.25 * self._next), self._maxiter)
        self._previous, self._previous_value = iteration, value
        return iteration > self._miniter and (stagnates or rises)
