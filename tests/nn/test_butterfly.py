import math

import pytest
import torch

from lightning_struct.functional import hadamard_transform
from lightning_struct.nn import Butterfly
from tests.nn.layers import linear_of


def test_frozen_layer_is_a_monarch_matrix():
    for units, numbers in ((1024, 2**16), (4096, 2**19)):
        frozen = Butterfly(units, units, bias=False).freeze()
        assert sum(buffer.numel() for buffer in frozen.buffers()) == numbers  # 3.2 and 5.3 times the parameters


@pytest.mark.parametrize(
    ("m", "n", "rank", "count"),
    [
        (1024, 1024, 1, 2 * 1024 * 10),
        (784, 784, 1, 2 * 1024 * 10),  # filled up to 1,024
        (10, 784, 1, 2 * 1024 * 10),
        (1024, 1024, 2, 8 * 1024 + 8 * 8 * 1024),  # 4 N in the first factor and in the last, 8 N in each other
        (2, 2, 3, 4),
        (1, 1, 1, 4),
    ],
)
def test_counts(m, n, rank, count):
    assert Butterfly(n, m, rank=rank, bias=False).weight_parameters == count


def test_orders_of_the_inputs():
    places = {order: Butterfly(8, 8, order=order).places.tolist() for order in ("fourier", "cosine")}
    assert places == {"fourier": [0, 4, 2, 6, 1, 5, 3, 7], "cosine": [0, 7, 4, 3, 2, 5, 6, 1]}


def test_scaling_multiplies_the_matrix():
    layer = Butterfly(16, 16, dtype=torch.float64)
    before = layer.to_dense().detach()
    torch.testing.assert_close(layer.scale_(3.0).to_dense(), 3 * before)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_from_linear_finds_a_member(rank):
    member = Butterfly(32, 32, rank=rank, order="fourier", bias=False, dtype=torch.float64)
    found = Butterfly.from_linear(linear_of(member.to_dense()), rank=rank, refine=0)
    assert (found.order, found.approximation_error < 1e-13) == ("fourier", True)


def test_from_linear_takes_the_order_that_is_given():
    member = Butterfly(32, 32, order="fourier", bias=False, dtype=torch.float64)
    found = Butterfly.from_linear(linear_of(member.to_dense()), order="natural", refine=0)
    assert (found.order, found.approximation_error > 0.1) == ("natural", True)


def transform(name, n):
    i, j = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    return {
        "Hadamard": hadamard_transform(torch.eye(n, dtype=torch.float64)),
        "Fourier, real": torch.cos(2 * math.pi * i * j / n),
        "Fourier, imaginary": -torch.sin(2 * math.pi * i * j / n),
        "Hartley": torch.cos(2 * math.pi * i * j / n) + torch.sin(2 * math.pi * i * j / n),
        "DCT-II": torch.cos(math.pi * i * (2 * j + 1) / (2 * n)),
        "DCT-IV": torch.cos(math.pi * (2 * i + 1) * (2 * j + 1) / (4 * n)),
        "DST-II": torch.sin(math.pi * (i + 1) * (2 * j + 1) / (2 * n)),
        "DST-IV": torch.sin(math.pi * (2 * i + 1) * (2 * j + 1) / (4 * n)),
    }[name]


@pytest.mark.parametrize("n", [32, 256])
@pytest.mark.parametrize(
    ("name", "rank", "order"),
    [
        ("Hadamard", 1, "natural"),
        ("Fourier, real", 2, "fourier"),
        ("Fourier, imaginary", 2, "fourier"),
        ("Hartley", 2, "fourier"),
        ("DCT-II", 2, "cosine"),
        ("DCT-IV", 2, "cosine"),
        ("DST-II", 2, "cosine"),
        ("DST-IV", 2, "cosine"),
    ],
)
def test_trigonometric_transforms_are_members(name, rank, order, n):
    found = Butterfly.from_linear(linear_of(transform(name, n)), rank=rank, refine=0)
    assert found.approximation_error < 1e-10
    assert found.order == order or name == "Hadamard"  # any order of its inputs has bits alone
