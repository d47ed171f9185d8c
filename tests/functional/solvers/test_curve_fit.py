"""Fits against certified values (NIST StRD), against each other in a batch, and what bad input gets."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import exp

from lightning_struct.functional import curve_fit, levenberg_marquardt

# Data, two starts, certified parameters and standard deviations (NIST/ITL StRD, nonlinear regression).
MISRA1A = (
    lambda x, a, b: a * (1 - exp(-b * x)),
    [77.6, 114.9, 141.1, 190.8, 239.9, 289.0, 332.8, 378.4, 434.8, 477.3, 536.8, 593.1, 689.1, 760.0],
    [10.07, 14.73, 17.94, 23.93, 29.61, 35.18, 40.02, 44.82, 50.76, 55.05, 61.01, 66.4, 75.47, 81.78],
    [[500.0, 0.0001], [250.0, 0.0005]],
    [238.94212918, 0.00055015643181],
    [2.7070075241, 7.2668688436e-06],
)
BOXBOD = (
    MISRA1A[0],
    [1.0, 2.0, 3.0, 5.0, 7.0, 10.0],
    [109.0, 149.0, 149.0, 191.0, 213.0, 224.0],
    [[1.0, 1.0], [100.0, 0.75]],
    [213.80940889, 0.54723748542],
    [12.354515176, 0.10455993237],
)
MGH09 = (
    lambda x, a, b, c, d: a * (x**2 + x * b) / (x**2 + x * c + d),
    [4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625],
    [0.1957, 0.1947, 0.1735, 0.16, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246],
    [[25.0, 39.0, 41.5, 39.0], [0.25, 0.39, 0.415, 0.39]],
    [0.19280693458, 0.19128232873, 0.12305650693, 0.13606233068],
    [0.011435312227, 0.19633220911, 0.080842031232, 0.090025542308],
)
MGH10 = (
    lambda x, a, b, c: a * exp(b / (x + c)),
    [50.0 + 5.0 * step for step in range(16)],
    [34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872],
    [[2.0, 400000.0, 25000.0], [0.02, 4000.0, 250.0]],
    [0.005609636471, 6181.3463463, 345.22363462],
    [0.00015687892471, 23.309021107, 0.78486103508],
)
CERTIFIED = {"Misra1a": MISRA1A, "BoxBOD": BOXBOD, "MGH09": MGH09, "MGH10": MGH10}


def doubles(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.fixture
def decays():
    """Forty noisy decays a exp(-b x) + c, at 30 places each, and the parameters that made them."""
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(40, 3, dtype=torch.float64, generator=generator) + 0.5
    x = torch.linspace(0, 4, 30, dtype=torch.float64)
    noise = torch.randn(40, 30, dtype=torch.float64, generator=generator)
    return x, decay(x, *true[:, :, None].unbind(1)) + 0.01 * noise, true


def decay(x, a, b, c):
    return a * exp(-b * x) + c


@pytest.mark.parametrize(("name", "start"), [*itertools.product(CERTIFIED, [1]), ("BoxBOD", 0), ("MGH09", 0)])
def test_certified_values_are_reached(name, start):
    f, x, y, starts, parameters, deviations = CERTIFIED[name]
    x, y, parameters, deviations = doubles(x, y, parameters, deviations)
    fit = curve_fit(f, x, y, starts[start])
    assert fit.converged and fit.reason[0] in ("ftol", "xtol", "gtol")
    torch.testing.assert_close(fit.parameters, parameters, rtol=2e-5, atol=0)
    torch.testing.assert_close(fit.standard_errors, deviations, rtol=2e-5, atol=0)
    torch.testing.assert_close(fit.residuals, f(x, *fit.parameters) - y)


@pytest.mark.parametrize("leading", [(40,), (8, 5), (3, 40)], ids=["by QR", "two dimensions", "by Cholesky"])
def test_fits_of_a_batch_are_those_of_each_alone(decays, leading):
    x, y, _ = decays
    y = y.expand(3, 40, 30) if leading == (3, 40) else y.reshape(*leading, 30)
    fits = curve_fit(decay, x, y, torch.ones(*leading, 3, dtype=torch.float64))
    assert fits.converged.all() and fits.converged.shape == fits.steps.shape == leading
    for index in (0, 17):
        place = np.unravel_index(index, leading)
        alone = curve_fit(decay, x, y[place], [1.0, 1.0, 1.0])
        for name in ("parameters", "covariance", "residuals"):
            torch.testing.assert_close(getattr(fits, name)[place], getattr(alone, name), rtol=1e-5, atol=1e-8)
    cut_off = curve_fit(decay, x, y[place], [1.0, 1.0, 1.0], max_steps=1)
    assert cut_off.reason == ["max_steps"] and not cut_off.converged and cut_off.steps == 1


def test_fits_in_parts_have_their_own_data():
    generator = torch.Generator().manual_seed(0)
    x, true = 4 * torch.rand(6000, 30, dtype=torch.float64, generator=generator), torch.ones(6000, 3).double()
    true[:, 1] += torch.linspace(0, 1, 6000)
    y, sigma = decay(x, *true[:, :, None].unbind(1)) + 0.01 * torch.sin(20 * x), 0.01 + 0.01 * x
    fits = curve_fit(decay, x, y, torch.ones_like(true), sigma=sigma)
    assert fits.converged.all()
    for index in (0, 4400, 5999):
        alone = curve_fit(decay, x[index], y[index], [1.0, 1.0, 1.0], sigma=sigma[index])
        for name in ("parameters", "covariance", "residuals"):
            torch.testing.assert_close(getattr(fits, name)[index], getattr(alone, name), rtol=1e-5, atol=1e-8)


def test_a_curve_whose_rows_depend_on_each_other_has_the_right_derivatives(decays):
    x, y, _ = decays

    def normalised(x, a, b, c):
        curve = decay(x, a, b, torch.zeros_like(c))
        return curve / curve.sum() + c

    y = normalised(x, *doubles(2.0, 0.7, 0.1))
    fit = curve_fit(lambda x, b, c: normalised(x, torch.ones_like(b), b, c), x, y, [1.5, 0.0])
    torch.testing.assert_close(fit.parameters, torch.tensor([0.7, 0.1], dtype=torch.float64))


def test_covariance_is_that_of_linear_regression():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20, 3, dtype=torch.float64, generator=generator)
    y, sigma = torch.randn(20, dtype=torch.float64, generator=generator), torch.linspace(0.5, 2, 20).double()

    def line(x, a, b, c):
        return x[:, 0] * a + x[:, 1] * b + x[:, 2] * c

    A = X / sigma[:, None]
    fit = curve_fit(line, X, y, [0.0, 0.0, 0.0], sigma=sigma)
    expected = torch.linalg.lstsq(A, (y / sigma)[:, None]).solution[:, 0]
    torch.testing.assert_close(fit.parameters, expected)
    variance = (A @ expected - y / sigma).square().sum() / 17
    torch.testing.assert_close(fit.covariance, variance * torch.linalg.inv(A.T @ A))
    absolute = curve_fit(line, X, y, [0.0, 0.0, 0.0], sigma=sigma, absolute_sigma=True)
    torch.testing.assert_close(absolute.covariance, torch.linalg.inv(A.T @ A))


@pytest.mark.parametrize("at", [0, 2])
def test_a_fit_within_bounds_rests_on_them_and_has_the_others_at_their_minimum(decays, at):
    x, y, _ = decays
    bound = float(curve_fit(decay, x, y[0], [1.0, 1.0, 1.0]).parameters[at]) + 0.1
    lower, start = [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]
    lower[at], start[at] = bound, bound + 1

    def held(x, first, second):
        return decay(x, bound, first, second) if at == 0 else decay(x, first, second, bound)

    fit, expected = curve_fit(decay, x, y[0], start, bounds=(lower, 5.0)), curve_fit(held, x, y[0], [1.0, 1.0])
    others = torch.tensor([index for index in range(3) if index != at])
    assert fit.converged and float(fit.parameters[at]) == bound and fit.covariance[at].eq(0).all()
    torch.testing.assert_close(fit.parameters[others], expected.parameters, rtol=1e-6, atol=0)
    torch.testing.assert_close(fit.covariance[others][:, others], expected.covariance * 28 / 27, rtol=1e-4, atol=0)


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy"])
def test_a_robust_loss_is_at_its_minimum_and_near_the_truth(decays, loss):
    x, _, true = decays
    y = decay(x, *true[0]) + 0.01 * torch.sin(20 * x)
    y[::7] += 3.0
    fit = curve_fit(decay, x, y, [1.0, 1.0, 1.0], loss=loss, scale=0.02)
    assert fit.converged
    torch.testing.assert_close(fit.parameters, true[0], rtol=0.05, atol=0)
    rho = {
        "soft_l1": lambda z: 2 * ((1 + z).sqrt() - 1),
        "huber": lambda z: torch.where(z <= 1, z, 2 * z.sqrt() - 1),
        "cauchy": lambda z: (1 + z).log(),
    }[loss]
    p = fit.parameters.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(rho(((decay(x, *p) - y) / 0.02).square()).sum(), p)
    assert gradient.norm() < 0.05


def test_a_fit_that_fails_is_marked_and_the_others_go_on(decays):
    x, y, _ = decays
    damaged = y[:4].clone()
    damaged[2, 5] = math.nan
    fits = curve_fit(decay, x, damaged, torch.ones(4, 3, dtype=torch.float64))
    assert fits.converged.tolist() == [True, True, False, True] and fits.reason[2] == "not_finite"
    torch.testing.assert_close(fits.parameters[3], curve_fit(decay, x, y[3], [1.0, 1.0, 1.0]).parameters)


@pytest.mark.parametrize("values", [3, 30], ids=["no degrees of freedom", "singular"])
def test_a_covariance_that_there_is_none_of_is_infinite(decays, values):
    x, y, _ = decays
    f = decay if values == 3 else lambda x, a, b, c: (a + b) * exp(-x) + c
    fit = curve_fit(f, x[:values], y[0, :values], [1.0, 1.0, 1.0])
    assert fit.covariance.isinf().all()


def test_parameters_without_influence_at_the_start_do_not_stop_a_fit():
    x = torch.linspace(0, 6, 80, dtype=torch.float64)
    wave = curve_fit(lambda x, a, w, p: a * torch.sin(w * x + p), x, 2 * torch.sin(1.3 * x + 0.4), [0.0, 1.25, 0.4])
    torch.testing.assert_close(wave.parameters, torch.tensor([2.0, 1.3, 0.4], dtype=torch.float64))
    unused = curve_fit(lambda x, a, b: a * x + 0 * b, x, 3 * x, [1.0, 1.0])
    torch.testing.assert_close(unused.parameters, torch.tensor([3.0, 1.0], dtype=torch.float64))
    assert unused.converged and unused.steps < 10 and unused.covariance.isinf().all()
    many = curve_fit(lambda x, a, b: a * x + 0 * b, x, (3 * x).expand(70, 80), torch.ones(70, 2, dtype=torch.float64))
    torch.testing.assert_close(many.parameters, unused.parameters.expand(70, 2))
    assert many.converged.all() and many.covariance.isinf().all()


@pytest.mark.parametrize(
    ("f", "start"),
    [
        (lambda x, a, w, p, c: a * torch.sin(w * x + p) + c, [0.7, 0.7, -0.1, 0.0]),
        (lambda x, a, b, c: a / (1 + exp(-b * (x - c))), [2.0, 5.0, 80.0]),
    ],
    ids=["minimum at infinity", "tiny derivatives"],
)
def test_a_fit_that_gets_nowhere_ends_long_before_the_last_step(f, start):
    x = torch.linspace(0, 10, 60, dtype=torch.float64)
    fit = curve_fit(f, x, torch.sin(1.5 * x), start)
    assert fit.converged and fit.steps < 500


def test_infinite_sigma_masks_measurements(decays):
    x, y, _ = decays
    masked, sigma = y[0].clone(), torch.ones_like(x)
    masked[::4], sigma[::4] = math.nan, math.inf
    fit, kept = curve_fit(decay, x, masked, [1.0, 1.0, 1.0], sigma=sigma), sigma.isfinite()
    expected = curve_fit(decay, x[kept], y[0, kept], [1.0, 1.0, 1.0])
    torch.testing.assert_close(fit.parameters, expected.parameters)
    torch.testing.assert_close(fit.covariance, expected.covariance)


def test_arrays_and_lists_are_taken_and_the_result_is_not_unpacked(decays):
    x, y, _ = decays
    fit = curve_fit(decay, x.numpy(), y[0].numpy(), [1, 1, 1], sigma=x.numpy() + 1)
    expected = curve_fit(decay, x, y[0], [1.0, 1.0, 1.0], sigma=x + 1)
    torch.testing.assert_close(fit.parameters, expected.parameters, rtol=0, atol=0)
    with pytest.raises(TypeError, match="fit.parameters and fit.covariance"):
        _, _ = fit


def test_residual_functions_with_data_of_their_own():
    targets = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)

    def residuals(p, target):
        return torch.stack([10 * (p[1] - p[0] ** 2), target[0] - p[0], target[1] * (p[0] - target[0])])

    fits = levenberg_marquardt(residuals, torch.zeros(2, 2, dtype=torch.float64), targets)
    torch.testing.assert_close(fits.parameters, torch.stack([targets[:, 0], targets[:, 0] ** 2], 1))
    with pytest.raises(ValueError, match="as many as the 2 parameters at least, but are 1"):
        levenberg_marquardt(lambda p, target: target[:1] - p[:1], torch.zeros(2, 2, dtype=torch.float64), targets)


def test_derivatives_that_become_nan_on_the_way_end_the_fit_as_not_finite():
    def f(x, a, b):
        return a * x + b + 0 * a.sqrt()  # whose derivative at a = 0 is 0 times infinity

    fit = curve_fit(f, X, -X, [1.0, 0.0], bounds=([0.0, -5.0], [5.0, 5.0]))
    assert not fit.converged and fit.reason == ["not_finite"] and fit.steps < 100


X, Y = torch.linspace(0, 1, 5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
WRONG = {
    "y must hold real floating-point numbers, but is torch.complex128": ({"y": Y + 0j}, TypeError),
    "p0 must hold real floating-point numbers": ({"p0": torch.ones(2, dtype=torch.complex64)}, TypeError),
    "y has 1 values for 2 parameters": ({"x": X[:1], "y": Y[:1]}, ValueError),
    "y must be .N,. or p0's leading dimensions and N": ({"y": Y.expand(3, 5)}, ValueError),
    "x must have 5 rows, as y has values": ({"x": X[:3]}, ValueError),
    "f must return 5 numbers .* returns \\(\\)": ({"f": lambda x, a, b: a * x.sum()}, ValueError),
    "f must return 5 numbers .* returns NoneType": ({"f": lambda x, a, b: None}, ValueError),
    "f must compute by functions of torch": ({"f": lambda x, a, b: np.exp(a * x) + b}, TypeError),
    "p0 must hold numbers in one rectangular array": ({"p0": [1.0, "b"]}, TypeError),
    "bounds must be two": ({"bounds": (1.0,)}, ValueError),
    "bounds must be a Sequence": ({"bounds": 3}, TypeError),
    "y is on the meta device": ({"y": Y.to("meta")}, TypeError),
    "sigma must be positive": ({"sigma": 0.0}, ValueError),
    "bounds must be lower ones below upper ones": ({"bounds": (1.0, 0.0)}, ValueError),
    "bounds exclude the first value 1 of parameter 0": ({"bounds": (2.0, 3.0)}, ValueError),
    "loss must be one of 'squared', .*, but is 'l1'": ({"loss": "l1"}, ValueError),
    "scale must be a finite number > 0": ({"scale": 0.0}, ValueError),
    "tolerance must be a finite number > 0": ({"tolerance": math.nan}, ValueError),
    "max_steps must be a whole number >= 1": ({"max_steps": 0}, ValueError),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_is_named(message):
    changed, error = WRONG[message]
    with pytest.raises(error, match=message):
        curve_fit(**{"f": lambda x, a, b: a * x + b, "x": X, "y": Y, "p0": [1.0, 0.0], **changed})
