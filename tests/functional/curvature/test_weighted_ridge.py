"""The recursion of ridge regression against its solution in exact rationals, and against dense decompositions."""

from fractions import Fraction

import pytest
import torch

from lightning_struct.functional.curvature.weighted_ridge import FEW_COLUMNS, WeightedRidge
from tests.cases import gaussian

ROWS = 24
FEATURES = {
    "constant and year": torch.stack([torch.ones(ROWS), 1950 + torch.arange(ROWS) / 4], 1).double(),
    "constant and a sensor near 5": torch.stack([torch.ones(ROWS), 5 + 0.05 * gaussian(ROWS, seed=1)], 1).double(),
    "of scales 1e-8, 1 and 1e8": gaussian(ROWS, 3, seed=2) * torch.tensor([1e-8, 1, 1e8]).double(),
}


def fractions(tensor):
    return [[Fraction(value) for value in row] for row in tensor.tolist()]


def exact_solution(gram):
    """Of the normal equations [A | b], in rationals."""
    size = len(gram)
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(gram[row][i]))
        gram[i], gram[pivot] = gram[pivot], gram[i]
        for row in range(size):
            if row != i:
                factor = gram[row][i] / gram[i][i]
                gram[row] = [a - factor * b for a, b in zip(gram[row], gram[i], strict=True)]
    return torch.tensor([float(row[-1] / row[i]) for i, row in enumerate(gram)], dtype=torch.float64)


def exact_ridge(inputs, targets, forgetting, regularization):
    number, size = inputs.shape
    λ, rows = Fraction(forgetting), fractions(torch.cat([inputs, targets[:, None]], 1))
    gram = [[λ**number * Fraction(regularization) * (i == j) for j in range(size + 1)] for i in range(size)]
    for age, row in enumerate(reversed(rows)):
        gram = [[a + λ**age * row[i] * b for a, b in zip(gram[i], row, strict=True)] for i in range(size)]
    return exact_solution(gram)


def ridge_of_zeros(inputs, regularization=1.0):
    return WeightedRidge.start(torch.zeros(1, inputs, dtype=torch.float64), regularization)


@pytest.mark.covering(2)
@pytest.mark.parametrize("one_block", [False, True])
@pytest.mark.parametrize(
    ("forgetting", "regularization"), [(1.0, 1.0), (1.0, 1e-10), (1.0, 1e-30), (0.95, 1.0), (0.5, 1e-6)]
)
@pytest.mark.parametrize("name", FEATURES)
def test_weights_are_those_of_exact_rationals(name, forgetting, regularization, one_block):
    inputs = FEATURES[name]
    size = inputs.shape[1]
    targets = inputs @ torch.arange(1.0, size + 1).double() + 0.01 * gaussian(ROWS, seed=3)
    ridge = ridge_of_zeros(size, regularization)
    if one_block:
        ages = torch.arange(ROWS - 1, -1, -1, dtype=torch.float64)
        ridge.learn([inputs, targets[:, None]], forgetting**ROWS, forgetting**ages)
    else:
        for x, y in zip(inputs, targets, strict=True):
            ridge.learn([x[None], y[None, None]], forgetting)
    expected = exact_ridge(inputs, targets, forgetting, regularization)
    condition = torch.linalg.cond(ridge.factor[:size, :size])
    assert (ridge.weights[0] - expected).norm() <= 1e-14 * condition * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_many_rows_leave_nothing_but_rounding(forgetting):
    number = 10_000
    inputs = gaussian(number, 3, seed=4) + torch.tensor([0.0, 100.0, 1.0])
    targets = inputs @ torch.tensor([[3.0], [-1.0], [2.0]]).double() + gaussian(number, 1, seed=5)
    ridge = ridge_of_zeros(3)
    for row in torch.cat([inputs, targets], 1).split(1):
        ridge.learn([row], forgetting)
    roots = forgetting ** (torch.arange(number - 1, -1, -1, dtype=torch.float64)[:, None] / 2)
    penalty = forgetting ** (number / 2) * torch.eye(3, 4, dtype=torch.float64)
    rows = torch.cat([penalty, roots * torch.cat([inputs, targets], 1)])
    expected = torch.linalg.lstsq(rows[:, :3], rows[:, 3:]).solution
    torch.testing.assert_close(ridge.weights.T, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("block", [1, 7, 200])
def test_many_columns_are_eliminated_by_panels(block):
    size = 2 * FEW_COLUMNS + 5
    inputs, targets = gaussian(200, size), gaussian(200, 2, seed=1)
    inputs[:, [0, 3, size - 1]] = 0  # reflectors that are the identity
    start = gaussian(2, size, seed=2)
    ridge = WeightedRidge.start(start, regularization=0.5)
    for rows in torch.cat([inputs, targets], 1).split(block):
        ridge.learn([rows])
    root = 0.5**0.5
    stacked = torch.cat([root * torch.eye(size, dtype=torch.float64), inputs]), torch.cat([root * start.T, targets])
    expected = torch.linalg.lstsq(*stacked).solution
    torch.testing.assert_close(ridge.weights.T, expected, rtol=0, atol=1e-13)
    residuals = (stacked[1] - stacked[0] @ expected).square().sum(0)
    torch.testing.assert_close(ridge.residuals(), residuals, rtol=1e-12, atol=0)
    assert torch.equal(ridge.factor, ridge.factor.triu())


def test_a_direction_that_is_forgotten_keeps_its_weights():
    """After (1, 5) alone for long, weights change along it only: (5, -1) is below rounding."""
    ridge = ridge_of_zeros(2)
    for x in (*gaussian(20, 2), *torch.tensor([[1.0, 5.0]]).double().expand(600, 2)):
        ridge.learn([x[None], x[None] @ torch.tensor([[2.0], [-1.0]]).double()], 0.9)
    before = ridge.weights.clone()
    for _ in range(250):
        ridge.learn([torch.tensor([[1.0, 5.0, 23.0]]).double()], 0.9)
    change = ridge.weights - before
    torch.testing.assert_close(change, torch.tensor([[1.0, 5.0]]).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("columns", [3, 2 * FEW_COLUMNS])
def test_an_input_that_never_comes_again_keeps_its_weight_however_long(columns):
    ridge, generator = ridge_of_zeros(columns), torch.Generator().manual_seed(0)
    ridge.learn([5 * torch.eye(columns).double(), torch.ones(columns, 1).double()])
    before = ridge.weights[0, 0].clone()
    for _ in range(60):
        rows = torch.randn(3 * columns, columns, generator=generator, dtype=torch.float64)
        rows[:, 0] = 0
        ridge.learn([rows, rows.sum(1, keepdim=True)], 1e-12)
    expected = torch.ones(columns, dtype=torch.float64)
    expected[0] = before
    torch.testing.assert_close(ridge.weights[0], expected, rtol=1e-12, atol=1e-12)
