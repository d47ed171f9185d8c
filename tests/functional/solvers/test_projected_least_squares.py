from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_struct.functional import ProjectedLeastSquares, lsmr
from tests.cases import gaussian

SHAPES = {"tall": (12, 5), "wide": (5, 12)}


def project(jacobian: Tensor, b: Tensor, steps: int, **options: Any) -> ProjectedLeastSquares:
    return ProjectedLeastSquares(jacobian.matmul, jacobian.mT.matmul, b, steps, **options)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("damping", [3.0, 0.1])
def test_for_every_damping_the_iterate_of_the_solver(shape: str, damping: float) -> None:
    rows, columns = SHAPES[shape]
    jacobian, b = gaussian(rows, columns, seed=0), gaussian(rows, seed=1)
    for steps in (1, 3):
        expected = lsmr(jacobian.matmul, jacobian.mT.matmul, b, damp=damping, maxiter=steps, atol=0.0, btol=0.0).x
        torch.testing.assert_close(project(jacobian, b, steps).solution(damping), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_space_has_the_solution_for_every_damping_and_right_hand_side(shape: str) -> None:
    rows, columns = SHAPES[shape]
    jacobian, b, other = gaussian(rows, columns, seed=0), gaussian(rows, seed=1), gaussian(rows, seed=2)
    given = project(jacobian, b, 5, gradient=-jacobian.mT @ b)  # which saves a product
    solver = project(jacobian, b, 5)
    torch.testing.assert_close(solver.gradient, given.gradient)
    for damping in (3.0, 0.1):
        torch.testing.assert_close(given.solution(damping), solver.solution(damping))
        matrix = jacobian.mT @ jacobian + damping**2 * torch.eye(columns, dtype=torch.float64)
        torch.testing.assert_close(solver.solution(damping), torch.linalg.solve(matrix, jacobian.mT @ b))
        torch.testing.assert_close(solver.solve(other, damping), torch.linalg.solve(matrix, jacobian.mT @ other))


def test_it_ends_where_the_gradient_has_fallen_to_the_tolerance() -> None:
    jacobian, b = gaussian(200, 100, seed=0), gaussian(200, seed=1)
    solver = project(jacobian, b, 100, damping=5.0, tolerance=1e-3)
    d = solver.solution(5.0)
    gradient = jacobian.mT @ (b - jacobian @ d) - 25.0 * d
    assert gradient.norm() <= 1e-3 * (jacobian.mT @ b).norm()
    assert solver.steps < 40


def test_a_right_hand_side_that_needs_no_step_and_one_that_ends_early() -> None:
    jacobian = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    for b, steps in ((torch.zeros(3), 3), (torch.ones(3), 0)):
        none = project(jacobian, b.double(), steps)
        assert none.solution(1.0).eq(0).all() and none.solve(b.double(), 1.0).eq(0).all()
    early = project(jacobian, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), 3)
    assert early.steps == 1
    torch.testing.assert_close(early.solution(1.0), torch.tensor([0.0, 0.4, 0.0], dtype=torch.float64))


def test_as_many_steps_as_a_basis_has_no_room_for_at_first() -> None:
    jacobian, b = gaussian(60, 50, seed=0), gaussian(60, seed=1)
    solver = project(jacobian, b, 50)
    assert solver.steps == 50
    torch.testing.assert_close(solver.solution(0.0), torch.linalg.lstsq(jacobian, b[:, None]).solution[:, 0])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
def test_float32_numbers_whose_squares_are_out_of_range_are_solved(scale: float) -> None:
    jacobian, b = gaussian(12, 5, seed=0).float(), gaussian(12, seed=1).float()
    expected = project(jacobian, b, 5).solution(1.0)
    torch.testing.assert_close(project(jacobian, b * scale, 5).solution(1.0) / scale, expected)


@pytest.mark.parametrize("shape", [(400, 3), (5, 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_ends_where_rounding_errors_alone_are_left(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(0, 20, 2):
        jacobian, b = gaussian(*shape, seed=seed).to(dtype), gaussian(shape[0], seed=seed + 1).to(dtype)
        solver = project(jacobian, b, 50)
        assert solver.steps == min(shape)
        torch.testing.assert_close(solver.singular_values.to(dtype), torch.linalg.svdvals(jacobian))


def test_nan_in_a_product_is_an_error() -> None:
    jacobian = torch.full((3, 2), torch.nan)
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        project(jacobian, torch.ones(3), 2)
