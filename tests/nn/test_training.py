"""Structured layers under the optimizers and measurements of this package."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.nn import BlockStructured, LDRSubdiagonal, LowRank, StructuredLSTM
from lightning_struct.optim import LSMR, RLS, SHF
from tests.nn.layers import FACTORIES


def network(name, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(FACTORIES[name](12, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(n, 12, generator=generator, dtype=torch.float64)
    return inputs, torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], 1)


def test_shf_lowers_the_loss():
    model = network("ldr_sd")
    optimizer = SHF(model, "mse", damping=1.0, solver=LSMR(maxiter=10))
    inputs, targets = data()
    reports = [optimizer.step(inputs=inputs, targets=targets) for _ in range(3)]
    assert reports[-1].loss_after < 0.9 * reports[0].loss_before


def test_rls_leaves_a_structured_layer_to_the_auxiliary_optimizer():
    model = network("ldr_sd").float()
    inputs, targets = (tensor.float() for tensor in data())
    with pytest.raises(ValueError, match="0.G"):
        RLS(model)
    optimizer = RLS(model, auxiliary=partial(torch.optim.Adam, lr=1e-2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = 0.5 * (model(inputs) - targets).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (StructuredLSTM(4, 4, partial(LDRSubdiagonal, rank=1), hidden_factory=LowRank), (5, 3, 4)),
        (BlockStructured(2, 3, 4, LDRSubdiagonal), (5, 2, 2, 2)),
    ],
    ids=["lstm", "blocks"],
)
def test_composed_layers_are_trained(model, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        outputs = model(x)
        loss = ((outputs[0] if isinstance(outputs, tuple) else outputs) - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
