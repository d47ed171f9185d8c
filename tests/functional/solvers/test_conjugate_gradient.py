import math
from collections.abc import Callable
from typing import Any

import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from lightning_struct.functional.solvers.conjugate_gradient import conjugate_gradient
from tests.cases import Triangular, gaussian, triangular


def positive_definite(n: int, seed: int, condition: float = 100.0) -> Tensor:
    basis = torch.linalg.qr(gaussian(n, n, seed=seed)).Q
    return basis @ torch.diag(torch.logspace(0, math.log10(condition), n, dtype=torch.float64)) @ basis.T


def quadratic(matrix: Tensor, b: Tensor, x: Tensor) -> float:
    return (0.5 * x @ matrix @ x - b @ x).item()


PRECONDITIONERS = {"none": None, "scale": gaussian(7, seed=50).abs() + 0.2, "object": Triangular(triangular(7, 51))}


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS.values(), ids=PRECONDITIONERS)
@pytest.mark.parametrize("started", [False, True], ids=["from_zero", "from_x0"])
def test_solution_is_that_of_a_dense_solve(preconditioner: Any, started: bool) -> None:
    matrix, b = positive_definite(7, seed=0), gaussian(7, seed=1)
    x0 = gaussian(7, seed=2) if started else None
    result = conjugate_gradient(
        matrix.matmul, b, x0=x0, preconditioner=preconditioner, maxiter=100, progress_tolerance=0.0, rtol=1e-13
    )
    assert result.stop_reason == "residual"
    torch.testing.assert_close(result.x, torch.linalg.solve(matrix, b), rtol=0, atol=1e-10)


@pytest.mark.parametrize("iterations", [1, 2, 4])
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS.values(), ids=PRECONDITIONERS)
def test_iterates_are_those_of_scipy_and_the_reported_quadratic_and_residual_are_theirs(
    preconditioner: Any, iterations: int
) -> None:
    matrix, b, x0 = positive_definite(7, seed=3), gaussian(7, seed=4), gaussian(7, seed=5)
    inverse = torch.eye(7, dtype=torch.float64)
    if isinstance(preconditioner, Tensor):
        inverse = torch.diag(preconditioner.square())
    elif preconditioner is not None:
        inverse = torch.linalg.inv(preconditioner.matrix.T @ preconditioner.matrix)
    result = conjugate_gradient(
        matrix.matmul, b, x0=x0, preconditioner=preconditioner, maxiter=iterations, progress_tolerance=0.0
    )
    x, _ = scipy.sparse.linalg.cg(
        matrix.numpy(), b.numpy(), x0.numpy(), rtol=0.0, maxiter=iterations, M=inverse.numpy()
    )
    assert (result.iterations, result.stop_reason) == (iterations, "maxiter")
    assert result.quadratic == pytest.approx(quadratic(matrix, b, result.x), rel=1e-12)
    assert result.residual_norm == pytest.approx((b - matrix @ result.x).norm().item(), rel=1e-10)
    torch.testing.assert_close(result.x, torch.from_numpy(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("tolerance", "window"), [(5e-4, 10), (5e-3, 10), (0.05, 2)])
@pytest.mark.parametrize("n", [40, 400])
def test_martens_rule_stops_where_a_loop_over_the_recorded_quadratics_says(
    n: int, tolerance: float, window: int
) -> None:
    matrix, b = positive_definite(n, seed=13, condition=3e4), gaussian(n, seed=14)
    values = [0.0]

    def record(iteration: int, solution: Callable[[], Tensor]) -> None:
        values.append(quadratic(matrix, b, solution()))

    conjugate_gradient(matrix.matmul, b, maxiter=250, progress_tolerance=0.0, callback=record)

    def stop() -> int:
        for i in range(1, len(values)):
            k = max(window, math.floor(0.1 * i))
            if i > k and values[i] < 0 and (values[i] - values[i - k]) / values[i] < k * tolerance:
                return i
        raise AssertionError("the rule never holds on this problem")

    result = conjugate_gradient(matrix.matmul, b, maxiter=250, progress_tolerance=tolerance, progress_window=window)
    assert (result.iterations, result.stop_reason) == (stop(), "progress")
    if (n, tolerance) == (400, 5e-4):  # past iteration 110 the interval is longer than 10
        assert result.iterations > 110


def test_an_indefinite_matrix_ends_with_curvature_and_the_iterate_before_it() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64))
    iterates: list[Tensor] = []
    b = torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64)
    result = conjugate_gradient(matrix.matmul, b, callback=lambda _, solution: iterates.append(solution()))
    assert result.stop_reason == "curvature"
    assert result.iterations == len(iterates) >= 1
    assert torch.equal(result.x, iterates[-1])
    result = conjugate_gradient(lambda x: -x, b)
    assert (result.stop_reason, result.iterations, result.x.any().item()) == ("curvature", 0, False)


@pytest.mark.parametrize("solved", ["zero_b", "exact_start"])
def test_a_start_that_solves_the_system_is_returned(solved: str) -> None:
    x0 = torch.tensor([1.0, -2.0], dtype=torch.float64) if solved == "exact_start" else None
    b = torch.zeros(2, dtype=torch.float64) if x0 is None else 4.0 * x0
    result = conjugate_gradient(lambda x: 4.0 * x, b, x0=x0)
    assert (result.stop_reason, result.iterations, result.residual_norm) == ("zero_gradient", 0, 0.0)
    assert torch.equal(result.x, torch.zeros_like(b) if x0 is None else x0)


def test_rtol_ends_the_solve_at_the_first_small_residual() -> None:
    matrix, b = positive_definite(30, seed=18), gaussian(30, seed=19)
    small: list[bool] = []

    def callback(iteration: int, solution: Callable[[], Tensor]) -> None:
        small.append(bool((b - matrix @ solution()).norm() <= 1e-2 * b.norm()))

    result = conjugate_gradient(matrix.matmul, b, progress_tolerance=0.0, rtol=1e-2, callback=callback)
    assert result.stop_reason == "residual"
    assert small == [False] * (result.iterations - 1) + [True]


def test_a_true_value_of_the_callback_ends_the_solve_with_the_iterate_that_it_saw() -> None:
    matrix, b = positive_definite(9, seed=20), gaussian(9, seed=21)
    seen: list[Tensor] = []
    copies: list[Tensor] = []

    def callback(iteration: int, solution: Callable[[], Tensor]) -> bool:
        seen.append(solution())
        copies.append(seen[-1].clone())
        return iteration == 3

    result = conjugate_gradient(matrix.matmul, b, callback=callback)
    assert (result.stop_reason, result.iterations, len(seen)) == ("callback", 3, 3)
    assert torch.equal(result.x, seen[-1]) and all(map(torch.equal, seen, copies))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("started", [False, True], ids=["from_zero", "from_x0"])
@pytest.mark.parametrize("condition", [10.0, 1e4])
def test_the_quadratic_of_a_long_solve_is_that_of_its_solution(
    condition: float, started: bool, dtype: torch.dtype
) -> None:
    matrix, b = positive_definite(200, seed=0, condition=condition), gaussian(200, seed=1)
    x0 = gaussian(200, seed=2) if started else torch.zeros(200, dtype=torch.float64)
    result = conjugate_gradient(
        matrix.to(dtype).matmul, b.to(dtype), x0=x0.to(dtype), maxiter=150, progress_tolerance=0.0
    )
    exact, eps = quadratic(matrix, b, result.x.double()), torch.finfo(dtype).eps
    assert abs(result.quadratic - exact) < eps * (100 * abs(exact) + abs(quadratic(matrix, b, x0)))


def test_maxiter_zero_returns_the_start_and_its_residual() -> None:
    matrix, b, x0 = positive_definite(5, seed=22), gaussian(5, seed=23), gaussian(5, seed=24)
    copies = b.clone(), x0.clone()
    conjugate_gradient(matrix.matmul, b, x0=x0)
    assert torch.equal(b, copies[0]) and torch.equal(x0, copies[1])
    result = conjugate_gradient(matrix.matmul, b, x0=x0, maxiter=0)
    assert (result.stop_reason, result.iterations) == ("maxiter", 0)
    assert torch.equal(result.x, x0)
    assert result.residual_norm == pytest.approx((b - matrix @ x0).norm().item(), rel=1e-14)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_float32_numbers_whose_squares_are_out_of_range_are_solved(scale: float) -> None:
    matrix, b = positive_definite(6, seed=0), gaussian(6, seed=1)
    x = conjugate_gradient(matrix.float().matmul, (b * scale).float()).x
    torch.testing.assert_close(x / scale, torch.linalg.solve(matrix, b).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxiter": -1}, "maxiter.* -1"),
        ({"progress_tolerance": -1e-3}, "progress_tolerance.* -0.001"),
        ({"progress_window": 0}, "progress_window must be a whole number >= 1, got 0"),
        ({"rtol": -1e-3}, "rtol.* -0.001"),
        ({"rtol": math.nan}, "rtol.* nan"),
        ({"x0": torch.ones(3, dtype=torch.float64)}, r"x0 .*\(3,\).*\(4,\)"),
        ({"preconditioner": torch.ones(3, dtype=torch.float64)}, r"preconditioner .*\(3,\).*\(4,\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conjugate_gradient(lambda x: x, gaussian(4, seed=0), **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_product_with_nan_or_infinity_is_an_error(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        conjugate_gradient(lambda x: x * bad, gaussian(4, seed=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_solve_ends_where_only_rounding_is_left(dtype):
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        A = torch.randn(12, 12, generator=generator, dtype=torch.float64)
        B, b = (A @ A.T + torch.eye(12)).to(dtype), torch.randn(12, generator=generator, dtype=torch.float64).to(dtype)
        result = conjugate_gradient(B.matmul, b, maxiter=3000, progress_tolerance=0.0)
        assert result.stop_reason == "residual" and result.iterations < 200
        torch.testing.assert_close(B @ result.x, b, rtol=1e-3, atol=1e-3)
