"""Layers that are called with nothing, or not at all, cleared by others, unfrozen later, or moved."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_struct.optim import RLS, FullP
from lightning_struct.optim.rls.statistics import Arrival, Use
from lightning_struct.optim.rls.weights import MOST_WAITING
from tests.optim.helpers import gaussian

ADAM = partial(torch.optim.Adam, lr=1e-2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def loss_of(module: nn.Module, step: int) -> Tensor:
    return module(gaussian(7, 6, seed=step) + 0.5).square().sum() / 14


def train(module: nn.Module, optimizer: RLS, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()


def weights(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


# --- nothing to read -------------------------------------------------------------------------------------------------

EMPTY: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (0, 6)),
    "positions": (lambda: nn.Linear(6, 5), (3, 0, 6)),
    "convolution": (lambda: nn.Conv2d(6, 5, 3), (0, 6, 4, 4)),
    "lstm": (lambda: nn.LSTM(6, 5), (3, 0, 6)),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), (0, 3, 6)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_layer_that_reads_nothing_keeps_its_weights(name: str) -> None:
    build, shape = EMPTY[name]
    layer, other = build(), nn.Linear(6, 2)
    module = nn.ModuleList([layer, other])
    optimizer = RLS(module, momentum=0.5)
    before = weights(layer)
    inputs = torch.zeros(shape, requires_grad=True)
    outputs = layer(inputs, inputs, inputs)[0] if name == "attention" else layer(inputs)
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    (outputs.sum() + other(torch.randn(4, 6)).square().sum()).backward()
    optimizer.step()
    assert torch.equal(weights(layer), before)
    assert list(optimizer.state["rls"]) == ["1.weight"]  # type: ignore[index]


class Experts(nn.Module):
    """Each token goes to one of three experts; none goes to the last in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        chosen = torch.arange(len(x)) % (3 - self.calls % 2)
        return torch.cat([expert(x[chosen == i]) for i, expert in enumerate(self.experts)])


def test_experts_without_tokens_keep_their_weights_and_train_when_they_have_some() -> None:
    torch.manual_seed(0)
    module = Experts().double()
    optimizer, start = RLS(module), weights(module.experts[2])
    train(module, optimizer, range(1))
    assert torch.equal(weights(module.experts[2]), start)
    train(module, optimizer, range(1, 2))
    assert not torch.equal(weights(module.experts[2]), start)


# --- gradients that others clear -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clear",
    [
        lambda module: module.zero_grad(),
        lambda module: module.zero_grad(set_to_none=False),
        lambda module: torch.optim.SGD(module.parameters()).zero_grad(),
    ],
)
def test_gradients_cleared_by_others_take_what_was_read_with_them(clear: Callable[[nn.Module], Any]) -> None:
    """As in a GAN: the discriminator's layers are called for the generator's loss, and its gradients then dropped."""
    module, reference = network(), network()
    optimizer, plain = RLS(module, auxiliary=ADAM), RLS(reference, auxiliary=ADAM)
    for step in range(3):
        loss_of(module, 100 + step).backward()
        clear(module)
        loss_of(module, step).backward()
        optimizer.step()
        clear(module)
    train(reference, plain, range(3))
    assert torch.equal(weights(module), weights(reference))


def test_a_layer_used_twice_in_a_pass_is_not_taken_for_a_cleared_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    module = Twice()
    optimizer = RLS(module)
    for _ in range(2):
        loss_of(module, 0).backward()
        assert optimizer._weights[0].statistics.counts[0] == 14
        optimizer.step()
        module.zero_grad()


def test_uses_of_other_passes_wait_only_if_these_may_be_differentiated_and_are_the_last_ones() -> None:
    module = network()
    optimizer = RLS(module, auxiliary=ADAM)
    weight = optimizer._weights[0]
    uses = [Use(torch.zeros(1, 6), (1,)) for _ in range(MOST_WAITING + 9)]
    for number, use in enumerate(uses[:-3]):
        weight.arrive(Arrival(use, None, number, number != 7))
    for use in uses[-3:]:
        weight.arrive(Arrival(use, None, 1000, False))
    weight.arrive(Arrival(uses[-3], None, 1000, False))  # again
    waiting = [use for number, use in enumerate(uses[:-3]) if number != 7][-MOST_WAITING:]
    assert list(weight.arrived) == [*waiting, uses[-2], uses[-1], uses[-3]]


def test_a_gradient_that_a_step_was_made_with_is_none_for_the_next() -> None:
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
def test_a_layer_that_is_unfrozen_later_is_trained(moment: str) -> None:
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
    assert optimizer.state["rls"]["0.weight"]["steps"] == 2  # type: ignore[index]
    assert "0.weight" in optimizer.summary()


def test_an_unfrozen_parameter_that_nobody_trains_is_named() -> None:
    module = network()
    module[2].requires_grad_(False)
    optimizer = RLS(module)
    module[2].requires_grad_(True)
    with pytest.raises(ValueError, match=r"RLS does not train 2\.weight, 2\.bias: give auxiliary"):
        train(module, optimizer, range(1))


def test_groups_can_be_added() -> None:
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


WRONG_GROUPS: list[tuple[Callable[[nn.Module], Any], type[Exception], str]] = [
    (lambda m: {"params": m[0].parameters(), "lr": -1.0}, ValueError, "lr must be >= 0, got -1.0"),
    (lambda m: {"params": m[0].parameters(), "momentum": 1.5}, ValueError, r"momentum must be in \[0, 1\), got 1.5"),
    (lambda m: {"params": m[0].parameters(), "gradient_scale": 0}, ValueError, "gradient_scale must be > 0, got 0"),
    (lambda m: {"params": [m[3].weight]}, ValueError, "more than one parameter group: 3.weight"),
    (lambda m: {"params": [nn.Parameter(torch.zeros(1))]}, ValueError, r"RLS trains .* others, of shape \(1,\)"),
    (lambda m: [*m.parameters()], TypeError, r"a dict .* {'params': layer.parameters\(\), 'lr': 0.5}, got list"),
]


@pytest.mark.parametrize(("group", "error", "message"), WRONG_GROUPS)
def test_a_wrong_group_is_refused_and_nothing_is_added(
    group: Callable[[nn.Module], Any], error: type[Exception], message: str
) -> None:
    module = network()
    module[0].requires_grad_(False)
    optimizer = RLS(module, auxiliary=ADAM)
    groups = len(optimizer.param_groups)
    module[0].requires_grad_(True)
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group(module))
    assert len(optimizer.param_groups) == groups
    optimizer.add_param_group({"params": module[0].parameters()})


def test_a_layer_that_is_unfrozen_later_follows_the_schedulers_of_before_whatever_its_scale() -> None:
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


@pytest.mark.parametrize("moment", ["found in the pass", "added as a group"])
def test_a_bias_of_several_weights_joins_a_group_once(moment: str) -> None:
    attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True).double().requires_grad_(False)
    module = nn.ModuleList([attention, nn.Linear(6, 3).double()])
    optimizer = RLS(module)
    attention.requires_grad_(True)
    if moment == "added as a group":
        optimizer.add_param_group({"params": attention.parameters()})
    outputs, _ = attention(*(torch.randn(2, 5, size).double() for size in (6, 4, 3)))
    module[1](outputs).square().sum().backward()
    optimizer.step()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(trained) == len(set(trained)) == len(list(module.parameters()))


def test_a_group_without_layers_is_one_of_the_auxiliary_optimizer() -> None:
    module = network()
    module[2].requires_grad_(False)
    optimizer = RLS(module, exclude=["3"], auxiliary=ADAM)
    optimizer.add_param_group({"params": module[2].requires_grad_(True).parameters(), "lr": 0.25})
    assert optimizer.param_groups[-1]["lr"] == 0.25 and "betas" in optimizer.param_groups[-1]
    before = weights(module[2])
    train(module, optimizer, range(1))
    assert not torch.equal(weights(module[2]), before)


def new_parameters(module: nn.Sequential) -> None:
    for layer in (module[0], module[3]):
        layer.weight, layer.bias = nn.Parameter(layer.weight.detach()), nn.Parameter(layer.bias.detach())


def new_layer(module: nn.Sequential) -> None:
    module[3] = nn.Linear(5, 3).double()


def assigned(module: nn.Sequential) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


@pytest.mark.parametrize("replace", [new_parameters, new_layer, assigned])
def test_a_layer_that_was_replaced_is_not_left_to_the_auxiliary_optimizer(replace: Callable[[Any], None]) -> None:
    module = network()
    optimizer = RLS(module, auxiliary=ADAM)
    replace(module)
    loss_of(module, 0).backward()
    with pytest.raises(ValueError, match=r"others than when RLS was made: .*3\.weight"):
        optimizer.step()


def test_a_module_on_the_meta_device_can_be_called_but_not_leave_it() -> None:
    module = nn.Linear(3, 2, device="meta")
    optimizer = RLS(module)
    assert module(torch.empty(4, 3, device="meta")).shape == (4, 2)
    module.to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"others than when RLS was made: weight\."):
        optimizer.step()


# --- precision, options, memory --------------------------------------------------------------------------------------


def test_a_module_in_lower_precision_keeps_p_in_float32() -> None:
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
    assert optimizer.state["rls"]["0.weight"]["P"].dtype == torch.float32  # type: ignore[index]
    assert module[0].weight.dtype == torch.bfloat16
    difference = (weights(module).float() - weights(reference)).norm()
    assert difference <= 0.1 * (weights(reference) - start).norm()


@pytest.mark.parametrize("converted", ["before", "after"])
@pytest.mark.parametrize("form", ["full", "low_rank", "rank1"])
def test_p_follows_a_module_into_another_precision(converted: str, form: Any) -> None:
    module = network().float()
    optimizer = RLS(module, momentum=0.5, form=form, auxiliary=ADAM)

    def step(number: int) -> None:
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
        optimizer.auxiliary.state.clear()  # type: ignore[union-attr]  # Adam's own does not follow
    step(1)
    tensors = [t for t in optimizer.state["rls"]["0.weight"].values() if isinstance(t, Tensor)]  # type: ignore[index]
    assert {t.dtype for t in tensors} == {torch.float64}


def test_weight_decay_is_decoupled_and_follows_the_learning_rate() -> None:
    module = nn.Linear(6, 3).double()
    decayed = copy.deepcopy(module)
    start = weights(module)
    for each, options in ((module, {}), (decayed, {"weight_decay": 0.1})):
        optimizer = RLS(each, lr=0.5, **options)
        train(each, optimizer, range(1))
    torch.testing.assert_close(weights(decayed), weights(module) - 0.05 * start)


def test_p_is_updated_in_every_interval_by_as_much_as_in_all_its_steps() -> None:
    module = nn.Linear(6, 3).double()
    optimizer = RLS(module, form=FullP(interval=3))
    train(module, optimizer, range(6))
    rows = [torch.cat([(gaussian(7, 6, seed=i) + 0.5).mean(0), torch.ones(1, dtype=torch.float64)]) for i in (0, 3)]
    expected = torch.linalg.inv(torch.eye(7, dtype=torch.float64) + 0.3 * sum(torch.outer(row, row) for row in rows))
    torch.testing.assert_close(optimizer.state["rls"]["weight"]["P"][0], expected)  # type: ignore[index]


def test_p_of_wide_layers_is_of_low_rank_unless_its_form_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(513, 2), nn.Linear(2, 512), nn.Linear(512, 2))
    with caplog.at_level(logging.INFO):
        chosen = [line.split()[1] for line in RLS(module).summary().splitlines()[1:-1]]
    assert chosen == ["low_rank", "full", "full"]
    assert (
        "RLS takes 1.1 MiB for P; weights that it trains: 3; 1 with more than 512 inputs have the low-rank form"
        in caplog.text
    )
    assert RLS(module, form="full").summary().count("full") == 3


def test_a_bias_that_is_frozen_later_keeps_its_values_through_decay_and_signs() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = RLS(layer, weight_decay=0.1, l1=0.1)
    layer.bias.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    layer(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before[0])
    assert torch.equal(layer.bias, before[1])
