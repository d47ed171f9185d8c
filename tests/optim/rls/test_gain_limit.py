"""The bound on the gain of a step: training without settings stays stable, and the bound is what it is said to be."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_struct.optim import RLS, LowRankP
from tests.optim.rls.reference import recorded_rows
from tests.optim.rls.test_layers import (
    CONVOLUTIONS,
    LINEAR,
    RECURRENT,
    TRANSPOSED,
    as_convolution,
    in_the_order_of_a_convolution,
)
from tests.optim.rls.twins import descend, first_step, weights


def descent(module, loss_of, steps, **options):
    return descend(module, RLS(module, **options), loss_of, range(steps))


def step_of(module, batch, max_gain, lr=1.0):
    """The first one with h = 1, by small gradients, so that the weights change little."""
    loss = lambda changed: 1e-6 * changed(batch).square().sum()
    return first_step(copy.deepcopy(module), loss, max_gain=max_gain, ratio=1e-9, lr=lr)


# --- stability -------------------------------------------------------------------------------------------------------


def with_rare_large_entries(x):
    """As of pixels that are standardised one by one, and are nearly always dark."""
    rare = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.002
    return torch.where(rare, 40.0, (x - x.mean()) / x.std())


SCALES = {
    "standardised": lambda x: (x - x.mean()) / x.std(),
    "badly_scaled": lambda x: x * torch.where(torch.arange(x.shape[1]) % 3 == 0, 1e4, 1.0),
    "large": lambda x: 1e4 * x,
    "rare_large_entries": with_rare_large_entries,
}


def images(seed):
    """256 blurred patterns of 12 x 12 in [0, 1], and their classes."""
    generator = torch.Generator().manual_seed(seed)
    patterns = (torch.rand(10, 144, generator=generator) > 0.8).float()
    labels = torch.randint(10, (256,), generator=generator)
    return (patterns[labels] + 0.3 * torch.rand(256, 144, generator=generator)).clamp(max=1), labels


def losses(scale, **options):
    inputs, labels = images(0)
    inputs, targets = SCALES[scale](inputs), nn.functional.one_hot(labels, 10).float()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss_of(step):
        batch = slice(64 * (step % 4), 64 * (step % 4 + 1))
        return (module(inputs[batch]) - targets[batch]).square().sum() / 128

    return descent(module, loss_of, 25, **options)


@pytest.mark.parametrize("scale", SCALES)
def test_training_without_settings_never_loses_what_it_began_with(scale):
    values = losses(scale)
    assert max(values) <= 3 * values[0]  # NaN is not
    assert values[-1] < values[0]


def test_passes_of_which_no_rows_are_kept_any_more_count_in_the_bound_as_the_others():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = 3 * torch.randn(512, 4, generator=generator), torch.randn(512, 3, generator=generator)
    weights = []
    for passes in (1, 8):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        optimizer = RLS(layer)
        for _ in range(passes):
            ((layer(inputs) - targets).square().sum() / (1024 * passes)).backward()
        optimizer.step()
        weights.append(layer.weight.detach())
    torch.testing.assert_close(*weights)


def autoencoder():
    sizes = (144, 96, 48, 16, 48, 96, 144)
    layers = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())][:-1]
    return nn.Sequential(*layers), lambda module, step: squared(module, images(0)[0][64 * (step % 4) :][:64]) / 128


def squared(module, inputs):
    return (module(inputs) - inputs).square().sum()


def encoder():
    """The decoder, trained by Adam, enlarges each step of the encoder."""
    inputs = torch.randn(128, 20) @ torch.randn(20, 256) / 20**0.5
    module = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 256))
    return module, lambda module, step: squared(module, inputs) / 256


def uses():
    """A loss for each of eight uses of a layer."""
    target = torch.randn(20, 5)

    def loss(module, step):
        inputs = torch.randn(8, 32, 20, generator=torch.Generator().manual_seed(step))
        return sum((module(x) - x @ target).square().sum() / 64 for x in inputs)

    return nn.Linear(20, 5), loss


def positions(layer, *shape):
    """A loss that is summed over positions."""
    inputs = torch.randn(16, *shape)
    return layer, lambda module, step: squared(module, inputs) / 32


def regression():
    """A squared error without the half."""
    inputs = torch.randn(512, 10) @ torch.randn(10, 10)
    targets, batches = inputs @ torch.randn(10, 1) / 3, torch.randint(512, (100, 32))

    def loss(module, step):
        return nn.functional.mse_loss(module(inputs[batches[step]]), targets[batches[step]])

    return nn.Linear(10, 1), loss


WITH_ADAM = {"exclude": ["2"], "auxiliary": partial(torch.optim.Adam, lr=1e-3)}


@pytest.mark.parametrize(
    ("make", "options", "steps", "highest", "last"),
    [
        (autoencoder, {}, 60, 1.5, 0.2),
        (encoder, WITH_ADAM, 100, 1.1, 0.5),
        (uses, {}, 40, 1.5, 1e-4),
        (lambda: positions(nn.Linear(8, 8), 8, 8), {}, 60, 1.1, 0.1),
        (lambda: positions(nn.Conv2d(8, 8, 3, padding=1), 8, 8, 8), {}, 60, 1.1, 0.1),
        (regression, {}, 100, 1.5, 1e-2),
    ],
)
def test_training_without_settings_is_stable(make, options, steps, highest, last):
    torch.manual_seed(0)
    module, loss = make()
    values = descent(module, partial(loss, module), steps, **options)
    assert max(values) <= highest * values[0] and values[-1] < last * values[0]


def test_without_the_bound_standardised_inputs_end_in_nan():
    with pytest.raises(ValueError, match="NaN or infinity"):
        losses("standardised", max_gain=None)


# --- the bound itself ------------------------------------------------------------------------------------------------


def largest_eigenvalues(use):
    """Of (T/r) X Xᵀ, which is the gain while P = I, for each group."""
    steps = 1.0 if use.sequences is None else len(use.groups[0]) / use.sequences
    rows = [g if use.bias is None else torch.cat([g, torch.ones_like(g[:, :1])], 1) for g in use.groups]
    return [torch.linalg.eigvalsh(steps / len(g) * g @ g.t()).max().item() for g in rows]


@pytest.mark.parametrize("name", [
    "linear", "positions", "few_rows", "conv1d", "conv3d", "groups", "depthwise", "reflect", "circular_same",
    "channels_last",
])  # fmt: skip
def test_steps_are_scaled_by_the_largest_eigenvalue_of_the_gain(name):
    build, batches = next(c[1:] for c in LINEAR + CONVOLUTIONS if c[0] == name)
    torch.manual_seed(0)
    module, batch = build().double(), 3 * batches(0)
    with recorded_rows(module) as uses:
        module(batch)
    names = {parameter: n for n, parameter in module.named_parameters()}
    bounded, free = step_of(module, batch, 0.5), step_of(module, batch, None)
    for use in uses:
        step, plain = (steps[names[use.weight]].chunk(len(use.groups)) for steps in (bounded, free))
        for largest, s, p in zip(largest_eigenvalues(use), step, plain, strict=True):
            expected = min(1, max(0.5, 1 / len(uses)) / largest) * (3 if len(uses) > 1 else 1)
            # Power iteration estimates the eigenvalue from below.
            assert (1 - 1e-9) * expected <= (s.norm() / p.norm()).item() <= 1.1 * expected


@pytest.mark.parametrize(("layers", "factor"), [(1, 1), (2, 3), (4, 3)])
def test_steps_of_several_weights_are_three_times_those_that_the_equations_give(layers, factor):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).double()
    batch = torch.randn(9, 3, dtype=torch.float64)
    bounded, free = step_of(module, batch, 1e3), step_of(module, batch, None)  # so loose that it does nothing
    for name, step in bounded.items():
        torch.testing.assert_close(step, factor * free[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("lr", [0.1, 3.0])
def test_the_learning_rate_multiplies_what_the_bound_leaves(lr):
    torch.manual_seed(0)
    module, batch = nn.Linear(5, 3).double(), 10 * torch.randn(8, 5, dtype=torch.float64)
    bounded, scaled = step_of(module, batch, 1.0), step_of(module, batch, 1.0, lr)
    for name, step in bounded.items():
        torch.testing.assert_close(scaled[name], lr * step)


@pytest.mark.parametrize("name", ["LSTM_stacked", "GRU_packed", "RNN_bidirectional"])
def test_steps_of_recurrent_layers_are_scaled_too(name):
    torch.manual_seed(0)
    build, batches = next(c[1:] for c in RECURRENT if c[0] == name)
    module, batch = build().double(), 3 * batches(0)
    bounded, free = step_of(module, batch, 1e-3), step_of(module, batch, 1e3)
    assert all(step.norm() < 0.5 * free[n].norm() for n, step in bounded.items())


@pytest.mark.parametrize("name", ["2d", "groups"])
def test_steps_of_a_transposed_convolution_are_scaled_as_those_of_the_convolution(name):
    build, batches = next(c[1:] for c in TRANSPOSED if c[0] == name)
    torch.manual_seed(0)
    layer, batch = build().double(), 10 * batches(0)
    bounded = step_of(layer, batch, 0.1)["weight"]
    expected = step_of(as_convolution(layer), batch, 0.1)["weight"]
    # Power iteration begins in another direction.
    torch.testing.assert_close(in_the_order_of_a_convolution(layer, bounded), expected, rtol=0.1, atol=0)


def test_a_step_whose_gain_is_small_is_that_without_a_bound():
    torch.manual_seed(0)
    module, batch = nn.Linear(4, 3), 0.1 * torch.randn(9, 4)
    bounded, free = step_of(module, batch, 4.0), step_of(module, batch, None)
    assert torch.equal(bounded["weight"], free["weight"])


class Counter(TorchDispatchMode):
    """Counts what is computed."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


# --- the bound on the change -----------------------------------------------------------------------------------------


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()


def large_steps(module, steps=1, **options):
    """By how much of its norm each layer changes in the last of steps with huge gradients."""
    optimizer = RLS(module, **options)
    batch = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        before = [weights(layer) for layer in module.children()]
        optimizer.zero_grad()
        (1e6 * module(batch).square().sum()).backward()
        optimizer.step()
    after = [weights(layer) for layer in module.children()]
    return [((new - old).norm() / old.norm()).item() for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, {"form": LowRankP(rank=2)}, {"form": "rank1"}, {"forgetting": 0.9}, {"lr": 3.0}]
)
def test_weights_that_step_together_change_by_a_twentieth_of_their_norm_at_most(options):
    """The rate multiplies the bound, too."""
    assert large_steps(two_layers(), **options) == pytest.approx([0.05 * options.get("lr", 1.0)] * 2)


def test_a_bounded_change_has_the_direction_of_the_step():
    bounded, free = two_layers(), two_layers()
    before = [weights(layer) for layer in bounded.children()]
    large_steps(bounded)
    large_steps(free, max_gain=None)
    for old, small, large in zip(before, bounded.children(), free.children(), strict=True):
        cosine = nn.functional.cosine_similarity(weights(small) - old, weights(large) - old, dim=0)
        assert cosine.item() == pytest.approx(1)


def test_with_momentum_many_steps_in_one_direction_are_bounded_together():
    changes = large_steps(two_layers(), steps=8, momentum=0.5)
    assert max(changes) <= 0.05 / 0.95 and max(changes) > 0.03


def test_weights_that_begin_at_zero_may_change_as_those_that_torch_draws():
    module = two_layers()
    nn.init.zeros_(module[1].weight)
    nn.init.constant_(module[1].bias, 1e-3)
    before = weights(module[1])
    large_steps(module)
    assert (weights(module[1]) - before).norm().item() == pytest.approx(0.05)  # of sqrt(3 / 3), for three outputs


def test_a_weight_that_steps_alone_may_change_by_more():
    module = nn.Sequential(two_layers()[0])
    assert large_steps(module)[0] > 1


@pytest.mark.parametrize("eta", [0.25, 4.0])
def test_a_smaller_scale_is_a_part_of_the_bounded_step_and_a_larger_one_does_not_exceed_it(eta):
    module, batch = nn.Linear(20, 3).double(), torch.randn(9, 20, dtype=torch.float64)
    one, scaled = (
        first_step(copy.deepcopy(module), lambda changed: changed(batch).square().sum(), gradient_scale=scale)["weight"]
        for scale in (1.0, eta)
    )
    torch.testing.assert_close(scaled, min(eta, 1.0) * one, rtol=1e-9, atol=0)
