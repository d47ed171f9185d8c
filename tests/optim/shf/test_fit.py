"""SHF on small regressions: the verdict of a fit, the loop until it, and the covariance."""

import math

import pytest
import torch
from torch import nn

from lightning_struct.functional import curve_fit
from lightning_struct.optim import SHF


class Decay(nn.Module):
    """Residuals of a decay a exp(-b x) + c."""

    def __init__(self, *start):
        super().__init__()
        self.parameters_ = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x, y):
        a, b, c = self.parameters_
        return a * torch.exp(-b * x) + c - y


@pytest.fixture
def data():
    x = torch.linspace(0, 4, 30, dtype=torch.float64)
    noise = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, 2 * torch.exp(-x) + 0.5 + 0.05 * noise


def test_a_fit_ends_at_the_minimum_with_its_reason_and_covariance(data):
    x, y = data
    module = Decay(1.0, 0.5, 0.0)
    optimizer = SHF(module, "least_squares")
    report = optimizer.fit(data, max_steps=50)
    assert report.converged and report.reason in ("ftol", "xtol", "gtol", "precision")
    expected = curve_fit(lambda x, a, b, c: a * torch.exp(-b * x) + c, x, y, [1.0, 0.5, 0.0])
    torch.testing.assert_close(module.parameters_.data, expected.parameters, rtol=1e-5, atol=0)
    torch.testing.assert_close(optimizer.covariance(data), expected.covariance, rtol=1e-4, atol=0)


def test_a_fit_that_is_cut_off_has_not_converged(data):
    report = SHF(Decay(1.0, 0.5, 0.0), "least_squares").fit(data, max_steps=1)
    assert report.reason is None and not report.converged


def test_the_tolerance_ends_a_fit(data):
    rough, fine = (SHF(Decay(1.0, 0.5, 0.0), "least_squares") for _ in range(2))
    report = rough.fit(data, tolerance=1e-2)
    assert report.reason_within(1e-2) in ("ftol", "gtol") and not report.converged
    fine.fit(data)
    assert fine.state_dict()["state"]["shf"]["steps"] > rough.state_dict()["state"]["shf"]["steps"]


def test_a_gradient_whose_square_is_zero_is_no_minimum(data):
    x, y = data
    module = Decay(1.0, 0.5, 0.0)
    optimizer = SHF(module, "least_squares")

    def tiny(module, args, residuals):
        return 1e-120 * residuals

    module.register_forward_hook(tiny)
    with pytest.warns(UserWarning, match="too small for its dtype: multiply the residuals"):
        report = optimizer.fit((x, y + 1e-60))
    assert report.reason == "underflow" and not report.converged


def test_a_fit_shows_its_progress_if_asked(data, capfd):
    SHF(Decay(1.0, 0.5, 0.0), "least_squares").fit(data, max_steps=3, progress=True)
    assert "3/3" in capfd.readouterr().err


def test_of_outputs_there_is_no_verdict():
    optimizer = SHF(nn.Linear(3, 1), "mse")
    report = optimizer.step(inputs=torch.randn(8, 3), targets=torch.randn(8, 1))
    assert report.reason is None and not report.converged
    for method in (optimizer.fit, optimizer.covariance):
        with pytest.raises(ValueError, match="is for residuals: SHF.module, 'least_squares'"):
            method(torch.randn(8, 3))


def test_a_covariance_that_the_data_do_not_determine_is_refused(data):
    x, y = data
    optimizer = SHF(Decay(0.0, 1.0, 0.0), "least_squares")  # with a = 0, b does not matter
    with pytest.raises(ValueError, match="3 residuals are too few for a covariance of 3 parameters"):
        optimizer.covariance((x[:3], y[:3]))
    with pytest.raises(ValueError, match="singular"):
        optimizer.covariance(data)


@pytest.mark.parametrize("wrong", [{"max_steps": 0}, {"tolerance": math.nan}])
def test_bounds_of_a_fit_must_be_positive(data, wrong):
    with pytest.raises(ValueError, match="must be a (whole|finite) number >"):
        SHF(Decay(1.0, 0.5, 0.0), "least_squares").fit(data, **wrong)
