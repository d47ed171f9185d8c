"""Parameters that no gradient reaches, although their layers are called."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_struct.optim import SHF
from tests.optim.helpers import gaussian


class Checkpointed(nn.Module):
    """Two layers, the first within activation checkpointing, and one that is never called."""

    def __init__(self, use_reentrant: bool, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.first, self.second = nn.Linear(4, 5).double(), nn.Linear(5, 2).double()
        self.unused = nn.Linear(2, 2).double()
        self.second.weight.data.mul_(scale)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x.detach().requires_grad_(), use_reentrant=self.use_reentrant)
        return self.second(torch.tanh(hidden))


@pytest.mark.parametrize(
    ("module", "loss", "options", "named"),
    [
        (Checkpointed(True), "mse", {}, True),
        (Checkpointed(True), "mse", {"l2": 0.1}, True),
        (Checkpointed(True), "mse", {"chunk_size": 3}, True),
        (Checkpointed(True), "least_squares", {"solver": "lsmr"}, True),
        (Checkpointed(False), "mse", {}, False),  # nor is the layer that is not called
        (Checkpointed(False, scale=0.0), "mse", {}, False),
    ],
    ids=["plain", "l2", "chunks", "residuals", "other checkpoints", "before weights of zero"],
)
def test_layers_in_reentrant_checkpoints_are_named_once_with_the_remedy(
    module: nn.Module, loss: str, options: dict[str, Any], named: bool
) -> None:
    optimizer = SHF(module, loss, damping=1.0, **options)
    data = {"inputs": gaussian(8, 4, seed=1)} | ({} if loss == "least_squares" else {"targets": gaussian(8, 2, seed=2)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step(**data)
    messages = [str(w.message) for w in caught if "does not train" in str(w.message)]
    assert len(messages) == named
    for message in messages:
        assert re.match("SHF does not train first.weight, first.bias: .*use_reentrant=False", message)
