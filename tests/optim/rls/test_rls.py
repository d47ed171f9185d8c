"""RLS as an optimizer: what it trains, its options, its state, and where it works."""

import copy
import gc
import math
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel

from lightning_struct.optim import RLS, LowRankP, memory
from tests.optim.helpers import gaussian
from tests.optim.rls.twins import ADAM, assert_equal, descend, first_step, matrix, weights


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 12)).to(dtype)


def mixed():
    """With layers that RLS does not train."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, 20), nn.Linear(20, 15), nn.LayerNorm(15), nn.Linear(15, 12, bias=False)
    ).double()


def batch(step):
    return gaussian(5, 20, seed=step) + 0.5


def squared(module, inputs):
    outputs = module(inputs)
    return 0.5 * (outputs - outputs.detach().sin()).square().sum() / len(inputs)


def train(module, optimizer, steps=range(5), change=lambda: None):
    dtype = next(module.parameters()).dtype
    descend(module, optimizer, lambda step: squared(module, batch(step).to(dtype)), steps, change)


# --- the mathematics -------------------------------------------------------------------------------------------------


def test_batches_of_one_with_ratio_one_are_ridge_regression():
    """Towards the initial weights: min ½ Σ‖θx - y‖² + ½‖θ - θ₀‖²."""
    inputs, targets = gaussian(40, 6, seed=0), gaussian(40, 3, seed=1)
    torch.manual_seed(0)
    module = nn.Linear(6, 3).double()
    start = torch.cat([module.weight.detach(), module.bias.detach()[:, None]], 1)
    samples = list(zip(inputs.split(1), targets, strict=True))

    def loss(step):
        x, y = samples[step]
        return 0.5 * (module(x) - y).square().sum()

    descend(module, RLS(module, ratio=1.0), loss, range(40))
    rows = torch.cat([inputs, torch.ones(40, 1, dtype=torch.float64)], 1)
    matrix = rows.t() @ rows + torch.eye(7, dtype=torch.float64)
    expected = torch.linalg.solve(matrix, rows.t() @ targets + start.t()).t()
    found = torch.cat([module.weight.detach(), module.bias.detach()[:, None]], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "steps", "options"),
    [
        (LowRankP(rank=8), 8, {"l1": 1e-2, "momentum": 0.5}),
        (LowRankP(rank=8), 8, {"weight_decay": 0.1}),
        ("rank1", 2, {"momentum": 0.5}),
    ],
    ids=str,
)
def test_small_forms_are_the_full_one_while_all_mean_inputs_have_room(form, steps, options):
    module, same = network(), network()
    train(module, RLS(module, form=form, **options), range(steps))
    train(same, RLS(same, form="full", **options), range(steps))
    assert_equal(module, same, 1e-12)


# --- gradients that are not only those of the layers -----------------------------------------------------------------


class Twin(nn.Module):
    """A network whose layers are there twice, so that no rows are kept for a product with few of them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.twins = nn.ModuleList(nn.Linear(layer.in_features, layer.out_features) for layer in (inner[0], inner[2]))
        for twin, layer in zip(self.twins, (inner[0], inner[2]), strict=True):
            twin.weight, twin.bias = layer.weight, layer.bias

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("change", ["penalised", "clipped", "noisy"])
def test_changes_of_the_gradients_count_though_few_rows_are_multiplied_by_themselves(change):
    def changed(module):
        if change == "clipped":
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        elif change == "noisy":
            next(module.parameters()).grad.data[3, 4] += 1e-6
        else:
            for parameter in module.parameters():
                parameter.grad.add_(parameter.detach(), alpha=1e-4)

    few, plain = network(), Twin(network())
    for module in (few, plain):
        train(module, RLS(module, momentum=0.5), change=partial(changed, module))
    assert_equal(few, plain, 1e-13)


@pytest.mark.parametrize("bound", [0.1, 100.0])
def test_the_norm_of_all_gradients_is_clipped_within_the_step(bound):
    module, reference, indices = mixed(), mixed(), torch.tensor([1, 4, 4, 7])

    def clip():
        assert (nn.utils.clip_grad_norm_(reference.parameters(), bound) > bound) == (bound < 1)

    for each, options, change in ((module, {"max_grad_norm": bound}, lambda: None), (reference, {}, clip)):
        optimizer = RLS(each, auxiliary=partial(torch.optim.SGD, lr=0.1), **options)
        descend(each, optimizer, lambda _, each=each: squared(each, indices), range(4), change)
    assert_equal(module, reference, 1e-12)


def test_sparse_gradients_of_the_auxiliary_optimizer_and_other_precisions_count_in_the_norm():
    module = nn.ModuleDict({"embedding": nn.Embedding(4, 3, sparse=True), "linear": nn.Linear(3, 3).double()})
    optimizer = RLS(module, max_grad_norm=0.5, auxiliary=partial(torch.optim.SGD, lr=1.0))
    before = module["embedding"].weight.detach().clone()
    (module["embedding"](torch.tensor([1, 2, 2])).sum() + module["linear"](torch.ones(1, 3).double()).sum()).backward()
    optimizer.step()  # norms: 1 and 2 in three places each; three weights and a bias of 1 for each of three outputs
    expected = torch.tensor([0.0, 1.0, 2.0, 0.0])[:, None] * 0.5 / (15 + 12) ** 0.5
    torch.testing.assert_close(before - module["embedding"].weight.detach(), expected.expand(4, 3))


# --- what is trained -------------------------------------------------------------------------------------------------


def test_other_parameters_and_excluded_layers_are_trained_by_the_auxiliary_optimizer():
    module = mixed()
    optimizer = RLS(module, exclude=[module[3]], auxiliary=ADAM)
    expected = {id(module[0].weight), id(module[2].weight), id(module[2].bias), id(module[3].weight)}
    assert {id(p) for p in optimizer.param_groups[-1]["params"]} == expected
    before = [p.detach().clone() for p in module.parameters()]
    adam = torch.optim.Adam([p.clone().detach().requires_grad_() for p in module[3].parameters()], lr=1e-2)
    squared(module, torch.tensor([1, 2])).backward()
    adam.param_groups[0]["params"][0].grad = module[3].weight.grad
    optimizer.step()
    adam.step()
    assert torch.equal(module[3].weight, adam.param_groups[0]["params"][0])
    assert all(not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))


def test_excluded_by_name_is_all_below_it():
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert RLS(module, exclude=["0"], auxiliary=ADAM).param_groups[0]["params"] == [*module[1].parameters()]


@pytest.mark.parametrize("later", [False, True])
def test_frozen_parameters_are_left_alone(later):
    module = network()
    optimizer = RLS(module, l1=1e-3, momentum=0.5, auxiliary=ADAM) if later else None
    frozen = [module[0].weight, module[2].bias]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    train(module, optimizer or RLS(module, auxiliary=ADAM, momentum=0.5))
    same = [torch.equal(parameter, old) for parameter, old in zip(module.parameters(), before, strict=True)]
    assert same == [True, False, False, True]


def test_layers_without_a_gradient_keep_weights_and_p():
    module = nn.ModuleList([nn.Linear(20, 3), nn.Linear(20, 3)]).double()
    optimizer, before = RLS(module), weights(module[1])
    descend(module, optimizer, lambda step: squared(module[0], batch(step)), range(1))
    assert torch.equal(weights(module[1]), before) and list(optimizer.state["rls"]) == ["0.weight"]


def test_gradient_scale_by_module_name():
    whole, half = (
        first_step(network(), lambda module: squared(module, batch(0)), gradient_scale=scale)
        for scale in (1.0, {"0": 0.5, "": 1.0})
    )
    torch.testing.assert_close(half["0.weight"], 0.5 * whole["0.weight"])
    assert torch.equal(half["2.weight"], whole["2.weight"])


def test_schedulers_act_on_the_gradient_scale_and_on_the_auxiliary_optimizer():
    module, reference = mixed(), mixed()
    options = {"gradient_scale": 0.8, "max_gain": None, "auxiliary": partial(torch.optim.SGD, lr=0.1)}
    optimizer, halved = RLS(module, **options), RLS(reference, **options)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(3):
        for each, trained in ((module, optimizer), (reference, halved)):
            descend(each, trained, lambda step, each=each: squared(each, torch.tensor([step, 4])), [step])
        scheduler.step()
        halved.param_groups[0]["gradient_scale"] *= 0.5
        halved.param_groups[1]["lr"] *= 0.5
    assert_equal(module, reference)


def test_a_scheduler_of_the_momentum_acts_on_it():
    optimizer = RLS(network(), momentum=0.5)
    OneCycleLR(optimizer, max_lr=2.0, total_steps=10)
    assert optimizer.param_groups[0]["momentum"] == 0.95


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "ratio must be > 0, got 0.0"),
        ({"forgetting": 1.1}, r"forgetting must be in \(0, 1\], got 1.1"),
        ({"gradient_scale": {"7": 1.0}}, "gradient_scale names '7'"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"l1": math.nan}, "l1 must be a finite number >= 0, got nan"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be > 0, or None, got 0.0"),
        ({"max_gain": 0.0}, "max_gain must be > 0, or None, got 0.0"),
        ({"form": "half"}, r"form must be 'full', .*, LowRankP\(...\) or None, got 'half'"),
        ({"form": "low_rank", "forgetting": 0.9}, "a P of low rank does not forget"),
        ({"lr": 1.0, "weight_decay": 5.0}, "must be < 1, got lr=1.0 and weight_decay=5.0:"),
        ({"lr": math.inf}, "lr must be a finite number >= 0, got inf"),
        ({"exclude": ["head"]}, "exclude has 'head', which is no module of Sequential"),
        ({"exclude": "*2"}, r"'\*2', which is no .* the full names of modules, no patterns; it matches '2'$"),
        ({"exclude": ["head.*"]}, r"'head\.\*', which is no .*, no patterns; there are '0', '1', '2'$"),
        ({"exclude": ["0", "2"], "auxiliary": ADAM}, "for RLS to train"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RLS(network(), **options)


def is_head(name, layer):
    return name == "2"


WITH_NORM = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))
EXTRA = [nn.Parameter(torch.ones(1))]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LowRankP(rank=0), ValueError, "rank must be a whole number >= 1, got 0"),
        (lambda: RLS(mixed()), ValueError, r"0\.weight, 2\.weight, 2\.bias"),
        (lambda: RLS(WITH_NORM, exclude=["2"], auxiliary=ADAM), ValueError, "are no parameters, as in 0$"),
        (
            lambda: RLS(network(), exclude=is_head),
            TypeError,
            "exclude has this function is_head, but takes modules or the",
        ),
        (lambda: RLS(network(torch.bfloat16)), ValueError, "0.weight is torch.bfloat16.*bf16-mixed"),
        (lambda: RLS(nn.LazyLinear(3)), ValueError, "weight, bias have no shape yet: .* before making RLS"),
        (
            lambda: RLS(AveragedModel(network()), exclude=["2"], auxiliary=ADAM),
            ValueError,
            r"exclude has '2', which is no module of .*; there is 'module.2'$",
        ),
        (lambda: RLS(network().parameters()), TypeError, "RLS takes the module.*return RLS"),
        (lambda: RLS(mixed(), auxiliary=ADAM(network().parameters())), TypeError, r"got this Adam: .*partial\(torch"),
        (lambda: RLS(mixed(), auxiliary=torch.optim.LBFGS), TypeError, "auxiliary makes an LBFGS, which evaluates"),
        (lambda: RLS(mixed(), auxiliary=lambda given: ADAM(EXTRA)), ValueError, r"leaves out 0\.weight"),
        (lambda: RLS(mixed(), auxiliary=lambda given: ADAM(given + EXTRA)), ValueError, "it takes others as well"),
    ],
)
def test_what_cannot_be_made_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_rate_that_weight_decay_does_not_allow_is_refused_when_a_scheduler_comes_to_it():
    module = network()
    optimizer = RLS(module, weight_decay=0.5)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 + step)
    train(module, optimizer, range(1))
    scheduler.step()
    before = weights(module)
    with pytest.raises(ValueError, match=r"must be < 1, got lr=2.0 and weight_decay=0.5:.* rates of a scheduler"):
        train(module, optimizer, range(1, 2))
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize("where", ["inputs", "gradient"])
def test_nan_stops_the_step_before_anything_changes(where):
    module = network()
    optimizer = RLS(module, momentum=0.5)
    train(module, optimizer, range(2))
    before, inverse = weights(module), matrix(optimizer, "0.weight").clone()
    optimizer.zero_grad()
    inputs = batch(2)
    if where == "inputs":
        inputs[1, 1] = math.nan
    (squared(module, inputs) * (math.inf if where == "gradient" else 1.0)).backward()
    with pytest.raises(ValueError, match=r"RLS step 3: NaN or infinity in the gradient of 0.weight.*2.bias"):
        optimizer.step()
    assert torch.equal(weights(module), before) and torch.equal(matrix(optimizer, "0.weight"), inverse)
    train(module, optimizer, range(2, 4))
    without = network()
    train(without, RLS(without, momentum=0.5), range(4))
    assert_equal(module, without)


def test_gradients_that_no_backward_pass_has_made_are_an_error_with_the_remedy():
    module = network()
    optimizer = RLS(module)
    parameters = list(module.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(squared(module, batch(0)), parameters), strict=True):
        parameter.grad = gradient
    with pytest.raises(ValueError, match=r"step 1: 0.weight has .* from torch.autograd.grad .*: .* call backward\(\)"):
        optimizer.step()


def test_a_weight_used_without_its_layer_is_an_error_that_names_it():
    module = network()
    optimizer = RLS(module)
    (module(batch(0)) @ module[2].weight).sum().backward()  # beside its layer is all right
    optimizer.step()
    optimizer.zero_grad()
    nn.functional.linear(module[0](batch(0)), module[2].weight).sum().backward()
    with pytest.raises(ValueError, match="2.weight has a gradient, but its layer was not seen to read anything"):
        optimizer.step()


# --- memory ----------------------------------------------------------------------------------------------------------


def test_summary_tells_form_size_and_memory_of_each_weight():
    module = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(1023, 2))
    lines = [line.split() for line in RLS(module).summary().splitlines()]
    assert lines[1] == ["0.weight", "full", "2", "x", "19", "x", "19", "2.8", "KiB"]
    assert lines[2] == ["2.weight", "low_rank", "64", "x", "1024", "256.0", "KiB"]
    assert lines[3] == ["total", "258.8", "KiB"]
    assert RLS(module, form="rank1").summary().splitlines()[2].split() == ["2.weight", "rank1", "1024", "4.0", "KiB"]


def test_too_little_memory_is_an_error_that_names_layers_and_remedies(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 5000)
    with pytest.raises(MemoryError, match=r"take 5.4 KiB, but 4.9 KiB are free on cpu.*0.weight 3.4 KiB.*'rank1'"):
        RLS(network())
    RLS(network(), form="rank1")


# --- state -----------------------------------------------------------------------------------------------------------


def test_a_loaded_state_is_a_copy_with_integer_counters_in_the_precision_of_the_module():
    module, other = network(), network()
    optimizer, loaded = RLS(module), RLS(other)
    train(module, optimizer, range(3))
    before = matrix(optimizer, "0.weight").clone()
    loaded.load_state_dict(optimizer.state_dict())
    state = loaded.state_dict()["state"]["rls"]["0.weight"]
    assert type(state["steps"]) is int and state["steps"] == 3
    assert state["P"].dtype == torch.float64 and torch.equal(state["P"][0], before)
    train(other, loaded)
    assert torch.equal(matrix(optimizer, "0.weight"), before)


def test_groups_are_still_those_of_the_auxiliary_optimizer_after_loading():
    module = mixed()
    optimizer = RLS(module, auxiliary=partial(torch.optim.SGD, lr=0.1))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[-1]["lr"] = 0.0
    before = module[0].weight.detach().clone()
    squared(module, torch.tensor([1, 2])).backward()
    optimizer.step()
    assert torch.equal(module[0].weight, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "rank1"}, "0.weight is of another form"),
        ({"exclude": ["0"], "auxiliary": ADAM}, "trains 0.weight, which this one does not: make it with the same lay"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(options, message):
    module = network()
    optimizer = RLS(module)
    train(module, optimizer, range(1))
    with pytest.raises(ValueError, match=message):
        RLS(network(), **options).load_state_dict(optimizer.state_dict())
    adam = torch.optim.Adam(module.parameters())  # its groups have no options of RLS, which would then train nothing
    with pytest.raises(ValueError, match="of another optimizer than RLS"):
        optimizer.load_state_dict(adam.state_dict())


def test_what_makes_the_auxiliary_optimizer_may_look_at_parameters_that_will_be_unfrozen_later():
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    module[1].requires_grad_(False)

    def by_dimension(parameters):
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])

    optimizer = RLS(module, auxiliary=by_dimension)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0, 0]
    optimizer.load_state_dict(optimizer.state_dict())
    module[1].requires_grad_(True)
    module(torch.ones(2, 3)).square().sum().backward()
    before = module[1].bias.detach().clone()
    optimizer.step()
    assert not torch.equal(module[1].bias, before)


# --- hooks -----------------------------------------------------------------------------------------------------------


def number_of_hooks(module):
    return sum(len(layer._forward_hooks) for layer in module.modules())


@pytest.mark.parametrize("on_demand", [True, False])
def test_hooks_are_removed_on_demand_and_with_the_optimizer(on_demand):
    module = network()
    optimizer = RLS(module)
    train(module, optimizer)
    assert number_of_hooks(module) == 2
    if on_demand:
        optimizer.remove_hooks()
    else:
        del optimizer
        gc.collect()
    assert number_of_hooks(module) == 0


@pytest.mark.parametrize("clears_in_between", [False, True])
def test_a_loss_of_derivatives_counts_each_row_once(clears_in_between):
    """As of a physics-informed network; Lightning clears gradients between the two passes."""
    module = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    reference = copy.deepcopy(module)
    optimizer, plain = RLS(module), RLS(reference)
    points = gaussian(9, 2, seed=1).requires_grad_()
    optimizer.zero_grad()
    (slope,) = torch.autograd.grad(module(points).sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
    loss = (second[:, 0] - slope[:, 1]).square().mean() / 2
    if clears_in_between:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plain.zero_grad()
    reference(points.detach()).square().mean().backward()
    plain.step()
    for name in ("0.weight", "2.weight"):  # P depends on the rows that were read, and not on the loss
        torch.testing.assert_close(matrix(optimizer, name), matrix(plain, name), rtol=1e-12, atol=0)


# --- precision and compilation ---------------------------------------------------------------------------------------


def test_under_autocast_p_stays_in_float32():
    module, reference = network(torch.float32), network(torch.float32)
    optimizer, plain = RLS(module), RLS(reference)
    with torch.autocast("cpu", torch.bfloat16):
        train(module, optimizer, range(2))
    train(reference, plain, range(2))
    assert matrix(optimizer, "0.weight").dtype == torch.float32
    torch.testing.assert_close(matrix(optimizer, "0.weight"), matrix(plain, "0.weight"), rtol=0, atol=1e-6)
    assert_equal(module, reference, 0.03)


def test_the_outputs_of_a_step_do_not_outlive_it():
    layer = nn.Linear(3, 2)
    optimizer = RLS(layer)
    outputs = layer(torch.randn(4, 3))
    watched = weakref.ref(outputs)
    outputs.square().mean().backward()
    optimizer.step()
    del outputs
    assert watched() is None


class Hiding(nn.Module):
    """Scales its outputs by a parameter in a list; another one is not used."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.scales, self.unused = [nn.Parameter(torch.ones(2))], [nn.Parameter(torch.ones(2))]

    def forward(self, x):
        return self.net(x) * self.scales[0]


def test_parameters_that_nobody_trains_are_named_once():
    module = Hiding()
    optimizer = RLS(module)
    for step in range(2):
        optimizer.zero_grad()
        module(torch.randn(5, 3)).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(w.message).partition(":")[0] for w in caught] == ["RLS does not train scales[0]"] * (step == 0)
