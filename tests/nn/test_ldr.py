import copy

import pytest
import torch

from lightning_struct.functional import SubdiagonalOperator
from lightning_struct.nn import LDRSubdiagonal, LDRTridiagonal, ToeplitzLike
from lightning_struct.nn.approximation import stein_residual
from tests.cases import gaussian
from tests.nn.layers import linear_of

CLASSES = [LDRSubdiagonal, LDRTridiagonal]
SUBDIAGONAL_METHODS = ["scaled", "scaled_float64", "tree"]


def randomised(layer, spread=0.1):
    with torch.no_grad():
        for name in layer.weight_names[2:]:
            weight = getattr(layer, name)
            if weight is not None:
                weight.add_(spread * torch.randn_like(weight))
    return layer


STEEP = {  # a change of the operators, and the method from then on
    "none": (lambda layer: None, "scaled"),
    "a zero": (lambda layer: layer.subdiagonal_b[3].fill_(0.0), "tree"),
    "small entries": (lambda layer: layer.subdiagonal_a[20:30].fill_(1e-6), "tree"),
    "near to zero": (lambda layer: layer.subdiagonal_a[5].fill_(1e-6), "scaled_float64"),
    "a large corner": (lambda layer: layer.corner_a.fill_(1e9), "tree"),
}


@pytest.mark.parametrize("change", STEEP)
@pytest.mark.parametrize("n", [64, 256])
def test_the_method_follows_the_operators_from_the_next_product_on(n, change):
    """In training and in eval mode, compiled or not, and within torch.func."""
    torch.manual_seed(0)
    layer, x = LDRSubdiagonal(n, n), torch.randn(2, n)
    layer(x)
    change, method = STEEP[change]
    with torch.no_grad():
        change(layer)
    assert layer.method_in_use == method
    expected = x @ layer.to_dense().T
    tolerance = {"rtol": 0, "atol": 1e-4 * float(expected.detach().abs().max())}
    torch.testing.assert_close(layer(x), expected, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected, **tolerance)
    layer.train()
    parameters = dict(layer.named_parameters())
    gradient = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(parameters)["G"]
    theirs = torch.autograd.grad(expected.square().sum(), layer.G)[0]
    torch.testing.assert_close(gradient, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_checkpoints_of_version_0_3_are_loaded():
    torch.manual_seed(0)
    layer, resumed = (LDRSubdiagonal(256, 256) for _ in range(2))
    for choice in (torch.tensor([3, 2, 7]), torch.full((66,), -1), torch.ones(66).half()):
        resumed.load_state_dict(layer.state_dict() | {"choice": choice})
        assert list(resumed.state_dict()) == list(layer.state_dict())


@pytest.mark.parametrize("on_meta", [False, True])
def test_an_ensemble_is_mapped_over_by_a_method_for_any_operators(on_meta):
    torch.manual_seed(0)
    layers, x = [randomised(LDRSubdiagonal(256, 256)) for _ in range(3)], torch.randn(5, 256)
    with torch.no_grad():
        layers[1].subdiagonal_a[3] = 0.0
        layers[2].subdiagonal_b[20:30] = 1e-6
    expected = torch.stack([layer(x) for layer in layers])
    parameters, buffers = torch.func.stack_module_state(layers)
    base = copy.deepcopy(layers[0]).to("meta" if on_meta else "cpu")
    outputs = torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", CLASSES)
def test_operators_start_as_shifts_and_corners_are_trained_or_absent(cls):
    torch.manual_seed(0)
    for corner in ("learned", "zero"):
        layer = cls(8, 8, 2, corner=corner)
        assert (layer.subdiagonal_a == 1).all() and (layer.subdiagonal_b == 1).all()
        assert all(entries.sum() == 7 for entries in layer.operator_entries())  # all else is 0
        layer(torch.randn(3, 8)).square().sum().backward()
        corners = {name: p.grad for name, p in layer.named_parameters() if "corner" in name}
        assert len(corners) == (2 if corner == "learned" else 0)
        assert all(gradient.abs().sum() > 0 for gradient in corners.values())


@pytest.mark.parametrize("cls", CLASSES)
def test_toeplitz_like_matrix_is_a_member(cls):
    torch.manual_seed(0)
    weight = ToeplitzLike(12, 12, 2, dtype=torch.float64).to_dense().detach()
    assert cls.from_linear(linear_of(weight), 2, refine=0).approximation_error < 1e-10


@pytest.mark.parametrize(("m", "n"), [(4, 6), (6, 4), (5, 5)])
def test_residual_of_a_matrix_makes_it_again(m, n):
    a, b = (SubdiagonalOperator(gaussian(k - 1, seed=k), gaussian(1, seed=0)[0]) for k in (m, n))
    target = gaussian(m, n, seed=1)
    term = made = stein_residual(target, a, b)
    for _ in range(1, min(m, n)):
        term = a.matvec(b.matvec(term).mT).mT
        made = made + term
    torch.testing.assert_close(made, target)
