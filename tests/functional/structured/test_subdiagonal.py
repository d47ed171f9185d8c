"""Products with LDR-SD matrices: all methods against the definition, over families of operators."""

import itertools
import math

import pytest
import torch

from lightning_struct.functional.structured.subdiagonal import (
    SUBDIAGONAL_METHODS,
    choose_subdiagonal_method,
    prepare_subdiagonal,
    subdiagonal_matmul,
    subdiagonal_to_dense,
)

FAMILIES = {
    "ones": lambda n, generator: torch.ones(n),
    "near one": lambda n, generator: 1 + 0.05 * torch.randn(n, generator=generator),
    "around one": lambda n, generator: 1 + 0.2 * torch.randn(n, generator=generator),
    "uniform": lambda n, generator: 0.5 + torch.rand(n, generator=generator),
    "decaying": lambda n, generator: torch.full((n,), 0.9),
    "normal": lambda n, generator: torch.randn(n, generator=generator),
    "smooth image": lambda n, generator: smooth_image(n),
    "zeros": lambda n, generator: torch.where(torch.rand(n, generator=generator) < 0.05, 0.0, 1.0),
}
CORNERS = [0.0, 0.7, -0.7, 1.0, -1.0]
SMALL = [(1, 1), (1, 4), (4, 1), (2, 2), (20, 20), (20, 7), (33, 64)]
LARGE = [(784, 600)]
NAMES = ("values", "A", "B", "G", "H", "x")


def smooth_image(n):
    """Of .3 to 1.05, row by row."""
    side = math.isqrt(n) + 1
    rows, columns = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    return (0.675 + 0.375 * torch.sin(3 * columns + 1) * torch.cos(4 * rows)).flatten()[:n]


def parameters(family, m, n, corner, rank=2, rows=3, seed=0):
    """The seven tensors of a product, in float64, with a corner of the other sign for B, and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    subdiagonals = [FAMILIES[family](size - 1, generator).double() for size in (m, n)]
    corners = [torch.tensor(value, dtype=torch.float64) for value in (corner, -corner)]
    G, H, x, u = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((m, rank), (n, rank), (rows, n), (rows, m))
    )
    return [subdiagonals[0], corners[0], subdiagonals[1], corners[1], G, H, x], u


def operator(subdiagonal, corner):
    matrix = torch.diag(subdiagonal, -1)
    return torch.cat([torch.cat([matrix[:1, :-1], matrix[:1, -1:] + corner], 1), matrix[1:]])


def definition(a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H, x):
    """x Mᵀ by the powers of the dense operators."""
    a, b = operator(a_subdiagonal, a_corner), operator(b_subdiagonal, b_corner)
    left, right = [G], [H]
    for _ in range(min(len(G), len(H)) - 1):
        left.append(a @ left[-1])
        right.append(b @ right[-1])
    return (x @ torch.cat(right, 1)) @ torch.cat(left, 1).T


def by_rows(*inputs):
    return inputs[6] @ subdiagonal_to_dense(*inputs[:6]).T


def values_and_gradients(function, inputs, u, dtype=torch.float64):
    """The product and the gradients of A, B, G, H and x, in float64; a corner is an entry of its operator."""
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    product = function(*inputs)
    gradients = torch.autograd.grad(product, inputs, u.to(dtype), allow_unused=True, materialize_grads=True)
    a, b = (torch.cat([gradients[i], gradients[i + 1][None]]) for i in (0, 2))
    return [tensor.double() for tensor in (product.detach(), a, b, *gradients[4:])]


def relative_errors(values, references):
    """Of a gradient that is zero, as with matrices of one row: relative to the values."""
    scales = [reference.norm() if reference.any() else references[0].norm() for reference in references]
    return {
        name: ((value - reference).norm() / scale).item()
        for name, value, reference, scale in zip(NAMES, values, references, scales, strict=True)
    }


def errors_of(method, reference, inputs, u, dtype=torch.float64):
    product = values_and_gradients(lambda *tensors: subdiagonal_matmul(*tensors, method=method), inputs, u, dtype)
    return relative_errors(product, values_and_gradients(reference, inputs, u))


def too_large(errors, tolerance):
    return {case: worst for case, worst in errors.items() if not max(worst.values()) <= tolerance}


def cases(shapes, corners):
    return [(family, m, n, corner) for family, (m, n), corner in itertools.product(FAMILIES, shapes, corners)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype"), [*((m, torch.float64) for m in ("auto", "tree")), ("auto", torch.float32)]
)
def test_small_matrices_are_the_definition(method, dtype):
    of = cases(SMALL, [0.7]) + cases([(5, 7)], CORNERS)
    errors = {case: errors_of(method, definition, *parameters(*case), dtype) for case in of}
    assert too_large(errors, 1e-10 if dtype == torch.float64 else 1e-5) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype", "tolerance"), [("tree", torch.float64, 1e-10), ("auto", torch.float32, 1e-5)], ids=str
)
def test_large_matrices_are_those_of_the_rows(method, dtype, tolerance):
    """Against the dense rows, which the small ones check."""
    of = cases(LARGE, [0.7])
    errors = {case: errors_of(method, by_rows, *parameters(*case, rank=1), dtype) for case in of}
    assert too_large(errors, tolerance) == {}


def test_the_rows_of_larger_matrices_are_the_definition():
    """More rows than are computed between two renewals of the copied columns."""
    inputs, u = parameters("uniform", 150, 170, 0.7, rank=1)
    errors = relative_errors(values_and_gradients(by_rows, inputs, u), values_and_gradients(definition, inputs, u))
    assert max(errors.values()) < 1e-12


def test_a_tree_of_several_levels():
    errors = errors_of("tree", by_rows, *parameters("normal", 2100, 40, 0.7, rank=1))
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize(
    "family, sizes, dtype, expected",
    [
        ("near one", (784, 784), torch.float32, "scaled"),
        ("near one", (600, 4096), torch.float32, "scaled"),
        ("near one", (1, 2), torch.float32, "scaled"),
        ("uniform", (784, 784), torch.float32, "scaled_float64"),
        ("uniform", (784, 784), torch.float64, "tree"),
        ("normal", (784, 784), torch.float32, "tree"),
        ("zeros", (100, 300), torch.float64, "tree"),
    ],
)
def test_auto_takes_the_fastest_method_that_keeps_the_digits(family, sizes, dtype, expected):
    inputs, _ = parameters(family, *sizes, 0.7)
    assert choose_subdiagonal_method(*(tensor.to(dtype) for tensor in inputs[:4])) == expected


def test_a_corner_that_dwarfs_the_subdiagonal_is_noticed():
    """A Z_w with a huge w: the scaled method would lose its digits though the subdiagonal is constant."""
    inputs, u = parameters("ones", 50, 50, 0.7)
    inputs[0], inputs[2] = 1e-6 * inputs[0], 1e-6 * inputs[2]
    assert max(errors_of("auto", definition, inputs, u, torch.float32).values()) < 1e-5


@pytest.mark.parametrize("method", SUBDIAGONAL_METHODS)
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (2, 2), (1, 2)])
def test_first_and_second_derivatives(method, shape):
    inputs, _ = parameters("uniform", *shape, 0.7, rank=1, rows=1)
    # torch 2.6 cannot check derivatives to a tensor without elements, as the subdiagonal of a 1 x 1 operator is.
    inputs = [tensor.requires_grad_(tensor.numel() > 0) for tensor in inputs]

    def product(*tensors):
        return subdiagonal_matmul(*tensors, method=method)

    assert torch.autograd.gradcheck(product, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(product, inputs, fast_mode=True)


@pytest.mark.parametrize("method", SUBDIAGONAL_METHODS)
def test_derivatives_by_torch_func(method):
    """Forward over reverse, and per-sample gradients."""
    inputs, _ = parameters("uniform", 4, 5, 0.7, rank=1, rows=2)

    def loss(function, *tensors):
        return function(*tensors).sin().sum()

    def product(*tensors):
        return subdiagonal_matmul(*tensors, method=method)

    for argument in (0, 1, 4, 6):
        of_method, of_definition = (
            torch.func.jacfwd(torch.func.jacrev(lambda *tensors, f=f: loss(f, *tensors), argument), argument)(*inputs)
            for f in (product, definition)
        )
        torch.testing.assert_close(of_method, of_definition)
    gradient = torch.func.grad(lambda *tensors: loss(product, *tensors), argnums=(0, 3, 5))
    together = torch.func.vmap(gradient, in_dims=(None,) * 6 + (0,))(*inputs)
    for value, expected in zip(
        together, zip(*(gradient(*inputs[:6], row) for row in inputs[6]), strict=True), strict=True
    ):
        torch.testing.assert_close(value, torch.stack(expected))


@pytest.mark.parametrize("method", SUBDIAGONAL_METHODS)
def test_vmap_over_operators(method):
    inputs, _ = parameters("uniform", 4, 5, 0.7)
    stack = torch.stack([inputs[0], 2 * inputs[0]])
    product = torch.func.vmap(lambda a: subdiagonal_matmul(a, *inputs[1:], method=method))(stack)
    torch.testing.assert_close(product, torch.stack([definition(a, *inputs[1:]) for a in stack]))


@pytest.mark.parametrize("method", ["auto", *SUBDIAGONAL_METHODS])
@pytest.mark.parametrize("shape", [(20, 20), (30, 11)])
def test_the_prepared_matrix_computes_the_same(method, shape):
    inputs, _ = parameters("near one", *shape, 0.7)
    prepared = prepare_subdiagonal(*inputs[:6], method=method)
    x = torch.randn(2, 3, shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(prepared.matmul(x), definition(*inputs[:6], x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", SUBDIAGONAL_METHODS)
def test_the_prepared_matrix_keeps_the_dtype_of_x_and_computes_in_float32_at_least(method):
    inputs, _ = parameters("near one", 6, 6, 0.7)
    half = [tensor.bfloat16() for tensor in inputs]
    product = prepare_subdiagonal(*half[:6], method=method).matmul(half[6])
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product, definition(*(tensor.double() for tensor in half)).bfloat16())
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert subdiagonal_matmul(*(tensor.to(dtype) for tensor in inputs), method=method).dtype == dtype


@pytest.mark.parametrize(("position", "name"), enumerate(["a_subdiagonal", "a_corner", "b_subdiagonal", "b_corner"]))
def test_operators_of_wrong_shapes_are_refused(position, name):
    inputs, _ = parameters("ones", 5, 6, 0.7)
    inputs[position] = torch.ones(7)
    with pytest.raises(ValueError, match=rf"{name} must be of shape .*, not \(7,\)"):
        subdiagonal_matmul(*inputs)


@pytest.mark.covering(2)
@pytest.mark.parametrize("corner", [0.0, 1.0])
@pytest.mark.parametrize("growth", [0.09, -0.09])
def test_powers_of_one_operator_may_overflow_where_those_of_the_other_vanish(corner, growth):
    n, generator = 1024, torch.Generator().manual_seed(0)
    a, b = (
        (0.05 * torch.randn(n - 1, generator=generator) + trend).exp().requires_grad_() for trend in (growth, -growth)
    )
    corner = torch.tensor(corner)
    G, H, x = (torch.randn(size, generator=generator) for size in ((n, 1), (n, 1), (1, n)))
    expected = by_rows(*(t.detach().double() for t in (a, corner, b, corner, G, H, x)))
    inputs = (a, corner, b, corner, G, H, x)
    for product in (subdiagonal_matmul(*inputs, method="tree"), by_rows(*inputs)):
        assert (product - expected).norm() < 1e-5 * expected.norm()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(product.sum(), (a, b)))
