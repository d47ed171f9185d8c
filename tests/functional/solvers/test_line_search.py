import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_struct.functional.solvers.line_search import LineSearchResult, armijo

NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("function", "options", "expected", "evaluated"),
    [
        (lambda s: 1.0 - s + 0.5 * s * s, {}, (1.0, 0.5, 1), [1.0]),
        (lambda s: 1.0 - s, {"first_value": 0.0}, (1.0, 0.0, 1), []),
        (lambda s: 1.0 - s + 3.0 * s * s, {"first_value": 3.0}, (0.25, 0.9375, 3), [0.5, 0.25]),
        (lambda s: 1.0 - 0.25 * s, {"alpha": 0.25}, (1.0, 0.75, 1), [1.0]),
        (lambda s: 1.0 - 0.2 * s if s == 1.0 else 1.0 - s, {"alpha": 0.25}, (0.5, 0.5, 2), [1.0, 0.5]),
        *((lambda s, v=v: v if s > 0.3 else 1.0 - s, {}, (0.25, 0.75, 3), [1.0, 0.5, 0.25]) for v in NOT_FINITE),
        (lambda s: 1.0 - s, {"first_value": math.nan}, (0.5, 0.5, 2), [0.5]),
        (lambda s: 2.0, {"shrink": 0.1, "max_backtracks": 2}, (0.0, 1.0, 3), [1.0, 0.1, 0.01]),
        (lambda s: 2.0, {"max_backtracks": 0}, (0.0, 1.0, 1), [1.0]),
    ],
    ids=["a full step", "a known value", "halved", "on the bound", "above the bound", *map(str, NOT_FINITE),
         "a known value that is not finite", "shrink", "no good step"],
)  # fmt: skip
def test_the_first_step_whose_value_is_low_enough_is_taken(
    function: Any, options: dict[str, Any], expected: tuple[float, float, int], evaluated: list[float]
) -> None:
    steps: list[float] = []

    def counted(step: float) -> float:
        steps.append(step)
        return function(step)

    assert armijo(counted, 1.0, -1.0, **options) == LineSearchResult(*expected)
    assert steps == pytest.approx(evaluated)


@pytest.mark.parametrize("slope", [0.0, 1.0])
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
@settings(max_examples=50)
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
