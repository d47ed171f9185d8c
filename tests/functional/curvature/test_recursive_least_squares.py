"""P against the matrix whose inverse it is, in float64."""

import pytest
import torch
from torch import Tensor

from lightning_struct.functional.curvature.recursive_least_squares import (
    LARGEST_DIAGONAL,
    FullInverse,
    InverseAutocorrelation,
    LowRankInverse,
    RankOneInverse,
    SquareRootInverse,
    gain,
)

GROUPS, SIZE, CONSTANTS, RATIO = 2, 6, 1, 0.3


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def update(inverse: InverseAutocorrelation, mean: Tensor, steps: float = 1.0) -> None:
    weight = RATIO * steps
    applied = inverse.apply(mean)
    inverse.update_(mean, applied, gain(mean, applied, weight, inverse.forgetting), weight)


def dense(inverse: InverseAutocorrelation, size: int = SIZE, groups: int = GROUPS) -> Tensor:
    rows = torch.eye(size, dtype=torch.float64).expand(groups, -1, -1)
    return torch.cat(inverse.multiply(rows[..., :-CONSTANTS], rows[..., -CONSTANTS:]), 2)


def identities() -> list[InverseAutocorrelation]:
    like = torch.zeros((), dtype=torch.float64)
    return [
        FullInverse.identity(GROUPS, SIZE, like),
        SquareRootInverse.identity(GROUPS, SIZE, like, 0.95),
        RankOneInverse.identity(GROUPS, SIZE, like),
        LowRankInverse.identity(GROUPS, SIZE, like, 2),
    ]


NAMES = ["full", "square_root", "rank1", "low_rank"]


@pytest.mark.parametrize("steps", [1.0, 7.0])
def test_full_form_is_the_inverse_of_the_sum(steps: float) -> None:
    inverse = FullInverse.identity(GROUPS, SIZE, draws())
    means = draws(50, GROUPS, SIZE)
    for mean in means:
        update(inverse, mean, steps)
    expected = torch.eye(SIZE).double() + RATIO * steps * torch.einsum("sgi,sgj->gij", means, means)
    torch.testing.assert_close(inverse.P, torch.linalg.inv(expected), rtol=0, atol=1e-12)


def test_square_root_forgets() -> None:
    """While no diagonal entry reaches its bound: A = λˢI + k Σ λˢ⁻ⁱ x̄x̄ᵀ."""
    forgetting = 0.9
    inverse = SquareRootInverse.identity(1, 2, draws(), forgetting)
    means = torch.tensor([[2.0, 0.3], [-0.2, 1.5]], dtype=torch.float64).repeat(10, 1)[:, None]
    expected = torch.eye(2, dtype=torch.float64)
    for mean in means:
        update(inverse, mean, steps=5)
        expected = forgetting * expected + 5 * RATIO * torch.outer(mean[0], mean[0])
        assert (torch.linalg.inv(expected).diagonal() < LARGEST_DIAGONAL).all()
    torch.testing.assert_close(inverse.root @ inverse.root.mT, torch.linalg.inv(expected)[None], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("forgetting", [0.99, 0.9])
def test_square_root_stays_bounded_and_positive_definite(dtype: torch.dtype, forgetting: float) -> None:
    inverse = SquareRootInverse.identity(1, 8, draws(dtype=dtype), forgetting)
    common = draws(8, seed=1, dtype=dtype)
    for mean in draws(1500, 8, dtype=dtype):
        mean = common + 0.1 * mean
        mean[5:] = 0  # no input ever
        update(inverse, mean[None])
    matrix = (inverse.root @ inverse.root.mT)[0]
    assert torch.linalg.eigvalsh(matrix.double()).min() > 0
    assert matrix.abs().max() <= 1.001 * LARGEST_DIAGONAL
    torch.testing.assert_close(matrix[5:, 5:], LARGEST_DIAGONAL * torch.eye(3, dtype=dtype))


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_rank_one_form_is_the_inverse_with_the_mean_in_place_of_each_input(forgetting: float) -> None:
    inverse = RankOneInverse.identity(GROUPS, SIZE, draws(), forgetting)
    means, steps = draws(20, GROUPS, SIZE), [1.0 + i for i in range(20)]
    for mean, number in zip(means, steps, strict=True):
        update(inverse, mean, number)
    weights = torch.tensor([RATIO * n * forgetting ** (19 - i) for i, n in enumerate(steps)], dtype=torch.float64)
    mean = (weights[:, None, None] * means).sum(0) / weights.sum()
    expected = torch.eye(SIZE).double() + weights.sum() * mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(dense(inverse), torch.linalg.inv(expected), rtol=0, atol=1e-12)


def test_low_rank_form_keeps_the_largest_directions() -> None:
    """Means in a space of two dimensions, with little beside it."""
    low_rank, full = LowRankInverse.identity(1, 20, draws(), 2), FullInverse.identity(1, 20, draws())
    basis = draws(2, 20, seed=1)
    for factors, rest in zip(draws(200, 2, seed=2), draws(200, 20, seed=3), strict=True):
        mean = (factors @ basis + 1e-3 * rest)[None]
        update(low_rank, mean)
        update(full, mean)
    difference = dense(low_rank, 20, 1) - full.P
    assert torch.linalg.eigvalsh(full.P).min() > 0
    assert torch.linalg.matrix_norm(difference, 2).item() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_inputs_do_not_make_p_indefinite(dtype: torch.dtype) -> None:
    inverse = FullInverse.identity(1, 30, draws(dtype=dtype))
    for mean in 1e4 * draws(100, 1, 30, dtype=dtype).abs():
        update(inverse, mean)
    assert torch.linalg.eigvalsh(inverse.P.double()).min() > -1e-6
    assert (torch.linalg.vecdot(mean, inverse.apply(mean)) >= 0).all()


@pytest.mark.parametrize("inverse", identities(), ids=NAMES)
def test_apply_is_the_product_with_one_vector(inverse: InverseAutocorrelation) -> None:
    for mean in draws(5, GROUPS, SIZE):
        update(inverse, mean)
    vector = draws(GROUPS, SIZE, seed=3)
    expected = torch.einsum("gij,gj->gi", dense(inverse), vector)
    torch.testing.assert_close(inverse.apply(vector), expected, rtol=0, atol=1e-12)


def test_gain_is_defined_with_the_old_inverse() -> None:
    inverse, mean = FullInverse.identity(1, 3, draws()), torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.float64)
    assert gain(mean, inverse.apply(mean), 0.5, 0.9).item() == pytest.approx(0.9 + 0.5 * 9)


@pytest.mark.slow
def test_p_stays_symmetric_and_positive_definite_over_5000_updates_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    used = torch.rand(48, generator=generator) > 0.3  # some inputs are always zero, as the border of digits
    patterns = torch.rand(16, 48, generator=generator) * used
    means = torch.rand(5_000, 8, 16, generator=generator).mean(1) @ patterns / 4
    inverse = FullInverse.identity(1, 49, means)
    for mean in torch.nn.functional.pad(means, (0, 1), value=1.0)[:, None]:
        update(inverse, mean)
    eigenvalues = torch.linalg.eigvalsh(inverse.P[0].double())
    assert (inverse.P - inverse.P.mT).abs().max() <= 1e-8
    assert 0 < eigenvalues.min() and eigenvalues.max() <= 1.001
