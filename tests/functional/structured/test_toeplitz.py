"""Toeplitz-like products against the definition by Krylov matrices."""

import itertools

import pytest
import torch

from lightning_struct.functional.structured.transforms import (
    prepare_toeplitz_like,
    toeplitz_like_matmul,
    toeplitz_like_to_dense,
)

SHAPES = [(1, 1), (1, 4), (4, 1), (2, 2), (20, 20), (100, 37), (37, 64)]
CORNERS = [(1.0, -1.0), (0.0, 0.0), (0.7, -0.7), (-1.0, 0.5)]


def shift(n, corner):
    matrix = torch.diag(torch.ones(n - 1, dtype=torch.float64), -1)
    matrix[0, n - 1] += corner
    return matrix


def dense(G, H, f, g):
    """Σ_j Z_f^j G Hᵀ (Z_gᵀ)^j, j < min(m, n)."""
    a, b = shift(G.shape[0], f), shift(H.shape[0], g)
    term, total = G @ H.T, torch.zeros(G.shape[0], H.shape[0], dtype=G.dtype)
    for _ in range(min(total.shape)):
        total, term = total + term, a @ term @ b.T
    return total


def factors(m, n, rank=2, rows=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((m, rank), (n, rank), (rows, n))
    )


def relative_error(value, reference):
    return ((value - reference).norm() / reference.norm().clamp(min=1e-300)).item()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
def test_it_is_the_definition(dtype, tolerance):
    for (m, n), (f, g), rank in itertools.product(SHAPES, CORNERS, [1, 3]):
        G, H, x = factors(m, n, rank)
        matrix = dense(G, H, f, g)
        parts = [tensor.to(dtype) for tensor in (G, H, x)]
        prepared = prepare_toeplitz_like(*parts[:2], f, g)
        for product in (toeplitz_like_matmul(*parts, f, g), prepared.matmul(parts[2])):
            assert product.dtype == dtype
            assert relative_error(product.double(), x @ matrix.T) <= tolerance, (m, n, f, g, rank)
        if dtype == torch.float64:
            torch.testing.assert_close(toeplitz_like_to_dense(G, H, f, g), matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [256, 320, 1000])
@pytest.mark.parametrize("rank, rows", [(1, 1), (1, 5), (3, 2), (3, 20), (3, 50), (17, 2)])
def test_the_prepared_matrix_takes_few_rows_and_many(n, rank, rows):
    G, H, x = factors(n, n, rank, rows)
    f, g = 0.7, -0.3
    product = prepare_toeplitz_like(G, H, f, g).matmul(x)
    assert relative_error(product, toeplitz_like_matmul(G, H, x, f, g)) < 1e-13


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (1, 3)])
def test_first_and_second_derivatives(shape):
    G, H, x = factors(*shape, rows=2)
    corners = [torch.tensor(value, dtype=torch.float64) for value in (0.7, -0.3)]
    inputs = [tensor.requires_grad_() for tensor in (G, H, x, *corners)]
    assert torch.autograd.gradcheck(toeplitz_like_matmul, inputs, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(toeplitz_like_matmul, inputs, fast_mode=True)


def test_gradients_of_large_batches_and_ranks():
    """So many numbers that the ranks are taken one after the other."""
    G, H, x = factors(60, 61, rank=3, rows=3000)
    inputs = [tensor.requires_grad_() for tensor in (G, H, x)]
    cotangent = torch.randn(3000, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(toeplitz_like_matmul(*inputs), inputs, cotangent)
    expected = torch.autograd.grad(x @ dense(G, H, 1.0, -1.0).T, inputs, cotangent)
    assert max(relative_error(*pair) for pair in zip(gradients, expected, strict=True)) < 1e-12


def loss(G, H, x, f, g):
    return toeplitz_like_matmul(G, H, x, f, g).sin().sum()


@pytest.mark.parametrize("batched", range(5), ids=["G", "H", "x", "f", "g"])
def test_vmap_over_one_argument(batched):
    inputs = [*factors(4, 5), torch.tensor(0.7, dtype=torch.float64), torch.tensor(-0.3, dtype=torch.float64)]
    stack = torch.stack([inputs[batched], 2 * inputs[batched]])
    in_dims = tuple(0 if i == batched else None for i in range(5))
    product = torch.func.vmap(toeplitz_like_matmul, in_dims)(*inputs[:batched], stack, *inputs[batched + 1 :])
    expected = [toeplitz_like_matmul(*inputs[:batched], part, *inputs[batched + 1 :]) for part in stack]
    torch.testing.assert_close(product, torch.stack(expected))


def test_forward_over_reverse():
    G, H, x = factors(3, 4)
    f, g = (torch.tensor(value, dtype=torch.float64) for value in (0.7, -0.3))
    hessian = torch.func.jacfwd(torch.func.jacrev(loss))(G, H, x, f, g)
    expected = torch.autograd.functional.hessian(lambda G: (x @ dense(G, H, 0.7, -0.3).T).sin().sum(), G)
    torch.testing.assert_close(hessian, expected)


@pytest.mark.parametrize("corner", [1j, torch.tensor(1j), torch.ones(1)], ids=str)
def test_a_corner_that_is_no_real_number_is_named(corner):
    with pytest.raises((TypeError, ValueError), match="g must be a (finite )?real number,? or a .*tensor"):
        toeplitz_like_matmul(torch.ones(3, 1), torch.ones(3, 1), torch.ones(3), 1.0, corner)
