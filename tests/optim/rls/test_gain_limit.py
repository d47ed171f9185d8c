"""The bound on the gain of a step: training without settings stays stable, and the bound is what it is said to be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_struct.optim import RLS, LowRankP
from lightning_struct.optim.rls.gain_limit import Sample, joined_samples
from lightning_struct.optim.rls.patches import patch_sample
from tests.optim.rls.reference import Rows, convolution_rows, recorded_rows
from tests.optim.rls.test_layers import (
    ATTENTION,
    CONVOLUTIONS,
    LINEAR,
    RECURRENT,
    TRANSPOSED,
    Unrolled,
    as_convolution,
    in_the_order_of_a_convolution,
    inputs,
)

# --- stability -------------------------------------------------------------------------------------------------------


def with_rare_large_entries(x: Tensor) -> Tensor:
    """As of pixels that are standardised one by one, and are nearly always dark."""
    rare = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.002
    return torch.where(rare, 40.0, (x - x.mean()) / x.std())


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "standardised": lambda x: (x - x.mean()) / x.std(),
    "unit_interval": lambda x: x,
    "badly_scaled": lambda x: x * torch.where(torch.arange(x.shape[1]) % 3 == 0, 1e4, 1.0),
    "large": lambda x: 1e4 * x,
    "constant": lambda x: torch.full_like(x, 3.0),
    "rare_large_entries": with_rare_large_entries,
}


def images(seed: int) -> tuple[Tensor, Tensor]:
    """256 blurred patterns of 12 x 12 in [0, 1], and their classes."""
    generator = torch.Generator().manual_seed(seed)
    patterns = (torch.rand(10, 144, generator=generator) > 0.8).float()
    labels = torch.randint(10, (256,), generator=generator)
    return (patterns[labels] + 0.3 * torch.rand(256, 144, generator=generator)).clamp(max=1), labels


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 12, 12)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.unflatten(1, (12, 12)))[0][:, -1])

    return Last()


def descent(module: nn.Module, loss_of: Callable[[int], Tensor], steps: int, **options: Any) -> list[float]:
    """The losses before each of some steps."""
    optimizer, values = RLS(module, **options), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def losses(build: Callable[[], nn.Module], scale: str, seed: int, steps: int = 25, **options: Any) -> list[float]:
    inputs, labels = images(seed)
    inputs, targets = SCALES[scale](inputs), nn.functional.one_hot(labels, 10).float()
    torch.manual_seed(seed)
    module = build()

    def loss_of(step: int) -> Tensor:
        batch = slice(64 * (step % 4), 64 * (step % 4 + 1))
        return (module(inputs[batch]) - targets[batch]).square().sum() / 128

    return descent(module, loss_of, steps, **options)


@pytest.mark.parametrize(
    ("build", "scale"),
    [
        *((perceptron, scale) for scale in SCALES),
        *(
            pytest.param(build, scale, marks=pytest.mark.slow)
            for build in (convolutional, recurrent)
            for scale in ("standardised", "large", "rare_large_entries")
        ),
    ],
)
def test_training_without_settings_never_loses_what_it_began_with(build: Callable[[], nn.Module], scale: str) -> None:
    for seed in range(2 if build is perceptron else 1):
        values = losses(build, scale, seed)
        assert max(values) <= 3 * values[0]  # NaN is not
        assert values[-1] < values[0]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_autoencoder_without_settings_learns(momentum: float) -> None:
    inputs, _ = images(0)
    torch.manual_seed(0)
    layers = [layer for n, m in pairwise((144, 96, 48, 16, 48, 96, 144)) for layer in (nn.Linear(n, m), nn.ReLU())]
    module = nn.Sequential(*layers[:-1])

    def loss_of(step: int) -> Tensor:
        batch = inputs[64 * (step % 4) : 64 * (step % 4 + 1)]
        return (module(batch) - batch).square().sum() / 128

    values = descent(module, loss_of, 60, momentum=momentum)
    assert max(values) <= 1.5 * values[0]
    assert values[-1] < 0.2 * values[0]


def test_passes_of_which_no_rows_are_kept_any_more_count_in_the_bound_as_the_others() -> None:
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


@pytest.mark.parametrize("uses", [2, 8])
def test_a_layer_with_a_loss_for_each_of_its_uses_is_stable(uses: int) -> None:
    torch.manual_seed(0)
    layer, target = nn.Linear(20, 5), torch.randn(20, 5)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(uses, 32, 20, generator=torch.Generator().manual_seed(step))
        return torch.stack([(layer(x) - x @ target).square().sum() / 64 for x in inputs]).sum()

    values = descent(layer, loss_of, 40)
    assert max(values) <= 1.5 * values[0]
    assert values[-1] < 1e-4 * values[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_steps_alone_before_others_is_stable(frozen: bool) -> None:
    """The decoder, frozen or trained by Adam, enlarges each step of the encoder."""
    torch.manual_seed(0)
    inputs = torch.randn(128, 20) @ torch.randn(20, 256) / 20**0.5
    module = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 256))
    module[2].requires_grad_(not frozen)
    options = {} if frozen else {"exclude": [module[2]], "auxiliary": partial(torch.optim.Adam, lr=1e-3)}
    values = descent(module, lambda _: (module(inputs) - inputs).square().sum() / 256, 100, **options)
    assert max(values) <= 1.1 * values[0] and values[-1] < (0.9 if frozen else 0.5) * values[0]


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1)])
def test_a_single_layer_is_stable_with_a_loss_that_is_summed_over_positions(layer: Any) -> None:
    torch.manual_seed(0)
    layer.reset_parameters()
    inputs = torch.randn(16, *((8, 8, 8) if isinstance(layer, nn.Conv2d) else (8, 8)))
    values = descent(layer, lambda _: (layer(inputs) - inputs).square().sum() / (2 * len(inputs)), 60)
    assert max(values) <= 1.1 * values[0] and values[-1] < 0.1 * values[0]


def test_a_linear_regression_is_stable_with_a_squared_error_without_the_half() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(512, 10) @ torch.randn(10, 10)
    targets = inputs @ torch.randn(10, 1) / 3
    layer, batches = nn.Linear(10, 1), torch.randint(512, (100, 32))
    values = descent(
        layer, lambda step: nn.functional.mse_loss(layer(inputs[batches[step]]), targets[batches[step]]), 100
    )
    assert max(values) <= 1.5 * values[0] and values[-1] < 1e-2 * values[0]


def test_without_the_bound_standardised_inputs_end_in_nan() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        losses(
            lambda: nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10)), "standardised", 0, max_gain=None
        )


# --- the bound itself ------------------------------------------------------------------------------------------------


def largest_eigenvalues(use: Rows) -> list[float]:
    """Of (T/r) X Xᵀ, which is the gain while P = I, for each group."""
    steps = 1.0 if use.sequences is None else len(use.groups[0]) / use.sequences
    rows = [g if use.bias is None else torch.cat([g, torch.ones_like(g[:, :1])], 1) for g in use.groups]
    return [torch.linalg.eigvalsh(steps / len(g) * g @ g.t()).max().item() for g in rows]


def first_step(module: nn.Module, batch: Tensor, max_gain: float | None, lr: float = 1.0) -> dict[str, Tensor]:
    changed = copy.deepcopy(module)
    optimizer = RLS(changed, max_gain=max_gain, ratio=1e-9, lr=lr)  # h = 1
    (1e-6 * changed(batch).square().sum()).backward()  # small, so that the weights change little
    optimizer.step()
    return {
        name: (p - q).detach() for (name, p), q in zip(changed.named_parameters(), module.parameters(), strict=True)
    }


@pytest.mark.parametrize("name", [
    "linear", "positions", "few_rows", "conv1d", "conv3d", "groups", "depthwise", "reflect", "circular_same",
    "channels_last", "self_attention", "other_dimensions",
])  # fmt: skip
def test_steps_are_scaled_by_the_largest_eigenvalue_of_the_gain(name: str) -> None:
    build, batches = next(c[1:] for c in LINEAR + CONVOLUTIONS + ATTENTION if c[0] == name)
    torch.manual_seed(0)
    module, batch = build().double(), 3 * batches(0)
    with recorded_rows(module) as uses:
        module(batch)
    names = {parameter: n for n, parameter in module.named_parameters()}
    bounded, free = first_step(module, batch, 0.5), first_step(module, batch, None)
    for use in uses:
        step, plain = (steps[names[use.weight]].chunk(len(use.groups)) for steps in (bounded, free))
        for largest, s, p in zip(largest_eigenvalues(use), step, plain, strict=True):
            expected = min(1, max(0.5, 1 / len(uses)) / largest) * (3 if len(uses) > 1 else 1)
            # Power iteration estimates the eigenvalue from below.
            assert (1 - 1e-9) * expected <= (s.norm() / p.norm()).item() <= 1.1 * expected


@pytest.mark.parametrize(("layers", "factor"), [(1, 1), (2, 3), (4, 3)])
def test_steps_of_several_weights_are_three_times_those_that_the_equations_give(layers: int, factor: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).double()
    batch = torch.randn(9, 3, dtype=torch.float64)
    bounded, free = first_step(module, batch, 1e3), first_step(module, batch, None)  # so loose that it does nothing
    for name, step in bounded.items():
        torch.testing.assert_close(step, factor * free[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("lr", [0.1, 3.0])
def test_the_learning_rate_multiplies_what_the_bound_leaves(lr: float) -> None:
    torch.manual_seed(0)
    module, batch = nn.Linear(5, 3).double(), 10 * torch.randn(8, 5, dtype=torch.float64)
    bounded, scaled = first_step(module, batch, 1.0), first_step(module, batch, 1.0, lr)
    for name, step in bounded.items():
        torch.testing.assert_close(scaled[name], lr * step)


@pytest.mark.parametrize("name", ["LSTM_stacked", "GRU_packed", "RNN_bidirectional", "cell"])
def test_steps_of_recurrent_layers_and_cells_are_scaled_too(name: str) -> None:
    torch.manual_seed(0)
    build, batches = next((c[1:] for c in RECURRENT if c[0] == name), (partial(Unrolled, nn.LSTMCell), inputs(4, 5, 3)))
    module, batch = build().double(), 3 * batches(0)
    bounded, free = first_step(module, batch, 1e-3), first_step(module, batch, 1e3)
    assert all(step.norm() < 0.5 * free[n].norm() for n, step in bounded.items() if n != "first")


@pytest.mark.parametrize("name", ["2d", "groups"])
def test_steps_of_a_transposed_convolution_are_scaled_as_those_of_the_convolution(name: str) -> None:
    build, batches = next(c[1:] for c in TRANSPOSED if c[0] == name)
    torch.manual_seed(0)
    layer, batch = build().double(), 10 * batches(0)
    bounded = first_step(layer, batch, 0.1)["weight"]
    expected = first_step(as_convolution(layer), batch, 0.1)["weight"]
    # Power iteration begins in another direction.
    torch.testing.assert_close(in_the_order_of_a_convolution(layer, bounded), expected, rtol=0.1, atol=0)


@pytest.mark.parametrize(("build", "batches"), [c[1:] for c in CONVOLUTIONS], ids=[c[0] for c in CONVOLUTIONS])
def test_all_sampled_patches_are_those_that_a_convolution_reads(
    build: Callable[[], Any], batches: Callable[[int], Tensor]
) -> None:
    layer = build().double()
    expected = torch.stack(convolution_rows(layer, batches(0))[0].groups)
    positions = layer(batches(0)).shape[-len(layer.kernel_size) :]
    assert torch.equal(patch_sample(layer, batches(0), positions, expected.shape[1]), expected)


def test_a_sample_of_patches_is_spread_over_images_and_positions() -> None:
    layer = nn.Conv2d(1, 1, 1)
    images = torch.arange(64 * 32 * 32.0).view(64, 1, 32, 32)
    places = patch_sample(layer, images, (32, 32), 512).long().flatten()
    assert all(len(torch.unique(part)) == count for part, count in ((places, 512), (places // 1024, 64)))
    assert len(torch.unique(places % 32)) == len(torch.unique(places // 32 % 32)) == 32


def test_a_step_whose_gain_is_small_is_that_without_a_bound() -> None:
    torch.manual_seed(0)
    module, batch = nn.Linear(4, 3), 0.1 * torch.randn(9, 4)
    bounded, free = first_step(module, batch, 4.0), first_step(module, batch, None)
    assert torch.equal(bounded["weight"], free["weight"])


def test_joined_samples_stand_for_the_rows_of_all() -> None:
    samples = [Sample(torch.randn(2, s, 3, dtype=torch.float64), share) for s, share in ((4, 1.0), (2, 1.0), (5, 2.5))]
    joined = joined_samples(samples)
    expected = sum(share * rows.mT @ rows for rows, share in samples)
    torch.testing.assert_close(joined.share * joined.rows.mT @ joined.rows, expected)


class Counter(TorchDispatchMode):
    """Counts what is computed."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_a_step_does_not_grow_with_the_calls_of_a_layer() -> None:
    numbers = []
    for calls in (5, 50):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        optimizer = RLS(layer)
        torch.stack([layer(3 * torch.randn(2, 4)) for _ in range(calls)]).square().mean().backward()
        with Counter() as counter:
            optimizer.step()
        numbers.append(counter.number)
    assert numbers[0] == numbers[1]


# --- the bound on the change -----------------------------------------------------------------------------------------


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()


def large_steps(module: nn.Module, steps: int = 1, **options: Any) -> list[float]:
    """By how much of its norm each layer changes in the last of steps with huge gradients."""
    optimizer = RLS(module, **options)
    batch = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        before = [joined(layer) for layer in module.children()]
        optimizer.zero_grad()
        (1e6 * module(batch).square().sum()).backward()
        optimizer.step()
    after = [joined(layer) for layer in module.children()]
    return [((new - old).norm() / old.norm()).item() for old, new in zip(before, after, strict=True)]


def joined(layer: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


@pytest.mark.parametrize(
    "options", [{}, {"form": LowRankP(rank=2)}, {"form": "rank1"}, {"forgetting": 0.9}, {"lr": 3.0}]
)
def test_weights_that_step_together_change_by_a_twentieth_of_their_norm_at_most(options: dict[str, Any]) -> None:
    """The rate multiplies the bound, too."""
    assert large_steps(two_layers(), **options) == pytest.approx([0.05 * options.get("lr", 1.0)] * 2)


def test_a_bounded_change_has_the_direction_of_the_step() -> None:
    bounded, free = two_layers(), two_layers()
    before = [joined(layer) for layer in bounded.children()]
    large_steps(bounded)
    large_steps(free, max_gain=None)
    for old, small, large in zip(before, bounded.children(), free.children(), strict=True):
        cosine = nn.functional.cosine_similarity(joined(small) - old, joined(large) - old, dim=0)
        assert cosine.item() == pytest.approx(1)


def test_with_momentum_many_steps_in_one_direction_are_bounded_together() -> None:
    changes = large_steps(two_layers(), steps=8, momentum=0.5)
    assert max(changes) <= 0.05 / 0.95 and max(changes) > 0.03


def test_weights_that_begin_at_zero_may_change_as_those_that_torch_draws() -> None:
    module = two_layers()
    nn.init.zeros_(module[1].weight)
    nn.init.constant_(module[1].bias, 1e-3)
    before = joined(module[1])
    large_steps(module)
    assert (joined(module[1]) - before).norm().item() == pytest.approx(0.05)  # of sqrt(3 / 3), for three outputs


def test_a_weight_that_steps_alone_may_change_by_more() -> None:
    module = nn.Sequential(two_layers()[0])
    assert large_steps(module)[0] > 1


@pytest.mark.parametrize("eta", [0.25, 4.0])
def test_a_smaller_scale_is_a_part_of_the_bounded_step_and_a_larger_one_does_not_exceed_it(eta: float) -> None:
    torch.manual_seed(0)
    module, batch = nn.Linear(20, 3).double(), torch.randn(9, 20, dtype=torch.float64)
    steps = []
    for scale in (1.0, eta):
        changed = copy.deepcopy(module)
        optimizer = RLS(changed, gradient_scale=scale)
        changed(batch).square().sum().backward()
        optimizer.step()
        steps.append((changed.weight - module.weight).detach())
    torch.testing.assert_close(steps[1], min(eta, 1.0) * steps[0], rtol=1e-9, atol=0)
