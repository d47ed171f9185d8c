"""Structured layers under the optimizers and measurements of this package."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.functional import linearize, per_sample_gradient_norms
from lightning_struct.nn import BlockStructured, LDRSubdiagonal, LowRank, StructuredLSTM
from lightning_struct.optim import LSMR, RLS, SHF
from tests.nn.layers import FACTORIES, NAMES


def network(name, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(FACTORIES[name](12, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(n, 12, generator=generator, dtype=torch.float64)
    return inputs, torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], 1)


def dense_twin(model):
    """The network with an nn.Linear of the same matrix."""
    layer = model[0]
    linear = nn.Linear(12, 7).double()
    with torch.no_grad():
        linear.weight.copy_(layer.to_dense())
        linear.bias.copy_(layer.bias)
    return nn.Sequential(linear, *model[1:])


@pytest.mark.parametrize("name", ["ldr_sd", "toeplitz_like", "low_rank"])
def test_shf_lowers_the_loss(name):
    model = network(name)
    optimizer = SHF(model, "mse", damping=1.0, solver=LSMR(maxiter=10))
    inputs, targets = data()
    reports = [optimizer.step(inputs=inputs, targets=targets) for _ in range(3)]
    assert reports[-1].loss_after < 0.9 * reports[0].loss_before


@pytest.mark.parametrize("name", NAMES)
def test_products_with_the_jacobian(name):
    model = network(name)
    inputs, _ = data(3)
    weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
    linearization = linearize(lambda w, x: torch.func.functional_call(model, w, (x,)), weights, inputs)
    v = {key: torch.randn_like(weight) for key, weight in weights.items()}
    jacobian = torch.autograd.functional.jacobian(
        lambda *w: torch.func.functional_call(model, dict(zip(weights, w, strict=True)), (inputs,)),
        tuple(weights.values()),
    )
    expected = sum(j.reshape(3, 2, -1) @ v[key].flatten() for j, key in zip(jacobian, v, strict=True))
    torch.testing.assert_close(linearization.jvp(v), expected)
    u = torch.randn_like(expected)
    for key, j in zip(v, jacobian, strict=True):
        torch.testing.assert_close(linearization.vjp(u)[key], torch.einsum("no,no...->...", u, j))


@pytest.mark.filterwarnings("ignore:these layers have no rule")
@pytest.mark.parametrize("name", NAMES)
def test_per_sample_gradient_norms(name):
    model = network(name)
    inputs, targets = data(5)
    with per_sample_gradient_norms(model) as norms:
        (model(inputs) - targets).square().sum().backward()
    for sample in range(5):
        alone = network(name)
        (alone(inputs[sample : sample + 1]) - targets[sample : sample + 1]).square().sum().backward()
        expected = sum(parameter.grad.square().sum() for parameter in alone.parameters())
        torch.testing.assert_close(norms.squared_norms[sample], expected)


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


@pytest.mark.parametrize("name", NAMES)
def test_first_step_of_sgd_is_that_of_the_dense_layer(name):
    model = network(name)
    twin = dense_twin(model)
    inputs, targets = data()
    losses = [(net(inputs) - targets).square().sum() for net in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(model[0].bias.grad, twin[0].bias.grad)
    torch.testing.assert_close(model[2].weight.grad, twin[2].weight.grad)
    ours = torch.autograd.grad(model[0].to_dense(), list(model[0]._weights().values()), twin[0].weight.grad)
    for weight, gradient in zip(model[0]._weights().values(), ours, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


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
    for _ in range(30):
        optimizer.zero_grad()
        outputs = model(x)
        loss = ((outputs[0] if isinstance(outputs, tuple) else outputs) - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
