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


def ridge(x, y, weights=None, regularization=1.0, forgetting=1.0, bias=True):
    """Weights and, in the last column, biases: by normal equations, as the guide's page defines them."""
    x = torch.cat([x, x.new_ones(len(x), 1)], 1) if bias else x
    weights = x.new_ones(len(x)) if weights is None else weights
    unit = torch.eye(x.shape[1], dtype=x.dtype)
    A, b = regularization * unit, x.new_zeros(x.shape[1], y.shape[1])
    period = round(1 / (1 - forgetting)) if forgetting < 1 else len(x)
    for s, (row, target, weight) in enumerate(zip(x, y, weights, strict=True)):
        if s and s % period == 0:
            renewed = (1 - forgetting**period) * regularization
            A, b = A + renewed * unit, b + renewed * torch.linalg.solve(A, b)
        A, b = (forgetting * old + weight * torch.outer(row, new) for old, new in ((A, row), (b, target)))
    return torch.linalg.solve(A, b).T


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
    expected = ridge(x, y, None, options.get("regularization", 1.0), forgetting, options.get("bias", True))
    torch.testing.assert_close(joined(trained), expected, rtol=0, atol=1e-12)


def test_rows_of_weights_and_of_none_count_as_rows_where_old_ones_fade():
    (x, y), trained, weights = data(), layer(forgetting=0.9), torch.arange(ROWS).double() % 3
    trained.update(x, y, weights)
    torch.testing.assert_close(joined(trained), ridge(x, y, weights, 1.0, 0.9), rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("forgetting", [0.9, 1.0])
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 2), (3, 0), (1, 1)])
def test_added_features_are_as_if_they_had_been_zero_all_along(inputs, outputs, forgetting):
    (x, y), options = data(), {"forgetting": forgetting, "regularization": 0.5, "dtype": torch.float64}
    grown, whole = layer(**options), RecursiveLinear(INPUTS + inputs, OUTPUTS + outputs, **options)
    wider, longer = nn.functional.pad(x, (0, inputs)), nn.functional.pad(y, (0, outputs))
    grown.update(x[:25], y[:25])
    whole.update(wider[:25], longer[:25])
    if inputs:
        grown.add_inputs(inputs)
    if outputs:
        grown.add_outputs(outputs)
    resumed = layer(**options)
    resumed.load_state_dict(copy.deepcopy(grown.state_dict()))
    assert (resumed.in_features, resumed.out_features) == (INPUTS + inputs, OUTPUTS + outputs)
    for trained in (grown, resumed, whole):
        trained.update(wider.roll(1, 1), longer.roll(1, 1))
    assert torch.equal(joined(grown), joined(resumed))
    torch.testing.assert_close(joined(grown), joined(whole), rtol=0, atol=1e-13)
    torch.testing.assert_close(grown.noise_variance, whole.noise_variance, rtol=1e-12, atol=0)
    variances = (trained.predictive_variance(wider.roll(1, 1)) for trained in (grown, whole))
    torch.testing.assert_close(*variances, rtol=1e-11, atol=0)


def noisy(rows):
    """Rows of a linear relation with so much noise that a regularization pays, and a layer that has learnt them."""
    x, trained = gaussian(rows, INPUTS), layer(regularization=1e-3)
    y = 0.2 * x @ gaussian(INPUTS, OUTPUTS, seed=1) + gaussian(rows, OUTPUTS, seed=2)
    for part, targets in zip(x.split(7), y.split(7), strict=True):
        trained.update(part, targets)
    return x, y, trained


@pytest.mark.parametrize("rows", [4, ROWS])
def test_the_chosen_regularization_has_the_least_generalized_cross_validation(rows):
    x, y, trained = noisy(rows)
    inputs, errors = torch.cat([x, x.new_ones(rows, 1)], 1), {}
    unit = torch.eye(INPUTS + 1, dtype=torch.float64)
    for value in (1e-3 * 10 ** (k / 2) for k in range(14)):
        H = inputs @ torch.linalg.solve(inputs.T @ inputs + value * unit, inputs.T)
        errors[value] = (y - H @ y).square().sum() / (rows - H.trace()) ** 2
    assert trained.choose_regularization() == pytest.approx(min(errors, key=errors.get), rel=1e-12)


def test_a_layer_is_as_if_its_chosen_regularization_had_been_that_all_along():
    x, y, trained = noisy(ROWS)
    whole = layer(regularization=trained.choose_regularization())
    whole.update(x, y)
    for _ in range(2):
        torch.testing.assert_close(joined(trained), joined(whole), rtol=0, atol=1e-13)
        torch.testing.assert_close(trained.noise_variance, whole.noise_variance, rtol=1e-12, atol=0)
        for each in (trained, whole):
            each.update(x[:1] + 1, y[:1])


def test_a_chosen_regularization_is_part_of_the_state():
    x, y, trained = noisy(ROWS)
    trained.choose_regularization()
    resumed = layer(regularization=1e-3)
    resumed.load_state_dict(copy.deepcopy(trained.state_dict()))
    assert resumed.regularization == trained.regularization
    for each in (trained, resumed):
        each.add_inputs(1)
        each.update(nn.functional.pad(x, (1, 0)), y)
    assert torch.equal(joined(trained), joined(resumed))
    resumed.reset_parameters()
    assert resumed.regularization == 1e-3


def test_float32_features_are_learnt_in_float64():
    x, y = data(torch.float32)
    far, trained = x + 100, RecursiveLinear(INPUTS, OUTPUTS, regularization=1e-3)
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


@pytest.mark.parametrize("forgetting", [0.9, 1.0])
def test_a_state_of_an_older_version_is_gone_on_from(forgetting):
    (x, y), older, trained = data(), layer(regularization=1e-3), layer(forgetting=forgetting)
    older.update(x, y)
    state = copy.deepcopy(older.state_dict())
    state["_extra_state"] = {name: state["_extra_state"][name] for name in ("weights", "factor", "samples")}
    trained.load_state_dict(state)
    assert torch.equal(joined(trained), joined(older))
    trained.update(x[:1], trained(x[:1]))
    torch.testing.assert_close(joined(trained), joined(older), rtol=0, atol=1e-12)
    trained.update(x, x @ torch.ones(INPUTS, OUTPUTS).double())
    assert (trained(x) - x.sum(1, keepdim=True)).abs().max() < (older(x) - x.sum(1, keepdim=True)).abs().max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forgetting": 0.9}, "of a layer with forgetting=1.0, and this one has 0.9: make it with forgetting=1.0"),
        ({"regularization": 0.1}, "with regularization=1.0, and this one has 0.1"),
    ],
)
def test_a_state_of_another_problem_is_refused(options, message):
    (x, y), older, trained = data(), layer(), layer(**options)
    older.update(x, y)
    with pytest.raises(ValueError, match=message):
        trained.load_state_dict(older.state_dict())
    assert not joined(trained).any()
    assert all(f"{name}={value:g}" in repr(trained) for name, value in options.items())


@pytest.mark.parametrize("convert", [lambda t: t.numpy(), lambda t: t.tolist(), lambda t: t[:, None].numpy()[:, 0]])
def test_arrays_and_lists_are_tensors(convert):
    (x, y), trained, expected = data(), layer(), layer()
    expected.update(x, y)
    expected.update(x.round(), torch.arange(ROWS) % OUTPUTS, torch.arange(ROWS))
    trained.update(convert(x), convert(y))
    trained.update(convert(x.round().int()), convert(torch.arange(ROWS) % OUTPUTS), convert(torch.arange(ROWS)))
    assert torch.equal(joined(trained), joined(expected))
    assert torch.equal(trained.predictive_variance(convert(x)), trained.predictive_variance(x))


@pytest.mark.parametrize("outputs", [1, OUTPUTS])
def test_rows_alone_may_have_targets_of_any_form(outputs):
    (x, y), options = data(), {"forgetting": 0.9, "dtype": torch.float64}
    labels = torch.arange(ROWS) % OUTPUTS
    expected, trained = (RecursiveLinear(INPUTS, outputs, **options) for _ in range(2))
    for row, target, label in zip(x.split(1), y.split(1), labels.split(1), strict=True):
        expected.update(row, target[:, :1] if outputs == 1 else nn.functional.one_hot(label, OUTPUTS).double())
        trained.update(row, target[:, 0] if outputs == 1 else label)
    assert torch.equal(joined(trained), joined(expected))


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


def one_output():
    return RecursiveLinear(2, 1)


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
    (([[1.0] * 5, [1.0]], torch.ones(2, 3)), TypeError, "x must be a tensor, an array or nested lists of real numbers"),
    ((torch.ones(1, 5), [["a", "b", "c"]]), TypeError, r"y must be a tensor, .* got \[\['a'"),
    ((torch.ones(1, 5), None), TypeError, "y must be a tensor, .* got None"),
    ((torch.ones(1, 5).bool(), torch.ones(1, 3)), ValueError, "and x is torch.bool"),
    ((torch.ones(1, 5), torch.ones(1, 3).bool().numpy()), ValueError, "and y is torch.bool"),
    ((torch.ones(1, 5), torch.ones(1, 3) * 1j), ValueError, "and y is torch.complex64"),
    (((torch.ones(1, 5) * 1j).numpy(), torch.ones(1, 3)), ValueError, "and x is torch.complex64"),
    ((torch.ones(1, 5), torch.ones(1, 3), torch.ones(1) * 1j), ValueError, "weights must be finite numbers >= 0"),
    ((torch.ones(1, 5), torch.ones(1, 3), [float("nan")]), ValueError, "weights must be finite numbers >= 0"),
    ((torch.ones(1, 5).to_sparse(), torch.ones(1, 3)), TypeError, "x must be a dense tensor that holds numbers, got a"),
    ((torch.ones(1, 5, device="meta"), torch.ones(1, 3)), TypeError, "x must be .* on meta"),
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
        (lambda: layer(bias="no"), "bias must be a bool, got 'no'"),
        (lambda: layer(bias=1), "bias must be a bool, got 1"),
        (lambda: RecursiveLinear(0, 1), "in_features takes an integer in 1 ... 1048576, got 0"),
        (lambda: RecursiveLinear(2.5, 1), "in_features must be a whole number, got 2.5"),
        (lambda: RecursiveLinear(10**12, 1), "in_features takes .* got 1000000000000"),
        (lambda: RecursiveLinear(1, -1), "out_features takes .* got -1"),
        (lambda: RecursiveLinear(1, None), "out_features must be a whole number, got None"),
        (lambda: RecursiveLinear(1, True), "out_features must be a whole number, got True"),
        (lambda: layer().add_outputs(0), "add_outputs takes an integer in 1 ... 1048576, got 0"),
        (lambda: layer().add_inputs(1.5), "add_inputs takes an integer in 1 ... 1048576, got 1.5"),
        (
            lambda: one_output().update(torch.ones(1, 2), torch.tensor([0])),
            "torch.int64, and the layer one output: conv",
        ),
        (lambda: one_output().update(torch.nested.nested_tensor([torch.ones(2)]), [[1.0]]), "x must .*, got a nested"),
        (lambda: one_output().update([[1, 2]], [[0]]), "by .float.*labels need out_features >= 2"),
        (
            lambda: one_output().update(torch.ones(1, 2), torch.tensor([[1e149]]).double()),
            "numbers above 1e\\+30 among",
        ),
        (lambda: layer().set_extra_state(RecursiveLinear(3, 3).get_extra_state()), "state is of 4 inputs.*has 6"),
        (lambda: layer(forgetting=0.9).choose_regularization(), "takes forgetting=1, not 0.9: try values of δ"),
        (lambda: layer().predictive_variance(torch.ones(3)), r"x must be \(..., 5\), got \(3,\)"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def learn_a_share(rank):
    """Weights after rows of which the first process has none, then three, then four in each update."""
    (x, y), trained = data(), layer(forgetting=0.9)
    weights = 1 + torch.arange(ROWS) % 2
    for place in range(0, ROWS, 8):
        cut = place + {0: 0, 8: 3}.get(place, 4)
        rows = slice(place, place + 8) if rank is None else (slice(place, cut), slice(cut, place + 8))[rank]
        trained.update(x[rows], y[rows], weights=weights[rows])
    trained.add_inputs(1)
    last = slice(None) if rank is None else (slice(25), slice(25, None))[rank]
    trained.update(nn.functional.pad(x, (1, 0))[last], y[last])
    return [joined(trained), trained.noise_variance]


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    first, second = in_two_processes(learn_a_share, tmp_path)
    for mine, other, expected in zip(first, second, learn_a_share(None), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
