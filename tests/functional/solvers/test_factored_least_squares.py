from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_struct.functional import FactoredLeastSquares, GramLeastSquares
from tests.cases import gaussian


def refined(jacobian: Tensor) -> GramLeastSquares:
    gram = GramLeastSquares(jacobian)
    gram.refine()
    return gram


SHAPES = {"tall": (12, 5), "wide": (5, 12), "square": (6, 6)}


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("damping", [10.0, 0.1, 1e-3])
@pytest.mark.parametrize("factorisation", [FactoredLeastSquares, GramLeastSquares, refined])
def test_every_damping_from_one_factorisation(
    factorisation: Callable[[Tensor], FactoredLeastSquares | GramLeastSquares], shape: str, damping: float
) -> None:
    rows, columns = SHAPES[shape]
    jacobian, b = gaussian(rows, columns, seed=0), gaussian(rows, seed=1)
    normal_matrix = jacobian.mT @ jacobian + damping**2 * torch.eye(columns, dtype=jacobian.dtype)
    expected = torch.linalg.solve(normal_matrix, jacobian.mT @ b)
    torch.testing.assert_close(factorisation(jacobian).solve(b, damping), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_condition_is_squared_by_the_gram_matrix_alone_which_leaves_the_residual_of_the_exact_solution(
    shape: str,
) -> None:
    rows, columns = SHAPES[shape]
    left, right = (torch.linalg.qr(gaussian(n, n, seed=seed))[0] for seed, n in enumerate((rows, columns)))
    values = torch.logspace(0, -12, min(rows, columns), dtype=torch.float64)
    jacobian, b = left[:, : len(values)] * values @ right[: len(values)], gaussian(rows, seed=2)
    factored, gram = FactoredLeastSquares(jacobian), GramLeastSquares(jacobian)
    assert factored.singular_values.allclose(values, rtol=1e-3)
    exact = jacobian @ factored.solve(b, gram.smallest_damping) - b
    error = jacobian @ gram.solve(b, gram.smallest_damping) - b - exact
    assert error.norm() < 0.01 * exact.norm()
    gram.refine()
    assert gram.smallest_damping < 1e-13
    for damping in (1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12):
        solution = factored.solve(b, damping)
        assert (gram.solve(b, damping) - solution).norm() < 1e-13 / damping * solution.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_singular_value_is_estimated_from_below_whatever_the_order_of_the_rows(shape: str) -> None:
    jacobian = gaussian(*SHAPES[shape], seed=0)
    largest = FactoredLeastSquares(jacobian).largest_singular_value
    estimate = GramLeastSquares(jacobian).largest_singular_value
    assert 0.9 * largest < estimate <= largest * (1 + 1e-12)
    assert GramLeastSquares(jacobian.flip(0)).largest_singular_value == pytest.approx(estimate, rel=1e-12)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)], ids=str)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_float32_numbers_whose_squares_are_out_of_range_are_solved(shape: tuple[int, int], scale: float) -> None:
    jacobian, b = gaussian(*shape, seed=0).float(), gaussian(shape[0], seed=1).float()
    expected = FactoredLeastSquares(jacobian).solve(b, 2.0)
    torch.testing.assert_close(FactoredLeastSquares(jacobian * scale).solve(b, 2.0 * scale) * scale, expected)


def test_a_singular_value_of_zero_gets_no_share() -> None:
    solution = FactoredLeastSquares(torch.diag(torch.tensor([2.0, 0.0]))).solve(torch.ones(2), 1.0)
    torch.testing.assert_close(solution, torch.tensor([0.4, 0.0]))
