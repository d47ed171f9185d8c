import copy
import json
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_struct.nn import (
    Butterfly,
    CauchyLike,
    Fastfood,
    LDRSubdiagonal,
    LowRank,
    Monarch,
    PrunedLinear,
    ToeplitzLike,
    VandermondeLike,
    layer_structure,
)
from tests.nn.layers import FACTORIES, NAMES, linear_of

SIZES = [(12, 12), (12, 7), (7, 12)]


def make(name, in_features=12, out_features=7, **options):
    torch.manual_seed(0)
    layer = FACTORIES[name](in_features, out_features, **options)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer


def reference(layer, x):
    y = x @ layer.to_dense().T
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_arguments_may_be_integers_of_numpy(name):
    of, layer = FACTORIES[name], make(name)
    arguments = {key: np.int64(value) if isinstance(value, int) else value for key, value in of.keywords.items()}
    twin = of.func(np.int64(12), np.int64(7), **arguments)
    assert repr(twin) == repr(layer) and twin(torch.ones(12)).shape == (7,)
    assert json.loads(json.dumps(layer_structure(twin))) == layer_structure(layer)
    weights = sum(parameter.numel() for key, parameter in layer.named_parameters() if key != "bias")
    assert layer.weight_parameters == weights and layer.compression_ratio == 12 * 7 / weights


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_any_leading_shape_is_multiplied_by_the_dense_matrix(name, training):
    for in_features, out_features in SIZES:
        layer = make(name, in_features, out_features, bias=in_features == 12, dtype=torch.float64).train(training)
        assert layer.to_dense().shape == layer.weight.shape == (out_features, in_features)
        with torch.set_grad_enabled(training):
            for shape in ((), (3,), (2, 3), (0,), (2, 0, 3)):
                x = torch.randn(*shape, in_features, dtype=torch.float64)
                y = layer(x)
                assert y.shape == (*shape, out_features)
                torch.testing.assert_close(y, reference(layer, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_dense_matrix(name):
    for in_features, out_features in SIZES:
        layer = make(name, in_features, out_features, dtype=torch.float64)
        x = torch.randn(5, in_features, dtype=torch.float64, requires_grad=True)
        cotangent = torch.randn(5, out_features, dtype=torch.float64)
        tensors = [x, *layer.parameters()]
        ours = torch.autograd.grad(layer(x), tensors, cotangent)
        theirs = torch.autograd.grad(reference(layer, x), tensors, cotangent)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("in_features", "out_features"), [(33, 3), (3, 33), (33, 16)])
@pytest.mark.parametrize("name", NAMES)
def test_many_rows_give_what_they_give_one_by_one(name, in_features, out_features):
    layer = make(name, in_features, out_features, dtype=torch.float64)
    x = torch.randn(70, in_features, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(70, out_features, dtype=torch.float64)
    tensors = [x, *layer.parameters()]
    together, one_by_one = layer(x), torch.stack([layer(row) for row in x])
    torch.testing.assert_close(together, one_by_one, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad((y * cotangent).sum(), tensors) for y in (together, one_by_one))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("sizes", [(12, 12), (300, 200)])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_have_the_strides_of_their_parameters(name, sizes):
    """DDP warns of others, in each run."""
    factory = FACTORIES[name]
    options = {**factory.keywords, **({"rank": 1} if "rank" in factory.keywords else {})}
    layer = factory.func(*sizes, **options)
    layer(torch.randn(5, sizes[0])).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("sizes", [(12, 1), (1, 12), (1, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_gradient_also_where_a_side_is_one(name, sizes):
    """DDP waits for those that have none."""
    layer = FACTORIES[name].func(*sizes, **({"parameters": 1} if name == "pruned" else {}))
    for rows in (1, 64):
        layer.zero_grad()
        layer(torch.randn(rows, sizes[0])).square().sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name):
    layer = make(name, 4, 3, dtype=torch.float64) if name != "pruned" else make(name, 8, 6, dtype=torch.float64)
    x = torch.randn(2, layer.in_features, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x, *tensors):
        return torch.func.functional_call(layer, dict(zip(names, tensors, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(function, (x, *parameters))


@pytest.mark.parametrize("name", NAMES)
def test_function_transforms(name):
    layer = make(name, dtype=torch.float64).eval()
    x = torch.randn(5, 12, dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def run(parameters, x=x):
        return torch.func.functional_call(layer, parameters, (x,))

    with torch.no_grad():
        layer(x)  # what is kept for this call must not be taken for the others
    y, push_forward = torch.func.jvp(run, (parameters,), (tangents,))
    cotangent = torch.randn_like(y)
    (pull_back,) = torch.func.vjp(run, parameters)[1](cotangent)
    inner = sum((pull_back[name] * tangents[name]).sum() for name in parameters)
    torch.testing.assert_close((push_forward * cotangent).sum(), inner)
    gradients = torch.func.vmap(torch.func.grad(lambda p, x: run(p, x).square().sum()), (None, 0))(parameters, x)
    for sample in range(5):
        alone = torch.func.grad(lambda p, x: run(p, x).square().sum())(parameters, x[sample])
        for key in parameters:
            torch.testing.assert_close(gradients[key][sample], alone[key])


ALL_METHODS = FACTORIES | {
    method: partial(LDRSubdiagonal, rank=2, method=method) for method in ("scaled", "dense", "tree", "krylov")
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ALL_METHODS)
def test_several_gradients_at_once_are_those_one_after_the_other(name, training):
    torch.manual_seed(0)
    layer = ALL_METHODS[name](12, 7, dtype=torch.float64).train(training).requires_grad_(training)
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    y, cotangents = layer(x), torch.randn(3, 5, 7, dtype=torch.float64)
    inputs = [x, *layer.parameters()] if training else [x]
    at_once = torch.autograd.grad(y, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    singly = [torch.autograd.grad(y, inputs, cotangent, retain_graph=True) for cotangent in cotangents]
    torch.testing.assert_close(at_once, tuple(torch.stack(of) for of in zip(*singly, strict=True)))


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_the_dtype_that_linear_gives(name):
    layer = make(name)
    x = torch.randn(3, 12)
    for training in (True, False):
        layer.train(training)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(training):
            assert nn.Linear(12, 7)(x).dtype == layer(x).dtype == layer(x.bfloat16()).dtype == torch.bfloat16
            torch.testing.assert_close(layer(x).float(), reference(layer, x), rtol=0.05, atol=0.05)
    layer.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layer(x).square().sum()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_the_matrix_and_its_gradients_as_they_are(name):
    layer = make(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        M = layer.to_dense()
    expected = layer.to_dense()
    torch.testing.assert_close(M, expected)
    parameters = [parameter for name, parameter in layer.named_parameters() if name != "bias"]
    gradients, others = (torch.autograd.grad(of.sin().sum(), parameters) for of in (M, expected))
    torch.testing.assert_close(gradients, others)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_prepared_in_eval_mode_follows_the_parameters(name):
    layer = make(name).eval()
    other = make(name)
    x = torch.randn(3, 12)

    def nudge():
        layer._parameters[layer.weight_names[0]].add_(1.0)

    def swap_data():
        weight = layer._parameters[layer.weight_names[0]]
        weight.data = weight.data + 1.0

    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
        for change in (lambda: None, nudge, swap_data, lambda: layer.load_state_dict(other.state_dict()), layer.double):
            change()
            inputs = x.to(layer.bias.dtype)
            torch.testing.assert_close(layer(inputs), reference(layer, inputs))
            torch.testing.assert_close(layer(inputs), reference(layer, inputs))


@pytest.mark.parametrize("name", NAMES)
def test_eval_mode_keeps_nothing_that_gradients_need(name):
    layer = make(name).eval()
    x = torch.randn(3, 12)
    with torch.inference_mode():
        layer(x)
    layer(x).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, layer.to_dense().sum(0).expand(3, -1))


@pytest.mark.parametrize("name", NAMES)
def test_state_and_copies(name):
    layer = make(name).eval()
    x = torch.randn(3, 12)
    with torch.no_grad():
        before = layer(x)
        keys = list(layer.state_dict())
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert list(twin.state_dict()) == keys
            torch.testing.assert_close(twin(x), before)
        fresh = FACTORIES[name](12, 7)
        fresh.load_state_dict(layer.state_dict())
        torch.testing.assert_close(fresh.eval()(x), before)


@pytest.mark.parametrize("name", NAMES)
def test_frozen_layer_is_exported(name):
    layer = make(name)
    x = torch.randn(3, 12)
    frozen = layer.freeze()
    assert not list(frozen.parameters()) and frozen.in_features == 12
    torch.testing.assert_close(frozen(x), layer(x).detach(), rtol=1e-5, atol=1e-5)
    torch.compiler.reset()  # torch 2.6 counts the exports of one process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(nn.Sequential(frozen), (x,))
    torch.testing.assert_close(exported.module()(x), frozen(x))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert frozen(x).abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_frozen_layer_in_half_precision(name, dtype):
    layer = make(name).eval()
    x = torch.randn(3, 12, dtype=dtype)
    expected = reference(layer, x.float())
    frozen = layer.freeze()
    tolerance = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
    for module in (frozen.to(dtype), layer.to(dtype).freeze(), layer, nn.Sequential(layer)):
        for rows in (x, x[:1]):
            with torch.no_grad():
                outputs = module(rows)
            assert outputs.dtype == dtype
            torch.testing.assert_close(outputs.float(), expected[: len(rows)], rtol=0, atol=tolerance)
    exported = torch.export.export(frozen, (x,))
    torch.testing.assert_close(exported.module()(x), frozen(x), rtol=0, atol=tolerance)
    frozen.load_state_dict({key: tensor.to(dtype) for key, tensor in frozen.state_dict().items()})
    torch.testing.assert_close(frozen(x).float(), expected, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_frozen_layer_is_as_small_as_its_parameters_or_dense(name):
    torch.manual_seed(0)
    layer = FACTORIES[name](256, 256, bias=False)
    x = torch.randn(40, 256)
    with torch.no_grad():
        expected = x @ layer.to_dense().T
    for frozen in (layer.freeze(), layer.freeze(dense=True)):
        size = sum(buffer.numel() for buffer in frozen.state_dict().values())
        if frozen.state_dict().keys() == {"matrix_entries"}:
            assert torch.equal(frozen.weight, layer.to_dense()) and size == 256 * 256
        else:
            # The factors of a Butterfly are multiplied out to those of a Monarch matrix; randomised Hadamard transforms
            # have signs and orders besides.
            factor = {"butterfly": 8, "randomized": 4}.get(name.split("_")[0], 3)
            assert size <= factor * layer.weight_parameters
        for rows in (x, x[:1]):
            torch.testing.assert_close(frozen(rows), expected[: len(rows)], rtol=1e-4, atol=1e-4)
        assert frozen.state_dict().keys() == copy.deepcopy(frozen).state_dict().keys()
    assert frozen.state_dict().keys() == {"matrix_entries"}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_matrix_of_a_frozen_layer_has_the_dtype_of_the_layer(name, dense):
    """Also where the spectra are in float64, as of some operators that are near to a weight."""
    torch.manual_seed(0)
    of = FACTORIES[name]
    layer = of.func.from_linear(nn.Linear(54, 8), refine=0, **of.keywords)
    frozen = layer.freeze(dense=dense)
    assert frozen.weight.dtype == torch.float32 and frozen.weight.is_contiguous()
    torch.testing.assert_close(frozen.weight, layer.to_dense().detach(), rtol=1e-4, atol=1e-4)
    assert not dense or frozen.matrix_entries.is_contiguous()  # as safetensors asks for
    x = torch.randn(3, 54)
    torch.testing.assert_close(frozen(x), layer(x).detach(), rtol=1e-4, atol=1e-4)
    assert [frozen.to(dtype).weight.dtype for dtype in (torch.bfloat16, torch.float64)] == [
        torch.bfloat16,
        torch.float64,
    ]


@pytest.mark.parametrize("name", ["ldr_sd", "vandermonde_like", "randomized_hadamard", "butterfly"])
def test_state_of_a_layer_of_another_kind_is_named_with_the_remedy(name):
    dense, layer = nn.Sequential(nn.Linear(12, 7)), nn.Sequential(make(name).eval())
    frozen = nn.Sequential(layer[0].freeze())
    with pytest.warns(UserWarning, match="those of a dense layer were saved: load these .* before replace_"):
        layer.load_state_dict(dense.state_dict(), strict=False)
    with pytest.warns(UserWarning, match="frozen when it was saved: load .* into freeze"), pytest.raises(RuntimeError):
        layer.load_state_dict(frozen.state_dict())
    with pytest.warns(UserWarning, match="not frozen when it was saved: load .* freeze"), pytest.raises(RuntimeError):
        frozen.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_wrong_inputs_are_named(name):
    layer = make(name)
    with pytest.raises(ValueError, match=r"takes inputs \(\.\.\., 12\), but the input has shape \(3, 7\)"):
        layer(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"has shape \(\)"):
        layer(torch.tensor(1.0))
    with pytest.raises(TypeError, match="dtype torch.int64, its parameters have torch.float32"):
        layer(torch.ones(3, 12, dtype=torch.int64))
    with pytest.raises(TypeError, match="dtype torch.float64"):
        layer(torch.ones(3, 12, dtype=torch.float64))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_wrong_inputs_of_frozen_layers_are_named(name, dense):
    frozen = make(name).freeze(dense=dense)
    for _ in range(2):
        for columns in (7, 11, 13):
            with pytest.raises(ValueError, match=rf"takes inputs \(\.\.\., 12\), but .* has shape \(3, {columns}\)"):
                frozen(torch.randn(3, columns))
        with pytest.raises(ValueError, match=r"has shape \(\)"):
            frozen(torch.tensor(1.0))
        for dtype in (torch.int64, torch.bool, torch.complex64):
            with pytest.raises(TypeError, match=f"dtype {dtype}"):
                frozen(torch.ones(3, 12, dtype=dtype))
        frozen(torch.ones(3, 12))  # after which the fastest form is kept


@pytest.mark.parametrize("name", NAMES)
def test_wrong_sizes_are_named(name):
    for sizes, message in (
        ((0, 4), "in_features .* 0"),
        ((4, -1), "out_features .* -1"),
        ((4.0, 4), "in_features .* 4.0"),
    ):
        with pytest.raises(ValueError, match=message):
            FACTORIES[name](*sizes)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_are_not_finite_are_named(name):
    layer = make(name).eval()
    weight = layer.weight_names[0]
    with torch.no_grad():
        layer._parameters[weight].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=f"parameter '{weight}' .* NaN or infinite"):
        layer.freeze()
    with torch.no_grad(), pytest.raises(ValueError, match=f"parameter '{weight}' .* NaN or infinite"):
        layer(torch.randn(3, 12))


@pytest.mark.parametrize("name", NAMES)
def test_initial_weights_keep_the_variance_of_the_input(name):
    if name == "pruned":
        options = {"parameters": 2000}
    else:
        options = {}
    for sizes in ((64, 64), (1024, 1024), (96, 200), (200, 96)):
        torch.manual_seed(1)
        ratios = []
        for _ in range(4):
            layer = FACTORIES[name](*sizes, **options)
            with torch.no_grad():
                ratios.append(layer(torch.randn(32, sizes[0])).var().item())
        assert 0.5 < sum(ratios) / len(ratios) < 2, (sizes, ratios)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_drawn_in_half_precision(name, dtype):
    torch.manual_seed(0)
    layer = FACTORIES[name](64, 64, dtype=dtype)
    with torch.no_grad():
        outputs = layer(torch.randn(32, 64, dtype=dtype)).float()
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype} and 0.1 < outputs.var() < 10


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_drawn_from_the_seed(name):
    first, second = make(name), make(name)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    first.reset_parameters()
    weight = first.weight_names[0]
    assert not torch.equal(first._parameters[weight], second._parameters[weight]) and (first.bias == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_from_linear_copies_what_is_not_the_weight(name):
    linear = nn.Linear(12, 7).eval()
    layer = type(make(name)).from_linear(linear, refine=5, **FACTORIES[name].keywords)
    assert torch.equal(layer.bias, linear.bias) and not layer.training
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in layer.parameters())
    error = (layer.to_dense() - linear.weight).norm() / linear.weight.norm()
    assert layer.approximation_error == pytest.approx(error.item(), rel=1e-4)
    assert error < 1


@pytest.mark.parametrize("name", NAMES)
def test_from_linear_draws_no_random_numbers(name):
    linear = nn.Linear(12, 7, bias=False)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = type(make(name)).from_linear(linear, refine=3, **FACTORIES[name].keywords)
    torch.manual_seed(5)
    second = type(first).from_linear(linear, refine=3, **FACTORIES[name].keywords)
    assert first.bias is None and torch.equal(first.to_dense(), second.to_dense())
    torch.manual_seed(5)
    type(first).from_linear(linear, refine=3, **FACTORIES[name].keywords)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("refine", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_near_to_a_weight_is_never_further_from_it_than_zero(name, refine):
    torch.manual_seed(0)
    for weight in (torch.randn(40, 48), torch.zeros(40, 48), torch.zeros(40, 48).index_fill(0, torch.tensor(39), 1.0)):
        layer = type(make(name)).from_linear(linear_of(weight), refine=refine, **FACTORIES[name].keywords)
        assert (layer.to_dense() - weight).norm() <= (1 + 1e-6) * weight.norm()
        assert layer.approximation_error <= 1 + 1e-6 if weight.any() else layer.approximation_error == 0


@pytest.mark.parametrize("name", NAMES)
def test_from_linear_refuses_what_is_not_finite(name):
    linear = nn.Linear(12, 7)
    linear.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        type(make(name)).from_linear(linear, **FACTORIES[name].keywords)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_gpu_computes_what_the_cpu_computes(name):
    for in_features, out_features in SIZES:
        ours = make(name, in_features, out_features, dtype=torch.float64)
        theirs = copy.deepcopy(ours).cuda()
        x = torch.randn(5, in_features, dtype=torch.float64)
        for layer in (ours, theirs):
            layer(x.to(layer.bias.device)).square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad.cpu(), rtol=1e-8, atol=1e-9)
        with torch.no_grad():
            y = ours.eval()(x)
            torch.testing.assert_close(theirs.eval()(x.cuda()).cpu(), y, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(theirs.freeze()(x.cuda()).cpu(), y, rtol=1e-9, atol=1e-9)
            theirs.float().train()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                half = theirs(x.float().cuda())
            assert half.dtype == torch.bfloat16
            torch.testing.assert_close(half.double().cpu(), y, rtol=0.05, atol=0.05)
    linear = nn.Linear(12, 7, device="cuda")
    assert type(ours).from_linear(linear, refine=3, **FACTORIES[name].keywords).to_dense().device.type == "cuda"


@pytest.mark.parametrize(
    ("linear", "refine", "error", "message"),
    [
        (nn.Linear(4, 4), -1, ValueError, "^refine must be .* not negative, or None, but is -1"),
        (nn.Linear(4, 4), 0.5, ValueError, "^refine must be .* not negative, or None, but is 0.5"),
        (nn.Conv2d(3, 4, 1), 0, ValueError, r"has shape \(4, 3, 1, 1\): LowRank.from_linear takes nn.Linear; repl"),
        (nn.Linear(4, 3, dtype=torch.complex64), 0, TypeError, "is complex: LowRank.from_linear takes real ones"),
        (
            nn.Linear(4, 3, device="meta"),
            0,
            ValueError,
            "on the meta device.*: load the weights .*, or take LowRank",
        ),
    ],
)
def test_what_has_no_nearest_member_is_named(linear, refine, error, message):
    with pytest.raises(error, match=message):
        LowRank.from_linear(linear, rank=2, refine=refine)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(ToeplitzLike, 8, 5, 6), r"rank must be at most min\(in_features, out_features\) = 5, but is 6"),
        (partial(CauchyLike, 8, 8, 0), "rank must be a positive integer, but is 0"),
        (partial(VandermondeLike, 8, 8, True), "rank must be a positive integer, but is True"),
        (partial(Fastfood, 8, 8, init="ones"), "init must be one of 'variance', 'reference', but is 'ones'"),
        (partial(PrunedLinear, 8, 8, 65), r"in_features \* out_features = 64, but is 65"),
        (partial(PrunedLinear, 8, 8, 0), "parameters must be a positive integer, but is 0"),
        (partial(Butterfly, 12, 7, rank=0), "rank must be a positive integer, but is 0"),
        (partial(Butterfly, 12, 7, order="bits"), "order must be one of 'natural', 'fourier', 'cosine', but is 'bits'"),
        (partial(Monarch, 12, 7, blocks=8), "blocks must be at most min.* = 7, but is 8"),
        (partial(Monarch, 12, 7, blocks=0), "blocks must be a positive integer, but is 0"),
        (
            partial(Monarch, 12, 7, blocks=3, rank=4),
            "rank must be at most 3, the smaller side of a block 3 x 4, but is",
        ),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_near_to_the_dense_matrix_in_float64_and_freeze_double_too(name):
    layer, x = make(name), torch.randn(5, 12)
    reference = copy.deepcopy(layer).double()
    exact = nn.functional.linear(x.double(), reference.to_dense(), reference.bias).detach()
    frozen = layer.eval().freeze().double()
    for y in (layer.train()(x).detach(), layer.eval()(x).detach(), frozen(x.double())):
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    assert frozen.weight.dtype == torch.float64
