"""The size of the next batch, as a function of predictions and validation values."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_struct.callbacks.growing_batch_size import GradientStatistics, ValidationRule, next_batch_size
from lightning_struct.callbacks.growing_batch_size.rules import predicted_batch_size
from lightning_struct.functional import required_batch_size

SIZES = st.integers(1, 10_000)
VALUES = st.floats(-1e6, 1e6)
few = settings(max_examples=40)


def test_the_batch_grows_to_the_mean_of_the_last_predictions():
    assert next_batch_size(10, [1000, 10, 20, 30, 40, 51], [], max_batch_size=100) == 31


def test_there_is_no_decision_within_the_first_window():
    assert next_batch_size(10, [50] * 5, [1.0] * 6, max_batch_size=100) == 10


def test_smaller_predictions_do_not_shrink_the_batch():
    assert next_batch_size(10, [1] * 6, [], max_batch_size=100) == 10


def test_predictions_are_cut_at_the_limit():
    assert next_batch_size(10, [500] * 6, [], max_batch_size=100) == 100


def test_a_stalling_validation_lets_the_batch_grow_by_the_factor():
    assert next_batch_size(200, [1] * 6, [1.0] * 6, max_batch_size=500) == 1.005 * 200


def test_a_factor_close_to_one_keeps_its_meaning_over_many_checks():
    size, rule = 16, ValidationRule(threshold=math.inf, growth=1.0006)
    for _ in range(162):
        size = next_batch_size(size, [1] * 6, [], max_batch_size=500, validation=rule)
    assert math.isclose(size, 16 * 1.0006**162)


def test_validation_that_rises_stalls():
    assert next_batch_size(200, [1] * 6, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], max_batch_size=500) > 200


def test_validation_that_falls_enough_does_not_stall():
    assert next_batch_size(200, [1] * 6, [1.006, 1, 1, 1, 1, 1.0], max_batch_size=500) == 200


def test_validation_that_falls_by_the_threshold_itself_does_not_stall():
    rule = ValidationRule(threshold=0.5)
    assert next_batch_size(200, [1] * 6, [1.5, 1, 1, 1, 1, 1.0], max_batch_size=500, validation=rule) == 200


def test_where_the_predictions_are_what_the_batch_has_validation_decides():
    assert next_batch_size(200, [200] * 6, [1.0] * 6, max_batch_size=500) == 1.005 * 200


def test_validation_is_compared_with_five_checks_before():
    assert next_batch_size(200, [1] * 6, [2.0, 1.0, 1.0, 1.0, 1.0, 1.0], max_batch_size=500) == 200


def test_validation_of_too_few_checks_does_not_stall():
    assert next_batch_size(200, [1] * 6, [1.0] * 5, max_batch_size=500) == 200


def test_validation_at_zero_does_not_stall_on_its_way_there():
    assert next_batch_size(200, [1] * 6, [1.0, 0, 0, 0, 0, 0.0], max_batch_size=500) == 200


def test_negative_values_stall_too():
    assert next_batch_size(200, [1] * 6, [-1.0] * 6, max_batch_size=500) > 200


def test_a_batch_above_the_limit_stays():
    assert next_batch_size(200, [500] * 6, [], max_batch_size=100) == 200


def test_growth_by_validation_is_cut_at_the_limit():
    assert next_batch_size(200, [1] * 6, [1.0] * 6, max_batch_size=210, validation=ValidationRule(growth=1.5)) == 210


@few
@given(SIZES, st.lists(SIZES, max_size=8), st.lists(VALUES, max_size=8), SIZES, st.integers(1, 6))
def test_the_size_never_falls_nor_passes_the_limit(size, predictions, values, limit, window):
    decided = next_batch_size(size, predictions, values, max_batch_size=limit, validation=ValidationRule(window=window))
    assert size <= decided <= max(size, limit)


@few
@given(SIZES, st.lists(SIZES, min_size=6, max_size=6), st.lists(VALUES, max_size=8), SIZES)
def test_larger_predictions_never_give_a_smaller_batch(size, predictions, values, more):
    large = next_batch_size(size, [p + more for p in predictions], [], max_batch_size=100_000)
    assert large >= next_batch_size(size, predictions, [], max_batch_size=100_000)


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


def test_the_prediction_is_that_of_the_norm_test():
    assert predicted_batch_size(statistics(30.0), 60, 0.5, None) == required_batch_size(30.0, 2.0, 60, 0.5)


def test_without_a_variance_nothing_asks_for_more_than_one_sample():
    assert predicted_batch_size(statistics(None), 60, math.inf, None) == 1


def test_a_zero_gradient_asks_for_the_whole_data_set():
    assert predicted_batch_size(statistics(30.0, 0.0), 60, 0.5, None) == 60


def test_a_zero_gradient_of_a_stream_asks_for_the_limit_or_else_for_nothing_more():
    assert predicted_batch_size(statistics(30.0, 0.0), None, 0.5, 100) == 100
    assert predicted_batch_size(statistics(30.0, 0.0), None, 0.5, None) == 8
