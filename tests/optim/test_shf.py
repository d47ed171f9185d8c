from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.optim import SHF, StepReport
from tests.cases import flat, mlp, trainable
from tests.optim.helpers import gaussian


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return mlp().to(dtype)


def batch(n: int = 12, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Draws from one distribution: the targets are those of a teacher, with noise."""
    inputs = gaussian(n, 4, seed=seed)
    targets = (inputs @ gaussian(4, 2, seed=99)).tanh() + 0.1 * gaussian(n, 2, seed=seed + 1)
    return inputs.to(dtype), targets.to(dtype)


def take(optimizer: SHF, data: tuple[Any, Tensor]) -> StepReport:
    return optimizer.step(inputs=data[0], targets=data[1])


def weights(module: nn.Module) -> Tensor:
    return flat(trainable(module)).clone()


def without_seconds(report: StepReport) -> StepReport:
    return replace(report, seconds={})


def mean_loss(module: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return 0.5 * (module(data[0]) - data[1]).square().sum().item() / len(data[1])


# --- dropout, batch normalisation, and other things in the network ---------------------------------------------------


class FunctionalDropout(nn.Module):
    """A chain of Linear layers by its modules, with a dropout that shows in its forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.activation, self.second = nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.activation(self.first(x)), 0.5, self.training))


class CircularConvolution(nn.Module):
    """Not covered by the tracing backend, which finds that out only after it has run the network."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular")
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.convolution(x[:, None]).flatten(1)))


DROPOUTS = {
    "layer": lambda: nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 2)),
    "functional": FunctionalDropout,
    "circular": CircularConvolution,
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_both_losses_of_a_step_are_with_the_dropout_masks_of_one_forward(name: str, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    module, data = DROPOUTS[name]().double(), batch()
    optimizer = SHF(module, "mse", damping=3.0, preconditioner=None, chunk_size=chunk_size)
    state = torch.get_rng_state()

    def loss_with_those_masks() -> float:
        torch.set_rng_state(state)
        chunks = zip(*(t.split(chunk_size or len(t)) for t in data), strict=True)
        return sum(mean_loss(module, chunk) * len(chunk[0]) for chunk in chunks) / len(data[0])

    before = loss_with_those_masks()
    torch.set_rng_state(state)
    report = take(optimizer, data)
    assert report.loss_before == pytest.approx(before, rel=1e-12)
    assert report.loss_after == pytest.approx(loss_with_those_masks(), rel=1e-12)


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_every_step_draws_new_dropout_masks(name: str, chunk_size: int | None) -> None:
    torch.manual_seed(0)
    module, data = DROPOUTS[name]().double(), batch()
    optimizer = SHF(module, "mse", damping=1e6, preconditioner=None, chunk_size=chunk_size)
    first, second = take(optimizer, data), take(optimizer, data)
    assert abs(first.loss_before - second.loss_before) > 1e-3  # the weights moved by less than 1e-10


@pytest.mark.parametrize("name", DROPOUTS)
def test_the_variance_under_dropout_is_that_of_the_gradients_with_the_masks_of_the_step(name: str) -> None:
    torch.manual_seed(0)
    module, data = DROPOUTS[name]().double(), batch()
    optimizer = SHF(module, "mse", damping=1e6, preconditioner=None)
    state = torch.get_rng_state()
    loss = 0.5 * (module(data[0]) - data[1]).square().sum(1)
    gradients = [torch.autograd.grad(value, list(module.parameters()), retain_graph=True) for value in loss]
    rows = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in gradients])
    torch.set_rng_state(state)
    assert take(optimizer, data).gradient_variance == pytest.approx(rows.var(0).sum().item(), rel=1e-9)
