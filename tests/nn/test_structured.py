"""What all structured classes promise, each over the cases of ``layers.py`` and against its dense matrix in float64."""

import copy
import json
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lightning_struct.functional import linearize, per_sample_gradient_norms
from lightning_struct.nn import (
    CauchyLike,
    Fastfood,
    LDRSubdiagonal,
    LDRTridiagonal,
    LowRank,
    Monarch,
    PrunedLinear,
    ToeplitzLike,
    freeze,
    jacobian_norms,
    layer_structure,
)
from tests.nn.layers import CLASSES, FACTORIES, NAMES, SIZES, Dense, linear_of, make, reference

of_each_case = pytest.mark.parametrize("name", NAMES)
of_each_class = pytest.mark.parametrize("name", CLASSES)
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def from_linear(name, linear, **options):
    return FACTORIES[name].func.from_linear(linear, **FACTORIES[name].keywords, **options)


def inputs(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@of_each_case
def test_derivatives_are_those_of_the_dense_matrix(name):
    for n, m in SIZES:
        layer = make(name, n, m)
        rows = 70 if 33 in (n, m) else 5
        x, cotangent = inputs(rows, n).requires_grad_(), inputs(rows, m, seed=2)
        tensors = [x, *layer.parameters()]
        ours = torch.autograd.grad((layer(x).sin() * cotangent).sum(), tensors, create_graph=True)  # of each one
        unused = {"allow_unused": True, "materialize_grads": True}  # operators, if a side of M is one
        loss = (reference(layer, x).sin() * cotangent).sum()
        theirs = torch.autograd.grad(loss, tensors, create_graph=True, **unused)
        close(ours, theirs)
        second = (torch.autograd.grad(sum(g.sin().sum() for g in of), tensors, **unused) for of in (ours, theirs))
        torch.testing.assert_close(*second, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("sizes", [(12, 12), (300, 200)])
@of_each_class
def test_gradients_have_the_strides_of_their_parameters(name, sizes):
    """DDP warns of others, in each run."""
    layer = make(name, *sizes, **({"rank": 1} if "rank" in FACTORIES[name].keywords else {}))
    layer(inputs(5, sizes[0])).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_several_gradients_at_once_are_those_one_after_the_other(name, training):
    torch.manual_seed(0)
    layer = FACTORIES[name](12, 7, dtype=torch.float64).train(training).requires_grad_(training)
    x = inputs(5, 12).requires_grad_()
    y, cotangents = layer(x), inputs(3, 5, 7)
    of = [x, *layer.parameters()] if training else [x]
    at_once = torch.autograd.grad(y, of, cotangents, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(y, of, cotangent, retain_graph=True) for cotangent in cotangents]
    close(at_once, tuple(torch.stack(gradients) for gradients in zip(*singly, strict=True)))


@of_each_case
def test_transforms_of_functions_give_what_they_give_for_the_dense_matrix(name):
    layer, x = make(name).eval(), inputs(5, 12)
    with torch.no_grad():
        layer(x)  # what is kept for this call must not be taken for the others
    weights = {key: parameter.detach() for key, parameter in layer.named_parameters()}
    tangents = {key: torch.randn_like(weight) for key, weight in weights.items()}
    v, results = torch.randn(5, 7, dtype=torch.float64), []
    for module, prefix in ((layer, ""), (Dense(layer), "layer.")):

        def run(weights, x, module=module, prefix=prefix):
            return functional_call(module, {prefix + key: weight for key, weight in weights.items()}, (x,))

        def loss(weights, x, run=run):
            return run(weights, x).square().sum()

        of_each_row = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
        linearization = linearize(run, weights, x)
        results.append((torch.func.jvp(run, (weights, x), (tangents, x)), of_each_row))
        results[-1] += (linearization.jvp(tangents), linearization.vjp(v))
    close(*results)


@pytest.mark.filterwarnings("ignore:these layers have no rule")
@of_each_case
def test_squared_norms_of_the_gradients_of_samples(name):
    layer, x = make(name), inputs(5, 12)
    with per_sample_gradient_norms(nn.Sequential(layer)) as norms:
        layer(x).square().sum().backward()
    alone = [torch.autograd.grad(reference(layer, row).square().sum(), list(layer.parameters())) for row in x]
    close(norms.squared_norms, torch.stack([sum(g.square().sum() for g in of) for of in alone]))


@of_each_class
def test_jacobian_norms_are_the_largest_singular_values_of_the_jacobian(name):
    layer = make(name, 5, 4)
    norms = jacobian_norms(layer, iterations=200 if name in ("fastfood", "randomized_hadamard") else 50)
    assert list(norms) == [key for key, _ in layer.named_parameters() if key != "bias"]
    for key, norm in norms.items():
        weight = {key: getattr(layer, key).detach()}
        J = torch.func.jacrev(lambda weight: functional_call(Dense(layer), weight, torch.eye(5).double()))(
            {f"layer.{key}": weight[key]}
        )
        largest = torch.linalg.matrix_norm(J[f"layer.{key}"].reshape(20, -1), 2).item()
        assert norm == pytest.approx(largest, rel=1e-3), key


@of_each_case
def test_dtypes(name):
    """Products in float32 and half precision are near to those in float64; autocast has the outputs of nn.Linear."""
    single, x = make(name).float(), inputs(3, 12).float()
    exact = reference(copy.deepcopy(single).double(), x.double()).detach()
    for training in (True, False):
        single.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(single(x).double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for y in (single(x), single(x.bfloat16())):
                    assert y.dtype == torch.bfloat16
                    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, M = single.train()(x).square().sum(), single.to_dense()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in single.parameters())
    close(M, single.to_dense())
    weights = list(single._weights().values())
    close(*(torch.autograd.grad(of.sin().sum(), weights) for of in (M, single.to_dense())))
    for dtype in (torch.float16, torch.bfloat16):
        layer, rows = copy.deepcopy(single).eval(), x.to(dtype)
        expected = reference(copy.deepcopy(single).double(), rows.double()).detach()
        tolerance = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
        for some in (rows, rows[:1]):
            with torch.no_grad():
                outputs = layer.to(dtype)(some)
            assert outputs.dtype == dtype
            torch.testing.assert_close(outputs.double(), expected[: len(some)], rtol=0, atol=tolerance)


def test_state_of_a_dense_layer_is_named_with_the_remedy():
    layer = nn.Sequential(make("ldr_sd"))
    with pytest.warns(UserWarning, match="those of a dense layer were saved: load these .* before replace_"):
        layer.load_state_dict(nn.Sequential(nn.Linear(12, 7)).state_dict(), strict=False)


@of_each_case
def test_the_structure_is_plain_data(name):
    layer = make(name)
    assert json.loads(json.dumps(layer_structure(layer))) == layer_structure(layer)
    assert repr(FACTORIES[name](12, 7)) == repr(layer)


@of_each_case
def test_wrong_inputs_are_named(name):
    layer = make(name).float().eval()
    for module in (layer, layer.train()):
        for _ in range(2):
            for shape in ((3, 7), (3, 11), (3, 13), ()):
                with pytest.raises(
                    ValueError, match=rf"takes inputs \(\.\.\., 12\), but .* shape \({str(shape)[1:-1]}\)"
                ):
                    module(torch.ones(shape))
            for dtype in (torch.int64, torch.bool, torch.complex64):
                with pytest.raises(TypeError, match=f"dtype {dtype}"):
                    module(torch.ones(3, 12, dtype=dtype))
            module(torch.ones(3, 12))  # after which the fastest form is kept
    with pytest.raises(TypeError, match=r"dtype torch.float64, its parameters have torch.float32"):
        layer(inputs(3, 12))


@of_each_case
def test_wrong_sizes_and_parameters_that_are_not_finite_are_named(name):
    for sizes, message in (((0, 4), "in_features .* 0"), ((4, -1), "out_features .* -1")):
        with pytest.raises(ValueError, match=message):
            FACTORIES[name](*sizes)
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(TypeError, match=f"real floating-point numbers, but dtype is {dtype}"):
            FACTORIES[name](12, 12, dtype=dtype)
    layer = make(name).eval()
    weight = layer.weight_names[0]
    with torch.no_grad():
        layer._parameters[weight].view(-1)[0] = torch.nan
        for call in (lambda: freeze(layer), lambda: layer(inputs(3, 12))):
            with pytest.raises(ValueError, match=f"parameter '{weight}' .* NaN or infinite"):
                call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@of_each_case
def test_initial_weights_keep_the_variance_of_the_input(name, dtype):
    options = {"parameters": 2000} if name == "pruned" else {}
    sizes = ((64, 64), (256, 256), (96, 200), (200, 96)) if dtype == torch.float32 else ((64, 64),)
    for n, m in sizes:
        torch.manual_seed(1)
        layers = [FACTORIES[name](n, m, dtype=dtype, **options) for _ in range(4)]
        with torch.no_grad():
            ratios = [layer(torch.randn(32, n, dtype=dtype)).float().var().item() for layer in layers]
        assert 0.5 < sum(ratios) / len(ratios) < 2.5, (n, m, ratios)
        assert {parameter.dtype for layer in layers for parameter in layer.parameters()} == {dtype}


@of_each_class
def test_a_stack_with_rectifiers_keeps_the_power_of_its_input(name):
    options, powers = {"parameters": 640} if name == "pruned" else {}, []
    for seed in range(9):
        torch.manual_seed(seed)
        x = torch.randn(16, 64)
        with torch.no_grad():
            for _ in range(10):
                x = math.sqrt(2) * CLASSES[name](64, 64, bias=False, **options)(x).relu()
        powers.append(x.square().mean())
    assert 0.1 < torch.stack(powers).median() < 10


@of_each_case
def test_parameters_are_drawn_from_the_seed_also_after_the_meta_device(name):
    layers = [FACTORIES[name](12, 7, device=device) for device in ("cpu", "meta")]
    for layer in layers:
        torch.manual_seed(0)
        layer.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(0)
    layers.append(FACTORIES[name](12, 7))
    for own, *others in zip(*(layer.state_dict().values() for layer in layers), strict=True):
        assert all(torch.equal(own, other) for other in others)
    weight = layers[0].weight_names[0]
    layers[0].reset_parameters()
    assert not torch.equal(layers[0]._parameters[weight], layers[1]._parameters[weight]) and (layers[0].bias == 0).all()


@of_each_case
def test_from_linear_is_near_to_the_weight_and_copies_the_rest(name):
    linear = nn.Linear(12, 7).eval()
    torch.manual_seed(5)
    layer = from_linear(name, linear, refine=3)
    drawn = torch.rand(3)
    torch.manual_seed(6)
    assert torch.equal(from_linear(name, linear, refine=3).to_dense(), layer.to_dense())  # the seed does not matter
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(layer.bias, linear.bias) and not layer.training
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in layer.parameters())
    error = (layer.to_dense() - linear.weight).norm() / linear.weight.norm()
    assert error <= 1 + 1e-6 and layer.approximation_error == pytest.approx(error.item(), rel=1e-4)
    linear.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        from_linear(name, linear)


@pytest.mark.parametrize("refine", [0, 2])
@of_each_case
def test_what_is_made_near_to_a_weight_is_never_further_from_it_than_zero(name, refine):
    torch.manual_seed(0)
    for weight in (torch.randn(40, 48), torch.zeros(40, 48), torch.zeros(40, 48).index_fill(0, torch.tensor(39), 1.0)):
        layer = from_linear(name, linear_of(weight), refine=refine)
        assert (layer.to_dense() - weight).norm() <= (1 + 1e-6) * weight.norm()
        assert layer.approximation_error <= 1 + 1e-6 if weight.any() else layer.approximation_error == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@of_each_case
def test_gpu_computes_what_the_cpu_computes(name):
    for sizes in SIZES[:3]:
        ours = make(name, *sizes)
        theirs, x = copy.deepcopy(ours).cuda(), inputs(5, sizes[0])
        for layer in (ours, theirs):
            layer(x.to(layer.bias.device)).square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad.cpu(), rtol=1e-8, atol=1e-9)
        with torch.no_grad():
            y = reference(ours, x)
            close(theirs.eval()(x.cuda()).cpu(), y)
            theirs.float().train()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                half = theirs(x.float().cuda())
            assert half.dtype == torch.bfloat16
            torch.testing.assert_close(half.double().cpu(), y, rtol=0.05, atol=0.05 * float(y.abs().max()))
    linear = nn.Linear(12, 7, device="cuda")
    assert from_linear(name, linear, refine=3).to_dense().device.type == "cuda"


@pytest.mark.parametrize(
    ("linear", "refine", "error", "message"),
    [
        (nn.Linear(4, 4), -1, ValueError, "^refine must be .* not negative, or None, but is -1"),
        (nn.Conv2d(3, 4, 1), 0, ValueError, r"has shape \(4, 3, 1, 1\): LowRank.from_linear takes nn.Linear; repl"),
        (nn.Linear(4, 3, dtype=torch.complex64), 0, TypeError, "is complex: LowRank.from_linear takes real ones"),
        (nn.Linear(4, 3, device="meta"), 0, ValueError, "on the meta device.*: load the weights .*, or take LowRank"),
    ],
)
def test_what_has_no_nearest_member_is_named(linear, refine, error, message):
    with pytest.raises(error, match=message):
        LowRank.from_linear(linear, rank=2, refine=refine)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (partial(ToeplitzLike, 8, 5, 6), r"rank must be at most min\(in_features, out_features\) = 5, but is 6"),
        (partial(CauchyLike, 8, 8, 0), "rank must be a positive integer, but is 0"),
        (partial(Fastfood, 8, 8, init="ones"), "init must be one of 'variance', 'reference', but is 'ones'"),
        (partial(PrunedLinear, 8, 8, 65), r"in_features \* out_features = 64, but is 65"),
        (partial(Monarch, 12, 7, blocks=8), "blocks must be at most min.* = 7, but is 8"),
        (partial(Monarch, 12, 7, blocks=3, rank=4), "rank must be at most 3, the smaller side of a block 3 x 4, but"),
        (partial(LDRSubdiagonal, 8, 8, corner="free"), "corner must be one of 'learned', 'zero', but is 'free'"),
        (partial(LDRTridiagonal, 8, 8, corner=True), "corner must be one of 'learned', 'zero', but is True"),
        (partial(LDRSubdiagonal, 8, 8, pad=True), "pad must be 'square' or None, but is True"),
    ],
)
def test_wrong_arguments_are_named(factory, message):
    with pytest.raises(ValueError, match=message):
        factory()


def test_frozen_parameters_have_no_jacobian_norms_and_a_dense_weight_has_one():
    layer, state = LowRank(7, 5), torch.get_rng_state()
    layer.H.requires_grad_(False)
    assert list(jacobian_norms(layer)) == ["G"] and torch.equal(torch.get_rng_state(), state)
    assert jacobian_norms(nn.Linear(4, 4)) == {"weight": 1.0}
    few, many = (jacobian_norms(make("ldr_sd", 5, 5), *iterations) for iterations in ((), (60,)))
    assert all(0.9 * many[key] < few[key] <= 1.001 * many[key] for key in many)
