import itertools

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, vmap

from lightning_struct.functional.structured.operators import TridiagonalOperator
from lightning_struct.functional.structured.tridiagonal import (
    tridiagonal_matmul,
    tridiagonal_to_dense,
)

# Shorter and longer than a giant step, with blocks of one and of two lengths.
SHAPES = [(1, 1), (2, 2), (3, 3), (1, 5), (5, 2), (16, 16), (20, 20), (33, 33), (40, 17), (31, 100)]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parts(n: int, seed: int, scale: float = 0.3) -> list[Tensor]:
    return [scale * randn(length, seed=seed + k) for k, length in enumerate((n - 1, n, n - 1, 2))]


def arguments(m: int, n: int, r: int, batch: tuple[int, ...] = (3,)) -> list[Tensor]:
    """The parts of A, those of B', G, H and x."""
    return [*parts(m, 0), *parts(n, 10), randn(m, r, seed=20), randn(n, r, seed=21), randn(*batch, n, seed=22)]


def product(*arguments: Tensor) -> Tensor:
    a, b = TridiagonalOperator(*arguments[:4]), TridiagonalOperator(*arguments[4:8])
    return tridiagonal_matmul(a, b, *arguments[8:])


def definition(*arguments: Tensor) -> Tensor:
    """M by powers of dense matrices."""
    a, b = (TridiagonalOperator(*arguments[k : k + 4]).to_dense() for k in (0, 4))
    G, H = arguments[8:10]
    total, left, right = G @ H.mT, G, H
    for _ in range(min(len(a), len(b)) - 1):
        left, right = a @ left, b @ right
        total = total + left @ right.mT
    return total


def leaves(*arguments: Tensor) -> list[Tensor]:
    return [argument.clone().requires_grad_() for argument in arguments]


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max()) if reference.numel() else 0.0


@pytest.mark.parametrize("r", [1, 3])
def test_a_product_is_that_with_the_matrix_of_the_definition(r):
    for m, n in SHAPES:
        given = arguments(m, n, r)
        matrix = definition(*given)
        a, b = TridiagonalOperator(*given[:4]), TridiagonalOperator(*given[4:8])
        assert relative_error(product(*given), given[-1] @ matrix.mT) < 1e-12, (m, n)
        assert relative_error(tridiagonal_to_dense(a, b, *given[8:10]), matrix) < 1e-12, (m, n)


def test_gradients_are_those_of_the_definition():
    for m, n in SHAPES:
        given, expected = leaves(*arguments(m, n, 2)), leaves(*arguments(m, n, 2))
        output, reference = product(*given), expected[-1] @ definition(*expected).mT
        cotangent = randn(*reference.shape, seed=30)
        ours = torch.autograd.grad(output, given, cotangent, materialize_grads=True, allow_unused=True)
        theirs = torch.autograd.grad(reference, expected, cotangent, materialize_grads=True, allow_unused=True)
        for index, (value, target) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(value, target, rtol=1e-10, atol=1e-10, msg=f"argument {index} of {m} x {n}")


def test_derivatives_forwards_and_second_ones():
    given = leaves(*arguments(4, 3, 1, (2,)))
    assert torch.autograd.gradcheck(product, given, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, given, fast_mode=True)


def test_transforms_of_torch_func():
    given = arguments(6, 5, 2)

    def loss(x: Tensor, G: Tensor, diagonal: Tensor) -> Tensor:
        a = [given[0], diagonal, *given[2:4]]
        return product(*a, *given[4:8], G, given[9], x).square().sum()

    x, G, diagonal = given[-1], given[8], given[1]
    each = grad(loss, (1, 2))
    by_sample = vmap(each, (0, None, None))(x, G, diagonal)
    for expected, total in zip(each(x, G, diagonal), by_sample, strict=True):
        torch.testing.assert_close(total.sum(0), expected)
    ensemble = vmap(each, (None, 0, 0))(x, torch.stack([G, 2 * G]), torch.stack([diagonal, -diagonal]))
    for expected, member in zip(each(x, 2 * G, -diagonal), ensemble, strict=True):
        torch.testing.assert_close(member[1], expected)
    torch.testing.assert_close(hessian(loss, 2)(x, G, diagonal), jacrev(jacrev(loss, 2), 2)(x, G, diagonal))


FAMILIES = {
    "ones": lambda n: torch.ones(n, dtype=torch.float64),
    "ones and noise": lambda n: 1 + 0.05 * randn(n, seed=1),
    "more noise": lambda n: 1 + 0.2 * randn(n, seed=1),
    "uniform": lambda n: 0.5 + torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "constant": lambda n: torch.full((n,), 0.9, dtype=torch.float64),
    "normal": lambda n: randn(n, seed=1),
    "smooth": lambda n: 0.675 + 0.375 * torch.linspace(0, 20, n, dtype=torch.float64).sin(),
    "zeros": lambda n: torch.where(randn(n, seed=2).abs() < 0.06, 0.0, 1 + 0.05 * randn(n, seed=1)),
}


def float32_errors(m: int, n: int, family: str, corner: float) -> dict[str, float]:
    """Of the product and of the gradient to each argument, relative in the 2-norm."""
    arguments = [
        part
        for size in (m, n)
        for part in (
            FAMILIES[family](size - 1),
            0.01 * randn(size, seed=2),
            0.01 * randn(size - 1, seed=3),
            torch.full((2,), corner, dtype=torch.float64),
        )
    ]
    given = [*arguments, *(randn(size, 1, seed=size) / size**0.5 for size in (m, n)), randn(4, n, seed=7)]
    single, double = leaves(*(argument.float() for argument in given)), leaves(*(a.float().double() for a in given))
    output, reference = product(*single), product(*double)
    cotangent = randn(*reference.shape, seed=8).float()
    ours = torch.autograd.grad(output, single, cotangent)
    theirs = torch.autograd.grad(reference, double, cotangent.double())
    pairs = [(output.detach(), reference.detach()), *zip(ours, theirs, strict=True)]
    return {f"argument {k - 1}" if k else "product": float((a - b).norm() / b.norm()) for k, (a, b) in enumerate(pairs)}


@pytest.mark.parametrize(
    ("shape", "corners"),
    [
        ((64, 64), [0.0, -0.7, 1.0]),
        ((100, 300), [0.7, -1.0]),
        ((300, 100), [0.7, -1.0]),
        ((784, 784), [0.7]),  # the size of an image
    ],
    ids=str,
)
def test_float32_keeps_its_digits(shape, corners):
    for family, corner in itertools.product(FAMILIES, corners):
        errors = float32_errors(*shape, family, corner)
        assert max(errors.values()) < 2e-5, (family, corner, errors)


def test_half_precision_is_computed_in_float32():
    given = [argument.bfloat16() for argument in arguments(20, 33, 2)]
    output = product(*given)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, product(*(argument.float() for argument in given)).bfloat16())


def test_the_result_has_the_dtype_to_which_the_arguments_promote():
    given = arguments(4, 4, 1)
    assert product(*(argument.float() for argument in given[:-1]), given[-1].bfloat16()).dtype == torch.float32
    assert product(*(argument.float() for argument in given[:-1]), given[-1]).dtype == torch.float64


@pytest.mark.parametrize("flushed", [False, True])
def test_the_mode_of_denormal_numbers_is_left_as_it_was(flushed):
    if not torch.set_flush_denormal(flushed):
        pytest.skip("this processor has no such mode")
    try:
        product(*arguments(20, 20, 1))
        assert bool(torch.tensor([1e-40]) * 0.5 == 0) == flushed
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({8: randn(3, 1, seed=0)}, ValueError, r"G must be \(4, r\).*\(3, 1\)"),
        ({9: randn(5, 2, seed=0)}, ValueError, "columns, got 1 and 2"),
        ({8: randn(4, 1, seed=0) + 0j}, TypeError, "complex128"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    given = dict(enumerate(arguments(4, 5, 1))) | change
    with pytest.raises(error, match=message):
        product(*(given[k] for k in range(11)))
