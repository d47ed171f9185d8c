import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from lightning_struct.functional import lsmr
from lightning_struct.functional.solvers.conjugate_gradient import conjugate_gradient
from tests.cases import Triangular, gaussian, triangular

SHAPES = [pytest.param((9, 5), id="tall"), pytest.param((5, 9), id="wide"), pytest.param((6, 6), id="square")]
THREE_STEPS: dict[str, Any] = {"maxiter": 3, "atol": 0.0, "btol": 0.0}
TO_THE_END: dict[str, Any] = {"maxiter": 100, "atol": 0.0, "btol": 0.0}


def operators(matrix: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return (lambda x: matrix @ x), (lambda u: matrix.T @ u)


def dense_solution(
    matrix: Tensor, b: Tensor, damp: float = 0.0, center: Tensor | None = None, weight: Tensor | None = None
) -> Tensor:
    """argmin ‖A x - b‖² + damp² ‖W (x - center)‖² by a dense least-squares solve."""
    n = matrix.shape[1]
    below = damp * (torch.eye(n, dtype=matrix.dtype) if weight is None else weight)
    right = below @ (torch.zeros(n, dtype=matrix.dtype) if center is None else center)
    return torch.linalg.lstsq(torch.cat([matrix, below]), torch.cat([b, right])).solution


# --- against SciPy, iterate by iterate -------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", [1, 3, 5])
@pytest.mark.parametrize("damp", [0.0, 0.7])
@pytest.mark.parametrize("started", [False, True], ids=["from_zero", "from_x0"])
def test_iterates_and_norms_are_those_of_scipy(
    shape: tuple[int, int], iterations: int, damp: float, started: bool
) -> None:
    matrix, b = gaussian(*shape, seed=0), gaussian(shape[0], seed=1)
    x0 = gaussian(shape[1], seed=2) if started else None
    result = lsmr(*operators(matrix), b, damp=damp, x0=x0, maxiter=iterations, atol=0.0, btol=0.0)
    start = None if x0 is None else x0.numpy()
    x, _, done, *norms = scipy.sparse.linalg.lsmr(matrix.numpy(), b.numpy(), damp, 0.0, 0.0, 0.0, iterations, x0=start)
    assert result.iterations == done == iterations
    np.testing.assert_allclose(result.x.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose([result.residual_norm, result.normal_residual_norm], norms[:2], rtol=0, atol=1e-10)


# --- against dense solves --------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("center", ["start", "origin", "vector"])
@pytest.mark.parametrize("kind", ["plain", "scaled", "triangular"])
@pytest.mark.parametrize("space", ["y", "x"])
@pytest.mark.parametrize("started", [False, True], ids=["from_zero", "from_x0"])
def test_solution_is_that_of_the_dense_damped_problem(
    shape: tuple[int, int], center: str, kind: str, space: str, started: bool
) -> None:
    matrix, b = gaussian(*shape, seed=3), gaussian(shape[0], seed=4)
    start, vector = gaussian(shape[1], seed=5) if started else None, gaussian(shape[1], seed=6)
    scale, lower = gaussian(shape[1], seed=7).abs() + 0.2, triangular(shape[1], seed=12)
    preconditioner = {"plain": None, "scaled": scale, "triangular": Triangular(lower)}[kind]
    weight = {"plain": None, "scaled": torch.diag(1.0 / scale), "triangular": lower}[kind] if space == "y" else None
    options = {"damp": 0.8, "x0": start, "damping_center": vector if center == "vector" else center}
    options |= {"preconditioner": preconditioner, "damping_space": space, **TO_THE_END}
    point = {"start": start, "origin": None, "vector": vector}[center]
    if kind == "triangular" and space == "y" and center != "start" and (started or center == "vector"):
        with pytest.raises(ValueError, match="damping_space='x'"):  # it needs C itself
            lsmr(*operators(matrix), b, **options)
        return
    result = lsmr(*operators(matrix), b, **options)
    torch.testing.assert_close(result.x, dense_solution(matrix, b, 0.8, point, weight), rtol=0, atol=1e-10)


@pytest.mark.covering(2)
@pytest.mark.parametrize("center", ["start", "origin", "vector"])
@pytest.mark.parametrize("space", ["y", "x"])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_reported_norms_are_those_of_the_damped_problem_midway(center: str, space: str, with_gradient: bool) -> None:
    matrix, b, start = gaussian(9, 6, seed=13), gaussian(9, seed=14), gaussian(6, seed=15)
    scale, vector = gaussian(6, seed=16).abs() + 0.2, gaussian(6, seed=17)
    options = {"damp": 0.8, "x0": start, "damping_center": vector if center == "vector" else center}
    options["gradient"] = matrix.T @ (b - matrix @ start) if with_gradient else None
    result = lsmr(*operators(matrix), b, preconditioner=scale, damping_space=space, **options, **THREE_STEPS)
    point = {"start": start, "origin": torch.zeros_like(start), "vector": vector}[center]
    weight = 1.0 / scale if space == "y" else torch.ones_like(scale)
    residual = torch.cat([matrix @ result.x - b, 0.8 * weight * (result.x - point)])
    normal_residual = scale * (torch.cat([matrix, torch.diag(0.8 * weight)]).T @ residual)
    assert result.residual_norm == pytest.approx(residual.norm().item(), rel=1e-10)
    assert result.normal_residual_norm == pytest.approx(normal_residual.norm().item(), rel=1e-10)


def test_vectors_may_be_dicts_whose_keys_come_in_any_order() -> None:
    matrix, b = gaussian(8, 6, seed=18), gaussian(8, seed=19)
    start, scale, vector = gaussian(6, seed=20), gaussian(6, seed=21).abs() + 0.2, gaussian(6, seed=22)

    def split(x: Tensor, reverse: bool = False) -> dict[str, Tensor]:
        parts = {"weight": x[:4].view(2, 2), "bias": x[4:]}
        return dict(reversed(parts.items())) if reverse else parts

    def joined(x: dict[str, Tensor]) -> Tensor:
        return torch.cat([x["weight"].reshape(-1), x["bias"]])

    def rows(u: Tensor, reverse: bool = False) -> dict[str, Tensor]:
        parts = {"first": u[:3], "second": u[3:].view(5, 1)}
        return dict(reversed(parts.items())) if reverse else parts

    def stacked(u: dict[str, Tensor]) -> Tensor:
        return torch.cat([u["first"], u["second"].reshape(-1)])

    result = lsmr(
        lambda x: rows(matrix @ joined(x), reverse=True),
        lambda u: split(matrix.T @ stacked(u), reverse=True),
        rows(b),
        damp=0.5,
        x0=split(start),
        damping_center=split(vector, True),
        preconditioner=split(scale, True),
        **TO_THE_END,
    )
    expected = split(dense_solution(matrix, b, 0.5, vector, torch.diag(1.0 / scale)))
    assert list(result.x) == ["weight", "bias"]
    torch.testing.assert_close(result.x, expected, rtol=0, atol=1e-10)


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_rank_deficient_system_ends_with_the_correction_of_minimum_norm_in_y(
    shape: tuple[int, int], scaled: bool
) -> None:
    matrix = gaussian(shape[0], 2, seed=23) @ gaussian(2, shape[1], seed=24)
    b, start = gaussian(shape[0], seed=25), gaussian(shape[1], seed=26)
    scale = gaussian(shape[1], seed=30).abs() + 0.2 if scaled else torch.ones_like(start)
    options = {"x0": start, "preconditioner": scale if scaled else None, "btol": 0.0}
    expected = start + scale * (torch.linalg.pinv(matrix * scale) @ (b - matrix @ start))
    result = lsmr(*operators(matrix), b, maxiter=100, atol=1e-14, **options)
    torch.testing.assert_close(result.x, expected, rtol=0, atol=1e-10)
    b = matrix @ gaussian(shape[1], seed=33)  # iterating far past convergence keeps the solution
    expected = start + scale * (torch.linalg.pinv(matrix * scale) @ (b - matrix @ start))
    result = lsmr(*operators(matrix), b, maxiter=1000, atol=0.0, **options)
    torch.testing.assert_close(result.x, expected, rtol=0, atol=1e-10)


# --- start, stop, and what the caller sees ---------------------------------------------------------------------------


def test_a_start_that_solves_the_problem_and_one_that_maxiter_zero_keeps_are_returned_with_their_norms() -> None:
    for last in (0.0, 3.0):  # outside of the range
        matrix, b = torch.tensor([[1.0, 2.0], [0.0, 0.0]]).double(), torch.tensor([0.0, last]).double()
        result = lsmr(*operators(matrix), b, damp=0.5)
        assert (result.stop_reason, result.iterations, result.residual_norm) == ("zero_gradient", 0, last)
        assert torch.equal(result.x, torch.zeros(2, dtype=torch.float64))
    matrix, b, start = gaussian(6, 4, seed=0), gaussian(6, seed=1), gaussian(4, seed=2)
    result = lsmr(*operators(matrix), b, x0=start, maxiter=0)
    residual = b - matrix @ start
    assert (result.stop_reason, result.iterations) == ("maxiter", 0)
    assert torch.equal(result.x, start)
    assert result.residual_norm == pytest.approx(residual.norm().item(), rel=1e-14)
    assert result.normal_residual_norm == pytest.approx((matrix.T @ residual).norm().item(), rel=1e-14)


@pytest.mark.parametrize(
    "preconditioner", [None, torch.full((6,), 0.5, dtype=torch.float64), Triangular(triangular(6, seed=12))]
)
def test_a_true_value_of_the_callback_ends_the_solve_and_what_it_kept_does_not_change(preconditioner: Any) -> None:
    matrix, b = gaussian(9, 6, seed=0), gaussian(9, seed=1)
    seen: list[tuple[int, Tensor, Tensor]] = []

    def callback(iteration: int, solution: Callable[[], Tensor]) -> bool:
        x = solution()
        seen.append((iteration, x, x.clone()))
        return iteration == 3

    result = lsmr(*operators(matrix), b, preconditioner=preconditioner, callback=callback)
    assert (result.stop_reason, result.iterations) == ("callback", 3)
    assert [iteration for iteration, _, _ in seen] == [1, 2, 3]
    assert torch.equal(result.x, seen[-1][1]) and all(torch.equal(kept, copy) for _, kept, copy in seen)


@pytest.mark.parametrize(
    ("consistent", "damp", "atol", "btol", "reason"),
    [
        (False, 0.0, 1e-3, 0.0, "normal_residual"),
        (True, 0.0, 0.0, 1e-2, "residual"),
        (True, 0.0, 1e-2, 0.0, "residual"),
        (True, 0.1, 0.1, 0.0, "residual"),
    ],
    ids=["normal residual", "residual", "residual by atol", "damped residual by atol"],
)
def test_a_solve_ends_at_the_first_iteration_that_meets_a_tolerance(
    consistent: bool, damp: float, atol: float, btol: float, reason: str
) -> None:
    matrix = gaussian(30, 12, seed=0)
    b = matrix @ gaussian(12, seed=1) if consistent else gaussian(30, seed=1)
    met: list[bool] = []

    def callback(iteration: int, solution: Callable[[], Tensor]) -> None:
        x = solution()
        residual, normal = torch.cat([b - matrix @ x, damp * x]).norm(), matrix.T @ (b - matrix @ x) - damp**2 * x
        bound = atol * matrix.norm()
        is_small = residual <= btol * b.norm() + bound * x.norm() if consistent else normal.norm() <= bound * residual
        met.append(bool(is_small))

    result = lsmr(*operators(matrix), b, damp=damp, maxiter=50, atol=atol, btol=btol, callback=callback)
    # ‖A‖ is estimated from below by the bidiagonalisation, so a stop by atol may come later than the one with ‖A‖.
    assert result.stop_reason == reason and met[-1] and result.iterations < 12
    assert not btol or met.index(True) + 1 == len(met)


@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_are_by_default_at_most_as_many_as_exact_arithmetic_needs(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape, seed=0) * torch.logspace(0, -6, shape[1], dtype=torch.float64)
    result = lsmr(*operators(matrix), gaussian(shape[0], seed=1), atol=0.0, btol=0.0)
    assert (result.stop_reason, result.iterations) == ("maxiter", min(shape))


def test_arguments_are_left_as_they_were_by_operators_that_return_their_own() -> None:
    given = {"b": gaussian(6, seed=1), "x0": gaussian(6, seed=2), "preconditioner": gaussian(6, seed=3).abs() + 0.2}
    copies = {name: t.clone() for name, t in given.items()}
    options = {"damp": 0.5, "damping_center": "origin", "damping_space": "x", **TO_THE_END}
    for arguments in ({"b": given["b"]}, given):
        result = lsmr(lambda x: x, lambda u: u, **arguments, **options)
        torch.testing.assert_close(result.x, given["b"] / 1.25, rtol=0, atol=1e-12)
    assert all(torch.equal(given[name], t) for name, t in copies.items())


def test_a_float32_problem_is_solved_in_float32() -> None:
    matrix, b = gaussian(30, 12, seed=0).float(), gaussian(30, seed=1).float()
    result = lsmr(*operators(matrix), b, damp=0.5, maxiter=50)
    assert result.x.dtype == torch.float32
    torch.testing.assert_close(result.x, dense_solution(matrix.double(), b.double(), 0.5).float(), rtol=0, atol=1e-5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e25])
@pytest.mark.parametrize("scales_matrix", [False, True])
def test_float32_numbers_whose_squares_are_out_of_range_are_solved(scale: float, scales_matrix: bool) -> None:
    matrix, b = gaussian(30, 12, seed=0), gaussian(30, seed=1)
    expected = dense_solution(matrix, b, 0.0).float()
    if scales_matrix:
        x = lsmr(*operators((matrix * scale).float()), b.float()).x * scale
    else:
        x = lsmr(*operators(matrix.float()), (b * scale).float()).x / scale
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-5)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["matvec", "rmatvec", "b"])
def test_nan_or_infinity_is_an_error(bad: float, place: str) -> None:
    matrix, b = gaussian(6, 4, seed=0), gaussian(6, seed=1)
    factors = {name: bad if name == place else 1.0 for name in ("matvec", "rmatvec", "b")}
    with pytest.raises(FloatingPointError, match="right-hand side" if place == "b" else "NaN or infinity"):
        lsmr(
            lambda x: matrix @ x * factors["matvec"],
            lambda u: matrix.T @ u * factors["rmatvec"],
            b * factors["b"],
            gradient=matrix.T @ b if place == "b" else None,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damp": -1.0}, "damp must be a finite number >= 0, got -1.0"),
        ({"damp": math.nan}, "damp .* got nan"),
        ({"damping_space": "z"}, "damping_space must be 'y' or 'x', got 'z'"),
        ({"damping_center": "end"}, "damping_center .* got 'end'"),
        ({"maxiter": -1}, "maxiter.* -1"),
        ({"atol": -1e-3}, "atol.* -0.001"),
        ({"preconditioner": torch.ones(5, dtype=torch.float64)}, r"preconditioner .*\(5,\).*\(4,\)"),
        ({"preconditioner": {"a": torch.ones(4, dtype=torch.float64)}}, r"preconditioner .*\['a'\].* a tensor"),
        ({"damping_center": torch.ones(5, dtype=torch.float64), "damp": 1.0}, r"damping_center .*\(5,\).*\(4,\)"),
        ({"x0": gaussian(4, seed=2), "gradient": gaussian(5, seed=3)}, "gradient has the shapes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lsmr(*operators(gaussian(6, 4, seed=0)), gaussian(6, seed=1), **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("b", "x0", "product", "error", "message"),
    [
        (gaussian(6, seed=1), None, lambda x: x[:, None], ValueError, r"product with A .*\(6, 1\).*\(6,\)"),
        (gaussian(6, seed=1), gaussian(6, 1, seed=2), lambda x: x[:, 0], ValueError, r"transpose .*\(6,\).*\(6, 1\)"),
        ({"first": gaussian(6)}, None, lambda x: {"other": x["first"]}, ValueError, r"\['other'\].*\['first'\]"),
        ([1.0, 2.0], None, lambda x: x, TypeError, "b must be"),
    ],
    ids=["product", "start", "names", "list"],
)
def test_a_vector_of_another_structure_is_refused_before_it_is_broadcast(
    b: Any, x0: Any, product: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lsmr(product, lambda u: u, b, x0=x0)


@pytest.mark.parametrize("solver", [lsmr, conjugate_gradient])
def test_an_operator_of_parameters_can_be_solved_with(solver: Any) -> None:
    matrix = gaussian(5, 5, seed=0)
    matrix = torch.nn.Parameter(matrix @ matrix.T + torch.eye(5))
    b = torch.nn.Parameter(gaussian(5, seed=1))
    products = [matrix.matmul] if solver is conjugate_gradient else [matrix.matmul, matrix.T.matmul]
    solution = solver(*products, b, x0=torch.zeros(5, dtype=b.dtype)).x
    assert not solution.requires_grad
    torch.testing.assert_close(matrix @ solution, b, rtol=0, atol=1e-4)
