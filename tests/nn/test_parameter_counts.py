"""Every count that the paper prints, with the head where it has one (hidden layers without bias)."""

from functools import partial

import pytest
from torch import nn

from lightning_struct.nn import (
    BlockStructured,
    CauchyLike,
    Circulant,
    Fastfood,
    HankelLike,
    LDRSubdiagonal,
    LDRTridiagonal,
    LowRank,
    PrunedLinear,
    StructuredLSTM,
    ToeplitzLike,
    VandermondeLike,
    reduced_hidden_units,
)

DATASETS = {"mnist_bg_rot": (784, 10), "mnist_noise": (784, 10), "cifar10": (1024, 10), "norb": (1024, 6)}
TABLE_1 = {
    "unstructured": (nn.Linear, (622506, 622506, 1058826, 1054726)),
    "ldr_td": (partial(LDRTridiagonal, rank=1), (14122, 14122, 18442, 14342)),
    "toeplitz_like": (partial(ToeplitzLike, rank=4), (14122, 14122, 18442, 14342)),
    "hankel_like": (partial(HankelLike, rank=4), (14122, 14122, 18442, 14342)),
    "vandermonde_like": (partial(VandermondeLike, rank=4), (14122, 14122, 18442, 14342)),
    "low_rank": (partial(LowRank, rank=4), (14122, 14122, 18442, 14342)),
    "fastfood": (Fastfood, (10202, 10202, 13322, 9222)),
    "circulant": (Circulant, (8634, 8634, 11274, 7174)),
}


def trained(module):
    return sum(parameter.numel() for parameter in module.parameters())


def network(factory, size, classes, bias=False):
    return nn.Sequential(factory(size, size, bias=bias), nn.ReLU(), nn.Linear(size, classes))


@pytest.mark.parametrize("row", list(TABLE_1))
def test_table_1(row):
    factory, counts = TABLE_1[row]
    for (size, classes), count in zip(DATASETS.values(), counts, strict=True):
        assert trained(network(factory, size, classes)) == count, (size, classes)


OF_RANK_2 = [partial(c, rank=2) for c in (ToeplitzLike, HankelLike, VandermondeLike, LowRank)]


@pytest.mark.parametrize("factory", [partial(LDRSubdiagonal, rank=1), *OF_RANK_2])
def test_second_group_of_table_6(factory):
    counts = [trained(network(factory, size, classes)) for size, classes in DATASETS.values()]
    assert counts == [10986, 10986, 14346, 10246]
    ratios = [factory(size, size).compression_ratio for size, _ in DATASETS.values()]
    assert ratios == [196, 196, 256, 256]


RANKS = [1, 2, 4, 8, 12, 16]


@pytest.mark.parametrize(
    ("bias", "ours", "reduced"),
    [
        (False, [10986, 12554, 15690, 21962, 28234, 34506], [11126, 12714, 15890, 22242, 28594, 34946]),  # Table 8
        (True, [11770, 13338, 16474, 22746, 29018, 35290], [11935, 13525, 16705, 23065, 29425, 35785]),  # Table 9
    ],
)
def test_tables_8_and_9(bias, ours, reduced):
    for rank, count, count_reduced in zip(RANKS, ours, reduced, strict=True):
        layer = LDRSubdiagonal(784, 784, rank, bias=bias)
        assert trained(network(partial(LDRSubdiagonal, rank=rank), 784, 10, bias)) == count
        pruned = partial(PrunedLinear, parameters=layer.weight_parameters)
        assert trained(network(pruned, 784, 10, bias)) == count
        width = reduced_hidden_units(784, 10, count, bias=bias)
        assert trained(nn.Linear(784, width, bias)) + trained(nn.Linear(width, 10)) == count_reduced


def test_table_2():
    for rank, count in zip([1, 2, 4, 8, 16, 24], [2048, 3072, 5120, 9216, 17408, 25600], strict=True):
        separate = StructuredLSTM(128, 128, partial(LDRSubdiagonal, rank=rank), bias=False)
        padded = partial(LDRSubdiagonal, rank=rank, pad="square")
        joint = StructuredLSTM(128, 128, padded, gates="joint", bias=False)  # as in the authors' code
        hidden = 4 * 128 * 128
        assert trained(separate) - hidden == trained(joint) - hidden == count
    assert trained(StructuredLSTM(128, 128, nn.Linear, bias=False)) - hidden == 65536


@pytest.mark.parametrize(("factory", "counts"), [(ToeplitzLike, (393216, 393216)), (LDRSubdiagonal, (417792, 405504))])
def test_table_3(factory, counts):
    last = trained(factory(3072, 512, 16, bias=False, pad="square"))
    channels = trained(BlockStructured(3, 3, 1024, partial(factory, rank=16), bias=False))
    assert (channels + last, trained(factory(3072, 3072, 48, bias=False)) + last) == counts


@pytest.mark.parametrize(("m", "n"), [(30, 20), (20, 30)])
def test_rectangular_counts(m, n):
    operators = {LDRSubdiagonal: m + n, LDRTridiagonal: 3 * (m + n)}
    for cls in (LDRSubdiagonal, LDRTridiagonal, ToeplitzLike, HankelLike, VandermondeLike, CauchyLike, LowRank):
        assert cls(n, m, 3).weight_parameters == 3 * (m + n) + operators.get(cls, 0)
        assert cls(n, m, 3, pad="square").weight_parameters == 6 * 30 + operators.get(cls, 0) // (m + n) * 60
    assert LDRSubdiagonal(n, m, 3, corner="zero").weight_parameters == 4 * (m + n) - 2
    assert LDRTridiagonal(n, m, 3, corner="zero").weight_parameters == 6 * (m + n) - 4
    assert Circulant(n, m).weight_parameters == 30 and Fastfood(n, m).weight_parameters == m + n + 30


@pytest.mark.parametrize("budget", [0, -5])
def test_reduced_hidden_units_refuses_a_budget_that_is_none(budget):
    with pytest.raises(ValueError, match=f"parameters must be a positive integer, but is {budget}"):
        reduced_hidden_units(784, 10, budget)
