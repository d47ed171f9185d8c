import copy

import pytest
import torch
from torch import nn

from lightning_struct.functional import SubdiagonalOperator
from lightning_struct.nn import LDRSubdiagonal, LDRTridiagonal, ToeplitzLike
from lightning_struct.nn.approximation import stein_residual
from tests.cases import gaussian
from tests.nn.layers import linear_of

CLASSES = [LDRSubdiagonal, LDRTridiagonal]
SUBDIAGONAL_METHODS = ["scaled", "scaled_float64", "dense", "tree", "krylov"]


def randomised(layer, spread=0.1):
    with torch.no_grad():
        for name in layer.weight_names[2:]:
            weight = getattr(layer, name)
            if weight is not None:
                weight.add_(spread * torch.randn_like(weight))
    return layer


@pytest.mark.parametrize(
    ("cls", "methods"), [(LDRSubdiagonal, SUBDIAGONAL_METHODS), (LDRTridiagonal, ["recurrence", "giant_steps"])]
)
def test_all_methods_agree(cls, methods):
    torch.manual_seed(0)
    x = torch.randn(3, 40, dtype=torch.float64)
    layers = [cls(40, 30, 2, method=method, dtype=torch.float64) for method in methods]
    for layer in layers:
        layer.load_state_dict(randomised(layers[0], 0.05 if layer is layers[0] else 0.0).state_dict())
    expected = x @ layers[0].to_dense().T
    for layer, method in zip(layers, methods, strict=True):
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)
        assert layer.method_in_use == method
        with torch.no_grad():
            torch.testing.assert_close(layer.eval()(x), expected, rtol=1e-9, atol=1e-9)
        kept = {"scaled_float64": "scaled", "krylov": "dense"}  # the parameters are float64; the matrix itself is kept
        assert layer.method_in_use == kept.get(method, method)


@pytest.mark.parametrize("method", SUBDIAGONAL_METHODS)
def test_matrices_of_all_methods_are_frozen_and_exported(method):
    torch.manual_seed(0)
    layer = randomised(LDRSubdiagonal(100, 130, 2, method=method), 0.01).eval()
    x = torch.randn(2, 100)
    with torch.no_grad():
        y = layer(x)
    assert layer.method_in_use == ("dense" if method == "krylov" else method)
    frozen = layer.freeze()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    torch.testing.assert_close(frozen(x), y)
    torch.compiler.reset()
    exported = torch.export.export(frozen, (x,))
    assert not exported.constants  # all tensors are buffers
    torch.testing.assert_close(exported.module()(x), y)
    torch.testing.assert_close(frozen.double()(x.double()), y.double(), rtol=1e-4, atol=1e-5)


def test_automatic_choice_follows_the_operators():
    x = torch.randn(2, 512)
    layer = LDRSubdiagonal(512, 512)
    layer(x)
    assert layer.method_in_use == "scaled"
    with torch.no_grad():
        layer.subdiagonal_a[100] = 1e-9
    layer(x)  # not looked at yet
    assert layer.method_in_use == "scaled"
    layer.eval()
    layer.train()
    layer(x)
    assert layer.method_in_use == "tree"
    torch.testing.assert_close(layer(x), x @ layer.to_dense().T, rtol=1e-4, atol=1e-4)


def products_without_computing(layer, batch, count=1):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_struct.nn.ldr.subdiagonal_matmul", lambda *arguments: arguments[6].new_zeros(batch, 256)
        )
        for _ in range(count):
            layer(torch.zeros(batch, 256))
    return layer.method_in_use


def make_steep(layer):
    with torch.no_grad():
        layer.subdiagonal_b[3] = 1e-9


def test_automatic_choice_is_made_again_when_parameters_change_after_a_hundred_products():
    layer = LDRSubdiagonal(256, 256)
    assert products_without_computing(layer, 2) == "scaled"
    make_steep(layer)
    assert products_without_computing(layer, 2, 99) == "scaled"
    resumed = LDRSubdiagonal(256, 256)
    for at_step_end in (False, True):
        if at_step_end:
            make_steep(layer)
        resumed.load_state_dict(layer.state_dict())
        assert products_without_computing(resumed, 2) == ("tree" if at_step_end else "scaled")
    assert products_without_computing(layer, 2) == "tree"


def test_automatic_choice_is_made_for_each_magnitude_of_the_batch_and_stays():
    layer = LDRSubdiagonal(256, 256)
    assert products_without_computing(layer, 2) == "scaled"
    make_steep(layer)
    assert [products_without_computing(layer, batch) for batch in (64, 2, 33, 3)] == ["dense", "scaled"] * 2


def test_automatic_choice_is_made_again_when_a_zero_appears():
    layer = LDRSubdiagonal(256, 256)
    x = torch.randn(2, 256)
    layer(x)
    with torch.no_grad():
        layer.subdiagonal_b[3] = 0.0
    torch.testing.assert_close(layer(x), x @ layer.to_dense().T, rtol=1e-4, atol=1e-4)
    assert layer.method_in_use == "tree"


def test_choice_is_saved_so_that_a_resumed_run_takes_the_same_method():
    torch.manual_seed(0)
    layer = LDRSubdiagonal(256, 256)
    x = torch.randn(2, 256)
    layer(x)
    with torch.no_grad():
        layer.subdiagonal_a[5] = 1e-6  # from now on another method would be chosen
    resumed = LDRSubdiagonal(256, 256)
    resumed.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(resumed(x), layer(x)) and resumed.method_in_use == layer.method_in_use == "scaled"
    assert list(resumed.state_dict()) == list(LDRSubdiagonal(256, 256).state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(resumed.state_dict().values(), layer.state_dict().values(), strict=True)
    )
    fresh = LDRSubdiagonal(256, 256)
    fresh.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "choice"})
    fresh(x)
    assert fresh.method_in_use != "scaled"


def test_checkpoints_of_version_0_2_are_loaded():
    torch.manual_seed(0)
    layer, resumed = (LDRSubdiagonal(256, 256) for _ in range(2))
    state = layer.state_dict()
    state |= {"corner_a": torch.tensor(0.5), "corner_b": torch.tensor(0.25), "choice": torch.tensor([3, 2, 7])}
    resumed.load_state_dict(state)
    assert resumed.corner_a.tolist() == [0.5] and resumed.corner_b.tolist() == [0.25]
    resumed(torch.randn(2, 256))
    assert resumed.method_in_use == "tree"


UNREADABLE_CHOICES = {
    "averaged": lambda choice: (choice + choice) / 2,
    "cast": lambda choice: choice.half(),
    "another shape": lambda choice: choice[:7],
    "no such method": lambda choice: torch.where(choice < 0, 9, choice),
    "no such method below": lambda choice: torch.where(choice < 0, -2, choice),
    "no number of products": lambda choice: choice - 200,
    "of version 0.2, no such method": lambda choice: torch.tensor([5, 2, 7]),
    "no tensor": lambda choice: choice.tolist(),
}


@pytest.mark.parametrize("kind", UNREADABLE_CHOICES)
def test_a_choice_that_cannot_be_read_is_made_anew(kind):
    torch.manual_seed(0)
    layer, x = LDRSubdiagonal(12, 12), torch.randn(3, 12)
    expected, state = layer(x), layer.state_dict()
    state["choice"] = UNREADABLE_CHOICES[kind](state["choice"])
    loaded = LDRSubdiagonal(12, 12)
    loaded(x)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.choice, LDRSubdiagonal(12, 12).choice)
    assert torch.equal(loaded(x), expected)


def test_functional_call_takes_a_whole_state_dict():
    torch.manual_seed(0)
    layer, other, x = LDRSubdiagonal(12, 12), LDRSubdiagonal(12, 12), torch.randn(3, 12)
    expected = layer(x)
    for called, state in ((other, layer.state_dict()), (nn.Sequential(other), nn.Sequential(layer).state_dict())):
        for _ in range(2):
            assert torch.equal(torch.func.functional_call(called, state, (x,)), expected)


def test_under_function_transforms_the_choice_stays():
    layer = LDRSubdiagonal(64, 64)
    parameters = dict(layer.named_parameters())
    x = torch.randn(2, 64)
    for forwards in (0, 1):
        for _ in range(forwards):
            layer(x)
        gradient = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(parameters)
        expected = torch.autograd.grad((x @ layer.to_dense().T).square().sum(), layer.G)[0]
        torch.testing.assert_close(gradient["G"], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("on_meta", [False, True])
def test_an_ensemble_of_trained_layers_is_mapped_over_by_a_method_for_any_operators(on_meta):
    torch.manual_seed(0)
    layers, x = [randomised(LDRSubdiagonal(256, 256)) for _ in range(3)], torch.randn(5, 256)
    with torch.no_grad():
        layers[1].subdiagonal_a[3] = 0.0
        layers[2].subdiagonal_b[20:30] = 1e-6
    expected = torch.stack([layer(x) for layer in layers])  # by which each makes its choice
    assert layers[0].method_in_use == "scaled" != layers[1].method_in_use
    parameters, buffers = torch.func.stack_module_state(layers)
    base = copy.deepcopy(layers[0]).to("meta" if on_meta else "cpu")
    outputs = torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


def test_choice_refuses_parameters_that_are_not_finite():
    layer = LDRSubdiagonal(64, 64)
    with torch.no_grad():
        layer.subdiagonal_a[7] = torch.inf
    with pytest.raises(ValueError, match="parameter 'subdiagonal_a' .* NaN or infinite"):
        layer(torch.randn(2, 64))


def test_scaled_method_refuses_zeros_and_names_the_remedy():
    layer = LDRSubdiagonal(64, 64, method="scaled")
    with torch.no_grad():
        layer.subdiagonal_b[7] = 0.0
    with pytest.raises(ValueError, match='b_subdiagonal.*method="tree"'):
        layer(torch.randn(2, 64))


def test_log_ranges():
    layer = LDRSubdiagonal(5, 4)
    with torch.no_grad():
        layer.subdiagonal_a.fill_(-0.5)
        layer.subdiagonal_b.copy_(torch.tensor([1.0, 3.0, 3.0, 1.0]))
    a, b = layer.log_ranges()
    assert a < 1e-6 and b == pytest.approx(torch.tensor(3.0).log().item())
    with torch.no_grad():
        layer.subdiagonal_b[0] = 0.0
    assert layer.log_ranges()[1] == torch.inf


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


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLASSES)
def test_member_of_the_class_is_found_again(cls):
    torch.manual_seed(0)
    weight = randomised(cls(4, 6, dtype=torch.float64), 0.05).to_dense().detach()
    assert cls.from_linear(linear_of(weight), 1).approximation_error < 1e-3


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
