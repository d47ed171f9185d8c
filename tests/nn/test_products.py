"""Whatever runs a structured layer, it computes x Mᵀ + b, with M by the formula of its class."""

import copy
import functools
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from lightning_struct.nn import (
    BlockStructured,
    LDRSubdiagonal,
    LowRank,
    Monarch,
    StructuredLSTM,
    ToeplitzLike,
    add_adapters,
    freeze,
    replace_conv,
    replace_linear,
)
from lightning_struct.nn.channels import in_place_of
from lightning_struct.nn.structured import StructuredLinear
from tests.nn.layers import CLASSES, FACTORIES, NAMES, SIZES, dense_matrix, make, reference
from tests.processes import in_two_processes

close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)
of_each_case = pytest.mark.parametrize("name", NAMES)
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)


def inputs(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_arguments_of_numpy(layer):
    of = FACTORIES[layer.case]
    arguments = {key: np.int64(value) if isinstance(value, int) else value for key, value in of.keywords.items()}
    return loaded(layer, of.func(np.int64(12), np.int64(7), dtype=torch.float64, **arguments))


def loaded(layer, fresh=None, **options):
    fresh = FACTORIES[layer.case](12, 7, dtype=torch.float64) if fresh is None else fresh
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()), **options)
    assert list(fresh.state_dict()) == list(layer.state_dict())
    return fresh


def on_meta(layer):
    with torch.device("meta"):
        fresh = FACTORIES[layer.case](12, 7, dtype=torch.float64)
        y = fresh(torch.empty(3, 12, dtype=torch.float64))
    assert y.shape == (3, 7) and all(parameter.is_meta for parameter in fresh.parameters())
    return fresh


def prepared(layer):
    layer.eval()
    with torch.no_grad():
        layer(inputs(3, 12))
    return torch.no_grad()(layer)


def made_in_inference_mode(layer):
    with torch.inference_mode():
        fresh = loaded(layer).eval()
    return torch.inference_mode()(fresh)


def compiled(layer):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)


def exported(layer):
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(nn.Sequential(layer), (inputs(5, 12),)).module()


def traced(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(layer, inputs(3, 12))


def parallel(layer):
    """As one of an ensemble, over which vmap maps."""
    stacked = {key: torch.stack([2 * tensor, tensor]) for key, tensor in layer.named_parameters()}
    return lambda x: torch.vmap(lambda own: functional_call(layer, own, (x,)))(stacked)[1]


TRAINED = {
    "as it is": lambda layer: layer,
    "by the name of the input": lambda layer: lambda x: layer(input=x),
    "the matrix": lambda layer: lambda x: F.linear(x, layer.weight, layer.bias),
    "functional_call": lambda layer: lambda x: functional_call(layer, dict(layer.named_parameters()), (x,)),
    "an ensemble": parallel,
    "vmap over rows": torch.vmap,
    "checkpoint": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
    "reentrant checkpoint": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=True),
    "torch.fx": lambda layer: torch.fx.symbolic_trace(nn.Sequential(layer)),
    "compiled": compiled,
    "exported": exported,
}
OTHERS = {
    "prepared": prepared,
    "made in inference mode": made_in_inference_mode,
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(prepared(layer) and layer)),
    "loaded": loaded,
    "loaded by assignment": lambda layer: loaded(layer, on_meta(layer), assign=True),
    "loaded after the meta device": lambda layer: loaded(layer, on_meta(layer).to_empty(device="cpu")),
    "arguments of NumPy": with_arguments_of_numpy,
    "frozen": freeze,
    "frozen in a model": lambda layer: freeze(nn.Sequential(layer)),
    "frozen, dense": lambda layer: freeze(layer, dense=True),
    "frozen, dense, scripted": lambda layer: torch.jit.script(freeze(nn.Sequential(layer), dense=True)),
    "frozen, dense, traced": lambda layer: traced(freeze(layer, dense=True)),
    "frozen, dense, exported": lambda layer: exported(freeze(layer, dense=True)),
}
WAYS = TRAINED | OTHERS
QUICK = ("ldr_sd", "ldr_td")
LIMITED = {  # they take seconds
    "compiled": [*QUICK, "toeplitz_like", "vandermonde_like", "monarch"],
    "exported": QUICK,
    "frozen, dense, exported": ["ldr_sd"],
}
OF_VARIANTS = ("as it is", "an ensemble", "prepared", "loaded", "frozen", "frozen, dense")
CASES = [
    pytest.param(name, way, marks=[pytest.mark.slow] * (way in LIMITED and name not in QUICK))
    for name in NAMES
    for way in WAYS
    if name in LIMITED.get(way, NAMES if way in OF_VARIANTS else CLASSES)
]


@pytest.mark.filterwarnings("ignore:.*(script|trace).*:DeprecationWarning")
@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_way_multiplies_by_the_matrix(name, way):
    layer, x = make(name), inputs(5, 12).requires_grad_()
    layer.case = name
    expected = reference(layer, x)
    of = [x, *(layer.parameters() if way in TRAINED else ())]
    cotangent = inputs(5, 7, seed=2)
    derivatives = torch.autograd.grad(expected, of, cotangent, retain_graph=True)
    run = WAYS[way](layer)
    close(run(x.detach()).detach(), expected.detach())
    y = run(x)
    close(y.detach(), expected.detach())
    if way in TRAINED and way != "reentrant checkpoint":
        close(torch.autograd.grad(y, of, cotangent), derivatives)
    elif y.requires_grad:
        y.backward(cotangent)
        close(tuple(tensor.grad for tensor in of), derivatives)


@of_each_case
def test_inputs_of_any_shape_are_multiplied_by_the_dense_matrix(name):
    for n, m in SIZES:
        layer = make(name, n, m, bias=n != 7)
        M = dense_matrix(layer).detach()
        close(layer.to_dense().detach(), M)
        for training in (True, False, False):  # the last products are those with what was prepared before
            if training != layer.training:
                layer.train(training)
            with torch.set_grad_enabled(training):
                for shape in ((), (3,), (2, 3), (70,), (0,), (2, 0, 3)):
                    x = inputs(*shape, n)
                    close(layer(x).detach(), x @ M.T if layer.bias is None else x @ M.T + layer.bias.detach())
        weights = sum(parameter.numel() for key, parameter in layer.named_parameters() if key != "bias")
        assert layer.weight_parameters == weights and layer.compression_ratio == n * m / weights


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    "name", ["ldr_sd", "toeplitz_like", "hankel_like", "low_rank", "monarch", "circulant", "fastfood"]
)
def test_prepared_forms_that_are_not_dense(name, rows):
    torch.manual_seed(0)
    layer, x = CLASSES[name](1300, 1280).eval(), torch.randn(rows, 1300)
    with torch.no_grad():
        expected = F.linear(x, layer.to_dense(), layer.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


# ---- what is prepared in eval mode is made anew after any change of the parameters ----

FORMS = {
    "dense": lambda: LDRSubdiagonal(12, 12, dtype=torch.float64),
    "toeplitz": lambda: ToeplitzLike(12, 12, 2, dtype=torch.float64),
    "monarch": lambda: Monarch(12, 12, dtype=torch.float64),
}
of_each_form = pytest.mark.parametrize("form", FORMS)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def train_a_step(layer, optimizer):
    """In eval mode, as where the statistics of batch normalization are frozen."""
    layer(torch.ones(3, 12, dtype=torch.float64)).square().sum().backward()
    optimizer.step()


def train_by_data(layer):
    """By an optimizer that leaves no trace at the parameters."""
    layer(torch.ones(3, 12, dtype=torch.float64)).square().sum().backward()
    for parameter in layer.parameters():
        parameter.data.sub_(parameter.grad, alpha=0.1)


def first(layer):
    return layer._parameters[layer.weight_names[0]]


def doubled_state(layer):
    return {name: 2 * tensor for name, tensor in layer.state_dict().items()}


def shared_with_another_process(layer):
    layer.share_memory()
    with torch.no_grad():
        layer(torch.ones(3, 12, dtype=torch.float64))
    numbers = first(layer).detach().numpy()
    numbers *= 2  # which the parameter does not notice


CHANGES = {
    "SGD": lambda layer: train_a_step(layer, torch.optim.SGD(layer.parameters(), 0.1)),
    "Adam, all tensors at once": lambda layer: train_a_step(
        layer, torch.optim.Adam(layer.parameters(), 0.1, foreach=True)
    ),
    "optimizer through .data": train_by_data,
    "another process": shared_with_another_process,
    "new memory": lambda layer: vector_to_parameters(
        2 * parameters_to_vector(layer.parameters()).detach(), layer.parameters()
    ),
    "load_state_dict": lambda layer: layer.load_state_dict(doubled_state(layer)),
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict(doubled_state(layer), assign=True),
    "inference mode": torch.inference_mode()(lambda layer: first(layer).mul_(2)),
    "new parameter": lambda layer: setattr(layer, layer.weight_names[0], nn.Parameter(2 * first(layer).detach())),
    "parametrization": lambda layer: register_parametrization(layer, layer.weight_names[0], Doubled()),
    "through a view": lambda layer: first(layer).detach().view(-1)[0].add_(0.1),
    "reset_parameters": StructuredLinear.reset_parameters,
    "bias": lambda layer: nn.init.ones_(layer.bias),
}


def expected_of(layer, x):
    return x @ layer.to_dense().detach().T + layer.bias.detach()


@pytest.mark.parametrize("change", CHANGES)
@of_each_form
def test_a_change_of_the_parameters_is_seen_by_the_next_product(form, change):
    torch.manual_seed(0)
    layer, x = FORMS[form]().eval(), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        before = layer(x)
    CHANGES[change](layer)
    with torch.no_grad():
        after = layer(x)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, expected_of(layer, x))


@of_each_form
def test_what_is_prepared_serves_the_layer_itself_alone(form):
    layer, other, x = FORMS[form]().eval(), FORMS[form](), torch.randn(3, 12, dtype=torch.float64)
    with torch.no_grad():
        own = layer(x)
        torch.testing.assert_close(functional_call(layer, dict(other.named_parameters()), (x,)), expected_of(other, x))
        twin = copy.deepcopy(layer)
        first(twin).mul_(2)
        torch.testing.assert_close(twin(x), expected_of(twin, x))
        torch.testing.assert_close(layer(x), own)


@of_each_form
def test_gradients_are_those_of_a_layer_that_has_prepared_nothing(form):
    layer = FORMS[form]().eval()
    other, x = copy.deepcopy(layer), torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        layer(x)
    gradients, others = (torch.autograd.grad(module(x).sum(), [x, *module.parameters()]) for module in (layer, other))
    torch.testing.assert_close(gradients, others)
    with torch.no_grad():
        layer(x)
    layer.training = True  # without train()
    torch.testing.assert_close(torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]), others)
    layer.eval().requires_grad_(False)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(layer(x).sum(), x)[0], others[0])


# ---- freeze ----


def test_a_frozen_model_is_a_copy_whose_other_layers_stay_as_they_are():
    model = nn.Sequential(LowRank(12, 12), nn.Linear(12, 7), nn.Dropout())
    model[0].register_forward_hook(lambda layer, args, y: y + 1)
    model.state = (model[0].G * 2)[0]  # of a computation, which torch does not copy with its history
    x = torch.randn(3, 12)
    for dense in (False, True):
        frozen = freeze(model, dense=dense)
        assert [layer.training for layer in frozen] == [False, True, True]
        assert not any(parameter.requires_grad for parameter in frozen[0].parameters())
        assert frozen[1].weight.requires_grad and model[0].G.requires_grad
        torch.testing.assert_close(frozen[0](x), model[0](x))
        assert type(frozen[0]) is (nn.Linear if dense else LowRank)
        assert len(frozen[0].state_dict()) == (2 if dense else 3)
    with torch.inference_mode():
        torch.testing.assert_close(freeze(model, dense=True)[0](x), model[0](x))


@pytest.mark.slow
def test_a_frozen_dense_model_in_onnx(tmp_path):
    """Installed by `pip install lightning-struct[onnx]`."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = nn.Sequential(LDRSubdiagonal(7, 6), nn.ReLU(), Monarch(6, 5)), torch.randn(5, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = ({0: torch.export.Dim("rows", min=2)},)
        frozen = freeze(model, dense=True)
        torch.onnx.export(frozen, (x[:3],), dynamo=True, verbose=False, dynamic_shapes=rows).save(tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), model(x).detach(), rtol=1e-4, atol=1e-5)


# ---- tools of torch ----


def test_blocks_are_drawn_after_the_meta_device_from_the_outermost_module_on():
    with torch.device("meta"):
        model = nn.Sequential(BlockStructured(16, 4, 64, functools.partial(LDRSubdiagonal, rank=8)))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert 0.7 < model(torch.randn(100, 16, 64)).var() < 1.4
    with torch.device("meta"):
        lstm = StructuredLSTM(6, 8, LDRSubdiagonal)
    assert lstm(torch.empty(5, 3, 6, device="meta"))[0].shape == (5, 3, 8)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ldr_sd", lambda layer: nn.utils.prune.l1_unstructured(layer, "G", 0.5)),
        ("ldr_sd", lambda layer: nn.utils.parametrizations.weight_norm(layer, "G")),
        ("toeplitz_like", lambda layer: nn.utils.parametrizations.orthogonal(layer, "H")),
        ("pruned", lambda layer: nn.utils.prune.l1_unstructured(layer, "values", 10)),
    ],
)
def test_factors_are_pruned_and_parametrized(name, change):
    torch.manual_seed(0)
    layer, x = change(FACTORIES[name](12, 7)), torch.randn(3, 12)
    for _ in range(2):
        layer.train()(x).square().sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(parameter.grad, alpha=-1e-3)
            y = layer.eval()(x)
            torch.testing.assert_close(y, x @ layer.to_dense().T + layer.bias, rtol=1e-4, atol=1e-4)
            for dense in (False, True):
                torch.testing.assert_close(freeze(layer, dense=dense)(x), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5), "be pruned, .*: its matrix is made of G,"),
        (nn.utils.parametrizations.weight_norm, "does not have a parameter.* with name 'weight'"),
        (lambda layer: setattr(layer, "weight", nn.Linear(12, 7).weight), "no parameter 'weight' .* or tied"),
    ],
)
def test_pruning_and_parametrizing_the_matrix_are_refused_by_name(change, message):
    layer = LDRSubdiagonal(12, 7)
    with pytest.raises(ValueError, match=message):
        change(layer)
    assert layer(torch.randn(3, 12)).shape == (3, 7)


def wrapped(way, model):
    if way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(FACTORIES[name](12, 12) for name in ("ldr_sd", "cauchy_like", "monarch", "fastfood")))


def train(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return model.eval()(x)


INPUTS = torch.linspace(-1, 1, 96).view(8, 12).sin()


def train_in_ways(rank):
    ways = ("fsdp1",) if IS_OLD else ("fsdp1", "fsdp2")  # fully_shard of torch 2.6 needs a GPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {way: train(wrapped(way, network()), INPUTS.chunk(2)[rank]) for way in ways}


@pytest.mark.slow
def test_parameters_are_sharded_over_processes(tmp_path):
    expected = train(network(), INPUTS).chunk(2)
    for outputs, half in zip(in_two_processes(train_in_ways, tmp_path), expected, strict=True):
        for output in outputs.values():
            torch.testing.assert_close(output, half, rtol=1e-3, atol=1e-5)


def test_a_compiled_layer_follows_its_operators():
    layer = LDRSubdiagonal(64, 64)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 64)
    for training in (True, False):
        layer.train(training)
        for entry in (1.0, 0.0, 1e-9):  # by which "scaled" would divide
            with torch.no_grad():
                layer.subdiagonal_a[5] = entry
                torch.testing.assert_close(run(x), x @ layer.to_dense().T, rtol=1e-4, atol=1e-4)


# torch 2.6 takes the number of rows of a Fourier transform as a constant.
@pytest.mark.parametrize("name", ["ldr_td"] if IS_OLD else ["ldr_td", "toeplitz_like"])
def test_a_model_is_exported_with_any_number_of_rows(name):
    torch.manual_seed(0)
    model = nn.Sequential(FACTORIES[name](12, 7)).eval()
    torch.compiler.reset()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (torch.randn(3, 12),), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 12)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@of_each_case
@pytest.mark.filterwarnings("ignore")
def test_torchscript_records_the_right_numbers_or_says_what_to_do_instead(name):
    torch.manual_seed(0)
    layer, x, others = FACTORIES[name](12, 7).eval(), torch.randn(3, 12), torch.randn(9, 12)
    with torch.no_grad():
        layer(x)
        if name.startswith(("ldr_", "toeplitz", "hankel", "vandermonde")):
            with pytest.raises(RuntimeError, match="torch.jit.trace cannot record .*use torch.export.export"):
                torch.jit.trace(nn.Sequential(layer), x)
        else:
            torch.testing.assert_close(torch.jit.trace(layer, x)(others), layer(others), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="torch.jit.script cannot compile .*use torch.export.export"):
        torch.jit.script(nn.Sequential(layer))


class Mixed(nn.Module):
    """Of each kind of layer one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = replace_conv(nn.Conv2d(3, 4, 3, padding=1), LowRank, torch.zeros(1, 3, 4, 4))
        self.patches = in_place_of(nn.Conv2d(4, 4, 2, stride=2), LDRSubdiagonal(16, 4))
        self.pixels = replace_linear(nn.Conv2d(4, 12, 1), LowRank)
        self.lstm = StructuredLSTM(12, 12, LowRank)
        self.attention = replace_linear(nn.MultiheadAttention(12, 2), LowRank)
        self.adapted = add_adapters(nn.Linear(12, 12), LDRSubdiagonal)

    def forward(self, x):
        x = self.pixels(self.patches(self.blocks(x))).flatten(2).permute(2, 0, 1)
        x, _ = self.lstm(x)
        return self.adapted(x + self.attention(x, x, x)[0])


@pytest.mark.parametrize("way", [lambda model: model, freeze, functools.partial(freeze, dense=True)])
def test_torch_fx_records_layers_as_a_whole(way):
    original, x = Mixed().eval(), torch.randn(2, 3, 4, 4)
    model = way(original)
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(x), model(x))
    targets = {node.target for node in graph.graph.nodes if node.op == "call_module"}
    assert {"blocks", "patches", "lstm", "attention", "adapted"} < targets
    with pytest.raises(RuntimeError, match="torch.fx does not look into LowRank.*nn.Sequential"):
        torch.fx.symbolic_trace(LowRank(4, 4))
