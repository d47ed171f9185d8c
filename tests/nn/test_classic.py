import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_struct.nn import (
    CauchyLike,
    Circulant,
    Fastfood,
    HankelLike,
    LDRSubdiagonal,
    LDRTridiagonal,
    LowRank,
    PrunedLinear,
    RandomizedHadamard,
    ToeplitzLike,
    VandermondeLike,
    add_adapters,
    freeze,
)
from tests.nn.layers import linear_of

SIZES = [(12, 12), (12, 7), (7, 12), (1, 1), (1, 3)]
GENERATED = [ToeplitzLike, HankelLike, VandermondeLike, CauchyLike, LowRank]


def test_toeplitz_hankel_vandermonde_and_cauchy_matrices_are_members():
    torch.manual_seed(0)
    diagonals = torch.randn(23, dtype=torch.float64)
    rows, columns = torch.arange(12)[:, None], torch.arange(12)
    toeplitz, hankel = diagonals[rows - columns + 11], diagonals[rows + columns]
    assert ToeplitzLike.from_linear(linear_of(toeplitz), 2, refine=0).approximation_error < 1e-10
    assert HankelLike.from_linear(linear_of(hankel), 2, refine=0).approximation_error < 1e-10
    for m, n in ((12, 12), (8, 12), (12, 8)):
        layer = VandermondeLike(n, m, dtype=torch.float64)
        vandermonde = layer.nodes[:, None] ** torch.arange(n)
        assert VandermondeLike.from_linear(linear_of(vandermonde), 1, refine=0).approximation_error < 1e-10
        layer = CauchyLike(n, m, dtype=torch.float64)
        cauchy = 1 / (layer.row_nodes[:, None] - layer.column_nodes)
        assert CauchyLike.from_linear(linear_of(cauchy), 1, refine=0).approximation_error < 1e-10


def test_toeplitz_like_matrices_with_rows_in_reverse_order_are_hankel_like_too():
    """As the authors' code has them, where HankelLike reverses columns."""
    torch.manual_seed(0)
    matrix = ToeplitzLike(12, 12, 2, dtype=torch.float64).to_dense().detach()
    assert HankelLike.from_linear(linear_of(matrix.flip(0)), 2, refine=0).approximation_error < 1e-10
    assert HankelLike.from_linear(linear_of(matrix), 2, refine=0).approximation_error > 0.1


FOUND = {  # sizes, arguments of the class, and how near its own matrix is found again
    **{cls: ([(12, 12), (9, 12), (12, 9)], {"rank": 2}, 1e-5) for cls in GENERATED},
    Circulant: (SIZES, {"refine": 0}, 1e-12),
    PrunedLinear: ([(9, 8)], {"parameters": 11, "refine": 0}, 1e-12),
    RandomizedHadamard: ([(16, 16), (12, 9), (5, 12)], {"terms": 3}, 1e-5),
    LDRSubdiagonal: ([(4, 6)], {"rank": 1}, 1e-3),
}


@pytest.mark.parametrize("cls", FOUND)
def test_a_member_of_the_class_is_found_again(cls):
    torch.manual_seed(0)
    all_sizes, given, error = FOUND[cls]
    for sizes in all_sizes:
        layer = cls(*sizes, **{key: value for key, value in given.items() if key != "refine"}, dtype=torch.float64)
        assert cls.from_linear(linear_of(layer.to_dense().detach()), **given).approximation_error < error, sizes


def test_one_term_of_hadamard_transforms_is_found_exactly():
    one = RandomizedHadamard(16, 16, dtype=torch.float64)
    found = RandomizedHadamard.from_linear(linear_of(one.to_dense().detach()))
    assert found.approximation_error < 1e-12
    torch.testing.assert_close(found.G, one.G)


@pytest.mark.parametrize(
    ("cls", "options"), [(LowRank, {"rank": 4}), (Circulant, {}), (PrunedLinear, {"parameters": 20})]
)
def test_a_start_is_the_best_where_that_is_known(cls, options):
    torch.manual_seed(0)
    linear = nn.Linear(12, 9)
    start, refined = (cls.from_linear(linear, refine=refine, **options) for refine in (0, 50))
    assert refined.approximation_error == pytest.approx(start.approximation_error, rel=1e-6)
    values = linear.weight.detach().abs().flatten() if cls is PrunedLinear else torch.linalg.svdvals(linear.weight)
    if cls is not Circulant:
        lost = values.sort(descending=True).values[20 if cls is PrunedLinear else 4 :]
        assert start.approximation_error == pytest.approx((lost.norm() / values.norm()).item())


@pytest.mark.parametrize("cls", [*GENERATED, LDRSubdiagonal, LDRTridiagonal, Fastfood])
def test_refinement_and_more_parameters_come_nearer(cls):
    torch.manual_seed(0)
    linear = nn.Linear(12, 9)
    options = [{}] if cls is Fastfood else [{"rank": rank} for rank in (1, 4)]
    errors = [cls.from_linear(linear, refine=5, **given).approximation_error for given in options]
    assert 1 > errors[0] and errors == sorted(errors, reverse=True)
    for given, error in zip(options, errors, strict=True):
        assert error <= cls.from_linear(linear, refine=0, **given).approximation_error * (1 + 1e-6)


def test_reference_initial_values_are_those_of_the_authors():
    torch.manual_seed(0)
    for cls in (*GENERATED, LDRSubdiagonal, LDRTridiagonal):
        layer = cls(400, 400, 4, init="reference")
        assert layer.G.std().item() == pytest.approx((4 * 400) ** -0.5, rel=0.1)
        assert layer.H.std().item() == pytest.approx((4 * 400) ** -0.5, rel=0.1)
    nodes = VandermondeLike(400, 400, init="reference").nodes
    assert nodes.abs().max() <= 0.7 and nodes.std().item() == pytest.approx(1.4 / math.sqrt(12), rel=0.1)
    outputs = Fastfood(1024, 1024, init="reference")(torch.randn(20, 1024))
    assert outputs.std().item() == pytest.approx(1024, rel=0.2)


def test_default_nodes():
    torch.testing.assert_close(VandermondeLike(5, 4).nodes, torch.tensor([0.75, 0.25, -0.25, -0.75]))
    square = CauchyLike(3, 3)
    assert square.row_nodes.tolist() == [0, 2, 4] and square.column_nodes.tolist() == [1, 3, 5]
    for m, n in ((6, 6), (4, 8), (8, 4), (3, 7), (1, 1)):
        layer = CauchyLike(n, m, init="reference")
        both = torch.cat([layer.row_nodes, layer.column_nodes])
        assert sorted(both.tolist()) == list(range(m + n))


@pytest.mark.parametrize(("m", "n"), [(10, 256), (256, 10), (60, 64), (1, 7)])
def test_cauchy_like_layer_that_is_not_square_reads_and_writes_all_features_alike(m, n):
    layer = CauchyLike(n, m, bias=False)
    nn.init.ones_(layer.G)
    nn.init.ones_(layer.H)
    nearest = layer.to_dense().detach().abs().amax(0 if m < n else 1)
    assert nearest.max() <= 2 and nearest.min() >= 2 / 3  # distances to the nearest node from 1/2 to 3/2


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [ToeplitzLike, HankelLike, Circulant])
def test_spectra_stay_in_float32_in_half_precision(cls, dtype):
    torch.manual_seed(0)
    layer, x = cls(1200, 1200).to(dtype), torch.randn(1, 1200, dtype=dtype)
    expected = layer(x).detach()
    with torch.no_grad():
        outputs = layer.eval()(x)
    assert outputs.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(outputs, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [VandermondeLike, CauchyLike])
def test_nodes_stay_distinct_in_half_precision(cls, dtype):
    # The integers up to 2,600 of a Cauchy-like matrix coincide in both dtypes.
    torch.manual_seed(0)
    layer = cls(1300, 1300)
    with torch.no_grad():
        for parameter in layer.parameters():  # numbers that are the same in half precision
            parameter.copy_(parameter.to(dtype))
    x = torch.randn(3, 1300).to(dtype)
    expected = layer(x.float()).to(dtype)
    for half in (layer.to(dtype), cls(1300, 1300, dtype=dtype)):
        half.load_state_dict(layer.state_dict())
        assert all(getattr(half, name).dtype == torch.float32 for name in cls.node_names)
        for training in (True, False):
            y = half.train(training)(x)
            assert y.dtype == dtype
            torch.testing.assert_close(y, expected)
    assert all(getattr(layer.double(), name).dtype == torch.float64 for name in cls.node_names)


def test_dealt_nodes_that_version_0_2_rounded_are_restored():
    dealt, layer = CauchyLike(300, 200, init="reference"), CauchyLike(300, 200)
    layer.load_state_dict({name: tensor.half() for name, tensor in dealt.state_dict().items()})
    for name in CauchyLike.node_names:
        assert torch.equal(getattr(layer, name), getattr(dealt, name))


@pytest.mark.parametrize("assign", [True, False])
def test_rounded_nodes_of_checkpoints_in_half_precision_are_restored(assign):
    layer, x = CauchyLike(300, 200).bfloat16(), torch.randn(3, 300).bfloat16()
    state = {name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}
    fresh = CauchyLike(300, 200).bfloat16()
    fresh.load_state_dict(state, assign=assign)
    assert torch.equal(fresh(x), layer(x)) and layer(x).isfinite().all()


def test_what_is_random_in_hadamard_terms_is_always_the_same_and_is_not_saved():
    first, second = (RandomizedHadamard(6, 4, terms=2, bias=False) for _ in range(2))
    for name in ("output_signs", "input_signs", "order"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.output_signs.tolist() == [[-1, -1, 1, 1], [1, -1, -1, 1]]
    assert list(first.state_dict()) == ["G"] and not torch.equal(first.G, second.G)
    assert not torch.equal(first.input_signs[0], first.input_signs[1])
    assert [sorted(order.tolist()) != order.tolist() for order in first.order] == [True, True]


def average_of(layer, decay=0.9):
    averaged = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    for _ in range(20):
        averaged.update_parameters(layer)
    return averaged.module.eval()


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_an_average_of_weights_leaves_the_order_of_hadamard_terms_as_it_is(decay):
    torch.manual_seed(0)
    layer, x = RandomizedHadamard(32, 32, terms=2).double(), torch.randn(5, 32, dtype=torch.float64)
    torch.testing.assert_close(average_of(layer, decay)(x), layer(x))
    adapted = add_adapters(nn.Sequential(nn.Linear(32, 32)), RandomizedHadamard).double()
    nn.init.normal_(adapted[0].update.adapter.G)
    torch.testing.assert_close(average_of(adapted, decay)(x), adapted(x))


PLACED = [Fastfood, partial(PrunedLinear, parameters=500)]


@pytest.mark.parametrize("factory", PLACED)
def test_places_that_were_averaged_and_rounded_are_refused(factory):
    torch.manual_seed(0)
    averaged = average_of(factory(32, 32))
    with torch.no_grad(), pytest.raises(ValueError, match="no longer holds distinct places.*use_buffers=False"):
        averaged(torch.randn(3, 32))
    with pytest.raises(ValueError, match="no longer holds distinct places"):
        freeze(averaged)
