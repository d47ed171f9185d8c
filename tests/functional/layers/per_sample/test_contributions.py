import pytest
import torch
from torch import Tensor

from lightning_struct.functional.layers.per_sample import contributions as module_under_test
from lightning_struct.functional.layers.per_sample.contributions import (
    Contribution,
    Convolution,
    Dense,
    Lookup,
    Outer,
    Uncovered,
    squared_norms,
)
from tests.cases import gaussian

N, ROWS, COLUMNS = 4, 7, 3
ALL = slice(None)


def outer(positions: int, seed: int = 1, block: slice | None = None) -> Outer:
    height = len(range(*(block or ALL).indices(ROWS)))
    shape = None if block is None else (ROWS, COLUMNS)
    return Outer(
        gaussian(N, positions, COLUMNS, seed=seed), gaussian(N, positions, height, seed=seed + 1), shape, block
    )


def lookup(positions: int, seed: int = 1) -> Lookup:
    indices = torch.randint(0, ROWS, (N, positions), generator=torch.Generator().manual_seed(seed))
    return Lookup(indices, gaussian(N, positions, COLUMNS, seed=seed), ROWS)


def dense(seed: int = 1) -> Dense:
    return Dense(gaussian(N, ROWS, COLUMNS, seed=seed))


def convolution(seed: int = 1) -> Convolution:
    """Of a parameter (7, 3), with a kernel of one pixel."""
    images, cotangents = gaussian(N, COLUMNS, 5, seed=seed), gaussian(N, ROWS, 5, seed=seed + 1)
    return Convolution(images, cotangents, (1,), (1,), (1,), ((0, 0),), 1, (ROWS, COLUMNS))


def reference(uses: list[Contribution]) -> Tensor:
    """(n,), from the sums of the per-sample gradients."""
    return torch.stack([use.per_sample(ALL) for use in uses]).sum(0).flatten(1).square().sum(1)


def assert_exact(uses: list[Contribution]) -> None:
    torch.testing.assert_close(squared_norms(uses), reference(uses), rtol=1e-12, atol=1e-12)


def test_an_outer_product_fills_its_rows_of_the_parameter() -> None:
    use = outer(5, block=slice(2, 4))
    gradients = use.per_sample(ALL)
    assert gradients.shape == (N, ROWS, COLUMNS)
    torch.testing.assert_close(gradients[:, 2:4], torch.einsum("nto,nti->noi", use.cotangents, use.inputs))
    assert not gradients[:, :2].any() and not gradients[:, 4:].any()


def test_a_lookup_adds_up_the_cotangents_of_each_row() -> None:
    use = Lookup(torch.tensor([[1, 0, 1], [2, 2, 2]]), gaussian(2, 3, 2), 3)
    (a, b, c), others = use.cotangents[0], use.cotangents[1]
    expected = torch.stack([torch.stack([b, a + c, 0 * a]), torch.stack([0 * a, 0 * a, others.sum(0)])])
    torch.testing.assert_close(use.per_sample(ALL), expected)


USES: dict[str, list[Contribution]] = {
    "outer of one position": [outer(1)],
    "outer by Gram matrices": [outer(2)],
    "outer by the product": [outer(5)],
    "rows of an outer": [outer(5, block=slice(2, 4))],
    "lookup": [lookup(9)],
    "dense": [dense()],
    "convolution": [convolution()],
    "outers": [outer(1), outer(5, seed=3)],
    "lookups": [lookup(9), lookup(3, seed=3)],
    "denses": [dense(), dense(seed=3)],
    "convolutions": [convolution(), convolution(seed=3)],
    "rows of a packed projection": [outer(5, block=slice(0, 3)), outer(5, seed=3, block=slice(3, 7))],
    "rows, used twice": [outer(5, block=slice(0, 3)), outer(2, seed=3, block=slice(0, 3)), outer(3, 5, slice(3, 7))],
    "rows that overlap": [outer(5, block=slice(0, 4)), outer(5, seed=3, block=slice(3, 7))],
    "rows and the whole": [outer(5, block=slice(0, 4)), outer(5, seed=3)],
    "embedding tied to a decoder": [lookup(9), outer(5)],
    "embeddings tied to decoders": [outer(5), lookup(9), outer(1, seed=3), lookup(2, seed=3)],
    "lookup and rows": [lookup(9), outer(5, block=slice(0, 4))],
    "outer and dense": [outer(5), dense(seed=3)],
    "lookup, dense and convolution": [lookup(9), dense(seed=3), convolution(seed=5)],
}


@pytest.mark.parametrize("name", list(USES))
def test_squared_norms_of_all_uses_of_a_parameter(name: str) -> None:
    assert_exact(USES[name])


@pytest.mark.parametrize("name", list(USES))
def test_samples_may_be_taken_a_few_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "NUMBERS_AT_A_TIME", 3 * ROWS * COLUMNS)
    assert_exact(USES[name])
    for use in USES[name]:
        torch.testing.assert_close(use.total(), use.per_sample(ALL).sum(0), rtol=1e-12, atol=1e-12)


def test_uses_of_different_batches_are_uncovered() -> None:
    with pytest.raises(Uncovered, match="different sizes, 2 and 4"):
        squared_norms([Dense(torch.ones(2, 3)), Dense(torch.ones(4, 3)), Dense(torch.ones(4, 3))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_squared_and_summed_in_float32(dtype: torch.dtype) -> None:
    gradients = torch.full((2, 1000), 2.0**-14, dtype=dtype)
    norms = squared_norms([Dense(gradients)])
    torch.testing.assert_close(norms, torch.full((2,), 1000 * 2.0**-28))


def test_autocast_does_not_reach_the_norms() -> None:
    use = Outer(torch.rand(3, 5, 4), torch.rand(3, 5, 6))
    expected = squared_norms([use])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(squared_norms([use]), expected, rtol=0, atol=0)


def test_numbers_that_are_too_small_to_be_squared_count_as_zero() -> None:
    cotangents = torch.ones(2, 3, 4)
    cotangents[1, :, 1:] = 1e-30
    use = Outer(torch.ones(2, 3, 5), cotangents)
    torch.testing.assert_close(squared_norms([use]), torch.tensor([9.0 * 4 * 5, 9.0 * 5]))


# --- estimates -------------------------------------------------------------------------------------------------------


def large_outer() -> Outer:
    return Outer(gaussian(300, 40, 30), gaussian(300, 40, 30, seed=2))


def large_convolution() -> Convolution:
    images, cotangents = gaussian(300, 8, 9, 9), gaussian(300, 9, 9, 9, seed=2)
    return Convolution(images, cotangents, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)), 1)


ESTIMATED: dict[str, list[Contribution]] = {
    "outer": [large_outer()],
    "convolution": [large_convolution()],
}


@pytest.mark.parametrize("name", list(ESTIMATED))
def test_estimates_are_unbiased(name: str) -> None:
    uses = ESTIMATED[name]
    exact, generator = squared_norms(uses), torch.Generator().manual_seed(0)
    estimates = torch.stack([squared_norms(uses, probes=2, generator=generator) for _ in range(20)])
    ratios = (estimates / exact).mean(1)
    assert not torch.allclose(estimates[0], exact, rtol=1e-3)
    error = ratios.std() / 20**0.5
    assert (ratios.mean() - 1).abs() < 4 * error
    assert error < 0.02


def test_the_estimates_of_different_samples_are_independent() -> None:
    inputs, cotangents = gaussian(1, 40, 30).expand(300, -1, -1), gaussian(1, 40, 30, seed=2).expand(300, -1, -1)
    estimates = squared_norms([Outer(inputs, cotangents)], probes=2, generator=torch.Generator().manual_seed(0))
    assert len(estimates.unique()) == 300
    errors = estimates - squared_norms([Outer(inputs, cotangents)])
    assert errors.mean().abs() < 4 * errors.std() / 300**0.5


@pytest.mark.parametrize(
    "uses",
    [
        [outer(1)],
        [outer(5)],
        [dense()],
        [large_outer(), Dense(gaussian(300, 30, 30))],
    ],
    ids=["one position", "few columns", "dense", "mixed"],
)
def test_what_is_cheap_or_has_no_estimate_stays_exact(uses: list[Contribution]) -> None:
    assert torch.equal(squared_norms(uses, probes=4), squared_norms(uses))
