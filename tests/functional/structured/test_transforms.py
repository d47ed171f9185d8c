import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from lightning_struct.functional.structured import transforms
from lightning_struct.functional.structured.operators import DisplacementOperator, ShiftOperator, as_operator
from lightning_struct.functional.structured.transforms import (
    cauchy_like_matmul,
    circulant_matmul,
    hadamard_transform,
    hankel_like_matmul,
    toeplitz_like_matmul,
    vandermonde_like_matmul,
)

SHAPES = [(1, 1), (2, 2), (1, 3), (5, 2), (7, 12), (20, 20), (64, 100)]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def generators(m: int, n: int, r: int = 2) -> tuple[Tensor, Tensor]:
    return randn(m, r, seed=0), randn(n, r, seed=1)


def nodes(n: int, low: float = -1.0) -> Tensor:
    return torch.linspace(low, low + 1.8, n, dtype=torch.float64)


def hadamard(n: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def circulant(column: Tensor, m: int, n: int) -> Tensor:
    return torch.stack([torch.stack([column[(i - j) % len(column)] for j in range(n)]) for i in range(m)])


def krylov_sum(a: DisplacementOperator, b: DisplacementOperator, G: Tensor, H: Tensor, count: int) -> Tensor:
    """Σ_{j<count} Aʲ G Hᵀ (Bᵀ)ʲ, of dense matrices."""
    left, right = a.to_dense().to(G.dtype), b.to_dense().to(G.dtype)
    return sum(left.matrix_power(j) @ G @ H.mT @ right.mT.matrix_power(j) for j in range(count))


def hankel_like(m: int, n: int) -> tuple[list[Tensor], Tensor]:
    G, H = generators(m, n)
    return [G, H], krylov_sum(ShiftOperator(m, 1.0), ShiftOperator(n, 0.0).T, G, H, min(m, n))


def vandermonde_like(m: int, n: int) -> tuple[list[Tensor], Tensor]:
    G, H = generators(m, n)
    return [nodes(m), G, H], krylov_sum(as_operator(torch.diag(nodes(m))), ShiftOperator(n, 0.0), G, H, n)


def cauchy_like(m: int, n: int) -> tuple[list[Tensor], Tensor]:
    G, H = generators(m, n)
    s, t = nodes(m), nodes(n, low=1.1)
    return [s, t, G, H], (G @ H.mT) / (s[:, None] - t)


def toeplitz_like(m: int, n: int) -> tuple[list[Tensor], Tensor]:
    G, H = generators(m, n)
    return [G, H], krylov_sum(ShiftOperator(m, 1.0), ShiftOperator(n, -1.0), G, H, min(m, n))


CLASSES = [
    pytest.param(toeplitz_like_matmul, toeplitz_like, id="toeplitz"),
    pytest.param(hankel_like_matmul, hankel_like, id="hankel"),
    pytest.param(vandermonde_like_matmul, vandermonde_like, id="vandermonde"),
    pytest.param(cauchy_like_matmul, cauchy_like, id="cauchy"),
]


@pytest.mark.parametrize(("matmul", "make"), CLASSES)
def test_a_product_is_that_with_the_matrix_of_the_definition(matmul, make):
    for m, n in SHAPES:
        parameters, matrix = make(m, n)
        x = randn(2, 3, n, seed=2)
        torch.testing.assert_close(
            matmul(*parameters, x), x @ matrix.mT, rtol=1e-10, atol=1e-10 * float(matrix.abs().max()), msg=f"{m} x {n}"
        )


def circulant_arguments(m: int, n: int) -> tuple[list[Tensor], None]:
    return [randn(max(m, n), seed=0)], None


def no_arguments(m: int, n: int) -> tuple[list[Tensor], None]:
    return [], None


ALL = [*CLASSES, pytest.param(hadamard_transform, no_arguments, id="hadamard"),
       pytest.param(circulant_matmul, circulant_arguments, id="circulant")]  # fmt: skip


@pytest.mark.parametrize(("matmul", "make"), ALL)
def test_first_and_second_derivatives(matmul, make):
    parameters = [parameter.requires_grad_() for parameter in make(3, 4)[0]]
    inputs = (*parameters, randn(2, 4, seed=2).requires_grad_())
    assert torch.autograd.gradcheck(matmul, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(matmul, inputs, fast_mode=True)


@pytest.mark.parametrize(("matmul", "make"), CLASSES)
def test_gradients_of_each_sample(matmul, make):
    parameters, _ = make(3, 4)
    x = randn(5, 4, seed=2)

    def loss(G: Tensor, x: Tensor) -> Tensor:
        return matmul(*parameters[:-2], G, parameters[-1], x).square().sum()

    each = vmap(grad(loss), (None, 0))(parameters[-2], x)
    torch.testing.assert_close(each.sum(0), grad(loss)(parameters[-2], x))


@pytest.mark.parametrize(("matmul", "make"), ALL)
def test_half_precision_is_computed_in_float32(matmul, make):
    arguments = [argument.bfloat16() for argument in (*make(5, 8)[0], randn(2, 8, seed=2))]
    output = matmul(*arguments)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, matmul(*(argument.float() for argument in arguments)).bfloat16())


@pytest.mark.parametrize("f", [1.0, -0.5])
@pytest.mark.parametrize("g", [1.0, -1.0])
def test_corners_of_the_hankel_like_operators(f, g):
    G, H = generators(6, 4)
    matrix = krylov_sum(ShiftOperator(6, f), ShiftOperator(4, g).T, G, H, 4)
    x = randn(3, 4, seed=2)
    torch.testing.assert_close(hankel_like_matmul(G, H, x, f, g), x @ matrix.mT)


def test_a_cauchy_like_product_is_the_same_in_any_number_of_pieces(monkeypatch):
    parameters, matrix = cauchy_like(20, 7)
    x = randn(3, 7, seed=2)
    for entries in (1, 30):
        monkeypatch.setattr(transforms, "_CAUCHY_ENTRIES", entries)
        torch.testing.assert_close(cauchy_like_matmul(*parameters, x), x @ matrix.mT)


def test_nodes_in_common_are_refused():
    (s, t, G, H), _ = cauchy_like(3, 4)
    with pytest.raises(ValueError, match=r"no number in common.* 1\.1"):
        cauchy_like_matmul(s.index_fill(0, torch.tensor([1]), 1.1), t, G, H, randn(4, seed=2))


def test_nodes_in_common_are_let_pass_where_the_check_is_left_out():
    (s, t, G, H), _ = cauchy_like(3, 4)
    output = cauchy_like_matmul(s.index_copy(0, torch.tensor([1]), t[:1]), t, G, H, randn(4, seed=2), check_nodes=False)
    assert output.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("n", [1, 2, 8, 32, 64, 1024, 2048])
def test_the_hadamard_transform(n):
    x = randn(2, 3, n, seed=2)
    expected = x @ hadamard(n)
    torch.testing.assert_close(hadamard_transform(x), expected, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(hadamard_transform(x, normalize=True), expected / math.sqrt(n), rtol=1e-12, atol=1e-11)


def test_circulant_products():
    for k, m, n in [(1, 1, 1), (2, 2, 2), (7, 7, 7), (8, 3, 8), (8, 8, 5), (9, 4, 6)]:
        column, x = randn(k, seed=0), randn(2, 3, n, seed=1)
        matrix = circulant(column, m, n)
        torch.testing.assert_close(circulant_matmul(column, x, m), x @ matrix.mT, msg=f"{m} x {n} of {k}")
    torch.testing.assert_close(circulant_matmul(column, x), x @ circulant(column, 9, 6).mT)
    assert circulant_matmul(column, x[:0], 4).shape == (0, 3, 4)


def test_circulant_products_of_expanded_tensors_and_gradients():
    column, row = torch.randn(6, requires_grad=True), torch.randn(1, 6, requires_grad=True)
    y = circulant_matmul(column, row.expand(3, 6))
    torch.testing.assert_close(y, (row @ circulant(column.detach(), 6, 6).mT).expand(3, 6))
    y.sum().backward()  # the gradient of y is one number, expanded
    torch.testing.assert_close(column.grad, 3 * row.sum().expand(6))
    torch.testing.assert_close(row.grad, 3 * column.sum().expand(1, 6))


V3, V4, G_AND_H = randn(3, seed=0), randn(4, seed=0), generators(5, 3)
MISTAKES = [
    (hadamard_transform, (randn(2, 12, seed=0),), r"power of two.*\(2, 12\)"),
    (circulant_matmul, (V3, V4), "size 3 has no 3 rows by 4 columns"),
    (circulant_matmul, (V3, V3, 4), "no 4 rows"),
    (vandermonde_like_matmul, (nodes(4), *G_AND_H, V3), r"nodes must be \(5,\).*\(4,\)"),
    (cauchy_like_matmul, (nodes(1), nodes(3, 1.0), *G_AND_H, V3), r"s must be \(5,\).*\(1,\)"),
    (cauchy_like_matmul, (nodes(5), nodes(4), *G_AND_H, V3), r"t must be \(3,\).*\(4,\)"),
    (cauchy_like_matmul, (nodes(5), nodes(3, 1.0), randn(5, 1, seed=0), G_AND_H[1], V3), "columns, got 1 and 2"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_wrong_arguments_are_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
