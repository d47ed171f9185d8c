"""RLS.exact: least squares over all data, after every step."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.optim import RLS
from tests.cases import gaussian
from tests.optim.rls.twins import descend

STEPS = 60


def batch(step, rows=3):
    return gaussian(rows, 6, seed=step) + 0.5, gaussian(rows, 2, seed=1000 + step)


def squared_error(outputs, targets):
    return 0.5 * (outputs - targets).square().sum() / len(outputs)


def train(module, optimizer, steps, read=batch, **options):
    def loss(step):
        inputs, targets = read(step, **options)
        return squared_error(module(inputs), targets)

    descend(module, optimizer, loss, steps)


def joined(layer):
    return torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], 1)


def with_ones(inputs):
    return torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)


def least_squares(start, batches, forgetting, regularization):
    """By the normal equations."""
    penalty = regularization * forgetting ** len(batches)
    matrix = penalty * torch.eye(start.shape[1], dtype=start.dtype)
    right = penalty * start.t()
    for age, (inputs, targets) in enumerate(reversed(batches)):
        matrix += forgetting**age * with_ones(inputs).t() @ with_ones(inputs)
        right += forgetting**age * with_ones(inputs).t() @ targets
    return torch.linalg.solve(matrix, right).t()


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 2).double()


@pytest.mark.parametrize(
    ("forgetting", "regularization", "rows"), [(1.0, 1.0, 1), (1.0, 0.01, 5), (0.98, 1.0, 5), (0.98, 0.01, 1)]
)
def test_the_weights_are_the_least_squares_solution(forgetting, regularization, rows):
    layer = linear()
    start = joined(layer)
    train(layer, RLS.exact(layer, forgetting=forgetting, regularization=regularization), range(STEPS), rows=rows)
    expected = least_squares(start, [batch(step, rows) for step in range(STEPS)], forgetting, regularization)
    torch.testing.assert_close(joined(layer), expected, rtol=0, atol=1e-10)


def test_batches_need_not_be_of_one_size_and_all_of_many_rows_count():
    layer = linear()
    start, batches = joined(layer), [*(batch(step, rows=1 + step % 4) for step in range(9)), batch(9, rows=2100)]
    train(layer, RLS.exact(layer), range(10), lambda step: batches[step])
    torch.testing.assert_close(joined(layer), least_squares(start, batches, 1.0, 1.0), rtol=0, atol=1e-10)


def test_micro_batches_are_one_batch_though_the_next_overwrites_the_inputs():
    layer, whole = (nn.Linear(6, 2, bias=False).double() for _ in range(2))
    whole.load_state_dict(layer.state_dict())
    (inputs, targets), buffer = batch(0, rows=4), torch.empty(2, 6, dtype=torch.float64)
    optimizer, exact = RLS.exact(layer, forgetting=0.9), RLS.exact(whole, forgetting=0.9)
    for part in (slice(2), slice(2, 4)):
        buffer.copy_(inputs[part])
        (squared_error(layer(buffer), targets[part]) / 2).backward()
    optimizer.step()
    squared_error(whole(inputs), targets).backward()
    exact.step()
    torch.testing.assert_close(layer.weight, whole.weight, rtol=0, atol=1e-12)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 2)

    def forward(self, inputs):
        return self.head(self.body(inputs))


@pytest.mark.parametrize("by_name", [True, False])
def test_the_last_layer_of_a_network_is_exact_on_features_that_others_train(by_name):
    network = Network().double()
    body, start = [p.detach().clone() for p in network.body.parameters()], joined(network.head)
    layer = "head" if by_name else network.head
    optimizer = RLS.exact(network, layer, auxiliary=partial(torch.optim.Adam, lr=1e-2))
    features = []
    network.body.register_forward_hook(lambda layer, args, outputs: features.append(outputs.detach()))
    train(network, optimizer, range(9))
    batches = [(read, batch(step)[1]) for step, read in enumerate(features)]
    torch.testing.assert_close(joined(network.head), least_squares(start, batches, 1.0, 1.0), rtol=0, atol=1e-10)
    assert not any(torch.equal(p, q) for p, q in zip(network.body.parameters(), body, strict=True))


def test_the_only_linear_layer_needs_no_name():
    alone = nn.Sequential(nn.Flatten(), linear(), nn.Identity())
    assert RLS.exact(alone).summary().splitlines()[1].startswith("1.weight  full")


def test_a_layer_within_several_modules_is_trained_alone():
    layer, beside = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inner = nn.Sequential(nn.LayerNorm(2), layer)
    module = nn.ModuleDict({"once": inner, "beside": beside, "again": nn.ModuleList([inner, layer])})
    own, others = RLS.exact(module, layer, auxiliary=torch.optim.SGD).param_groups
    assert own["params"] == [*layer.parameters()]
    assert others["params"] == [*inner[0].parameters(), *beside.parameters()]


def test_an_input_that_never_comes_keeps_its_weights():
    layer = linear()
    start = layer.weight[:, 0].detach().clone()

    def read(step):
        inputs, targets = batch(step)
        return inputs * (torch.arange(6) > 0), targets

    train(layer, RLS.exact(layer, forgetting=0.5), range(30), read)
    torch.testing.assert_close(layer.weight[:, 0], start, rtol=0, atol=1e-12)


def test_a_loss_with_a_penalty_is_refused_and_changes_nothing():
    layer = linear()
    start, optimizer = joined(layer), RLS.exact(layer)
    inputs, targets = batch(0)
    (squared_error(layer(inputs), targets) + layer.weight.square().sum()).backward()
    with pytest.raises(ValueError, match="the gradient of weight is not that of ½‖outputs - targets‖² alone"):
        optimizer.step()
    assert torch.equal(joined(layer), start)


def test_the_state_of_another_recursion_is_refused():
    state = RLS.exact(linear())
    train(state.module, state, range(1))
    other = RLS.exact(nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"RLS.exact needs a state .* for weights \(3, 7\).*has \(2, 7\)"):
        other.load_state_dict(state.state_dict())


@pytest.mark.parametrize("forgetting", [1.0, 0.95])
def test_a_resumed_stream_is_bitwise_that_without_a_break(forgetting):
    whole, stopped, resumed = linear(), linear(), linear()
    train(whole, RLS.exact(whole, forgetting=forgetting), range(10))
    optimizer = RLS.exact(stopped, forgetting=forgetting)
    train(stopped, optimizer, range(6))
    resumed.load_state_dict(stopped.state_dict())
    again = RLS.exact(resumed, forgetting=forgetting)
    again.load_state_dict(optimizer.state_dict())
    train(resumed, again, range(6, 10))
    assert torch.equal(joined(resumed), joined(whole))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RLS.exact(Network()), ValueError, "Network has the layers body.0, body.2, head: name"),
        (lambda: RLS.exact(nn.Conv1d(2, 2, 2)), ValueError, "one linear layer, and Conv1d has none"),
        (lambda: RLS.exact(nn.Sequential(nn.ReLU())), ValueError, "Sequential has none"),
        (lambda: RLS.exact(nn.Sequential(nn.Conv1d(2, 2, 2)), "0"), ValueError, "'0', which is no linear layer"),
        (lambda: RLS.exact(Network(), "head"), ValueError, "RLS does not train body.0.weight.*give auxiliary"),
        (lambda: RLS.exact(nn.Linear(2, 2), regularization=0.0), ValueError, "regularization must be > 0, got 0"),
        (lambda: RLS.exact(nn.Linear(2, 2), forgetting=1.1), ValueError, r"forgetting must be in \(0, 1\], got 1.1"),
        (lambda: RLS.exact(nn.Linear(2, 2).parameters()), TypeError, "RLS takes the module"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_layer_with_a_loss_for_each_of_its_uses_ends_at_least_squares(micro_batches):
    layer = linear()
    start, optimizer = joined(layer), RLS.exact(layer)
    batches = []
    for step in range(10):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            uses = [batch(100 * step + 10 * micro_batch + use) for use in range(3)]
            loss = sum(squared_error(layer(inputs), targets) for inputs, targets in uses) / micro_batches
            loss.backward()
            batches += uses
        optimizer.step()
    torch.testing.assert_close(joined(layer), least_squares(start, batches, 1.0, 1.0), rtol=0, atol=1e-12)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match=r"RLS.exact reads every row in one process"):
        RLS.exact(linear())
