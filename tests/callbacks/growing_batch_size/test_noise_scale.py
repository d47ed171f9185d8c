"""The gradient noise scale of single measurements, and of their averages."""

import math

import pytest

from lightning_struct.callbacks.growing_batch_size import GradientStatistics
from lightning_struct.callbacks.growing_batch_size.noise import NoiseScale, relative_variance


def measured(variance, squared_norm, batch_size=8):
    return GradientStatistics(batch_size, variance, squared_norm, None)


def averaged(*statistics):
    noise = NoiseScale()
    for of_step in statistics:
        noise.update(of_step)
    return noise


def test_the_average_of_what_is_alike_is_that():
    noise = averaged(*[measured(16.0, 4.0)] * 5)
    assert (noise.variance, noise.gradient_squared_norm) == (pytest.approx(16.0), pytest.approx(2.0))


def test_the_noise_scale_is_the_ratio_of_averages_and_not_the_average_of_ratios():
    noise = averaged(measured(8.0, 2.0), measured(8.0, 4.0))  # ‖G‖² of 1 and 3
    assert noise.value == pytest.approx(8.0 / ((0.95 * 1 + 3) / 1.95))


def test_where_nothing_but_noise_was_measured_the_noise_scale_is_infinite():
    assert averaged(measured(16.0, 1.0)).value == math.inf


def test_nothing_is_known_before_the_first_measurement():
    assert math.isnan(NoiseScale().value) and math.isnan(NoiseScale().variance)


def test_a_state_goes_on_to_the_same_average():
    noise = averaged(measured(16.0, 4.0))
    resumed = NoiseScale(**vars(noise))
    for average in (noise, resumed):
        average.update(measured(4.0, 9.0))
    assert (resumed.variance, resumed.value) == (noise.variance, noise.value)


@pytest.mark.parametrize(
    ("variance", "squared_norm", "expected"), [(6.0, 2.0, 3.0), (6.0, 0.0, math.inf), (0.0, 0.0, 0.0), (None, 2.0, 0.0)]
)
def test_the_relative_variance_is_infinite_where_noise_alone_is_left(variance, squared_norm, expected):
    assert relative_variance(measured(variance, squared_norm)) == expected
