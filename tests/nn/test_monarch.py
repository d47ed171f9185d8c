import pytest
import torch

from lightning_struct.functional import hadamard_transform
from lightning_struct.functional.structured.monarch import monarch_matmul
from lightning_struct.nn import Monarch
from tests.nn.layers import linear_of


@pytest.mark.parametrize(
    ("m", "n", "options", "blocks", "rank", "count"),
    [
        (1024, 1024, {}, 32, 1, 2 * 1024 * 32),  # the paper's: 2 n √n
        (784, 784, {}, 28, 1, 2 * 784 * 28),
        (512, 512, {}, 16, 2, 2 * 512 * 32),
        (1024, 1024, {"blocks": 4}, 4, 64, 2 * 1024 * 256),  # of 4 blocks each: n² / 2
        (1024, 4096, {}, 32, 1, 5 * 1024 * 32),
        (10, 784, {}, 2, 2, 4 * 794),
        (97, 101, {"blocks": 8}, 8, 1, 8 * (104 + 104)),  # filled up
        (64, 64, {"blocks": 1, "rank": 3}, 1, 3, 3 * 128),
    ],
)
def test_counts(m, n, options, blocks, rank, count):
    layer = Monarch(n, m, **options)
    assert (layer.blocks, layer.rank, layer.weight_parameters) == (blocks, rank, count)


@pytest.mark.parametrize(
    ("m", "n", "options"),
    [(16, 16, {}), (13, 11, {"blocks": 3}), (12, 18, {"blocks": 3, "rank": 2}), (9, 14, {"blocks": 1, "rank": 3})],
)
def test_from_linear_gives_the_nearest_member(m, n, options):
    weight = torch.randn(m, n, dtype=torch.float64)
    layer = Monarch.from_linear(linear_of(weight), refine=0, **options)
    b = layer.blocks
    # Rows l, l + b, ... and the columns of block k make a block: of each one the first r singular values remain.
    columns = torch.arange(n).split(layer.R.shape[2])
    blocks = [weight[row::b][:, places] for row in range(b) for places in columns]
    lost = sum(torch.linalg.svdvals(block)[layer.rank :].square().sum() for block in blocks)
    assert layer.approximation_error == pytest.approx((lost.sqrt() / weight.norm()).item(), rel=1e-10)


@pytest.mark.parametrize("size", [64, 128, 512])
def test_hadamard_matrices_are_members(size):
    hadamard = hadamard_transform(torch.eye(size, dtype=torch.float64), normalize=True)
    assert Monarch.from_linear(linear_of(hadamard), refine=0).approximation_error < 1e-12


def test_kronecker_products_are_members():
    product = torch.kron(torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64))
    assert Monarch.from_linear(linear_of(product), blocks=4, rank=1, refine=0).approximation_error < 1e-12


@pytest.mark.parametrize(("left", "right"), [((2, 3, 0), (0, 2, 4)), ((2, 3, 0), (5, 0, 4))], ids=str)
def test_blocks_without_entries_are_named(left, right):
    with pytest.raises(ValueError, match="none of them 0, got"):
        monarch_matmul(torch.ones(left), torch.ones(right), torch.ones(7, right[0] * 4))
