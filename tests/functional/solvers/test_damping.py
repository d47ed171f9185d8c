import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_struct.functional import reduction_ratio_rule
from lightning_struct.functional.solvers.damping import ScaledDamping, next_batch_rule


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        *((ratio, 4.0) for ratio in (-math.inf, -5.0, 0.2499, math.nan)),
        *((ratio, 2.0) for ratio in (0.25, 0.5, 0.75)),
        *((ratio, 1.0) for ratio in (0.7501, 3.0, math.inf)),
    ],
)
def test_damping_rises_below_a_quarter_and_falls_above_three_quarters(ratio: float, expected: float) -> None:
    assert reduction_ratio_rule(2.0, ratio, drop=0.5) == expected


@pytest.mark.parametrize(
    ("ratio", "options", "expected"),
    [
        (0.5, {"lower": 0.6}, 4.0),
        (0.5, {"upper": 0.4}, 1.0),
        (1.0, {"min_damping": 1.5, "max_damping": 3.0}, 1.5),
        (0.0, {"min_damping": 1.5, "max_damping": 3.0}, 3.0),
        *((ratio, {"drop": 1.0}, 2.0) for ratio in (0.0, 0.5, 1.0)),
    ],
)
def test_thresholds_bounds_and_the_drop_can_be_set(ratio: float, options: dict[str, float], expected: float) -> None:
    assert reduction_ratio_rule(2.0, ratio, **{"drop": 0.5, **options}) == expected


def test_a_step_scale_grows_where_the_next_batch_shows_more_than_a_quarter_of_it() -> None:
    now = ScaledDamping(0.4, 2.0)
    assert next_batch_rule(now, 0.1, 1.0, drop=0.5) == now
    assert next_batch_rule(now, 0.11, 1.0, drop=0.5).scale > 0.4 > next_batch_rule(now, 0.09, 1.0, drop=0.5).scale


@given(st.floats(0.1, 1.0), st.floats(-1.0, 1.0))
def test_a_step_scale_changes_by_a_fifth_and_stays_in_its_bounds(scale: float, ratio: float) -> None:
    found = next_batch_rule(ScaledDamping(scale, 2.0), ratio, 1.0, drop=None)
    assert 0.1 <= found.scale <= 1.0
    assert abs(math.log(found.scale / scale)) <= 0.2 + 1e-12
    assert found.damping == 2.0


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.9, 1.0), (0.5, 2.0 * 0.5**0.5), (0.25, 2.0), (0.2, 2.0)],
    ids=["all", "half", "¼", "less"],
)
@pytest.mark.parametrize("fitted", [0.2, 3.0])
def test_the_damping_falls_at_full_steps_that_the_next_batch_confirms(
    ratio: float, expected: float, fitted: float
) -> None:
    assert next_batch_rule(ScaledDamping(1.0, 2.0), ratio, fitted, drop=0.5).damping == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fitted", "expected"), [(0.0, -0.2), (0.5, -0.1), (1.0, 0.0), (1.5, 0.1), (2.0, 0.2), (9.0, 0.2)]
)
@pytest.mark.parametrize("ratio", [-0.5, 0.0, 0.1])
def test_the_damping_of_shortened_steps_goes_by_what_they_fit_of_their_own_batch(
    fitted: float, expected: float, ratio: float
) -> None:
    found = next_batch_rule(ScaledDamping(0.1, 2.0), ratio, fitted, drop=0.5)
    assert math.log2(found.damping / 2.0) == pytest.approx(0.9 * expected)
    longer = next_batch_rule(ScaledDamping(0.7, 2.0), ratio, fitted, drop=0.5)
    assert math.log2(longer.damping / 2.0) == pytest.approx(0.3 * expected)


def test_the_damping_by_the_next_batch_is_bounded() -> None:
    assert next_batch_rule(ScaledDamping(1.0, 2.0), 1.0, 1.0, drop=0.5, min_damping=1.5).damping == 1.5
    assert next_batch_rule(ScaledDamping(0.1, 2.0), 0.0, 9.0, drop=0.5, max_damping=2.1).damping == 2.1
