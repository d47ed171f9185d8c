from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_struct.functional import GramLeastSquares
from tests.cases import gaussian


def refined(jacobian: Tensor) -> GramLeastSquares:
    gram = GramLeastSquares(jacobian)
    gram.refine()
    return gram


SHAPES = {"tall": (12, 5), "wide": (5, 12), "square": (6, 6)}


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("damping", [10.0, 0.1, 1e-3])
@pytest.mark.parametrize("factorisation", [GramLeastSquares, refined])
def test_every_damping_from_one_factorisation(
    factorisation: Callable[[Tensor], GramLeastSquares], shape: str, damping: float
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
    gram = GramLeastSquares(jacobian)

    def solved(damping: float) -> Tensor:
        shares = values / (values**2 + damping**2)
        return right[: len(values)].mT @ (shares * (left[:, : len(values)].mT @ b))

    exact = jacobian @ solved(gram.smallest_damping) - b
    error = jacobian @ gram.solve(b, gram.smallest_damping) - b - exact
    assert error.norm() < 0.01 * exact.norm()
    gram.refine()
    assert gram.smallest_damping < 1e-13
    for damping in (1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12):
        solution = solved(damping)
        assert (gram.solve(b, damping) - solution).norm() < 1e-13 / damping * solution.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_singular_value_is_estimated_from_below_whatever_the_order_of_the_rows(shape: str) -> None:
    jacobian = gaussian(*SHAPES[shape], seed=0)
    largest = torch.linalg.matrix_norm(jacobian, 2).item()
    estimate = GramLeastSquares(jacobian).largest_singular_value
    assert 0.9 * largest < estimate <= largest * (1 + 1e-12)
    assert GramLeastSquares(jacobian.flip(0)).largest_singular_value == pytest.approx(estimate, rel=1e-12)
