"""SHF by two arguments: what it chooses, and how it measures itself by the next batch."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.functional.jacobian.losses import SquaredError
from lightning_struct.functional.solvers.damping import ScaledDamping, next_batch_rule
from lightning_struct.optim import memory
from lightning_struct.optim.shf import SHF
from tests.cases import First, SelfAttention, gaussian
from tests.optim.shf.test_shf import Borrowing, batch, network, take, weights, without_seconds


def classification(n: int, seed: int = 0, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Samples whose class is the largest of four linear scores, but for a share of random labels."""
    inputs = gaussian(n, 20, seed=seed)
    labels = (inputs @ gaussian(20, 4, seed=99)).argmax(1)
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(4, (n,), generator=generator)
    return inputs.float(), torch.where(torch.rand(n, generator=generator) < noise, random, labels)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def attention() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (5, 4)), SelfAttention(), nn.LayerNorm(4), nn.Flatten(), nn.Linear(20, 4))


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (5, 4)), First(nn.GRU(4, 4, batch_first=True)), nn.Flatten(), nn.Linear(20, 4))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))


# Two arguments


@pytest.mark.parametrize("build", [dense, normalised, attention, recurrent])
def test_two_arguments_train_a_classifier(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    optimizer = SHF(build(), "cross_entropy")
    reports = [take(optimizer, classification(128, seed=i)) for i in range(15)]
    assert reports[-1].loss_before < 0.8 * reports[0].loss_before


def test_two_arguments_train_a_regression() -> None:
    optimizer = SHF(network(), SquaredError())
    reports = [take(optimizer, batch(64, seed=i)) for i in range(30)]
    assert reports[-1].loss_before < 0.2 * reports[0].loss_before


def test_the_first_damping_is_one_and_a_half_times_the_largest_singular_value() -> None:
    """For a linear network without bias the Gauss-Newton matrix is the second moment of the inputs."""
    inputs, targets = batch(40)
    optimizer = SHF(nn.Linear(4, 2, bias=False).double(), "mse")
    report = take(optimizer, (inputs, targets))
    largest = torch.linalg.matrix_norm(inputs, 2).item() / len(inputs) ** 0.5
    assert report.damping == optimizer.settings.damping.initial == pytest.approx(1.5 * largest, rel=0.02)


def test_the_log_says_once_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = SHF(network(), "mse")
    with caplog.at_level(logging.INFO, logger="lightning_struct"):
        for seed in range(3):
            take(optimizer, batch(seed=seed))
    (message,) = [record.getMessage() for record in caplog.records]
    damping = f"damping={optimizer.settings.damping.initial:.3g}"
    assert all(word in message for word in ("'cg'", "'kronecker' (every step)", "'layer_rules'", damping))


@pytest.mark.parametrize(("inputs", "interval"), [(10, 1), (1000, 10)])
def test_large_factors_are_updated_once_in_ten_steps_at_the_least(inputs: int, interval: int) -> None:
    settings: Any = SHF(nn.Linear(inputs, 1), "mse").settings
    assert settings.preconditioner.interval == interval


def test_a_damping_set_before_the_first_step_is_that_of_the_first_step() -> None:
    optimizer = SHF(network(), "mse")
    optimizer.damping = 3.0
    assert take(optimizer, batch()).damping == optimizer.settings.damping.initial == 3.0


def test_a_resumed_run_keeps_the_size_of_the_factors_that_found_room(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, data = nn.Linear(40, 4), (gaussian(8, 40, seed=0).float(), torch.zeros(8, 4))
    with monkeypatch.context() as short:
        short.setattr(memory, "available_memory", lambda _: 4_000)
        optimizer = SHF(module, "mse")
    take(optimizer, data)
    resumed = SHF(copy.deepcopy(module), "mse")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert without_seconds(take(resumed, data)) == without_seconds(take(optimizer, data))


# The next batch


def accuracies(optimizer: SHF, module: nn.Module, steps: int) -> list[float]:
    inputs, labels = classification(1000, seed=1000)
    found = []
    for step in range(steps):
        take(optimizer, classification(64, seed=step, noise=0.3))
        with torch.no_grad():
            found.append((module(inputs).argmax(1) == labels).float().mean().item())
    return found


def fall(values: list[float]) -> float:
    best, most = 0.0, 0.0
    for value in values:
        best = max(best, value)
        most = max(most, best - value)
    return most


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))


def test_small_noisy_batches_are_not_overfitted() -> None:
    module = wide()
    found = accuracies(SHF(module, "cross_entropy"), module, 60)
    assert max(found) > 0.85
    assert fall(found[20:]) < 0.05


def test_sparse_inputs_with_much_noise_do_not_freeze_the_weights() -> None:
    """A batch shows little more of them than noise: steps become short, and the damping rises not much above λ₁."""
    torch.manual_seed(0)
    categories, scores = torch.randint(0, 100, (6000, 5)), torch.randn(5, 100)
    labels = (sum(scores[j][categories[:, j]] for j in range(5)) > 0).long()
    inputs = nn.functional.one_hot(categories, 100).float().flatten(1)
    module = nn.Sequential(nn.Linear(500, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer, dampings = SHF(module, "cross_entropy"), []
    for rows in (torch.randperm(6000)[:5000].split(100) * 2)[:55]:
        take(optimizer, (inputs[rows], labels[rows]))
        dampings.append(optimizer.damping)
    assert max(dampings) < 2 * optimizer.settings.damping.initial  # type: ignore[operator]
    assert (module(inputs).argmax(1) == labels).float().mean() > 0.75


@pytest.mark.slow
def test_a_deep_plain_network_leaves_the_mean_of_the_targets() -> None:
    """There is next to no signal there: steps get short, and fit so little of their batches that the damping falls."""
    torch.manual_seed(2)
    inputs = torch.randn(640, 4)
    targets = torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], 1)
    targets = (targets - targets.mean(0)) / targets.std(0)
    hidden = [layer for _ in range(7) for layer in (nn.Linear(16, 16), nn.ReLU())]
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), *hidden, nn.Linear(16, 2))
    optimizer = SHF(module, "mse")
    for _ in range(13):
        for rows in torch.randperm(640).split(64):
            take(optimizer, (inputs[rows], targets[rows]))
    assert SquaredError().value(module(inputs), targets).item() < 0.2


def test_the_ratio_of_the_next_batch_is_that_of_averaged_gains() -> None:
    module = network()
    optimizer, loss = SHF(module, "mse"), SquaredError()
    before, own_gain, average, own_average = module, 0.0, 0.0, 0.0
    ratios, expected = [], []
    for i in range(8):
        inputs, targets = batch(10, seed=i)
        gain = (loss.value(before(inputs), targets) - loss.value(module(inputs), targets)).item()
        average, own_average = 0.8 * average + 0.2 * gain, 0.8 * own_average + 0.2 * own_gain
        before = copy.deepcopy(module)
        report = take(optimizer, (inputs, targets))
        own_gain = report.loss_before - report.loss_after
        ratios.append(report.next_batch_ratio)
        expected.append(min(max(average / own_average, -1.0), 1.0) if i else None)
    assert ratios == [None, *map(pytest.approx, expected[1:])] and 0 < expected[-1] < 1


def noise(seed: int) -> tuple[Tensor, Tensor]:
    """A batch without anything to learn: steps get short."""
    return batch(10, seed=seed)[0], batch(10, seed=1000 + seed)[1]


class Raised(SquaredError):
    """The squared error with a number added, as the entropy of the targets is to a cross-entropy."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().value(outputs, targets) + 1e3


@pytest.mark.parametrize(("loss", "added"), [("mse", 0.0), (Raised(), 1e3)], ids=["least 0", "least 1000"])
def test_the_damping_of_shortened_steps_goes_by_averages_of_what_they_fit(loss: Any, added: float) -> None:
    optimizer = SHF(network(), loss)
    fit, largest, last, shortened = 0.0, 0.0, None, 0
    for i in range(20):
        report = take(optimizer, noise(i))
        if last is not None:
            fit = 0.8 * fit + 0.2 * (last.loss_before - last.loss_after) / last.step_scale
            largest = 0.8 * largest + 0.2 * (last.loss_before - added)
            now = ScaledDamping(last.step_scale, last.damping)
            expected = next_batch_rule(now, report.next_batch_ratio, fit / largest, drop=0.85)
            assert report.step_scale == pytest.approx(expected.scale)
            assert report.damping == pytest.approx(expected.damping)
            shortened += last.step_scale < 1.0 and report.damping != last.damping
        last = report
    assert shortened > 10


@pytest.mark.parametrize("layers", [[], [nn.BatchNorm1d(4)]], ids=["plain", "batch normalisation"])
def test_a_step_that_harms_the_next_batch_is_taken_back(layers: list[nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*layers, nn.Linear(4, 2)).double()
    optimizer, loss = SHF(module, "mse"), SquaredError()
    inputs, targets = batch(20)
    at_start = loss.value(module(inputs), -5 * targets).item()
    take(optimizer, (inputs, 5 * targets))
    report = take(optimizer, (inputs, -5 * targets))
    assert report.loss_before == pytest.approx(at_start, rel=1e-12)
    assert report.step_scale < 0.5
    assert all(layer.num_batches_tracked == 3 for layer in layers)  # once by each step, and once above
    assert report.loss_after == pytest.approx(loss.value(module(inputs), -5 * targets).item(), rel=1e-12)


def test_a_small_rise_of_a_large_loss_is_no_harm() -> None:
    module, ones = nn.Linear(1, 1, bias=False).double(), torch.ones(20, 1, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    optimizer = SHF(module, "mse")
    take(optimizer, (ones, ones))
    before = SquaredError().value(module(3 * ones), -100 * ones).item()
    assert take(optimizer, (3 * ones, -100 * ones)).loss_before == pytest.approx(before, rel=1e-12) != 5000


def test_full_batches_are_fitted_by_full_steps() -> None:
    optimizer = SHF(network(), "mse")
    reports = [take(optimizer, batch(40)) for _ in range(20)]
    assert {report.step_scale for report in reports} == {1.0}
    assert reports[-1].damping < 0.2 * reports[0].damping


class Skipping(nn.Module):
    """A network that is no chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Anchored(Skipping):
    """Calls its layer without a graph, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            anchor = self.layer(-x)
        return super().forward(x) * anchor


@pytest.mark.parametrize(
    ("build", "exact", "parts"),
    [(Borrowing, True, (5, 6)), (Skipping, False, (5, 6)), (Skipping, True, (1,) * 11), (Anchored, True, (1,) * 11)],
)
def test_the_variance_is_that_of_single_samples_or_of_the_two_halves_that_layers_do_not_show_or_are_not_asked_for(
    build: type[nn.Module], exact: bool, parts: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module, (inputs, _) = build().double(), batch(11)
    targets, gradients = torch.zeros(11, 4, dtype=torch.float64), []
    for x, y in zip(inputs.split(parts), targets.split(parts), strict=True):
        loss = SquaredError().value(module(x), y)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]))
    expected = torch.stack(gradients).var(0).sum().item()
    if len(parts) == 2:
        expected *= 2 / (1 / parts[0] + 1 / parts[1])
    optimizer = SHF(module, "mse")
    optimizer.exact_variance = exact
    assert take(optimizer, (inputs, targets)).gradient_variance == pytest.approx(expected, rel=1e-9)


# Boundaries


class InPlace(nn.Module):
    """Scales its input in place before the layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x /= 2.0
        return self.layer(x)


@pytest.mark.parametrize("options", [{}, {"damping": 1.0}, {"damping": 1.0, "chunk_size": 4}], ids=str)
def test_a_forward_that_changes_its_input_in_place_is_refused(options: dict[str, Any]) -> None:
    module = InPlace().double()
    before = weights(module).clone()
    with pytest.raises(ValueError, match=r"changes its inputs in place.*x\.clone\(\)"):
        take(SHF(module, "mse", **options), batch())
    assert torch.equal(weights(module), before)
