from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_struct.functional.solvers.line_search import LineSearchResult, armijo


def counted(function: Any) -> tuple[Any, list[float]]:
    steps: list[float] = []

    def wrapper(step: float) -> float:
        steps.append(step)
        return function(step)

    return wrapper, steps


def test_the_full_step_is_taken_where_it_is_good_enough() -> None:
    function, steps = counted(lambda s: 1.0 - s + 0.5 * s * s)
    assert armijo(function, 1.0, -1.0) == LineSearchResult(step_length=1.0, value=0.5, evaluations=1)
    assert steps == [1.0]


def test_a_known_value_of_the_full_step_is_not_computed_again() -> None:
    function, steps = counted(lambda s: 1.0 - s)
    assert armijo(function, 1.0, -1.0, first_value=0.0).step_length == 1.0
    assert steps == []


def test_steps_are_halved_until_the_value_is_low_enough() -> None:
    function, steps = counted(lambda s: 1.0 - s + 3.0 * s * s)
    result = armijo(function, 1.0, -1.0, first_value=3.0)
    assert steps == [0.5, 0.25]
    assert result == LineSearchResult(step_length=0.25, value=0.9375, evaluations=3)


def test_a_value_on_the_bound_is_good_enough() -> None:
    assert armijo(lambda s: 1.0 - 0.25 * s, 1.0, -1.0, alpha=0.25).step_length == 1.0


def test_a_value_above_the_bound_is_not_good_enough_though_it_is_lower_than_before() -> None:
    result = armijo(lambda s: 1.0 - 0.2 * s if s == 1.0 else 1.0 - s, 1.0, -1.0, alpha=0.25)
    assert result.step_length == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_not_good_enough(bad: float) -> None:
    result = armijo(lambda s: bad if s > 0.3 else 1.0 - s, 1.0, -1.0)
    assert (result.step_length, result.evaluations) == (0.25, 3)


def test_a_known_value_that_is_not_finite_is_not_good_enough() -> None:
    assert armijo(lambda s: 1.0 - s, 1.0, -1.0, first_value=math.nan).step_length == 0.5


def test_shrink_is_the_factor_between_steps() -> None:
    function, steps = counted(lambda s: 2.0)
    armijo(function, 1.0, -1.0, shrink=0.1, max_backtracks=2)
    assert steps == pytest.approx([1.0, 0.1, 0.01])


@pytest.mark.parametrize("backtracks", [0, 5])
def test_without_a_good_step_the_result_is_zero_and_the_old_value(backtracks: int) -> None:
    function, steps = counted(lambda s: 2.0)
    result = armijo(function, 1.0, -1.0, max_backtracks=backtracks)
    assert result == LineSearchResult(step_length=0.0, value=1.0, evaluations=backtracks + 1)
    assert len(steps) == backtracks + 1


@pytest.mark.parametrize("slope", [0.0, 1.0, math.nan])
def test_a_slope_that_is_not_negative_is_an_error(slope: float) -> None:
    with pytest.raises(ValueError, match=f"negative, got {slope}"):
        armijo(lambda s: 0.0, 1.0, slope)


@pytest.mark.parametrize(
    "options", [{"alpha": 0.0}, {"alpha": 1.0}, {"shrink": 0.0}, {"shrink": 1.0}, {"max_backtracks": -1}], ids=str
)
def test_an_option_out_of_range_is_named(options: dict[str, Any]) -> None:
    (name,), (value,) = options, options.values()
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        armijo(lambda s: 0.0, 1.0, -1.0, **options)


@given(st.floats(0.01, 1e4), st.floats(-1e3, -1e-3), st.floats(1e-4, 0.49))
@settings(max_examples=200)
def test_on_a_parabola_the_step_is_the_largest_power_of_a_half_that_meets_armijo(
    curvature: float, slope: float, alpha: float
) -> None:
    def function(s: float) -> float:
        return slope * s + 0.5 * curvature * s * s

    bound = 2.0 * (1.0 - alpha) * -slope / curvature  # s slope + ½ c s² <= alpha s slope  <=>  s <= bound
    result = armijo(function, 0.0, slope, alpha=alpha, max_backtracks=60)
    assert result.step_length <= bound * (1 + 1e-9)
    assert result.step_length == 1.0 or 2.0 * result.step_length > bound * (1 - 1e-9)
    assert math.log2(result.step_length) == int(math.log2(result.step_length))
    assert result.value == function(result.step_length) < 0.0
