"""Parameters that no gradient reaches, although their layers are called."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_struct.optim import SHF, LevenbergMarquardt
from tests.optim.helpers import gaussian


class Checkpointed(nn.Module):
    """Two layers, the first within activation checkpointing, and one that is never called."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.first, self.second = nn.Linear(4, 5).double(), nn.Linear(5, 2).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x.detach().requires_grad_(), use_reentrant=self.use_reentrant)
        return self.second(torch.tanh(hidden))


class CheckpointedResiduals(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 1.0


def said(module: nn.Module, loss: str, steps: int = 1, **options: Any) -> list[str]:
    """What the steps say of parameters that are not trained."""
    optimizer = SHF(module, loss, damping=1.0, **options)
    data: dict[str, Any] = {"inputs": gaussian(8, 4, seed=1)}
    if loss != "least_squares":
        data["targets"] = gaussian(8, 2, seed=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.step(**data)
    return [str(w.message) for w in caught if "does not train" in str(w.message)]


@pytest.mark.parametrize("options", [{}, {"l2": 0.1}, {"chunk_size": 3}], ids=str)
def test_layers_in_reentrant_checkpoints_are_named_with_the_remedy(options: dict[str, Any]) -> None:
    (message,) = said(Checkpointed(use_reentrant=True), "mse", **options)
    assert message.startswith("SHF does not train first.weight, first.bias: ")
    assert "use_reentrant=False" in message


def test_with_residuals_layers_in_reentrant_checkpoints_are_named_with_the_remedy() -> None:
    (message,) = said(CheckpointedResiduals(use_reentrant=True), "least_squares", solver="lsmr")
    assert message.startswith("SHF does not train first.weight, first.bias: ")
    assert "use_reentrant=False" in message


def test_they_are_named_once() -> None:
    assert len(said(Checkpointed(use_reentrant=True), "mse", steps=3)) == 1


def test_layers_in_other_checkpoints_and_those_that_are_not_called_are_not_named() -> None:
    assert said(Checkpointed(use_reentrant=False), "mse") == []


def test_layers_before_weights_of_zero_are_not_named() -> None:
    module = Checkpointed(use_reentrant=False)
    nn.init.zeros_(module.second.weight)
    assert said(module, "mse") == []


def test_a_module_in_which_all_gradients_arrive_is_called_no_more_often_in_the_first_step() -> None:
    module = nn.Sequential(nn.Linear(4, 2)).double()
    optimizer, calls = (
        SHF(module, "mse", damping=LevenbergMarquardt(initial=1.0, drop=None), solver="cg", preconditioner=None),
        [0],
    )
    module.register_forward_pre_hook(lambda module, args: calls.__setitem__(0, calls[0] + 1))
    counts = []
    for _ in range(2):
        optimizer.step(inputs=gaussian(8, 4, seed=1), targets=gaussian(8, 2, seed=2))
        counts.append(calls[0])
        calls[0] = 0
    assert counts[0] == counts[1]
