"""SHF on a squared error: by the exact solver if the batch stays, by the steps of outputs if not."""

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.optim import SHF
from tests.cases import gaussian
from tests.optim.shf.test_shf import batch, mean_loss, network, take, weights, without_seconds


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x) - y


def test_the_exact_solver_takes_the_steps_of_residuals() -> None:
    asked, residuals = SHF(network(), "mse", solver="exact"), SHF(Residuals(), "least_squares", solver="exact")
    for seed in (1, 1, 2):
        x, y = batch(seed=seed)
        ours, theirs = asked.step(inputs=x, targets=y), residuals.step(inputs=(x, y))
        assert without_seconds(ours) == without_seconds(theirs)


def clean(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs = gaussian(60, 4).to(dtype)
    return inputs, torch.stack([inputs[:, 0].sin(), inputs[:, 1] * inputs[:, 2]], 1)


@pytest.mark.parametrize(("dtype", "reached"), [(torch.float64, 1e-12), (torch.float32, 1e-8)])
def test_a_batch_that_stays_is_fitted_by_the_exact_solver_in_any_order(
    dtype: torch.dtype, reached: float, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    module, data = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 2)).to(dtype), clean(dtype)
    optimizer, reports = SHF(module, "mse"), []
    with caplog.at_level(logging.INFO, logger="lightning_struct"):
        for _ in range(60):
            order = torch.randperm(60)
            reports.append(take(optimizer, (data[0][order], data[1][order])))
    assert [report.stop_reason for report in reports[1:4]] == ["progress", "exact", "exact"]
    assert mean_loss(module, data) < reached
    assert [text for text in caplog.messages if "chose solver='exact' for 120 residuals and 170 parameters" in text]
    assert len(caplog.messages) == 2


def test_another_batch_ends_the_exact_solver_for_good() -> None:
    optimizer = SHF(network(), "mse")
    reasons = [take(optimizer, batch(40, seed=seed)).stop_reason for seed in (1, 1, 1, 2, 2, 2)]
    assert [reason == "exact" for reason in reasons] == [False, False, True, False, False, False]


class Normalised(nn.Sequential):
    """Rows depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda: nn.Linear(4, 2), {"l2": 0.1}),
        (lambda: nn.Linear(4, 2), {"solver": "cg"}),
        (lambda: Normalised(nn.Linear(4, 2)), {}),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)), {}),
        (lambda: nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2)), {}),
    ],
    ids=["l2", "cg", "coupled rows", "dropout", "large"],
)
def test_other_networks_and_settings_keep_the_steps_of_outputs(build: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    optimizer, data = SHF(build(), "mse", **options), batch(2000, dtype=torch.float32)
    assert "exact" not in [take(optimizer, data).stop_reason for _ in range(4)]


@pytest.mark.parametrize(("seed", "deviation"), [(0, 0.7), (1, 3.0)])
def test_noise_is_not_fitted_unless_the_exact_solver_is_asked_for(seed: int, deviation: float) -> None:
    inputs, noise = gaussian(620, 4, seed=seed), deviation * gaussian(620, 1, seed=10 + seed)
    targets = 2 * inputs[:, :1].sin() + noise
    errors: list[float] = []
    for options in ({}, {"solver": "exact"}):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1)).double()
        optimizer = SHF(module, "mse", **options)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(25):
                before, report = weights(module), take(optimizer, (inputs[:120], targets[:120]))
        errors.append(mean_loss(module, (inputs[120:], (targets - noise)[120:])))
        warned = "fit the noise" in "".join(str(w.message) for w in caught)
        assert [warned, report.stop_reason == report.reason == "noise"] == [not options] * 2
        assert options or torch.equal(weights(module), before)
    assert errors[0] < 0.6 * errors[1]
