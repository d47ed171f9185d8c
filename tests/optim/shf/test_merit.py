import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_struct.optim import LSMR
from lightning_struct.optim.shf.outputs.solve import MeritStopping


def algorithm_6(
    merit: Callable[[int], float], start: float, maxiter: int, miniter: int, recover: int, ftol: float
) -> tuple[int, bool, list[int], int]:
    """The lines of Algorithm 6 about the merit, transcribed: (last k, stopped by them, where φ was evaluated, k_min).

    Where the pseudo-code has the undefined f_val, the text of section 5 has f_k.
    """
    f_min, f_prev, k_min, k_prev, k_next = math.inf, start, 0, 0, min(5, maxiter)
    evaluated = [0]
    for k in range(1, maxiter + 1):
        if k == k_next:
            evaluated.append(k)
            f_k = merit(k)
            if f_k < f_min:
                f_min, k_min = f_k, k
            if k > miniter and f_k == f_min and (f_prev - f_k) / f_k < (k - k_prev) * ftol:
                return k, True, evaluated, k_min
            if k > miniter and f_k > f_min and k > k_min + recover:
                return k, True, evaluated, k_min
            k_next, k_prev, f_prev = min(math.ceil(1.25 * k_next), maxiter), k, f_k
    return maxiter, False, evaluated, k_min


def run(merit: Callable[[int], float], start: float, maxiter: int, **options: Any) -> tuple[int, bool, MeritStopping]:
    """Feed the iterates 1, 2, ... to MeritStopping as a solver does; the x of iteration k is k."""
    stopping = MeritStopping(lambda x: merit(int(x)), start, LSMR(**options), maxiter)
    for k in range(1, maxiter + 1):
        if stopping(k, lambda k=k: torch.tensor(float(k))):
            return k, True, stopping
    return maxiter, False, stopping


@given(
    st.lists(st.sampled_from([0.5, 0.9, 0.999, 1.0, 1.0, 1.001, 1.1, 2.0]), min_size=40, max_size=40),
    st.integers(0, 60),
    st.integers(0, 60),
    st.sampled_from([0.0, 1e-7, 1e-4, 1e-2]),
)
@settings(max_examples=40)
def test_it_stops_where_algorithm_6_stops(factors: list[float], miniter: int, recover: int, ftol: float) -> None:
    values = [1.0]
    for factor in factors:
        values.append(values[-1] * factor)

    def merit(k: int) -> float:
        return values[k % len(values)]

    last, stopped, stopping = run(merit, 1.0, 200, miniter=miniter, recover=recover, ftol=ftol)
    expected_last, expected_stopped, evaluated, _ = algorithm_6(merit, 1.0, 200, miniter, recover, ftol)
    assert (last, stopped, [k for k, _ in stopping.values]) == (expected_last, expected_stopped, evaluated)


def test_a_merit_that_no_longer_changes_has_stagnated() -> None:
    """f_k = f_min and no decrease: it must not be taken for a rise that has to recover."""
    last, stopped, _ = run(lambda k: 1.0, 2.0, 400, miniter=50, recover=100)
    assert (last, stopped) == (60, True)


def test_nan_counts_as_a_rise() -> None:
    last, stopped, _ = run(lambda k: 1.0 / k if k < 20 else math.nan, 2.0, 400, miniter=10, recover=20)
    assert (last, stopped) == (48, True)


@pytest.mark.parametrize("maxiter", [1, 4, 5, 33])
def test_the_last_iterate_is_evaluated(maxiter: int) -> None:
    _, _, stopping = run(lambda k: 1.0 / k, 2.0, maxiter)
    assert stopping.values[-1] == (maxiter, 1.0 / maxiter)


def test_an_iterate_that_is_not_evaluated_is_not_formed() -> None:
    def solution() -> Tensor:
        raise AssertionError("the iterate was formed")

    stopping = MeritStopping(lambda x: 0.0, 1.0, LSMR(), 10)
    assert not any(stopping(k, solution) for k in (1, 2, 3, 4))
