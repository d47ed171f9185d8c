"""Structured layers where nn.Linear works: checkpointed activations, the meta device, sharded parameters, compilers."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_struct.nn import (
    BlockStructured,
    LDRSubdiagonal,
    LDRTridiagonal,
    LowRank,
    StructuredLSTM,
    add_adapters,
    freeze,
    replace_conv,
    replace_linear,
)
from lightning_struct.nn.channels import in_place_of
from tests.nn.layers import CLASSES, FACTORIES, NAMES
from tests.processes import in_two_processes


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_are_checkpointed(name, use_reentrant):
    torch.manual_seed(0)
    layer = FACTORIES[name](12, 7)
    plain = copy.deepcopy(layer)
    for _ in range(2):
        x = torch.randn(3, 12, requires_grad=True)
        checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
        plain(x).square().sum().backward()
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_activations_are_checkpointed_at_every_choice_of_a_method():
    # The layer is called twice in a step, with batches of two magnitudes; a steep operator makes the next choice
    # another one.
    torch.manual_seed(0)
    layer = LDRSubdiagonal(48, 48)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-7)
    methods = set()
    for step in range(70):
        x = torch.randn(40, 48, requires_grad=True)
        (
            checkpoint(layer, x, use_reentrant=False).sum() + checkpoint(layer, x[:2], use_reentrant=False).sum()
        ).backward()
        methods.add(layer.method_in_use)
        optimizer.step()
        if step == 5:
            with torch.no_grad():
                layer.subdiagonal_a[20] = 1e-4
    assert methods == {"krylov", "scaled_float64"}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_drawn_after_the_meta_device(name):
    make = functools.partial(FACTORIES[name], 12, 7)
    torch.manual_seed(0)
    expected = make().state_dict()
    with torch.device("meta"):
        in_context = make()
    for layer in (in_context, make(device="meta")):
        assert all(parameter.is_meta for parameter in layer.parameters())
        assert layer(torch.empty(3, 12, device="meta")).shape == (3, 7)
        torch.manual_seed(0)
        layer.to_empty(device="cpu").reset_parameters()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in layer.state_dict().items())
    trained = make()
    for layer, assign in ((make(device="meta"), True), (make(device="meta").to_empty(device="cpu"), False)):
        layer.load_state_dict(trained.state_dict(), assign=assign)  # all keys that match are all that it needs
        assert torch.equal(layer.to_dense(), trained.to_dense())


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


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_made_changed_and_frozen_in_inference_mode(name):
    torch.manual_seed(0)
    factory, trained = FACTORIES[name], FACTORIES[name](12, 7).eval()

    def check(layer, x, *modules):
        for module in modules:
            torch.testing.assert_close(module(x), x @ layer.to_dense().T + layer.bias, rtol=1e-4, atol=1e-5)

    with torch.inference_mode():
        layer, x = factory(12, 7), torch.randn(3, 12)
        for _ in range(2):
            check(layer, x, layer.train(), layer.eval(), layer.freeze())
            layer._parameters[layer.weight_names[0]].mul_(2)
        copied = factory(12, 7)
        copied.load_state_dict(copy.deepcopy(layer).state_dict())
        check(layer, x, copied.eval())
        frozen, near = trained.freeze(), factory.func.from_linear(nn.Linear(12, 7), refine=1, **factory.keywords)
        check(trained.double(), x.double(), trained)
    with torch.no_grad():
        check(layer, x, layer)
    inputs = torch.randn(3, 12, requires_grad=True)
    frozen(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, frozen.to_dense().sum(0).expand(3, -1))
    near.train()(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in near.parameters())


@pytest.mark.parametrize("name", ["ldr_sd", "toeplitz_like", "low_rank"])
@pytest.mark.parametrize(
    "make",
    [
        lambda layer: nn.utils.prune.l1_unstructured(layer, "G", 0.5),
        lambda layer: nn.utils.parametrizations.weight_norm(layer, "G"),
        lambda layer: nn.utils.parametrizations.orthogonal(layer, "H"),
    ],
)
def test_generators_are_pruned_and_parametrized(name, make):
    torch.manual_seed(0)
    layer = make(FACTORIES[name](12, 7))
    x = torch.randn(3, 12)
    for _ in range(2):
        layer.train()(x).square().sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(parameter.grad, alpha=-1e-3)
            torch.testing.assert_close(layer.eval()(x), x @ layer.to_dense().T + layer.bias, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.freeze()(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_norms_by_hooks_take_generators(norm):
    layer = norm(FACTORIES["ldr_sd"](12, 7), "H")
    layer(torch.randn(3, 12)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_values_of_a_pruned_layer_are_pruned_further():
    layer = nn.utils.prune.l1_unstructured(FACTORIES["pruned"](12, 7), "values", 10)
    assert (layer.to_dense() != 0).sum() == 20


def test_pruning_and_parametrizing_the_matrix_are_refused_by_name():
    layer = LDRSubdiagonal(12, 7)
    with pytest.raises(ValueError, match="could be pruned, .*: its matrix is made of G, H, sub"):
        nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    with pytest.raises(ValueError, match="no parameter 'weight' that could be pruned"):
        nn.utils.prune.global_unstructured([(layer, "weight")], nn.utils.prune.L1Unstructured, amount=0.5)
    with pytest.raises(ValueError, match="does not have a parameter.* with name 'weight'"):
        nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(ValueError, match="no parameter 'weight' that could be .*, or tied"):
        layer.weight = nn.Linear(12, 7).weight
    assert layer(torch.randn(3, 12)).shape == (3, 7)


IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
# fully_shard of torch 2.6 needs a GPU.
WAYS = ("ddp", "fsdp1") if IS_OLD else ("ddp", "fsdp1", "fsdp2")


def wrapped(way, model):
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
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
    return nn.Sequential(*(FACTORIES[name](12, 12) for name in NAMES if name != "pruned"))


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {way: train(wrapped(way, network()), INPUTS.chunk(2)[rank]) for way in WAYS}


@pytest.mark.slow
def test_parameters_are_sharded_over_processes(tmp_path):
    expected = train(network(), INPUTS).chunk(2)
    for outputs, half in zip(in_two_processes(train_in_ways, tmp_path), expected, strict=True):
        for output in outputs.values():
            torch.testing.assert_close(output, half, rtol=1e-3, atol=1e-5)


def compiled_gradients(layer, x):
    """The gradients of a compiled layer, of the layer itself, and whether the outputs in eval mode are the same."""
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    tensors = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(run(x).square().sum(), tensors) for run in (compiled, layer))
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-8, atol=1e-8)
    return ours, theirs


@pytest.mark.parametrize(
    "name", [name if name in ("ldr_sd", "ldr_td") else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]
)
def test_one_graph_is_compiled_in_training_and_in_eval_mode(name):
    torch.manual_seed(0)
    layer = FACTORIES[name](12, 7, dtype=torch.float64)
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    ours, theirs = compiled_gradients(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "method"), [(LDRSubdiagonal, "tree"), (LDRTridiagonal, "giant_steps")])
def test_methods_are_compiled_with_autocast_and_dense_matrices(cls, method):
    torch.manual_seed(0)
    layer, x = cls(40, 40, method=method), torch.randn(3, 40)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x), layer.to_dense()

    product, dense = compiled(x)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(dense, layer.to_dense())
    torch.testing.assert_close(product.float(), x @ dense.T, rtol=0.02, atol=0.02)


def test_compiled_layer_follows_its_operators():
    layer = LDRSubdiagonal(64, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 64)
    for entry in (1.0, 0.0, 1e-9):  # by which "scaled" would divide
        with torch.no_grad():
            layer.subdiagonal_a[5] = entry
        torch.testing.assert_close(compiled(x), x @ layer.to_dense().T, rtol=1e-4, atol=1e-4)


# torch 2.6 takes the number of rows of a Fourier transform as a constant.
@pytest.mark.parametrize("name", ["ldr_sd", "ldr_td"] if IS_OLD else ["ldr_sd", "ldr_td", "toeplitz_like"])
def test_model_is_exported_with_any_number_of_rows(name):
    torch.manual_seed(0)
    model = nn.Sequential(FACTORIES[name](12, 7)).eval()
    torch.compiler.reset()
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(model, (torch.randn(3, 12),), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 12)
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-5)


UNTRACEABLE = ("ldr_", "toeplitz", "hankel", "vandermonde")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_torchscript_records_the_right_numbers_or_says_what_to_do_instead(name):
    torch.manual_seed(0)
    layer, x = FACTORIES[name](12, 7).eval(), torch.randn(3, 12)
    others = torch.randn(9, 12)
    with torch.no_grad():
        layer(x)
        if name.startswith(UNTRACEABLE):
            with pytest.raises(RuntimeError, match="torch.jit.trace cannot record .*use torch.export.export"):
                torch.jit.trace(nn.Sequential(layer), x)
        else:
            torch.testing.assert_close(torch.jit.trace(layer, x)(others), layer(others), rtol=1e-4, atol=1e-5)
    for module in (layer, layer.freeze(), nn.Sequential(layer)):
        with pytest.raises(RuntimeError, match="torch.jit.script cannot compile .*use torch.export.export"):
            torch.jit.script(module)
    torch.testing.assert_close(
        torch.jit.trace(layer.freeze(dense=True), x)(others), layer(others), rtol=1e-4, atol=1e-5
    )
    if name.startswith(("ldr_td", "vandermonde")):
        with pytest.raises(RuntimeError, match="torch.jit.trace cannot record FrozenLinear.*dense=True"):
            torch.jit.trace(layer.freeze(), x)
    else:
        torch.testing.assert_close(torch.jit.trace(layer.freeze(), x)(others), layer(others), rtol=1e-4, atol=1e-5)


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
        self.layers = nn.ModuleDict({name: factory(12, 12) for name, factory in FACTORIES.items()})

    def forward(self, x):
        x = self.pixels(self.patches(self.blocks(x))).flatten(2).permute(2, 0, 1)
        x, _ = self.lstm(x)
        x = self.adapted(x + self.attention(x, x, x)[0])
        for layer in self.layers.values():
            x = x + layer(x)
        return x


@pytest.mark.parametrize("make", [lambda model: model, freeze], ids=["trained", "frozen"])
def test_torch_fx_records_layers_as_a_whole(make):
    model, x = make(Mixed().eval()), torch.randn(2, 3, 4, 4)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(x), model(x))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert {"blocks", "patches", "lstm", "attention", *(f"layers.{name}" for name in NAMES)} < set(targets)
    assert "adapted" in targets
    with pytest.raises(RuntimeError, match="torch.fx does not look into LowRank.*nn.Sequential"):
        torch.fx.symbolic_trace(LowRank(4, 4))


@pytest.mark.parametrize("name", NAMES)
def test_inputs_may_be_given_by_the_name_that_linear_has_for_them(name):
    layer, x = FACTORIES[name](12, 7), torch.randn(3, 12)
    for module in layer, layer.freeze(), add_adapters(nn.Sequential(nn.Linear(12, 7)), FACTORIES[name])[0]:
        assert torch.equal(module(input=x), module(x))
