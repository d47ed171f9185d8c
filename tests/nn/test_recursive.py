"""RecursiveLinear: ridge regression over all rows, whatever the batches, processes, dtypes and interruptions."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_struct import RecursiveLinear
from lightning_struct.functional.checks import NotFinite
from tests.cases import gaussian
from tests.processes import in_two_processes

INPUTS, OUTPUTS, ROWS = 5, 3, 40


def data(dtype=torch.float64):
    return gaussian(ROWS, INPUTS).to(dtype) + 2, gaussian(ROWS, OUTPUTS, seed=1).to(dtype)


def layer(**options):
    return RecursiveLinear(INPUTS, OUTPUTS, **{"dtype": torch.float64, **options})


def ridge(x, y, weights, regularization=1.0, penalty=1.0, bias=True):
    """Weights and, in the last column, biases, by a dense decomposition."""
    if bias:
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    roots = torch.cat([weights.sqrt(), x.new_full((x.shape[1],), (penalty * regularization) ** 0.5)])[:, None]
    rows = torch.cat([x, torch.eye(x.shape[1], dtype=x.dtype)])
    return torch.linalg.lstsq(roots * rows, roots * torch.cat([y, y.new_zeros(x.shape[1], y.shape[1])])).solution.T


def joined(trained):
    return trained.weight if trained.bias is None else torch.cat([trained.weight, trained.bias[:, None]], 1)


@pytest.mark.parametrize("batch", [1, 7, ROWS])
@pytest.mark.parametrize(
    ("options", "forgetting"),
    [({}, 1.0), ({"forgetting": 0.9, "bias": False}, 0.9), ({"half_life": 10, "regularization": 1e-6}, 0.5**0.1)],
)
def test_forgetting_counts_rows_and_the_result_does_not_depend_on_batches(options, forgetting, batch):
    (x, y), trained = data(), layer(**options)
    for rows, targets in zip(x.split(batch), y.split(batch), strict=True):
        trained.update(rows, targets)
    ages = torch.arange(ROWS - 1, -1, -1, dtype=torch.float64)
    δ, bias = options.get("regularization", 1.0), options.get("bias", True)
    expected = ridge(x, y, forgetting**ages, δ, forgetting**ROWS, bias)
    torch.testing.assert_close(joined(trained), expected, rtol=0, atol=1e-12)


def test_weights_of_rows_count_as_repetitions():
    (x, y), weighted, repeated = data(), layer(), layer()
    numbers = torch.arange(ROWS) % 3
    weighted.update(x.view(4, 10, INPUTS), y.view(4, 10, OUTPUTS), weights=numbers.view(4, 10))
    repeated.update(x.repeat_interleave(numbers, 0), y.repeat_interleave(numbers, 0))
    torch.testing.assert_close(joined(weighted), joined(repeated), rtol=0, atol=1e-13)
    torch.testing.assert_close(weighted.predictive_variance(x), repeated.predictive_variance(x), rtol=1e-12, atol=0)


def test_labels_stand_for_one_hot_targets():
    (x, _), by_label, by_target = data(), layer(), layer()
    labels = torch.arange(ROWS) % OUTPUTS
    by_label.update(x, labels)
    by_target.update(x, nn.functional.one_hot(labels).double())
    assert torch.equal(joined(by_label), joined(by_target))


def test_added_outputs_are_as_if_they_had_been_zero_all_along():
    (x, y), grown, whole = data(), layer(forgetting=0.95), RecursiveLinear(INPUTS, 5, forgetting=0.95).double()
    padded = nn.functional.pad(y, (0, 2))
    grown.update(x, y)
    whole.update(x, padded)
    grown.add_outputs(2)
    for trained in (grown, whole):
        trained.update(x.flip(0), padded.roll(1, 1))
    assert grown.out_features == 5
    torch.testing.assert_close(joined(grown), joined(whole), rtol=0, atol=1e-13)
    torch.testing.assert_close(grown.noise_variance, whole.noise_variance, rtol=1e-12, atol=0)


def test_float32_features_are_learnt_in_float64():
    x, y = data(torch.float32)
    far, trained = x + 1000, RecursiveLinear(INPUTS, OUTPUTS, regularization=1e-3)
    for _ in range(50):
        trained.update(far, y)
    expected = ridge(far.double(), y.double(), torch.full((ROWS,), 50.0, dtype=torch.float64), 1e-3)
    assert trained.weight.dtype == torch.float32
    assert torch.equal(trained.weight, trained.get_extra_state()["weights"][:, :-1].float())
    torch.testing.assert_close(trained.get_extra_state()["weights"], expected, rtol=0, atol=1e-9)


def test_variance_of_predictions():
    (x, y), trained = data(), layer(regularization=0.3)
    assert torch.isinf(trained.noise_variance).all()
    trained.update(x, y)
    inputs = torch.cat([x, x.new_ones(ROWS, 1)], 1)
    A = inputs.T @ inputs + 0.3 * torch.eye(INPUTS + 1, dtype=torch.float64)
    noise = ((trained(x) - y).square().sum(0) + 0.3 * joined(trained).square().sum(1)) / ROWS
    expected = (inputs @ torch.linalg.inv(A) * inputs).sum(1)[:, None] * noise
    found = trained.predictive_variance(x.view(2, 20, INPUTS))
    torch.testing.assert_close(found.view(ROWS, OUTPUTS), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("way", ["state_dict", "grown state_dict", "pickle", "copy"])
def test_a_stream_goes_on_bit_for_bit(way):
    (x, y), whole = data(), layer(forgetting=0.97)
    if way == "grown state_dict":
        whole.add_outputs(1)
        y = nn.functional.pad(y, (0, 1))
    for row, target in zip(x[:20].split(1), y[:20].split(1), strict=True):
        whole.update(row, target)
    if "state_dict" in way:
        resumed = layer(forgetting=0.97)
        resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    else:
        resumed = copy.deepcopy(whole) if way == "copy" else pickle.loads(pickle.dumps(whole))
    for trained in (whole, resumed):
        for row, target in zip(x[20:].split(1), y[20:].split(1), strict=True):
            trained.update(row, target)
    assert torch.equal(joined(whole), joined(resumed))
    assert torch.equal(whole.get_extra_state()["factor"], resumed.get_extra_state()["factor"])


def test_conversions_leave_the_state_alone():
    (x, y), trained = data(), layer()
    trained.update(x, y)
    before = copy.deepcopy(trained.get_extra_state())
    nn.Sequential(trained).float().double()
    assert torch.equal(trained.get_extra_state()["factor"], before["factor"])
    trained.update(x[:1], y[:1])
    torch.testing.assert_close(joined(trained), trained.get_extra_state()["weights"], rtol=0, atol=0)


def test_gradients_pass_to_features_and_not_to_the_layer():
    (x, y), trained = data(), layer()
    x.requires_grad_(True)
    trained.update(x, y)
    trained(x).sum().backward()
    assert x.grad is not None
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in trained.parameters())


NAN = torch.full((1, INPUTS), float("nan"), dtype=torch.float64)
REFUSED = [
    ((torch.ones(2, 4), torch.ones(2, 3)), ValueError, r"x must be \(..., 5\), got \(2, 4\)"),
    ((torch.ones(2, 5), torch.ones(2, 2)), ValueError, r"y must be targets \(2, 3\) or integer labels \(2,\), got"),
    ((torch.ones(2, 5), torch.ones(3, 3)), ValueError, r"y must be targets \(2, 3\)"),
    ((torch.ones(2, 5), torch.tensor([0, 3])), ValueError, r"labels must be in 0 ... 2, got 0 ... 3. add_outputs"),
    ((torch.ones(2, 5), torch.tensor([0, -1])), ValueError, "labels must be in 0 ... 2, got -1 ... 0"),
    ((torch.ones(2, 5).half(), torch.ones(2, 3)), ValueError, "float32 or float64, and x is torch.float16: convert"),
    ((torch.ones(2, 5), torch.ones(2, 3).bfloat16()), ValueError, "and y is torch.bfloat16"),
    ((torch.ones(2, 5), torch.ones(2, 3), -torch.ones(2)), ValueError, r"weights must be finite numbers >= 0, \(2,\)"),
    ((torch.ones(2, 5), torch.ones(2, 3), torch.ones(3)), ValueError, r"weights must be .* \(2,\), got \(3,\)"),
    ((NAN, torch.ones(1, 3)), NotFinite, "nothing was learnt from these rows. Leave them out"),
    ((NAN.expand(4, 5), torch.ones(4, 3)), NotFinite, "NaN, infinity"),
    ((torch.ones(1, 5), torch.full((1, 3), float("inf"))), NotFinite, "NaN, infinity"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_refused_rows_change_nothing(arguments, error, message):
    (x, y), trained = data(), layer(forgetting=0.9)
    trained.update(x, y)
    before = copy.deepcopy(trained.state_dict())
    with pytest.raises(error, match=message):
        trained.update(*arguments)
    after = trained.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in ("weight", "bias"))
    assert torch.equal(after["_extra_state"]["factor"], before["_extra_state"]["factor"])
    assert after["_extra_state"]["samples"] == before["_extra_state"]["samples"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer(forgetting=0.0), r"forgetting must be in \(0, 1\], got 0.0"),
        (lambda: layer(forgetting=1.01), r"forgetting must be in \(0, 1\], got 1.01"),
        (lambda: layer(half_life=0), "half_life must be a number of rows > 0, got 0"),
        (lambda: layer(half_life=3, forgetting=0.9), "give forgetting or half_life, not both: got 0.9 and 3"),
        (lambda: layer(regularization=0), "regularization must be a finite number > 0, got 0"),
        (lambda: layer(dtype=torch.float16), "float32 or float64, and dtype is torch.float16"),
        (lambda: layer().add_outputs(0), "add_outputs takes an integer >= 1, got 0"),
        (lambda: layer().set_extra_state(RecursiveLinear(3, 3).get_extra_state()), "state is of 4 inputs.*has 6"),
        (lambda: layer().predictive_variance(torch.ones(3)), r"x must be \(..., 5\), got \(3,\)"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def learn_a_share(rank):
    """Weights after rows of which the first process has none, then three, then four in each update."""
    (x, y), trained = data(), layer(forgetting=0.9)
    weights = 1 + torch.arange(ROWS) % 2
    for place in range(0, ROWS, 8):
        cut = place + {0: 0, 8: 3}.get(place, 4)
        rows = slice(place, place + 8) if rank is None else (slice(place, cut), slice(cut, place + 8))[rank]
        trained.update(x[rows], y[rows], weights=weights[rows])
    return [joined(trained), trained.noise_variance]


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    first, second = in_two_processes(learn_a_share, tmp_path)
    for mine, other, expected in zip(first, second, learn_a_share(None), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
