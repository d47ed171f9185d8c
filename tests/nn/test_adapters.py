import copy
import io
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from lightning_struct.nn import (
    AdaptedLinear,
    Circulant,
    LDRSubdiagonal,
    LowRank,
    RandomizedHadamard,
    ToeplitzLike,
    adapter_parameter_groups,
    adapter_state_dict,
    add_adapters,
    disable_adapters,
    load_adapter_state_dict,
    load_adapters,
    merge_adapters,
    replace_linear,
    replacement_report,
    save_adapters,
)
from tests.nn.layers import FACTORIES, NAMES, Conv1D
from tests.processes import in_two_processes

FACTORY = partial(LDRSubdiagonal, rank=2)


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Images(nn.Sequential):
    def forward(self, x):
        return super().forward(x.unsqueeze(1)).squeeze(1)


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8, bias=False)),
    "conv1d": lambda: nn.Sequential(Conv1D(6, 8), nn.Tanh(), Conv1D(8, 6)),
    "convolutions of one pixel": lambda: nn.Sequential(nn.Conv1d(3, 6, 1, stride=2), nn.Tanh(), nn.Conv1d(6, 3, 1)),
    "filters": lambda: Images(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 1, (1, 2), groups=1),
    ),
    "attention": Attention,
    "attention of other sizes": lambda: Attention(kdim=8, vdim=8, bias=False),
    "transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
}


def made(kind="linear", dtype=torch.float64):
    torch.manual_seed(0)
    return MODELS[kind]().to(dtype)


def inputs(dtype=torch.float64):
    return torch.randn(4, 3, 8, dtype=dtype, generator=torch.Generator().manual_seed(1))


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def train(model, steps=3, lr=0.05):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs()) - 1).square().mean().backward()
        optimizer.step()
    return model


@pytest.fixture(params=MODELS)
def kind(request):
    return request.param


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_adapters_of_a_model_without_values_are_loaded(kind, assign):
    trained = add_adapters(made(kind, torch.float32), FACTORY, learned_diagonals="outputs")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    with torch.device("meta"):
        model = add_adapters(MODELS[kind](), FACTORY, learned_diagonals="outputs")
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(trained.state_dict(), assign=assign)
    assert torch.equal(model(inputs(torch.float32)), trained(inputs(torch.float32)))


@pytest.mark.parametrize("options", [{}, {"learned_diagonals": "both"}, {"scale": 2.0}], ids=["", "diagonals", "scale"])
def test_adapters_of_a_model_without_values_are_drawn_after_to_empty(options):
    base = made(dtype=torch.float32)
    with torch.device("meta"):
        model = add_adapters(MODELS["linear"](), FACTORY, **options)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model[0].base.load_state_dict(base[0].state_dict())
    model[2].base.load_state_dict(base[2].state_dict())
    x = inputs(torch.float32)
    assert torch.equal(model(x), base(x))
    model(x).square().sum().backward()
    assert all(update.adapter.G.grad.count_nonzero() > 0 for update in (model[0].update, model[2].update))
    drawn = add_adapters(made(dtype=torch.float32), FACTORY, **options)
    for ours, theirs in zip((model[0], model[2]), (drawn[0], drawn[2]), strict=True):
        torch.testing.assert_close(ours.update.input_diagonal, theirs.update.input_diagonal)
        assert 0.4 < ours.update.scale / theirs.update.scale < 2.5


@pytest.mark.filterwarnings("ignore:.*nested_tensor")
def test_model_computes_at_first_what_it_did_and_gradients_go_to_adapters_alone(kind):
    model = made(kind)
    base, before = {id(parameter) for parameter in model.parameters()}, model(inputs())
    assert torch.equal(add_adapters(model, FACTORY)(inputs()), before)
    train(model, steps=1)  # from now on the update is not zero
    model(inputs()).square().sum().backward()
    for name, parameter in model.named_parameters():
        if id(parameter) in base:
            assert parameter.grad is None and not parameter.requires_grad, name
        elif "corner" not in name:
            assert parameter.grad.count_nonzero() > 0, name


def test_merged_model_is_the_base_with_the_updates_added_to_its_weights(kind):
    model = made(kind)
    names = list(model.state_dict())
    before = copy.deepcopy(model.state_dict())
    train(add_adapters(model, FACTORY))
    adapted = model(inputs())
    merged = merge_adapters(copy.deepcopy(model))
    torch.testing.assert_close(merged(inputs()), adapted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(inputs()), adapted, rtol=0, atol=0)  # the copy alone is merged
    assert list(merged.state_dict()) == names and not trainable(merged)
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in names if "weight" in name and "norm" not in name}


@pytest.mark.parametrize("name", NAMES)
def test_every_class_starts_at_zero_and_learns(name):
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(8, 12), FACTORIES[name](8, 12, bias=False)).double()
    assert layer.update.to_dense().count_nonzero() == 0
    layer(inputs()).square().sum().backward()
    assert layer.update.adapter._reference.grad.count_nonzero() > 0


@pytest.mark.parametrize("name", ["ldr_sd", "toeplitz_like", "circulant", "low_rank"])
def test_update_moves_with_its_first_factor_as_a_dense_weight_does(name):
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(48, 64), FACTORIES[name](48, 64, bias=False))
    step = torch.randn_like(layer.update.adapter._reference)
    with torch.no_grad():
        layer.update.adapter._reference.add_(step)
    assert 0.6 < layer.update.to_dense().norm() / step.norm() < 1.6


@pytest.mark.parametrize("sides", ["none", "outputs", "both"])
def test_forward_and_weight_are_the_dense_definition(sides):
    torch.manual_seed(0)
    base = nn.Linear(8, 12).double()
    adapter = ToeplitzLike(8, 12, rank=2, bias=False, dtype=torch.float64)
    layer = AdaptedLinear(base, adapter, scale=0.5, learned_diagonals=sides)
    learned = {name for name, _ in layer.update.named_parameters(recurse=False)}
    assert learned == {f"{side}_diagonal" for side in ("output", "input")[: ["none", "outputs", "both"].index(sides)]}
    for parameter in layer.update.parameters():
        nn.init.normal_(parameter)
    left, right = (d.double().diag() for d in (layer.update.output_diagonal, layer.update.input_diagonal))
    delta = 0.5 * left @ adapter.to_dense() @ right
    torch.testing.assert_close(layer.weight, base.weight + delta)
    torch.testing.assert_close(layer(inputs()), inputs() @ (base.weight + delta).T + base.bias)


def test_state_of_the_adapters_is_all_that_differs_from_the_base(kind):
    model = train(add_adapters(made(kind), FACTORY))
    state, file = adapter_state_dict(model), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    torch.manual_seed(5)
    other = add_adapters(MODELS[kind]().double(), FACTORY)
    base = {name: value for name, value in model.state_dict().items() if name not in state}
    other.load_state_dict(base, strict=False)
    load_adapter_state_dict(other, torch.load(file, weights_only=True))
    assert torch.equal(other(inputs()), model(inputs()))


@pytest.mark.parametrize("rows", [1, 200])  # so many that a training step makes the matrix of the update
@pytest.mark.parametrize("base", [nn.Linear(24, 32), nn.Conv2d(24, 32, 1, stride=2)])
def test_training_step_of_few_and_of_many_rows_is_by_the_sum_of_base_and_update(base, rows):
    torch.manual_seed(0)
    model = add_adapters(nn.Sequential(copy.deepcopy(base)), RandomizedHadamard, learned_diagonals="outputs").double()
    layer = model[0]
    nn.init.normal_(layer.update.adapter.G)
    x = torch.randn(rows, 24, *[3] * (isinstance(base, nn.Conv2d) * 2), dtype=torch.float64, requires_grad=True)
    kept = x if x.ndim == 2 else x[..., ::2, ::2].movedim(1, -1)
    update = nn.functional.linear(kept, layer.update.to_dense())
    expected = layer.base(x) + (update if x.ndim == 2 else update.movedim(-1, 1))
    parameters = [x, *layer.update.parameters()]
    found = layer(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.square().sum(), parameters) for y in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("other", [partial(LDRSubdiagonal, corner="zero"), Circulant])
def test_state_of_other_adapters_is_refused(other):
    state = adapter_state_dict(add_adapters(made(), FACTORY))
    with pytest.raises(ValueError, match="0.update.adapter.* are (missing|not in the model).*add_adapters"):
        load_adapter_state_dict(add_adapters(made(), other), state)


def test_biases_and_heads_stay_trainable_where_they_are_named():
    model = nn.Sequential(*made(), nn.BatchNorm1d(8))
    add_adapters(model, Circulant, include="0", train=["0.*bias", "2"])
    assert trainable(model) == {"0.base.bias", "0.update.adapter.column", "2.weight"}
    statistics = {"3.running_mean", "3.running_var", "3.num_batches_tracked"}
    assert {"0.base.bias", "2.weight"} | statistics < adapter_state_dict(model).keys()


def test_projections_of_attention_are_selected_by_name():
    model = made("attention")
    before = model.state_dict()["attention.in_proj_weight"].clone()
    train(add_adapters(model, FACTORY, include=["attention.q_proj", "attention.v_proj"]))
    assert len({name.split(".updates.")[1].split(".")[0] for name in trainable(model)}) == 2
    changed = (merge_adapters(model).attention.in_proj_weight != before).any(1)
    assert changed.tolist() == [True] * 8 + [False] * 8 + [True] * 8
    assert type(model.attention) is nn.MultiheadAttention


def test_further_call_leaves_the_first_adapters_and_what_is_trained():
    model = add_adapters(made(), FACTORY, include="0", train="2")
    first = model[0]
    add_adapters(model, Circulant)
    assert model[0] is first and isinstance(model[2], AdaptedLinear) and "2.base.weight" in trainable(model)
    with pytest.raises(ValueError, match="add_adapters adds nothing"):
        add_adapters(model, Circulant)


@pytest.mark.parametrize("kind", ["attention", "attention of other sizes"])
def test_further_projections_of_an_adapted_attention_get_adapters(kind):
    model = train(add_adapters(made(kind), FACTORY, include="attention.v_proj"))
    first, before = adapter_state_dict(model), model(inputs())
    for part in ("out_proj", "q_proj"):
        add_adapters(model, FACTORY, include=f"attention.{part}")
    torch.testing.assert_close(model(inputs()), before)
    assert all(torch.equal(adapter_state_dict(model)[name], value) for name, value in first.items())
    with pytest.raises(ValueError, match="add_adapters adds nothing"):
        add_adapters(model, FACTORY, include="attention.q_proj")
    whole = add_adapters(made(kind), FACTORY, include=["*.q_proj", "*.v_proj", "*.out_proj"])
    load_adapter_state_dict(whole, adapter_state_dict(train(model)))
    torch.testing.assert_close(whole(inputs()), model(inputs()))
    assert len(trainable(model)) == 3 * len(trainable(add_adapters(made(kind), FACTORY, include="*.q_proj")))
    again = saved_and_loaded(model)
    torch.testing.assert_close(merge_adapters(again)(inputs()), model(inputs()))


def test_layer_at_two_places_has_one_adapter_and_is_merged_once(caplog):
    linear = nn.Linear(8, 8).double()
    assert merge_adapters(add_adapters(linear, FACTORY)) is linear
    with caplog.at_level(logging.INFO, "lightning_struct"):
        model = add_adapters(nn.Sequential(linear, nn.ReLU(), linear), FACTORY)
    assert model[0] is model[2] and [record.getMessage()[:6] for record in caplog.records] == ["0 gets"]
    before = train(model)(inputs())
    assert merge_adapters(model)[0] is model[2] is linear
    torch.testing.assert_close(model(inputs()), before)


def test_a_weight_that_is_set_is_that_of_the_base():
    embedding = nn.Embedding(8, 12).double()
    model = train(add_adapters(made(), FACTORY))
    model[2].weight, model[0].bias = embedding.weight, nn.Parameter(torch.ones(12).double())
    assert model[2].base.weight is embedding.weight and torch.equal(model[0].bias, torch.ones(12).double())
    torch.testing.assert_close(model[2].weight, embedding.weight + model[2].update.to_dense())


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_weight_that_the_base_stores_otherwise_is_refused(kind):
    model = add_adapters(made(kind), FACTORY)
    wrong = model[0].base.weight if kind == "conv1d" else nn.Parameter(torch.zeros(8, 12))
    with pytest.raises(ValueError, match="'weight' of the adapted layer .* cannot be a parameter.*exclude"):
        model[0].weight = wrong
    with pytest.raises(ValueError, match="'weight_orig' of the adapted layer"):
        nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)


def test_merging_leaves_a_tied_weight_to_the_other_module():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    model[1].weight = model[0].weight
    before = model[0].weight.clone()
    add_adapters(model, Circulant, include="1")
    nn.init.ones_(model[1].update.adapter.column)
    with pytest.warns(UserWarning, match="no longer shared: 1 with 0"):
        merge_adapters(model)
    assert torch.equal(model[0].weight, before) and not torch.equal(model[1].weight, before)


def test_half_precision_base_gets_single_precision_adapters():
    model = add_adapters(made(dtype=torch.bfloat16), FACTORY)
    x = inputs(torch.bfloat16)
    assert model(x).dtype == torch.bfloat16 and model[0].update.adapter.G.dtype == torch.float32
    assert merge_adapters(model)[0].weight.dtype == torch.bfloat16


def test_outputs_have_the_dtype_of_autocast_and_gradients_that_of_the_adapters(kind):
    model = add_adapters(made(kind, torch.float32), FACTORY)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs(torch.float32))
    assert outputs.dtype == torch.bfloat16 or kind == "transformer layer"
    outputs.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in gradients)


def test_dropout_is_of_the_update_alone_and_of_training_alone():
    model, x = train(add_adapters(made(), FACTORY, dropout=0.5)), inputs()
    assert not torch.equal(model(x), model(x))
    graph = torch.fx.symbolic_trace(model).eval()
    assert torch.equal(model.eval()(x), model(x)) and torch.equal(graph(x), model(x))
    model = add_adapters(made().eval(), FACTORY, dropout=0.5)
    assert not any(module.training for module in model.modules())


@pytest.mark.slow
def test_compiled_model_trains_and_its_state_has_plain_names():
    model = train(add_adapters(made(), partial(LowRank, rank=2)))
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(inputs()), model(inputs()))
    compiled(inputs()).sum().backward()
    assert model[0].update.adapter.G.grad is not None
    state = adapter_state_dict(compiled)
    assert state.keys() == adapter_state_dict(model).keys()
    load_adapter_state_dict(compiled, state)


class PaddedConvolution(nn.Conv2d):
    """A convolution that fills images up itself, as those of efficientnet-lite-pytorch and timm do."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


FILTERS = {
    "forward of its own": (PaddedConvolution(8, 6, 1, stride=2),),
    "1 x 1": (nn.Conv2d(8, 6, 1, stride=2),),
    "1d": (nn.Conv1d(8, 6, 3, padding="same", padding_mode="reflect"),),
    "groups": (nn.Conv2d(8, 6, (3, 1), groups=2),),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8, dilation=2),),
    "transposed, dilated": (nn.ConvTranspose2d(8, 6, 2, groups=2, dilation=2),),
    "transposed, of a size": (nn.ConvTranspose2d(8, 6, 2, stride=2), [13, 13]),
    "3d": (nn.Conv3d(8, 2, 2),),
    "embedding": (nn.Embedding(9, 8),),
}


@pytest.mark.parametrize("case", FILTERS)
def test_filters_and_embeddings_have_adapters_and_are_merged(case, tmp_path):
    torch.manual_seed(0)
    layer, *arguments = copy.deepcopy(FILTERS[case])
    base = nn.ModuleList([layer.double()])
    x = torch.randint(9, (2, 5)) if case == "embedding" else torch.randn(2, 8, *[6] * len(layer.kernel_size)).double()
    before, shape = layer(x, *arguments), layer.weight.shape
    model = add_adapters(copy.deepcopy(base), FACTORY, include="0")
    assert torch.equal(model[0](x, *arguments), before)
    nn.init.normal_(model[0].update.adapter._reference)
    (trained := model[0](x, *arguments)).square().sum().backward()
    assert all(
        p.grad.count_nonzero() for name, p in model.named_parameters() if "update" in name and "corner" not in name
    )
    assert not torch.allclose(trained, before) and model[0].weight.shape == shape
    with disable_adapters(model):
        assert torch.equal(model[0](x, *arguments), before)
    save_adapters(model, tmp_path)
    assert torch.equal(load_adapters(base, tmp_path)[0](x, *arguments), trained)
    merged = merge_adapters(model)[0]
    assert type(merged) is type(layer)
    torch.testing.assert_close(merged(x, *arguments), trained, rtol=1e-10, atol=1e-10)


SIZES = {1: [6], 2: [4, 4], 3: [2, 2, 2]}
OF_PATCHES = {
    "1d, same": nn.Conv1d(6, 48, 3, padding="same", padding_mode="reflect", dilation=2),
    "2d, stride": nn.Conv2d(6, 40, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
    "2d, circular": nn.Conv2d(6, 40, 3, padding=1, padding_mode="circular", dilation=(1, 2)),
    "3d": nn.Conv3d(6, 40, 2, stride=2, padding=1, padding_mode="replicate"),
}


@pytest.mark.parametrize("images", [1, 30])  # so few that the update is multiplied by patches; and many
@pytest.mark.parametrize("case", OF_PATCHES)
def test_convolution_of_few_and_of_many_patches_is_by_the_sum_of_weights(case, images):
    torch.manual_seed(0)
    model = add_adapters(nn.Sequential(copy.deepcopy(OF_PATCHES[case])).double(), RandomizedHadamard)
    layer = model[0]
    nn.init.normal_(layer.update.adapter.G)
    x = torch.randn(images, 6, *SIZES[len(layer.base.kernel_size)], dtype=torch.float64, requires_grad=True)
    outputs = layer(x), functional_call(layer.base, {"weight": layer.weight}, (x,))
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(layer(x[0]), outputs[1][0])  # an image without a batch
    found, expected = (torch.autograd.grad(y.square().sum(), [x, layer.update.adapter.G]) for y in outputs)
    torch.testing.assert_close(found, expected)
    of_each = vmap(grad(lambda image: layer(image).square().sum()))(x.detach())  # without a warning, too
    torch.testing.assert_close(of_each, expected[0])


def test_convolution_of_few_patches_makes_no_matrix():
    layer = add_adapters(nn.Conv2d(32, 256, 3), RandomizedHadamard)
    with FlopCounterMode(display=False) as few:
        layer(torch.randn(1, 32, 3, 3))
    with FlopCounterMode(display=False) as made:
        layer.weight  # noqa: B018
    assert 10 * few.get_total_flops() < made.get_total_flops()


@pytest.mark.parametrize("train", ["head", "head.weight", "embedding"])
def test_tied_weights_are_trained_by_each_of_their_names(train):
    layers = {"embedding": nn.Embedding(9, 8), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 9, bias=False)}
    model = nn.ModuleDict(layers)
    model["head"].weight = model["embedding"].weight
    add_adapters(model, LowRank, include="hidden", train=train)
    assert model["head"].weight.requires_grad and not model["hidden"].base.weight.requires_grad


def test_operators_have_a_rate_of_their_own():
    model = add_adapters(made(), LDRSubdiagonal, train="0.bias")
    others, operators = adapter_parameter_groups(model, lr=0.01)
    assert (others["lr"], operators["lr"]) == (0.01, 0.001)
    assert len(others["params"]) == 5 and len(operators["params"]) == 8
    assert len(adapter_parameter_groups(add_adapters(made(), Circulant), lr=0.01)) == 1


def gradients(model, x):
    (model(x) - 1).square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.requires_grad}


def gradients_of_a_share(model, rank):
    return gradients(DistributedDataParallel(model), inputs()[2 * rank :][:2])


@pytest.mark.slow
def test_two_processes_that_get_a_model_do_what_one_does(tmp_path):
    model = train(add_adapters(made("attention"), FACTORY))
    model.zero_grad()
    shares = in_two_processes(partial(gradients_of_a_share, model), tmp_path)
    for share in shares:
        torch.testing.assert_close(share, gradients(copy.deepcopy(model), inputs()))


class OwnForward(nn.MultiheadAttention):
    def forward(self, x):
        return x


ADD = partial(add_adapters, factory=LowRank)


@pytest.mark.parametrize(
    ("model", "call", "message"),
    [
        (made, partial(add_adapters, factory=partial(LowRank, rank=9)), "no adapter for 0: rank must.*exclude='0'"),
        (made, partial(add_adapters, factory=LowRank.from_linear), "starts at zero"),
        (made, partial(ADD, include="head"), "include names 'head', which is not in"),
        (made, partial(ADD, train="head"), "train names 'head', which has no parameters"),
        (made, partial(ADD, dropout=1), "^dropout must be"),
        (made, partial(ADD, scale=0.0), "^scale must be finite and not 0"),
        (made, partial(ADD, learned_diagonals="all"), "^learned_diagonals must be one of 'none', 'outputs', 'both'"),
        (made, merge_adapters, "Sequential has no adapters: call add_adapters"),
        (made, adapter_state_dict, "Sequential has no adapters: call add_adapters"),
        (lambda: nn.Sequential(nn.LazyLinear(8)), ADD, "no shape yet"),
        (lambda: nn.Sequential(OwnForward(8, 2)), ADD, "no adapter for 0: .*forward"),
    ],
)
def test_errors_say_what_is_wrong_and_leave_the_model_as_it_was(model, call, message):
    model = model()
    names = model.state_dict().keys()
    with pytest.raises(ValueError, match=message):
        call(model)
    assert model.state_dict().keys() == names and all(parameter.requires_grad for parameter in model.parameters())


LEFT = {
    "it has an adapter": lambda: add_adapters(nn.Sequential(nn.Linear(8, 8)), LowRank),
    "it is structured": lambda: nn.Sequential(LowRank(8, 8)),
    "it is recurrent": lambda: nn.Sequential(nn.LSTM(8, 8)),
    "it is quantised": lambda: nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(8, 8)),
    "its weight is made by others": lambda: nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 3, 3))),
    "a parameter has three dimensions, as those of experts have": lambda: nn.Sequential(nn.Bilinear(2, 3, 4)),
    "it is an embedding: its full name in include adapts it": lambda: nn.Sequential(nn.Embedding(8, 8)),
    "exclude has it": lambda: nn.Sequential(nn.Linear(8, 8)),
}


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("reason", LEFT)
def test_error_where_nothing_gets_an_adapter_says_why(reason):
    exclude = nn.Linear if reason == "exclude has it" else None
    with pytest.raises(ValueError, match=f"add_adapters adds nothing: .*; 0: {reason}$"):
        add_adapters(LEFT[reason](), LowRank, exclude=exclude)


def test_heads_and_tied_layers_get_adapters_only_if_they_are_named():
    def network():
        layers = {
            "tokens": nn.Embedding(9, 8),
            "up": nn.Linear(8, 8),
            "lm": nn.Linear(8, 9),
            "last": nn.Linear(8, 9),
            "_fc": nn.Linear(8, 2),
        }
        heads = nn.ModuleList([nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))])
        layers["_fc"] = nn.Linear(8, 2)
        model = nn.ModuleDict(layers | {"classifier": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), "heads": heads})
        model["lm"].weight = model["tokens"].weight
        model["up"].get_output_embeddings = lambda: model["last"]  # as models of transformers have it
        return model

    model = add_adapters(network(), LowRank)
    assert {name for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)} == {
        "up",
        "classifier.0",
        "heads.1.0",
    }
    skipped = replacement_report(model).skipped
    assert set(skipped) == {"tokens", "lm", "last", "_fc", "classifier.1", "heads.0", "heads.1.1"}
    assert skipped["lm"] == "add_adapters: another module has its weight, too: name it in include to adapt it"
    for name in ("last", "classifier.1"):
        assert skipped[name] == "add_adapters: it is an output layer: name it in include to adapt it"
    model = add_adapters(network(), LowRank, include=["lm", "classifier", "last"])
    assert trainable(model) == {
        f"{name}.update.adapter.{factor}" for name in ("lm", "last", "classifier.0", "classifier.1") for factor in "GH"
    }


def test_routers_of_experts_get_no_adapter():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 8, 8))  # one matrix for each expert

    block = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": Experts(), "o": nn.Linear(8, 8)})
    skipped = replacement_report(add_adapters(nn.ModuleDict({"block": block}), LowRank)).skipped
    assert skipped == {
        "block.gate": "add_adapters: it chooses experts: name it in include to adapt it",
        "block.experts": "add_adapters: a parameter has three dimensions, as those of experts have",
    }


def test_classes_of_modules_are_trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    add_adapters(model, Circulant, train=nn.LayerNorm)
    assert trainable(model) == {"0.update.adapter.column", "1.weight", "1.bias"}
    with pytest.raises(TypeError, match="no adapter for 0: adapter must be a StructuredLinear.*Linear"):
        add_adapters(made(), nn.Linear)
    with pytest.raises(TypeError, match="train takes names of modules and parameters.*, but has"):
        add_adapters(made(), FACTORY, train=[int])


@pytest.mark.filterwarnings("ignore:0.base. frozen weights")
def test_adapter_beside_a_structured_base_is_not_merged():
    model = replace_linear(add_adapters(made(), FACTORY), LowRank, include="0.base")
    with pytest.raises(ValueError, match="the adapter of 0 cannot .*: its base is a LowRank.*before the base is repl"):
        merge_adapters(model)


class Activated(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


def test_adapter_beside_a_forward_of_its_own_is_not_merged():
    model = nn.Sequential(Activated(8, 8), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    before = model(x)
    assert torch.equal(add_adapters(model, FACTORY)(x), before)
    with pytest.raises(ValueError, match="the adapter of 0 cannot be added to its weight: Activated has a forward"):
        merge_adapters(model)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("again", [saved_and_loaded, copy.deepcopy, copy.copy])
def test_a_copy_of_an_adapted_model_is_whole_and_is_trained_and_merged_by_itself(kind, again):
    model = train(add_adapters(made(kind), FACTORY))
    before, copied = model(inputs()), again(again(model))
    assert torch.equal(copied(inputs()), before)
    assert [*copied.state_dict()] == [*model.state_dict()] and trainable(copied) == trainable(model)
    if again is copy.copy:
        return  # which shares the weights
    train(copied)
    after = copied(inputs())
    assert not torch.allclose(after, before)
    merged = merge_adapters(copied)
    assert [type(module) for module in merged.modules()] == [type(module) for module in made(kind).modules()]
    torch.testing.assert_close(merged(inputs()), after)
    assert torch.equal(model(inputs()), before)


def test_parametrized_weight_is_adapted_and_merged_without_its_parametrization():
    model = made()
    names = set(model.state_dict())
    nn.utils.parametrizations.weight_norm(model[0])
    before = model(inputs())
    assert torch.equal(add_adapters(model, FACTORY)(inputs()), before)
    after = train(model)(inputs())
    with pytest.raises(ValueError, match="the weight of 0.base cannot be added to: it is parametrized"):
        merge_adapters(model)
    nn.utils.parametrize.remove_parametrizations(model[0].base, "weight")
    torch.testing.assert_close(merge_adapters(model)(inputs()), after)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("model", [nn.Linear(8, 8), nn.MultiheadAttention(8, 2)], ids=["linear", "attention"])
def test_a_sum_beyond_the_range_of_the_weight_is_not_merged(model):
    adapted = add_adapters(copy.deepcopy(model).half(), LowRank, scale=1.0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.fill_(300.0)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    with pytest.raises(ValueError, match="with its adapter added is not finite"):
        merge_adapters(adapted)
    assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters())


@pytest.mark.parametrize("model", [nn.Linear(8, 8), nn.MultiheadAttention(8, 2)], ids=["linear", "attention"])
def test_adapters_that_are_not_finite_are_not_merged(model):
    adapted = add_adapters(copy.deepcopy(model), LowRank)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    name, parameter = next((name, p) for name, p in adapted.named_parameters() if p.requires_grad)
    with torch.no_grad():
        parameter.view(-1)[0] = before[name].view(-1)[0] = torch.inf
    with pytest.raises(ValueError, match="adapter .* holds NaN or infinity in .*load_adapter_state_dict"):
        merge_adapters(adapted)
    assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters())
