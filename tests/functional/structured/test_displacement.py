import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_struct.functional.structured.displacement import (
    displacement_rank,
    krylov_matrix,
    ldr_matmul,
    ldr_to_dense,
    sylvester_displacement,
)
from lightning_struct.functional.structured.operators import (
    DisplacementOperator,
    ShiftOperator,
    SubdiagonalOperator,
    TridiagonalOperator,
    as_operator,
)
from tests.cases import gaussian

SHAPES = [(1, 1), (1, 4), (3, 3), (8, 5), (5, 8)]
seeds = st.integers(0, 10**6)
sizes = st.integers(2, 9)


def check(test: Callable[..., None]) -> Callable[..., None]:
    return settings(max_examples=15)(test)


def uniform(*shape: int, seed: int) -> Tensor:
    """In [.5, 1.5)."""
    return 0.5 + torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shift(n: int, f: float) -> ShiftOperator:
    return ShiftOperator(n, torch.tensor(f, dtype=torch.float64))


def subdiagonal(n: int, seed: int = 0) -> SubdiagonalOperator:
    return SubdiagonalOperator(uniform(n - 1, seed=seed), uniform(1, seed=seed + 1)[0])


def tridiagonal(n: int, seed: int = 0, centre: float = 0.0) -> TridiagonalOperator:
    below, above = 0.5 * gaussian(n - 1, seed=seed), 0.5 * gaussian(n - 1, seed=seed + 1)
    return TridiagonalOperator(
        below, centre + 0.5 * gaussian(n, seed=seed + 2), above, 0.5 * gaussian(2, seed=seed + 3)
    )


def diagonal(n: int, seed: int = 0) -> Tensor:
    return torch.diag(uniform(n, seed=seed) * gaussian(n, seed=seed + 1).sign())


KINDS: dict[str, Callable[[int], DisplacementOperator | Tensor]] = {
    "shift": lambda n: shift(n, -0.5),
    "rotation": lambda n: ShiftOperator(n, 1.0),
    "transposed shift": lambda n: shift(n, 0.0).T,
    "subdiagonal": subdiagonal,
    "transposed subdiagonal": lambda n: subdiagonal(n, 3).T,
    "tridiagonal": tridiagonal,
    "transposed tridiagonal": lambda n: tridiagonal(n, 3).T,
    "diagonal": diagonal,
    "dense": lambda n: gaussian(n, n, seed=0) / n**0.5,
}


def dense(operator: DisplacementOperator | Tensor) -> Tensor:
    return as_operator(operator).to_dense()


def as_tridiagonal(operator: DisplacementOperator | Tensor) -> TridiagonalOperator:
    """The same matrix, which must have no entries elsewhere."""
    matrix, n = dense(operator), as_operator(operator).size
    corners = torch.stack([matrix[0, n - 1], matrix[n - 1, 0]]) if n > 2 else matrix.new_zeros(2)
    below, middle, above = (matrix.diagonal(k) for k in (-1, 0, 1))
    result = TridiagonalOperator(below, middle, above, corners)
    torch.testing.assert_close(result.to_dense(), matrix)
    return result


def definition(a: DisplacementOperator, b: DisplacementOperator, G: Tensor, H: Tensor) -> Tensor:
    left, right = dense(a).to(G.dtype), dense(b).to(G.dtype)
    return sum(
        left.matrix_power(j) @ G @ H.mT @ right.matrix_power(j) for j in range(min(left.shape[0], right.shape[0]))
    )


def matrix_of_rank(a: DisplacementOperator, b: DisplacementOperator, rank: int, seed: int) -> Tensor:
    """M with AM - MB of this rank, by solving that equation."""
    residual = gaussian(a.size, rank, seed=seed) @ gaussian(rank, b.size, seed=seed + 1)
    left, right = (torch.eye(operator.size, dtype=torch.float64) for operator in (a, b))
    system = torch.kron(a.to_dense(), right) - torch.kron(left, b.T.to_dense())
    return torch.linalg.solve(system, residual.flatten()).reshape(residual.shape)


def rank(M: Tensor, a: Any, b: Any) -> int:
    return displacement_rank(M, a, b, rtol=1e-9)


# ---- products of Krylov matrices ----


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_columns_of_a_krylov_matrix_are_powers_times_the_vector(kind):
    operator, v = KINDS[kind](5), gaussian(2, 5, seed=1)
    matrix = dense(operator).to(v.dtype)
    expected = torch.stack([v @ matrix.matrix_power(j).T for j in range(7)], -1)
    torch.testing.assert_close(krylov_matrix(operator, v, 7), expected)
    torch.testing.assert_close(krylov_matrix(matrix, v), expected[..., :5])


@pytest.mark.parametrize("kind_of_b", list(KINDS))
@pytest.mark.parametrize("kind_of_a", list(KINDS))
def test_formula_2_for_any_pair_of_operators(kind_of_a, kind_of_b):
    for m, n in SHAPES:
        a, b = KINDS[kind_of_a](m), KINDS[kind_of_b](n)
        G, H, x = gaussian(m, 2, seed=5), gaussian(n, 2, seed=6), gaussian(3, n, seed=7)
        expected = definition(a, b, G, H)
        for method in ("auto", "krylov"):
            message = f"{m} x {n}, {method}"
            torch.testing.assert_close(ldr_to_dense(a, b, G, H, method), expected, rtol=1e-10, atol=1e-10, msg=message)
            product = ldr_matmul(a, b, G, H, x, method)
            torch.testing.assert_close(product, x @ expected.mT, rtol=1e-10, atol=1e-10, msg=message)


@pytest.mark.parametrize("method", ["scaled", "tree", "krylov"])
def test_methods_of_a_pair_of_operators_by_name(method):
    a, b = KINDS["shift"](6), KINDS["shift"](4).T
    G, H, x = (gaussian(*shape, seed=k) for k, shape in enumerate([(6, 2), (4, 2), (3, 4)]))
    torch.testing.assert_close(ldr_matmul(a, b, G, H, x, method), x @ definition(a, b, G, H).mT)


@pytest.mark.parametrize("kind", ["subdiagonal", "transposed subdiagonal", "tridiagonal", "diagonal", "dense"])
@pytest.mark.parametrize("method", ["auto", "krylov"])
def test_first_and_second_derivatives(kind, method):
    def entries(operator: DisplacementOperator | Tensor) -> list[Tensor]:
        of = [operator] if isinstance(operator, Tensor) else vars(operator).values()
        return [entry.clone().requires_grad_() for entry in of if isinstance(entry, Tensor)]

    def rebuilt(operator: DisplacementOperator | Tensor, values: tuple[Tensor, ...]) -> DisplacementOperator | Tensor:
        if isinstance(operator, Tensor):
            return values[0]
        made = type(operator)(*values)
        return made.T if getattr(operator, "is_transposed", False) else made

    a, b = KINDS[kind](3), KINDS[kind](2)
    of_a, of_b = entries(a), entries(b)
    generators = [gaussian(*shape, seed=k).requires_grad_() for k, shape in enumerate([(3, 1), (2, 1), (2, 2)])]

    def product(*tensors: Tensor) -> Tensor:
        k = len(of_a)
        G, H, x = tensors[2 * k :]
        return ldr_matmul(rebuilt(a, tensors[:k]), rebuilt(b, tensors[k : 2 * k]), G, H, x, method)

    assert torch.autograd.gradcheck(product, (*of_a, *of_b, *generators), fast_mode=True)
    assert torch.autograd.gradgradcheck(product, (*of_a, *of_b, *generators), fast_mode=True)


def test_complex_operators_are_multiplied_by_the_definition():
    a, b = (torch.diag(torch.polar(torch.ones(n).double(), torch.arange(n).double())) for n in (4, 3))
    G, H, x = gaussian(4, 1, seed=0), gaussian(3, 1, seed=1), gaussian(2, 3, seed=2)
    torch.testing.assert_close(ldr_matmul(a, b, G, H, x), (x + 0j) @ definition(a, b, G + 0j, H + 0j).mT)


# ---- the Sylvester displacement ----


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_sylvester_displacement_of_operators_and_of_their_matrices(kind):
    a, b, M = KINDS[kind](4), KINDS[kind](6), gaussian(4, 6, seed=0)
    left, right = (dense(operator).to(M.dtype) for operator in (a, b))
    torch.testing.assert_close(sylvester_displacement(M, a, b), left @ M - M @ right)
    torch.testing.assert_close(sylvester_displacement(M, left, right), left @ M - M @ right)


def test_a_displacement_of_rounding_errors_has_rank_zero():
    a = tridiagonal(8)
    polynomial = a.to_dense() @ a.to_dense() + 3 * a.to_dense()
    assert displacement_rank(polynomial, a, a) == 0
    assert sylvester_displacement(polynomial, a, a).abs().max() > 0


@given(seeds, sizes, sizes, st.integers(1, 3))
@check
def test_the_displacement_rank_is_that_of_the_residual(seed, m, n, r):
    a, b = tridiagonal(m, seed, 2.5), tridiagonal(n, seed + 10, -2.5)
    assert rank(matrix_of_rank(a, b, r, seed + 20), a, b) == min(m, n, r)


# ---- Proposition 1: closure ----


@given(seeds, sizes, sizes, sizes, st.integers(1, 2), st.integers(1, 2))
@check
def test_ranks_of_transposes_inverses_sums_products_and_blocks(seed, m, n, k, r, s):
    a, b, c = tridiagonal(m, seed, 4.0), tridiagonal(n, seed + 10), tridiagonal(k, seed + 20, -4.0)
    M, N = matrix_of_rank(a, b, r, seed + 30), matrix_of_rank(a, b, s, seed + 40)
    assert rank(M.T, b.T, a.T) == rank(M, a, b)
    assert rank(M + N, a, b) == min(m, n, r + s)
    assert rank(M @ matrix_of_rank(b, c, s, seed + 50), a, c) <= r + s
    blocks = torch.cat([M, matrix_of_rank(a, c, s, seed + 60)], 1)
    assert rank(blocks, a, torch.block_diag(b.to_dense(), c.to_dense())) <= r + s
    other = tridiagonal(m, seed + 70, -4.0)
    square = matrix_of_rank(a, other, r, seed + 80)
    assume(torch.linalg.cond(square) < 1e4)
    assert rank(torch.linalg.inv(square), other, a) == rank(square, a, other)


# ---- Proposition 3 ----


@given(seeds, st.integers(5, 9), st.integers(1, 2), st.sampled_from(["subdiagonal", "tridiagonal"]))
@check
def test_formula_2_has_twice_the_rank_between_the_inverse_of_one_operator_and_the_other(seed, n, r, kind):
    make = subdiagonal if kind == "subdiagonal" else lambda n, seed: tridiagonal(n, seed, 1.0)
    a, b = make(n, seed), make(n, seed + 10)
    assume(torch.linalg.cond(a.to_dense()) < 1e4)
    M = ldr_to_dense(a, b, gaussian(n, r, seed=seed + 20), gaussian(n, r, seed=seed + 21))
    assert rank(M, torch.linalg.inv(a.to_dense()), b) <= 2 * r


def test_formula_2_with_both_shifts_downwards_is_hankel_like_and_with_opposite_ones_toeplitz_like():
    n = 8
    G, H = gaussian(n, 1, seed=0), gaussian(n, 1, seed=1)
    same, opposite = (ldr_to_dense(shift(n, 1.0), b, G, H) for b in (shift(n, -1.0), shift(n, -1.0).T))
    hankel, toeplitz = (shift(n, 1.0), shift(n, 0.0).T), (shift(n, 1.0), shift(n, -1.0))
    assert rank(same, *hankel) == 2
    assert rank(same, *toeplitz) == n - 1
    assert rank(opposite, *toeplitz) == 1
    assert rank(opposite, *hankel) == n


# ---- Proposition 2: what LDR-TD contains ----


def toeplitz(n: int, seed: int) -> Tensor:
    entries, place = gaussian(2 * n - 1, seed=seed), torch.arange(n)
    return entries[place[:, None] - place + n - 1]


def factors(residual: Tensor, r: int) -> tuple[Tensor, Tensor]:
    u, s, v = torch.linalg.svd(residual)
    return u[:, :r] * s[:r], v[:r].T


@given(seeds, sizes)
@check
def test_hankel_matrices(seed, n):
    M, a, b = toeplitz(n, seed).flip(0), shift(n, 1.0), shift(n, 0.0)
    assert rank(M, a, b.T) <= 2
    # M - A M B = G Hᵀ, since Bⁿ = 0.
    G, H = factors(M - a.to_dense() @ M @ b.to_dense(), 2)
    torch.testing.assert_close(ldr_to_dense(as_tridiagonal(a), as_tridiagonal(b), G, H), M)


@given(seeds, sizes)
@check
def test_vandermonde_matrices(seed, n):
    nodes = uniform(n, seed=seed)
    M, a, b = nodes[:, None] ** torch.arange(n), torch.diag(nodes), shift(n, 0.0)
    assert rank(M, a, b) == 1
    G, H = torch.ones(n, 1, dtype=torch.float64), torch.eye(n, 1, dtype=torch.float64)
    torch.testing.assert_close(ldr_to_dense(as_tridiagonal(a), as_tridiagonal(b.T), G, H), M)


@given(seeds, sizes, sizes)
@check
def test_cauchy_matrices(seed, m, n):
    s, t = uniform(m, seed=seed), 2.0 + uniform(n, seed=seed + 1)
    a, b = as_tridiagonal(torch.diag(s)), as_tridiagonal(torch.diag(t))
    assert rank(1 / (s[:, None] - t), a, b) == 1


@given(seeds, sizes, sizes, st.integers(1, 3))
@check
def test_matrices_of_low_rank(seed, m, n, r):
    G, H = gaussian(m, r, seed=seed), gaussian(n, r, seed=seed + 1)
    zero = TridiagonalOperator(*(torch.zeros(k, dtype=torch.float64) for k in (n - 1, n, n - 1, 2)))
    torch.testing.assert_close(ldr_to_dense(as_tridiagonal(shift(m, 1.0)), zero, G, H), G @ H.T)
    assert rank(G @ H.T, shift(m, 1.0), zero) == min(m, n, r)
    assert rank(G @ H.T, torch.diag(torch.ones(m, dtype=torch.float64)), zero) == min(m, n, r)


def recurrence_operator(a: list[float], b: list[float], c: list[float]) -> TridiagonalOperator:
    """A of Proposition 4, for p_{i+1}(X) = (a_i X + b_i) p_i(X) + c_i p_{i-1}(X)."""
    a, b, c = (torch.tensor(values, dtype=torch.float64) for values in (a, b, c))
    return TridiagonalOperator(-(c / a)[1:], -b / a, (1 / a)[:-1], torch.zeros(2, dtype=torch.float64))


def cosine_transform(n: int) -> tuple[Tensor, TridiagonalOperator, TridiagonalOperator]:
    """DCT-II, and the operators between which it has rank 1: Chebyshev's polynomials at Chebyshev's nodes."""
    angles = math.pi / n * (torch.arange(n, dtype=torch.float64) + 0.5)
    matrix = torch.cos(torch.arange(n)[:, None] * angles)
    a = recurrence_operator([1.0] + [2.0] * (n - 1), [0.0] * n, [0.0] + [-1.0] * (n - 1))
    return matrix, a, as_tridiagonal(torch.diag(angles.cos()))


@pytest.mark.parametrize("n", [3, 4, 8, 16])
def test_the_cosine_transform(n):
    """Proposition 4 leaves the last row; the nodes of the DCT-II are the roots of T_n, so that this one is zero too."""
    matrix, a, b = cosine_transform(n)
    assert displacement_rank(matrix, a, b) == 0
    fewer_rows = TridiagonalOperator(a.subdiagonal[1:], a.diagonal[1:], a.superdiagonal[:-1], a.corners)
    assert displacement_rank(matrix[:-1], fewer_rows, b) == 1


@pytest.mark.parametrize("n", [3, 6])
def test_legendre_transforms_at_any_nodes(n):
    nodes = torch.linspace(-1, 1, n + 2, dtype=torch.float64)
    rows = [torch.ones_like(nodes), nodes]
    for i in range(1, n - 1):
        rows.append(((2 * i + 1) * nodes * rows[i] - i * rows[i - 1]) / (i + 1))
    a = recurrence_operator([(2 * i + 1) / (i + 1) for i in range(n)], [0.0] * n, [-i / (i + 1) for i in range(n)])
    assert displacement_rank(torch.stack(rows), a, as_tridiagonal(torch.diag(nodes))) == 1


@pytest.mark.parametrize("n", [3, 4, 8, 16])
def test_the_fourier_transform(n):
    places = torch.arange(n, dtype=torch.float64)
    roots = torch.polar(torch.ones_like(places), -2 * math.pi * places / n)
    matrix = roots[:, None] ** torch.arange(n)
    assert displacement_rank(matrix, torch.diag(roots), ShiftOperator(n, 0.0)) == 1
    assert displacement_rank(matrix, torch.diag(roots), ShiftOperator(n, 1.0)) == 0


@given(seeds, st.integers(3, 10))
@check
def test_acdc_layers(seed, n):
    """Proposition 5 has rank 2, between A T A⁻¹ and T; it is 0, since that of the cosine transform is."""
    cosine, t, _ = cosine_transform(n)
    a, d = (torch.diag(uniform(n, seed=seed + k)) for k in (0, 1))
    conjugated = as_tridiagonal(a @ t.to_dense() @ torch.linalg.inv(a))
    assert rank(a @ cosine @ d @ torch.linalg.inv(cosine), conjugated, t) == 0


# ---- wrong arguments ----


A, B, G1, H1 = shift(3, 1.0), shift(4, 1.0), gaussian(3, 1, seed=0), gaussian(4, 1, seed=0)
MISTAKES = [
    (krylov_matrix, (A, gaussian(3, seed=0), 0), ValueError, "columns must be a positive integer, but is 0"),
    (ldr_to_dense, (A, B, H1, H1), ValueError, r"G must be \(3, r\).*\(4, 1\)"),
    (ldr_matmul, (A, B, G1, H1, gaussian(3, seed=0)), ValueError, r"x must be \(..., 4\).*\(3,\)"),
    (ldr_matmul, (A, torch.eye(4), G1, H1, gaussian(4, seed=0), "tree"), ValueError, "these operators, got 'tree'"),
    (displacement_rank, (gaussian(3, 4, seed=0), gaussian(3, 4, seed=0), B), ValueError, "square"),
    (displacement_rank, (torch.eye(3) / 0, A, A), ValueError, "not finite"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_wrong_arguments_are_refused(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)
