"""The size of the next batch, as a function of predictions and validation values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_struct.callbacks.growing_batch_size import GradientStatistics, ValidationRule, next_batch_size
from lightning_struct.callbacks.growing_batch_size.rules import predicted_batch_size
from lightning_struct.functional import required_batch_size

SIZES = st.integers(1, 10_000)
VALUES = st.floats(-1e6, 1e6)
few = settings(max_examples=40)


@pytest.mark.parametrize(
    ("size", "predictions", "values", "limit", "rule", "expected"),
    [
        (10, [1000, 10, 20, 30, 40, 51], [], 100, {}, 31),  # the mean of the last five, rounded up
        (10, [50] * 5, [1.0] * 6, 100, {}, 10),  # there is no decision within the first window
        (10, [1] * 6, [], 100, {}, 10),
        (200, [500] * 6, [], 100, {}, 200),  # a batch above the limit stays
        (200, [1] * 6, [1.0] * 6, 500, {}, 1.005 * 200),
        (200, [1] * 6, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], 500, {}, 1.005 * 200),
        (200, [1] * 6, [-1.0] * 6, 500, {}, 1.005 * 200),
        (200, [1] * 6, [1.006, 1, 1, 1, 1, 1.0], 500, {}, 200),
        (200, [1] * 6, [1.5, 1, 1, 1, 1, 1.0], 500, {"threshold": 0.5}, 200),  # by the threshold itself
        (200, [1] * 6, [2.0, 1.0, 1.0, 1.0, 1.0, 1.0], 500, {}, 200),  # compared with five checks before
        (200, [1] * 6, [1.0, 0, 0, 0, 0, 0.0], 500, {}, 200),
        (200, [1] * 6, [1.0] * 6, 210, {"growth": 1.5}, 210),
    ],
)
def test_the_next_size_is_that_of_algorithm_1(size, predictions, values, limit, rule, expected):
    rule = ValidationRule(**rule)
    assert next_batch_size(size, predictions, values, max_batch_size=limit, validation=rule) == expected


def test_a_factor_close_to_one_keeps_its_meaning_over_many_checks():
    size, rule = 16, ValidationRule(growth=1.0006)
    for _ in range(162):
        size = next_batch_size(size, [1] * 6, [1.0] * 6, max_batch_size=500, validation=rule)
    assert math.isclose(size, 16 * 1.0006**162)


@few
@given(SIZES, st.lists(SIZES, max_size=8), st.lists(VALUES, max_size=8), SIZES, st.integers(1, 6))
def test_the_size_never_falls_nor_passes_the_limit(size, predictions, values, limit, window):
    decided = next_batch_size(size, predictions, values, max_batch_size=limit, validation=ValidationRule(window=window))
    assert size <= decided <= max(size, limit)


@few
@given(SIZES, st.lists(SIZES, min_size=6, max_size=6), st.lists(VALUES, min_size=6, max_size=6), SIZES)
def test_algorithm_1_to_the_letter_but_for_the_fraction_that_is_kept(size, predictions, values, limit):
    average = math.ceil(sum(predictions[1:]) / 5)
    if average > size:
        expected = min(average, limit)
    elif values[5] > 0 and (values[0] - values[5]) / values[5] < 0.005:
        expected = min(1.005 * size, limit)
    elif values[5] > 0:
        expected = size
    else:
        return  # the paper's losses are positive
    assert next_batch_size(size, predictions, values, max_batch_size=limit) == max(size, expected)


# The prediction


def statistics(variance, squared_norm=2.0):
    return GradientStatistics(8, variance, squared_norm, None)


@pytest.mark.parametrize(
    ("variance", "squared_norm", "samples", "limit", "expected"),
    [
        (30.0, 2.0, 60, None, required_batch_size(30.0, 2.0, 60, 0.5)),
        (None, 2.0, 60, None, 1),
        (30.0, 0.0, 60, None, 60),
        (30.0, 0.0, None, 100, 100),
        (30.0, 0.0, None, None, 8),
    ],
)
def test_the_prediction_is_that_of_the_norm_test(variance, squared_norm, samples, limit, expected):
    assert predicted_batch_size(statistics(variance, squared_norm), samples, 0.5, limit) == expected
