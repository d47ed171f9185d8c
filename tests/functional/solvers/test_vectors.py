import pytest
import torch

from lightning_struct.functional.vectors import dot, inner, norm
from tests.cases import gaussian


@pytest.mark.parametrize("shape", [(0,), (), (1,), (1023,), (1024,), (1025,), (3, 1000), (2, 3, 4)], ids=str)
def test_inner_product_of_any_shape_around_the_size_of_a_block(shape: tuple[int, ...]) -> None:
    left, right = gaussian(*shape, seed=0), gaussian(*shape, seed=1)
    torch.testing.assert_close(inner(left, right), (left * right).sum(), rtol=1e-13, atol=1e-13)


def test_inner_product_of_tensors_with_other_strides() -> None:
    left, right = gaussian(50, 60, seed=0).t(), gaussian(60, 50, seed=1)
    torch.testing.assert_close(inner(left, right), (left * right).sum(), rtol=1e-13, atol=1e-13)


def test_inner_product_of_many_float32_numbers_is_better_than_a_float32_sum() -> None:
    vector = gaussian(200_000, seed=0).float()
    exact = vector.double().square().sum().item()
    product = inner(vector, vector)
    assert product.dtype == torch.float64
    assert product.item() == pytest.approx(exact, rel=5e-9)


def test_inner_product_has_the_precision_of_its_tensors_under_autocast() -> None:
    left, right = gaussian(2500, seed=0).float(), gaussian(2500, seed=1).float()
    expected = inner(left, right)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert inner(left, right) == expected


def test_norm_is_that_of_all_parts() -> None:
    parts = [gaussian(1500, seed=0), gaussian(2, 3, seed=1)]
    assert norm(parts).item() == pytest.approx(torch.cat([p.reshape(-1) for p in parts]).norm().item(), rel=1e-14)


@pytest.mark.parametrize("scale", [1.0, 1e-20], ids=["float32", "float64"])
def test_an_inner_product_of_parts_is_not_lost_in_float32(scale: float) -> None:
    left, right = ([scale * gaussian(5, seed=seed).float() for seed in range(first, 30, 2)] for first in (0, 1))
    exact = sum((a.double() @ b.double()).item() for a, b in zip(left, right, strict=True))
    assert dot(left, right).item() == pytest.approx(exact, rel=1e-6)
