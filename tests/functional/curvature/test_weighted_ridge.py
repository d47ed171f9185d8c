"""The recursion of ridge regression against its definition in 60 digits, and against dense decompositions."""

from decimal import Decimal, localcontext
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_struct.functional.curvature.weighted_ridge import FEW_COLUMNS, WeightedRidge
from tests.cases import gaussian

ROWS = 24
FEATURES = {
    "constant and year": torch.stack([torch.ones(ROWS), 1950 + torch.arange(ROWS) / 4], 1).double(),
    "constant and a sensor near 5": torch.stack([torch.ones(ROWS), 5 + 0.05 * gaussian(ROWS, seed=1)], 1).double(),
    "of scales 1e-8, 1 and 1e8": gaussian(ROWS, 3, seed=2) * torch.tensor([1e-8, 1, 1e8]).double(),
}


def solution(A, b):
    """Of A Θ = b, by Gauss-Jordan elimination; A is positive definite."""
    system = [[*row, right] for row, right in zip(A, b, strict=True)]
    for i, row in enumerate(system):
        row[i:] = [value / row[i] for value in row[i:]]
        for other in system[:i] + system[i + 1 :]:
            other[i:] = [a - other[i] * value for a, value in zip(other[i:], row[i:], strict=True)]
    return [row[-1] for row in system]


def exact_ridge(inputs, targets, forgetting, regularization):
    """Θ before each row and after the last, (rows + 1, d), by the definition in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        λ, δ, size = Decimal(forgetting), Decimal(regularization), range(inputs.shape[1])
        k = round(1 / (1 - forgetting)) if forgetting < 1 else len(inputs)
        A, b, found = [[δ * (i == j) for j in size] for i in size], [Decimal(0)] * len(size), [[Decimal(0)] * len(size)]
        rows = [list(map(Decimal, row)) for row in torch.cat([inputs, targets[:, None]], 1).tolist()]
        for s, (*x, y) in enumerate(rows):
            if s and s % k == 0:  # the regularization is renewed, around the weights of this time
                renewed = (1 - λ**k) * δ
                A = [[A[i][j] + renewed * (i == j) for j in size] for i in size]
                b = [b[i] + renewed * found[-1][i] for i in size]
            A = [[λ * A[i][j] + x[i] * x[j] for j in size] for i in size]
            b = [λ * b[i] + x[i] * y for i in size]
            found.append(solution(A, b))
        return torch.tensor([[float(value) for value in each] for each in found], dtype=torch.float64)


def learn(ridge, inputs, targets, block):
    """Θ before each block and after the last."""
    found = [ridge.weights[0].clone()]
    for x, y in zip(inputs.split(block), targets[:, None].split(block), strict=True):
        if block == 1:
            ridge.learn_row(x[0].numpy(), y[0].numpy())
        else:
            ridge.learn([x, y])
        found.append(ridge.weights[0].clone())
    return torch.stack(found)


@pytest.mark.covering(2)
@pytest.mark.parametrize("block", [1, ROWS])
@pytest.mark.parametrize(
    ("forgetting", "regularization"), [(1.0, 1.0), (1.0, 1e-10), (1.0, 1e-30), (0.95, 1.0), (0.5, 1e-6)]
)
@pytest.mark.parametrize("name", FEATURES)
def test_weights_are_those_of_the_definition(name, forgetting, regularization, block):
    inputs = FEATURES[name]
    size = inputs.shape[1]
    targets = inputs @ torch.arange(1.0, size + 1).double() + 0.01 * gaussian(ROWS, seed=3)
    ridge = WeightedRidge.start(size, 1, regularization, forgetting)
    found = learn(ridge, inputs, targets, block)[-1]
    expected = exact_ridge(inputs, targets, forgetting, regularization)[-1]
    condition = torch.linalg.cond(ridge.factor[:size, :size])
    assert (found - expected).norm() <= 1e-14 * condition * expected.norm()


LONG = 400
REST = slice(60, 360)


def stream(name):
    """Inputs whose weak directions get no rows for long, and then do again; targets with noise."""
    noise, x, one = 0.1 * gaussian(LONG, seed=5), 5 + gaussian(LONG, seed=6), torch.ones(LONG).double()
    if name == "a sensor rests":
        x[REST] = 5
        return torch.stack([x, one], 1), 2 * x + 1 + noise
    if name == "a sensor is doubled for long":
        twin = x + gaussian(LONG, seed=7)
        twin[: REST.stop] = x[: REST.stop]
        return torch.stack([x, twin, one], 1), x + twin + noise
    if name == "constants, zeros and a drift":
        rare, slopes = gaussian(LONG, seed=8), torch.linspace(1, 3, LONG).double()
        rare[: REST.stop] = 0
        return torch.stack([x, 3 * one, rare, one], 1), slopes * x + rare + noise
    hours = torch.arange(LONG) % 6
    hours[REST] %= 3
    return torch.cat([torch.eye(6).double()[hours], one[:, None]], 1), hours + noise


@pytest.mark.covering(2)
@pytest.mark.parametrize("block", [1, 7, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("forgetting", "regularization"),
    [(0.9, 1e-18), (0.99, 1e-18), *product((0.9, 0.95, 0.99, 1.0), (1e-10, 1e-4, 1.0))],
)
@pytest.mark.parametrize(
    "name", ["a sensor rests", "a sensor is doubled for long", "constants, zeros and a drift", "hours"]
)
def test_predictions_are_as_good_as_in_60_digits(name, forgetting, regularization, dtype, block):
    inputs, targets = (tensor.to(dtype) for tensor in stream(name))
    exact = exact_ridge(inputs.double(), targets.double(), forgetting, regularization)
    found = learn(WeightedRidge.start(inputs.shape[1], 1, regularization, forgetting), inputs, targets, block)
    for x, y, Θ, expected in zip(inputs.split(block), targets.split(block), found, exact[::block], strict=False):
        errors, least = ((x.double() @ weights - y).abs() for weights in (Θ, expected))
        assert (errors <= 2 * least + 1e-6 * targets.abs().max()).all()
    assert found.abs().max() <= 10 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_many_rows_leave_nothing_but_rounding(forgetting):
    number = 3_000
    inputs = gaussian(number, 3, seed=4) + torch.tensor([0.0, 100.0, 1.0])
    targets = inputs @ torch.tensor([3.0, -1.0, 2.0]).double() + gaussian(number, seed=5)
    found = learn(WeightedRidge.start(3, 1, 1.0, forgetting), inputs, targets, 1)
    expected = exact_ridge(inputs, targets, forgetting, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("block", [1, 7, 200])
def test_many_columns_are_eliminated_by_panels(block):
    size = 2 * FEW_COLUMNS + 5
    inputs, targets = gaussian(200, size), gaussian(200, 2, seed=1)
    inputs[:, [0, 3, size - 1]] = 0  # reflectors that are the identity
    ridge = WeightedRidge.start(size, 2, regularization=0.5)
    for rows in torch.cat([inputs, targets], 1).split(block):
        ridge.learn([rows])
    root = 0.5**0.5 * torch.eye(size, dtype=torch.float64)
    stacked = torch.cat([root, inputs]), torch.cat([torch.zeros(size, 2).double(), targets])
    expected = torch.linalg.lstsq(*stacked).solution
    torch.testing.assert_close(ridge.weights.T, expected, rtol=0, atol=1e-13)
    residuals = (stacked[1] - stacked[0] @ expected).square().sum(0)
    torch.testing.assert_close(ridge.residuals(), residuals, rtol=1e-12, atol=0)
    assert torch.equal(ridge.factor, ridge.factor.triu())


@pytest.mark.parametrize("size", [3, 2 * FEW_COLUMNS])
def test_what_no_row_points_at_keeps_its_weights(size):
    """After x alone for long, weights change along x only; and blocks learn what their rows do."""
    ridges = [WeightedRidge.start(size, 1, 1.0, forgetting=0.9) for _ in range(2)]
    rows, x = gaussian(3 * size, size), gaussian(1, size, seed=1).expand(300, -1)
    for ridge, block in zip(ridges, (50, 300), strict=True):
        learn(ridge, rows, rows.sum(1), block)
        learn(ridge, x, x.sum(1), block)
    before, other = (ridge.weights[0].clone() for ridge in ridges)
    torch.testing.assert_close(before, other, rtol=0, atol=1e-11)
    learn(ridges[0], x, x.sum(1) + 3, 300)
    change = 3 * x[0] / x[0].square().sum()
    torch.testing.assert_close(ridges[0].weights[0] - before, change, rtol=0, atol=0.1 * change.abs().max().item())
    along = (ridges[0].weights[0] - before) @ x[0] / x[0].square().sum() * x[0]
    torch.testing.assert_close(ridges[0].weights[0] - before, along, rtol=0, atol=1e-9)


class Names(TorchDispatchMode):
    """The operations of torch that are called."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names = {*getattr(self, "names", ()), function.overloadpacket.__name__}
        return function(*args, **kwargs or {})
