"""``from_linear`` of the classes with learned operators: what it finds of the matrices that they contain."""

import pytest
import torch

from lightning_struct.nn import LDRSubdiagonal, LDRTridiagonal
from lightning_struct.nn.approximation import BalancedCoordinates, leading_factors
from tests.nn.layers import linear_of

CLASSES = [LDRSubdiagonal, LDRTridiagonal]


def hippo(name, n):
    """The matrix A of HiPPO's operators (Gu et al., arXiv 2008.07669, appendices D.1 to D.3), without its sign."""
    row, column = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    scale = ((2 * row + 1) * (2 * column + 1)).sqrt()
    below = torch.ones(n, n, dtype=torch.float64).tril(-1)
    return {
        "LegS": below * scale + torch.diag(column + 1),
        "LegT": torch.where(row >= column, 1.0, (-1.0) ** (row - column)) * scale,
        "LagT": below + torch.eye(n, dtype=torch.float64) / 2,
    }[name]


def perturbed(cls, n, rank, deviation=0.1, **options):
    """A layer whose operators are not shifts."""
    torch.manual_seed(0)
    layer = cls(n, n, rank=rank, bias=False, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name not in "GH":
                parameter.add_(deviation * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize(("n", "corner"), [(32, "learned"), (256, "zero")])
@pytest.mark.parametrize("rank", [1, 3])
def test_members_of_ldr_sd_are_found_by_least_squares_alone(n, corner, rank):
    member = perturbed(LDRSubdiagonal, n, rank, corner=corner)
    found = LDRSubdiagonal.from_linear(linear_of(member.to_dense()), rank=rank, corner=corner, refine=0)
    assert found.approximation_error < 1e-9


@pytest.mark.covering(2)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("n", [32, 128])
@pytest.mark.parametrize(("name", "rank"), [("LegT", 2), ("LagT", 1)])
def test_scaled_toeplitz_matrices_of_hippo_are_members(cls, n, name, rank):
    found = cls.from_linear(linear_of(hippo(name, n)), rank=rank, refine=0)
    assert found.approximation_error < 1e-9


@pytest.mark.slow
def test_the_scaled_legendre_matrix_of_hippo_is_near():
    found = LDRTridiagonal.from_linear(linear_of(hippo("LegS", 16)), rank=2)
    assert found.approximation_error < 2e-3


@pytest.mark.parametrize("pad", [None, "square"])
@pytest.mark.parametrize("cls", CLASSES)
def test_balanced_coordinates_are_another_way_to_write_the_matrix(cls, pad):
    torch.manual_seed(0)
    layer = cls(9, 6, rank=2, pad=pad, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    expected = layer.to_dense().detach()
    assert BalancedCoordinates.are_exact_for(layer)
    coordinates = BalancedCoordinates(layer)
    torch.testing.assert_close(coordinates.to_dense(), expected)
    with torch.no_grad():
        for variable in coordinates.variables:
            variable.mul_(1 + 0.1 * torch.rand_like(variable))
        moved = coordinates.to_dense()
        for parameter in layer.parameters():
            parameter.add_(1)
    coordinates.write_back()
    assert not torch.allclose(moved, expected)
    torch.testing.assert_close(layer.to_dense(), moved)


def test_a_layer_whose_operators_have_zeros_is_refined_all_the_same():
    weight = torch.zeros(8, 8, dtype=torch.float64)
    weight[0] = 1.0
    assert LDRSubdiagonal.from_linear(linear_of(weight), refine=20).approximation_error < 1e-6


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("weight", [torch.zeros(4, 4), torch.ones(1, 1), torch.tensor([[1.0, 2.0, 3.0]]), torch.eye(3)])
def test_weights_without_a_typical_structure_are_members_too(cls, weight):
    assert cls.from_linear(linear_of(weight.double()), refine=0).approximation_error < 1e-12


def test_leading_factors_of_large_matrices_are_as_near_as_the_singular_vectors():
    torch.manual_seed(0)
    values = 0.9 ** torch.arange(600, dtype=torch.float64)
    U, V = (torch.linalg.qr(torch.randn(size, 600, dtype=torch.float64)).Q for size in (620, 600))
    G, H = leading_factors(U * values @ V.T, rank=3)
    error = (U * values @ V.T - G @ H.T).norm()
    assert error < 1.001 * values[3:].norm()
    torch.testing.assert_close(G.T @ G, H.T @ H)
