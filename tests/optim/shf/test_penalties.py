"""Weights of conditions that rise while these do not fall: on an equation that a constant meets."""

import io
import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_struct import SHF
from lightning_struct.functional import LeastSquares, laplacian
from lightning_struct.functional.residuals.penalties import Penalties
from lightning_struct.models import TanhNetwork


class Plateau(nn.Module):
    """Δu = 0 in a ring, u = 0 on its inner circle and 1 on the outer one; the equation is in a small unit."""

    def __init__(self) -> None:
        super().__init__()
        self.network = TanhNetwork(2, [12])

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        circle = nn.functional.normalize(points)
        conditions = {"inside": self.network(circle), "outside": self.network(2 * circle) - 1.0}
        return {"interior": 30 * laplacian(self.network, points), **conditions}


def trained(steps: int, loss: LeastSquares | str = "least_squares", state: bytes | None = None) -> tuple[SHF, list]:
    torch.manual_seed(0)
    module = Plateau().double()
    optimizer = SHF(module, loss)
    if state is not None:
        kept = torch.load(io.BytesIO(state))
        module.load_state_dict(kept["module"])
        optimizer.load_state_dict(kept["optimizer"])
    turns, radii = torch.rand(2, 40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    points = (1 + radii) * torch.cat([(6.2832 * turns).cos(), (6.2832 * turns).sin()], dim=1)
    return optimizer, [optimizer.step(inputs=points) for _ in range(steps)]


@pytest.fixture(scope="module")
def run() -> tuple[SHF, list]:
    return trained(30)


def test_weights_of_conditions_rise_on_a_plateau_and_lower_them(run: tuple[SHF, list]) -> None:
    _, reports = run
    _, fixed = trained(30, LeastSquares({"interior": 1.0, "inside": 1.0, "outside": 1.0}))
    assert max(reports[-1].block_weights.values()) > 1 and "interior" not in reports[-1].block_weights
    assert all(not report.block_weights for report in fixed)

    def conditions(report) -> float:
        return report.block_losses["inside"] + report.block_losses["outside"]

    assert conditions(reports[-1]) < 0.5 * conditions(fixed[-1])


def test_losses_are_reported_without_the_weights_that_rose(run: tuple[SHF, list]) -> None:
    _, reports = run
    for report, later in pairwise(reports):
        assert report.loss_before == pytest.approx(sum(report.block_losses.values()))
        assert report.loss_after == pytest.approx(later.loss_before)  # of the same points


def test_a_resumed_run_has_the_same_weights(run: tuple[SHF, list]) -> None:
    optimizer, _ = trained(17)
    file = io.BytesIO()
    torch.save({"module": optimizer.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    resumed, reports = trained(13, state=file.getvalue())
    assert reports[-1].block_weights == run[1][-1].block_weights
    ours, whole = resumed.module.state_dict(), run[0].module.state_dict()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_blocks_without_an_equation_have_no_weights() -> None:
    _, reports = trained(15, LeastSquares(equation="pde"))
    assert not reports[-1].block_weights


def compared(losses: list[dict[str, float]]) -> Penalties:
    penalties = Penalties()
    for each in losses:
        penalties = penalties.compared(each, "interior")
    return penalties


@pytest.mark.parametrize(
    ("losses", "weight"),
    [
        ([{"interior": 1e-4, "edge": 0.1}] * 4, 64.0),  # it stays
        ([{"interior": 1e-4, "edge": 0.1 * 0.4**k} for k in range(4)], None),  # it falls by itself
        ([{"interior": 1e-2, "edge": 0.015}] * 4, None),  # the equation is no easier than the condition
        ([{"interior": 1e-4, "edge": 0.1}] * 4 + [{"interior": 1.0, "edge": 1e-5}] * 2, 16.0),  # far more than needed
        ([{"interior": 1e-9, "edge": 0.1}] * 12, None),  # no weight lowers it: noise
        ([{"interior": 1e-6, "edge": 1e-6}, {"interior": 0.1, "edge": 1.0}], None),  # another problem
        ([{"interior": 1e-4, "edge": 0.1}] * 4 + [{"interior": 1e-4, "edge": 5.0}] * 4, None),  # from the fifth on
    ],
)
def test_a_weight_rises_as_long_as_its_block_stays(losses: list[dict[str, float]], weight: float | None) -> None:
    assert compared(losses).weights.get("edge") == weight


def test_a_block_that_no_weight_lowers_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, data: Tensor) -> dict[str, Tensor]:
            return {"interior": 1e-3 * self.level.expand(5), "data": self.level - data}

    optimizer = SHF(Noise(), "least_squares")
    data = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(60):
            report = optimizer.step(inputs=data)
    assert sum("'data' hold 100% of the loss, and no weight lowers them" in str(w.message) for w in caught) == 1
    assert not report.block_weights
