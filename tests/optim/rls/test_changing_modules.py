"""Layers that are called with nothing, or not at all, cleared by others, unfrozen later, or moved."""

import copy
import logging
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_struct.optim import RLS
from tests.optim.helpers import gaussian
from tests.optim.rls.twins import ADAM, descend, first_step, matrix, weights


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def loss_of(module, step):
    return module(gaussian(7, 6, seed=step) + 0.5).square().sum() / 14


def train(module, optimizer, steps):
    descend(module, optimizer, lambda step: loss_of(module, step), steps)


# --- nothing to read -------------------------------------------------------------------------------------------------

EMPTY = {
    "linear": (lambda: nn.Linear(6, 5), (0, 6)),
    "positions": (lambda: nn.Linear(6, 5), (3, 0, 6)),
    "convolution": (lambda: nn.Conv2d(6, 5, 3), (0, 6, 4, 4)),
    "lstm": (lambda: nn.LSTM(6, 5), (3, 0, 6)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_layer_that_reads_nothing_keeps_its_weights_until_it_reads_something(name):
    build, shape = EMPTY[name]
    layer, other = build(), nn.Linear(6, 2)
    optimizer, before = RLS(nn.ModuleList([layer, other]), momentum=0.5), weights(layer)
    for size in (0, 2):
        inputs = torch.zeros([n or size for n in shape], requires_grad=True)
        outputs = layer(inputs)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        optimizer.zero_grad()
        (outputs.sum() + other(torch.randn(4, 6)).square().sum()).backward()
        optimizer.step()
        assert torch.equal(weights(layer), before) == (size == 0)
        assert (list(optimizer.state["rls"]) == ["1.weight"]) == (size == 0)


def test_a_gradient_that_a_step_was_made_with_is_none_for_the_next():
    module = network()
    optimizer = RLS(module, auxiliary=partial(torch.optim.SGD, lr=0.0))
    loss_of(module, 0).backward()
    optimizer.step()
    before = weights(module)
    optimizer.step()
    assert torch.equal(weights(module), before)
    module[0].weight.grad.mul_(2.0)
    with pytest.raises(ValueError, match="0.weight has a gradient, but its layer was not seen"):
        optimizer.step()


# --- unfreezing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before the pass", "in a scheduler's run"])
def test_a_layer_that_is_unfrozen_later_is_trained(moment):
    module = network()
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    optimizer = RLS(module, auxiliary=ADAM)
    scheduler = OneCycleLR(optimizer, max_lr=2.0, total_steps=10) if moment != "before the pass" else None
    train(module, optimizer, range(2))
    before = weights(module[0]), weights(module[2])
    module.requires_grad_(True)
    train(module, optimizer, range(2, 4))
    if scheduler is not None:
        scheduler.step()
    assert not torch.equal(weights(module[0]), before[0])
    assert not torch.equal(weights(module[2]), before[1])
    assert optimizer.state["rls"]["0.weight"]["steps"] == 2
    assert "0.weight" in optimizer.summary()


def test_an_unfrozen_parameter_that_nobody_trains_is_named():
    module = network()
    module[2].requires_grad_(False)
    optimizer = RLS(module)
    module[2].requires_grad_(True)
    with pytest.raises(ValueError, match=r"RLS does not train 2\.weight, 2\.bias: give auxiliary"):
        train(module, optimizer, range(1))


def test_groups_can_be_added():
    module = network()
    module[0].requires_grad_(False)
    optimizer = RLS(module, auxiliary=ADAM)
    module[0].requires_grad_(True)
    optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.5})
    assert optimizer.param_groups[-1]["lr"] == 0.5
    before = weights(module[0])
    whole, half = copy.deepcopy((module, optimizer)), copy.deepcopy((module, optimizer))
    whole[1].param_groups[-1]["lr"] = 1.0
    for of_module, of_optimizer in (whole, half):
        train(of_module, of_optimizer, range(1))
    torch.testing.assert_close(weights(half[0][0]) - before, 0.5 * (weights(whole[0][0]) - before))


WRONG_GROUPS = [
    (lambda m: {"params": m[0].parameters(), "lr": -1.0}, ValueError, "lr must be >= 0, got -1.0"),
    (lambda m: {"params": [m[3].weight]}, ValueError, "more than one parameter group: 3.weight"),
    (lambda m: {"params": [nn.Parameter(torch.zeros(1))]}, ValueError, r"RLS trains .* others, of shape \(1,\)"),
    (lambda m: [*m.parameters()], TypeError, r"a dict .* {'params': layer.parameters\(\), 'lr': 0.5}, got list"),
]


@pytest.mark.parametrize(("group", "error", "message"), WRONG_GROUPS)
def test_a_wrong_group_is_refused_and_nothing_is_added(group, error, message):
    module = network()
    module[0].requires_grad_(False)
    optimizer = RLS(module, auxiliary=ADAM)
    groups = len(optimizer.param_groups)
    module[0].requires_grad_(True)
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group(module))
    assert len(optimizer.param_groups) == groups
    optimizer.add_param_group({"params": module[0].parameters()})


def test_a_layer_that_is_unfrozen_later_follows_the_schedulers_of_before_whatever_its_scale():
    module = network()
    module[0].requires_grad_(False)
    optimizer = RLS(module, auxiliary=ADAM, gradient_scale={"0": 0.5})
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        module[0].requires_grad_(step > 0)
        before = weights(module[0])
        train(module, optimizer, range(step, step + 1))
        assert torch.equal(weights(module[0]), before) == (step == 0)
        scheduler.step()
    (of_layer,) = [group for group in optimizer.param_groups if any(p is module[0].weight for p in group["params"])]
    assert (of_layer["lr"], of_layer["gradient_scale"]) == (0.5**3, 0.5)
    assert len(optimizer.param_groups) == 3


def test_a_group_without_layers_is_one_of_the_auxiliary_optimizer():
    module = network()
    module[2].requires_grad_(False)
    optimizer = RLS(module, exclude=["3"], auxiliary=ADAM)
    optimizer.add_param_group({"params": module[2].requires_grad_(True).parameters(), "lr": 0.25})
    assert optimizer.param_groups[-1]["lr"] == 0.25 and "betas" in optimizer.param_groups[-1]
    before = weights(module[2])
    train(module, optimizer, range(1))
    assert not torch.equal(weights(module[2]), before)


@pytest.mark.parametrize("replaced", ["parameters", "layer", "assigned"])
def test_a_layer_that_was_replaced_is_not_left_to_the_auxiliary_optimizer(replaced):
    module = network()
    optimizer = RLS(module, auxiliary=ADAM)
    if replaced == "layer":
        module[3] = nn.Linear(5, 3).double()
    elif replaced == "parameters":
        module[3].weight = nn.Parameter(module[3].weight.detach())
    else:
        module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    loss_of(module, 0).backward()
    with pytest.raises(ValueError, match=r"others than when RLS was made: .*3\.weight"):
        optimizer.step()


def test_a_module_on_the_meta_device_is_refused():
    with pytest.raises(ValueError, match="on the meta device: give RLS one with numbers"):
        RLS(nn.Linear(3, 2, device="meta"))


# --- precision, options, memory --------------------------------------------------------------------------------------


def test_a_module_in_lower_precision_keeps_p_in_float32():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    module, start = copy.deepcopy(reference), weights(reference)
    optimizer, plain = RLS(module, momentum=0.5), RLS(reference, momentum=0.5)
    module.bfloat16()
    for step in range(3):
        inputs = gaussian(7, 6, seed=step).float() + 0.5
        for each, trained in ((module, optimizer), (reference, plain)):
            trained.zero_grad()
            each(inputs.to(each[0].weight.dtype)).square().sum().backward()
            trained.step()
    assert optimizer.state["rls"]["0.weight"]["P"].dtype == torch.float32
    assert module[0].weight.dtype == torch.bfloat16
    difference = (weights(module).float() - weights(reference)).norm()
    assert difference <= 0.1 * (weights(reference) - start).norm()


@pytest.mark.parametrize("converted", ["before", "after"])
@pytest.mark.parametrize("form", ["full", "low_rank"])
def test_p_follows_a_module_into_another_precision(converted, form):
    module = network().float()
    optimizer = RLS(module, momentum=0.5, form=form, auxiliary=ADAM)

    def step(number):
        optimizer.zero_grad()
        dtype = module[0].weight.dtype
        module((gaussian(7, 6, seed=number) + 0.5).to(dtype)).square().sum().backward()
        optimizer.step()

    step(0)
    if converted == "before":  # than the optimizer
        state = optimizer.state_dict()
        module = network()
        optimizer = RLS(module, momentum=0.5, form=form, auxiliary=ADAM)
        optimizer.load_state_dict(state)
    else:
        module.double()
        optimizer.auxiliary.state.clear()  # Adam's own does not follow
    step(1)
    tensors = [t for t in optimizer.state["rls"]["0.weight"].values() if isinstance(t, Tensor)]
    assert {t.dtype for t in tensors} == {torch.float64}


def test_weight_decay_is_decoupled_and_follows_the_learning_rate():
    module = nn.Linear(6, 3).double()
    start = module.weight.detach().clone()
    plain = first_step(copy.deepcopy(module), partial(loss_of, step=0), lr=0.5)
    decayed = first_step(module, partial(loss_of, step=0), lr=0.5, weight_decay=0.1)
    torch.testing.assert_close(decayed["weight"], plain["weight"] - 0.05 * start)


def test_p_is_the_inverse_of_the_identity_and_the_mean_inputs_so_far():
    module = nn.Linear(6, 3).double()
    optimizer = RLS(module)
    train(module, optimizer, range(6))
    means = torch.stack([(gaussian(7, 6, seed=i) + 0.5).mean(0) for i in range(6)])
    rows = torch.cat([means, means.new_ones(len(means), 1)], 1)
    expected = torch.linalg.inv(torch.eye(7, dtype=torch.float64) + 0.1 * rows.t() @ rows)
    torch.testing.assert_close(matrix(optimizer, "weight"), expected)


def test_p_of_wide_layers_is_of_low_rank_unless_its_form_is_asked_for(caplog):
    module = nn.Sequential(nn.Linear(513, 2), nn.Linear(2, 512), nn.Linear(512, 2))
    with caplog.at_level(logging.INFO):
        chosen = [line.split()[1] for line in RLS(module).summary().splitlines()[1:-1]]
    assert chosen == ["low_rank", "full", "full"]
    assert (
        "RLS takes 1.1 MiB for P; weights that it trains: 3; 1 with more than 512 inputs have the low-rank form"
        in caplog.text
    )
    assert RLS(module, form="full").summary().count("full") == 3


def test_a_bias_that_is_frozen_later_keeps_its_values_through_decay_and_signs():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = RLS(layer, weight_decay=0.1, l1=0.1)
    layer.bias.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    layer(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before[0])
    assert torch.equal(layer.bias, before[1])
