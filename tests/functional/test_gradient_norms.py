from __future__ import annotations

import doctest
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_struct.functional import (
    gradient_variance,
    norm_test_batch_size,
    per_sample_gradient_norms,
    required_batch_size,
)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias)).double()


def loss_of(outputs: Tensor) -> Tensor:
    """A sum over samples of something that is not linear in the outputs."""
    return (outputs.sin() * outputs).sum()


def per_sample_gradients(module: nn.Module, inputs: Tensor) -> Tensor:
    """(n, parameters) by ordinary autograd, one sample at a time."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for x in inputs:
        gradients = torch.autograd.grad(loss_of(module(x[None])), parameters)
        rows.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(rows)


def measured(module: nn.Module, inputs: Tensor) -> Tensor:
    with per_sample_gradient_norms(module) as norms:
        loss_of(module(inputs)).backward()
    return norms.squared_norms


# 3 x 4 and 4 x 2 weights: the Gram matrices are the smaller way for up to 2 positions, the product for more than 3.
@pytest.mark.parametrize("leading", [(5,), (5, 1), (5, 2), (5, 3), (5, 7), (5, 2, 3), (1,), (1, 4)], ids=str)
def test_squared_norms_are_those_of_per_sample_autograd(leading: tuple[int, ...]) -> None:
    module, inputs = network(), gaussian(*leading, 3, seed=1)
    expected = per_sample_gradients(module, inputs).square().sum(1)
    torch.testing.assert_close(measured(module, inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("positions", [1, 2, 7])
@pytest.mark.parametrize(
    "frozen", [["0.weight"], ["0.bias"], ["2.weight"], ["2.bias"], ["0.weight", "0.bias"]], ids=str
)
def test_frozen_parameters_are_not_counted(frozen: list[str], positions: int) -> None:
    module, inputs = network(), gaussian(5, positions, 3, seed=1)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    expected = per_sample_gradients(module, inputs).square().sum(1)
    torch.testing.assert_close(measured(module, inputs), expected, rtol=1e-12, atol=1e-12)


def test_layers_may_have_no_bias() -> None:
    module, inputs = network(bias=False), gaussian(5, 3, seed=1)
    expected = per_sample_gradients(module, inputs).square().sum(1)
    torch.testing.assert_close(measured(module, inputs), expected, rtol=1e-12, atol=1e-12)


def test_the_share_in_a_mean_loss_is_scaled_by_its_weight() -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    with per_sample_gradient_norms(module) as norms:
        (loss_of(module(inputs)) / 5).backward()
    torch.testing.assert_close(25 * norms.squared_norms, measured(module, inputs), rtol=1e-12, atol=0)


def test_gradients_are_those_of_an_ordinary_backward_pass() -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    measured(module, inputs)
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss_of(module(inputs)).backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, module.parameters(), strict=True))


def test_a_forward_without_gradients_inside_the_context_is_not_counted() -> None:
    module, inputs = network(), gaussian(5, 3, seed=1)
    with per_sample_gradient_norms(module) as norms:
        loss = loss_of(module(inputs))
        with torch.no_grad():
            module(gaussian(9, 3, seed=2))
        loss.backward()
    torch.testing.assert_close(norms.squared_norms, measured(module, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("positions", [1, 2, 7])
def test_bfloat16_autocast_gives_float32_norms_near_the_float32_ones(positions: int) -> None:
    module, inputs = network().float(), gaussian(5, positions, 3, seed=1).float()
    expected = per_sample_gradients(module, inputs).square().sum(1)
    with per_sample_gradient_norms(module) as norms:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(module(inputs).float())
        loss.backward()
    assert norms.squared_norms.dtype == torch.float32
    torch.testing.assert_close(norms.squared_norms, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_module_afterwards(fails: bool) -> None:
    module = network()
    try:
        with per_sample_gradient_norms(module):
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert not any(layer._forward_hooks for layer in module.modules())


def test_reading_before_a_backward_pass_is_an_error() -> None:
    module = network()
    with per_sample_gradient_norms(module) as norms:
        module(gaussian(5, 3, seed=1))
    with pytest.raises(RuntimeError, match="backward pass"):
        _ = norms.squared_norms


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv1d(2, 2, 1), "1.weight of a Conv1d"),
        (nn.LayerNorm(3), "1.weight of a LayerNorm"),
        (nn.Embedding(3, 2), "1.weight of a Embedding"),
        (nn.LSTM(3, 2), "1.weight_ih_l0 of a LSTM"),
    ],
    ids=["conv", "layer_norm", "embedding", "lstm"],
)
def test_a_trainable_parameter_of_another_layer_is_named(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message), per_sample_gradient_norms(nn.Sequential(nn.Linear(3, 3), layer)):
        pass


def test_a_frozen_layer_of_another_kind_is_allowed() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    module[1].requires_grad_(False)
    inputs = gaussian(5, 3, seed=1)
    expected = per_sample_gradients(module, inputs).square().sum(1)
    torch.testing.assert_close(measured(module, inputs), expected, rtol=1e-12, atol=1e-12)


def test_tied_weights_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    with pytest.raises(ValueError, match="1.weight is tied to 0.weight"), per_sample_gradient_norms(module):
        pass


def test_a_layer_called_twice_is_refused_by_name() -> None:
    layer = nn.Linear(3, 3)
    module = nn.Sequential(layer, nn.Tanh(), layer)
    with per_sample_gradient_norms(module), pytest.raises(RuntimeError, match="0 is called twice"):
        module(torch.randn(5, 3))


def test_a_second_backward_pass_is_refused_since_its_samples_are_others() -> None:
    module = network()
    with per_sample_gradient_norms(module):
        loss_of(module(gaussian(5, 3, seed=1))).backward()
        second = loss_of(module(gaussian(5, 3, seed=2)))
        with pytest.raises(RuntimeError, match="second backward pass"):
            second.backward()


def test_layers_that_see_other_batches_are_refused() -> None:
    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).t())

    module = Transposing()
    with per_sample_gradient_norms(module), pytest.raises(ValueError, match="4 and 5.*must be the batch"):
        module(torch.randn(5, 3)).sum().backward()


# --- the variance, and the batch size read off it --------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 40])
def test_variance_is_the_sum_of_the_componentwise_sample_variances(n: int) -> None:
    module, inputs = network(), gaussian(n, 3, seed=1)
    gradients = per_sample_gradients(module, inputs)
    variance = gradient_variance(measured(module, inputs), gradients.mean(0).square().sum().item())
    assert variance == pytest.approx(gradients.var(0, correction=1).sum().item(), rel=1e-12)


def test_variance_of_equal_gradients_is_zero_and_not_negative_by_rounding() -> None:
    norms = torch.full((7,), 0.1, dtype=torch.float64)
    assert gradient_variance(norms, 0.1 * (1 + 1e-12)) == 0.0


def test_variance_of_one_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        gradient_variance(torch.ones(1), 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_that_are_not_finite_are_not_taken_for_a_small_variance(bad: float) -> None:
    with pytest.raises(ValueError, match=f"finite and >= 0, got {bad}"):
        norm_test_batch_size(torch.tensor([1.0, bad]), 1.0, dataset_size=100, theta=0.5)


sizes = st.integers(2, 100_000)
positive = st.floats(1e-6, 1e6)
thetas = st.floats(0.01, 2.0)


@given(positive, positive, sizes, thetas)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_size_passes_the_norm_test_and_one_less_does_not(
    variance: float, squared_norm: float, dataset_size: int, theta: float
) -> None:
    def error_over_bound(n: int) -> float:
        """The two sides of (14), with the squared norm, as a ratio."""
        return variance / n * (dataset_size - n) / (dataset_size - 1) / (theta**2 * squared_norm)

    n = required_batch_size(variance, squared_norm, dataset_size, theta)
    assert 1 <= n <= dataset_size
    assert error_over_bound(n) <= 1 + 1e-9
    assert n == 1 or error_over_bound(n - 1) > 1 - 1e-9


@given(positive, positive, thetas)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_size_for_a_stream_passes_the_test_and_one_less_does_not(
    variance: float, squared_norm: float, theta: float
) -> None:
    n = required_batch_size(variance, squared_norm, None, theta)
    bound = theta**2 * squared_norm
    assert variance / n <= bound * (1 + 1e-9)
    assert n == 1 or variance / (n - 1) > bound * (1 - 1e-9)


@given(positive, st.floats(1.0, 100.0), positive, st.one_of(st.none(), sizes), thetas)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_more_variance_never_asks_for_fewer_samples(
    variance: float, factor: float, squared_norm: float, dataset_size: int | None, theta: float
) -> None:
    smaller = required_batch_size(variance, squared_norm, dataset_size, theta)
    assert smaller <= required_batch_size(variance * factor, squared_norm, dataset_size, theta)


@given(positive, positive, st.floats(1.0, 100.0), st.one_of(st.none(), sizes), thetas)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_longer_gradient_never_asks_for_more_samples(
    variance: float, squared_norm: float, factor: float, dataset_size: int | None, theta: float
) -> None:
    larger = required_batch_size(variance, squared_norm, dataset_size, theta)
    assert larger >= required_batch_size(variance, squared_norm * factor, dataset_size, theta)


@given(positive, positive, sizes, thetas, st.integers(-20, 20))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_scale_of_the_loss_does_not_matter(
    variance: float, squared_norm: float, dataset_size: int, theta: float, exponent: int
) -> None:
    scale = 4.0**exponent
    scaled = required_batch_size(variance * scale, squared_norm * scale, dataset_size, theta)
    assert scaled == required_batch_size(variance, squared_norm, dataset_size, theta)


@pytest.mark.parametrize(
    ("variance", "squared_norm", "dataset_size", "expected"),
    [
        (0.0, 1.0, 100, 1),
        (0.0, 1.0, None, 1),
        (1.0, 0.0, 100, 100),
        (0.0, 0.0, 100, 100),
        (1.0, 1.0, 1, 1),
        (5.0, 1.0, None, 20),
    ],
)
def test_sizes_at_the_edges(variance: float, squared_norm: float, dataset_size: int | None, expected: int) -> None:
    assert required_batch_size(variance, squared_norm, dataset_size, theta=0.5) == expected


def test_a_zero_gradient_of_a_stream_has_no_size() -> None:
    with pytest.raises(ZeroDivisionError):
        required_batch_size(1.0, 0.0, None, theta=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1.0, 100, 0.0), "theta must be > 0, got 0.0"),
        ((1.0, 1.0, 100, math.nan), "theta must be > 0, got nan"),
        ((-1.0, 1.0, 100, 0.5), "variance .* got -1.0"),
        ((math.nan, 1.0, 100, 0.5), "variance .* got nan"),
        ((math.inf, 1.0, 100, 0.5), "variance .* got inf"),
        ((1.0, math.nan, 100, 0.5), "squared norm .* nan"),
        ((1.0, math.inf, 100, 0.5), "squared norm .* inf"),
        ((1.0, 1.0, 0, 0.5), "dataset_size must be >= 1, got 0"),
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_named(arguments: tuple[float, float, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        required_batch_size(*arguments)


def test_the_norm_test_reads_the_size_off_the_norms_of_one_batch() -> None:
    norms = torch.tensor([1.0, 2.0, 3.0])
    size = norm_test_batch_size(norms, torch.tensor(0.5), dataset_size=50, theta=0.5)
    variance = (6.0 - 3 * 0.5) / 2
    assert size == math.ceil(50 * variance / (variance + 49 * 0.25 * 0.5))


def test_the_example_of_the_docstring_runs() -> None:
    module = inspect.getmodule(per_sample_gradient_norms)
    tests = doctest.DocTestFinder().find(per_sample_gradient_norms, module=module)
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.attempted for result in results) == 3 and not any(result.failed for result in results)
