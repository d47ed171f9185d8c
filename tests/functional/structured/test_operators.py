import pytest
import torch
from torch import Tensor

from lightning_struct.functional.structured.operators import (
    DisplacementOperator,
    ShiftOperator,
    SubdiagonalOperator,
    TridiagonalOperator,
    as_operator,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(kind: str, n: int) -> tuple[DisplacementOperator, Tensor]:
    """An operator, and its matrix made of diagonals and corners."""
    below, middle, above, corners = randn(n - 1), randn(n, seed=1), randn(n - 1, seed=2), randn(2, seed=3)
    if kind == "matrix":
        return as_operator(randn(n, n)), randn(n, n)
    operator: DisplacementOperator = TridiagonalOperator(below, middle, above, corners)
    if kind != "tridiagonal":
        middle, above, corners[1] = 0 * middle, 0 * above, 0
        below = torch.ones_like(below) if kind == "shift" else below
        operator = ShiftOperator(n, corners[0]) if kind == "shift" else SubdiagonalOperator(below, corners[0])
    matrix = torch.diag(middle) + torch.diag(below, -1) + torch.diag(above, 1)
    matrix[0, n - 1] += corners[0]
    matrix[n - 1, 0] += corners[1]
    return operator, matrix


KINDS = ["subdiagonal", "tridiagonal", "shift", "matrix"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_an_operator_and_its_transpose_are_their_matrices_and_differentiable(kind, n):
    original, matrix = made(kind, n)
    transposes = [(t, matrix.T) for t in (original.T, original.T.T.T)]
    for operator, expected in [(original, matrix), *transposes]:
        v, cotangent = randn(2, 3, n, seed=4).requires_grad_(), randn(2, 3, n, seed=5)
        assert operator.size == n
        torch.testing.assert_close(operator.to_dense(), expected)
        torch.testing.assert_close(operator.matvec(v), v @ expected.T)
        torch.testing.assert_close(operator.rmatvec(v), v @ expected)
        (gradient,) = torch.autograd.grad(operator.matvec(v), v, cotangent)
        torch.testing.assert_close(gradient, cotangent @ expected)


def test_the_transpose_of_a_complex_operator_is_not_conjugated():
    operator = SubdiagonalOperator(torch.tensor([1j]), torch.tensor(2j)).T
    assert operator.to_dense().tolist() == [[0, 1j], [2j, 0]]


def test_a_shift_by_a_number_keeps_the_dtype_of_what_it_shifts():
    assert ShiftOperator(4, 0.5).matvec(randn(4)).dtype == torch.float64
    assert ShiftOperator(4, 0.5).to_dense().dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SubdiagonalOperator(randn(3, 1), randn(1)[0]), ValueError, r"subdiagonal .*\(3, 1\)"),
        (lambda: SubdiagonalOperator(randn(3), randn(1)), ValueError, r"corner .*\(1,\)"),
        (lambda: TridiagonalOperator(randn(3), randn(3), randn(2), randn(2)), ValueError, r"subdiagonal .*\(2,\)"),
        (lambda: TridiagonalOperator(randn(2), randn(3), randn(3), randn(2)), ValueError, r"superdiagonal .*\(2,\)"),
        (lambda: TridiagonalOperator(randn(2), randn(3), randn(2), randn(1)), ValueError, r"corners .*\(2,\)"),
        (lambda: ShiftOperator(0, 1.0), ValueError, "n must be a whole number >= 1, got 0"),
        (lambda: as_operator(randn(2, 3)), ValueError, r"square .*\(2, 3\)"),
        (lambda: as_operator(randn(2)), ValueError, r"2 dimensions, got shape \(2,\)"),
        (lambda: ShiftOperator(3, 1.0).matvec(randn(2, 4)), ValueError, r"size 3 .*\(2, 4\)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()
