import copy
import json
import logging
from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.nn import (
    BlockStructured,
    ChannelLinear,
    Circulant,
    LowRank,
    Monarch,
    PatchLinear,
    StructuredLinear,
    StructuredLSTM,
    add_adapters,
    apply_structure,
    compress,
    freeze,
    layer_structure,
    replace_conv,
    replace_linear,
    replacement_report,
)
from lightning_struct.nn.channels import as_matrix, in_place_of
from tests.nn.layers import CLASSES, dense_matrix, make


def low_rank_network():
    """A network whose first layer has rank 2, and whose second one has full rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(24, 2) @ torch.randn(2, 24) / 5)
        model[2].weight.copy_(torch.linalg.qr(torch.randn(24, 24)).Q)
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 24, generator=generator), torch.randint(3, (16,), generator=generator)) for _ in range(2)]


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("budget", [0.7, 0.3, 900])
def test_model_is_within_the_budget(budget):
    model = low_rank_network()
    whole = size(model)
    assert compress(model, batches(), budget=budget) is model
    assert size(model) <= (budget if budget > 1 else budget * whole)


def test_loss_is_called_as_it_is_documented():
    model = low_rank_network()
    seen = []

    def loss(of, batch):
        assert of is model and not of.training and not torch.is_grad_enabled()
        seen.append(batch)
        return of(batch).square().mean()

    data = [x for x, _ in batches()]
    compress(model.train(), data, budget=0.5, loss=loss)
    assert model.training and {id(batch) for batch in seen} == {id(batch) for batch in data}


@pytest.mark.parametrize("budget", [1.0, 4810])
def test_a_model_that_fits_stays_as_it_is(budget):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    compress(model, torch.randn(30, 64), budget=budget)
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]


def test_shared_layer_is_counted_once_and_stays_shared():
    torch.manual_seed(0)
    linear = nn.Linear(24, 24)
    model = compress(nn.Sequential(linear, nn.Tanh(), linear, nn.Linear(24, 3)), batches(), budget=0.5)
    assert model[0] is model[2] and isinstance(model[0], LowRank | Monarch)


def test_losses_before_and_after_are_logged(caplog):
    with caplog.at_level(logging.INFO, "lightning_struct"):
        compress(low_rank_network(), batches(), budget=0.5)
    assert caplog.messages[-1].startswith("compressed from 1,275 to ") and "loss 0 before" in caplog.messages[-1]


@pytest.mark.parametrize("include", [None, "*"])
def test_layers_have_the_largest_ranks_within_one_share_and_small_ends_stay(include):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 48), nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48), nn.Linear(48, 3))
    allowed = size(model) // 2
    compress(model, torch.randn(32, 4), budget=allowed, include=include)
    assert model[1].rank == model[3].rank and size(model) <= allowed < size(model) + 2 * (48 + 96)
    stay = dict.fromkeys("04", "compress: the first or last layer, which include does not name")
    assert replacement_report(model).skipped == ({} if include else stay)


def test_the_report_says_of_which_layers_others_have_the_weight():
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24))
    model[2].weight = model[1].weight
    compress(model, batches(), budget=0.9)
    reason = "another module has its weight, too"
    assert replacement_report(model).skipped == {"1": reason, "2": reason}


ZERO, ADVICE = nn.Linear(8, 8), "give loss="
with torch.no_grad():
    ZERO.weight.zero_()
    ZERO.bias.zero_()
WRONG = {
    "budget must be a finite number > 0 .*got 0": {"budget": 0},
    "budget must be a finite number > 0 .*got inf": {"budget": float("inf")},
    "compress needs one goal, but neither is given": {"budget": None},
    "compress needs one goal, but both are given": {"max_loss_increase": 0.1},
    "max_loss_increase must be a finite number >= 0": {"budget": None, "max_loss_increase": -0.1},
    "compress measures losses on data, but data has no batches": {"data": []},
    r"loss returns a tensor \(16, 3\) for a batch": {"loss": lambda model, batch: model(batch[0])},
    "the loss of the model on data is not finite": {"loss": lambda model, batch: torch.tensor(torch.nan)},
    "budget=100 allows 100 parameters, but with rank 1 in these layers the model has 174 of 1,275": {"budget": 100},
    "include names 'head', which is not in Sequential": {"include": "head"},
    "compress finds no layer": {"include": "1"},
    "compress finds .* is not structured already": {"model": nn.Sequential(LowRank(24, 24))},
    f"a batch is a dict, .*: {ADVICE}": {"model": nn.Linear(4, 4), "data": [{"x": torch.zeros(2, 4)}]},
    "the outputs of Sequential are no tensor, but a tuple": {"model": nn.Sequential(nn.Linear(24, 4), nn.LSTM(4, 4))},
    "the outputs of Linear for a batch are zero, .*train the": {"model": ZERO, "data": torch.ones(5, 8)},
    "the outputs of Linear for a batch are empty, .*train": {"model": ZERO, "data": torch.ones(0, 8)},
    "parameter 'weight' .* on the meta .* Load the .*; or take repl": {"model": nn.Linear(8, 2, device="meta")},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_say_what_is_wrong_and_leave_the_model_as_it_was(message):
    arguments = {"model": low_rank_network(), "data": batches(), "budget": 0.5} | WRONG[message]
    before = [type(module) for module in arguments["model"].modules()]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        compress(**arguments)
    assert [type(module) for module in arguments["model"].modules()] == before


def test_compiled_model_is_measured_as_it_is_and_compiled_again_once():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    inputs = batches()[0][0]
    expected = compress(low_rank_network(), inputs, budget=0.5)
    model = torch.compile(low_rank_network(), backend=backend)
    model(inputs)
    compress(model, inputs, budget=0.5)
    torch.testing.assert_close(model(inputs), expected(inputs))
    assert len(graphs) == 2


def test_a_tensor_is_one_batch():
    inputs = batches()[0][0]
    first, second = (compress(low_rank_network(), data, budget=0.5) for data in (inputs, [inputs]))
    assert layer_structure(first) == layer_structure(second)
    torch.testing.assert_close(first(inputs), second(inputs), rtol=0, atol=0)


CONVOLUTIONS = [
    (nn.Conv1d(3, 8, 5, stride=2, padding=1), (2, 3, 11)),
    (nn.Conv2d(3, 8, (3, 2), padding="same", dilation=2, bias=False), (2, 3, 7, 8)),
    (nn.Conv2d(3, 8, 1, stride=2), (2, 3, 7, 8)),
    (nn.Conv3d(2, 4, 2, stride=(1, 2, 1)), (2, 2, 4, 5, 4)),
]


@pytest.mark.parametrize(("convolution", "shape"), CONVOLUTIONS)
@pytest.mark.parametrize("layer", [LowRank, Monarch])
def test_matrix_in_place_of_a_convolution_computes_the_same(convolution, shape, layer):
    convolution = copy.deepcopy(convolution).double()
    linear = as_matrix(convolution)
    full = {"rank": min(linear.weight.shape)} if layer is LowRank else {"blocks": 1, "rank": min(linear.weight.shape)}
    new = in_place_of(convolution, layer.from_linear(linear, refine=0, **full))
    x = torch.randn(shape, dtype=torch.float64)
    expected = convolution(x)
    for module in (new, freeze(new), freeze(new, dense=True)):
        torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CLASSES)
def test_filters_of_any_class_are_the_rows_of_its_matrix(name):
    convolution, image = nn.Conv2d(3, 8, 3, stride=2, padding=1).double(), torch.randn(2, 3, 7, 8, dtype=torch.float64)
    layer = in_place_of(convolution, make(name, 27, 8))
    filters = dense_matrix(layer.linear).view(8, 3, 3, 3)
    expected = nn.functional.conv2d(image, filters, layer.bias, stride=2, padding=1)
    for module in (layer, freeze(layer), freeze(layer, dense=True)):
        torch.testing.assert_close(module(image), expected, rtol=1e-9, atol=1e-9)
    single = freeze(layer.float())(image.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)


class ConvolutionsAndAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, stride=2)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.embedding = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        pixels = self.depthwise(self.stem(x)).flatten(2).mT
        return self.head(self.attention(pixels, pixels, pixels, need_weights=False)[0].mean(1))


@pytest.fixture
def images():
    return [torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))]


@pytest.fixture
def network():
    torch.manual_seed(0)
    return ConvolutionsAndAttention()


def test_convolutions_and_projections_of_attention_are_compressed(network, images):
    whole = size(network)
    compress(network, images, budget=0.6)
    assert size(network) <= 0.6 * whole
    structured = {name for name, module in network.named_modules() if isinstance(module, StructuredLinear)}
    assert any(name.startswith("attention.") for name in structured)
    assert type(network.head) is nn.Linear and type(network.depthwise) is nn.Conv2d
    assert network.head.weight is network.embedding.weight


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("factory", [partial(LowRank.from_linear, rank=2), Circulant.from_linear])
def test_filters_can_be_read_from_what_stands_in_place_of_a_convolution(kernel, factory):
    torch.manual_seed(0)
    image = torch.randn(2, 8, 9, 9, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(8, 6, kernel, stride=2), nn.ReLU()).double()
    layer = in_place_of(model[0], factory(as_matrix(model[0])))
    assert type(layer) is (ChannelLinear if kernel == 1 else PatchLinear)
    assert layer.weight.shape == (6, 8, kernel, kernel)
    for module in layer, freeze(layer):
        torch.testing.assert_close(module(image), nn.functional.conv2d(image, module.weight, module.bias, stride=2))


def test_encoder_whose_attention_stays_goes_on_with_nested_tensors():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
    for include, goes_on in ("layers.0.linear1", True), ("layers.0.self_attn", False):
        encoder = nn.TransformerEncoder(layer, 1)
        compress(encoder, batches(), budget=0.95, include=include)
        assert encoder.use_nested_tensor == goes_on


def test_attention_that_stays_is_the_one_that_it_was(network, images):
    attention = network.attention
    compress(network, images, budget=0.9, include=["stem"])
    assert network.attention is attention and type(network.stem) is PatchLinear
    with pytest.raises(ValueError, match="with rank 1 in these layers the model has 246 of 438"):
        compress(network, images, budget=10, include=attention)
    assert network.attention is attention


def test_compressed_weights_are_loaded_into_the_model_that_it_was(network, images):
    compress(network, images, budget=0.6)
    torch.manual_seed(1)
    again = apply_structure(ConvolutionsAndAttention(), json.loads(json.dumps(layer_structure(network))))
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(images[0]), network(images[0]))
    assert apply_structure(again, layer_structure(network)) is again


def test_layers_that_have_their_structure_already_stay():
    made = nn.Sequential(LowRank(24, 24, rank=2), nn.Linear(24, 24))
    structure = {"0": {"class": "LowRank", "rank": 2}, "1": {"class": "LowRank", "rank": 3}}
    kept = made[0]
    assert layer_structure(apply_structure(made, structure)) == structure and made[0] is kept
    with pytest.raises(ValueError, match="the structure has LowRank for 0, but Sequential has a LowRank"):
        apply_structure(made, {"0": {"class": "LowRank", "rank": 4}})


@pytest.mark.parametrize("bias", [True, False])
def test_structure_has_the_blocks_in_place_of_a_convolution(bias):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=bias), nn.Sequential(nn.Conv2d(3, 4, 1)))

    model, x = network(), torch.randn(5, 2, 4, 6)
    replace_conv(model, partial(LowRank, rank=2), x)
    replace_linear(model, Circulant, include="1")
    structure = json.loads(json.dumps(layer_structure(model)))
    low_rank = {"class": "LowRank", "rank": 2}
    blocks = {"class": "BlockStructured", "size": 24, "in_shape": [4, 6], "blocks": low_rank}
    assert structure == {"0": blocks, "1.0": {"class": "Circulant"}}
    again = apply_structure(network().double(), structure)
    assert again[0].bias is None or again[0].bias.dtype == torch.float64
    again.float().load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x))
    assert apply_structure(again, structure) is again
    assert layer_structure(again[0]) == {"": blocks}
    assert apply_structure(model, {"0.blocks.1": blocks["blocks"]}) is model  # as up to version 0.2
    assert layer_structure(freeze(model)) == structure and layer_structure(freeze(model, dense=True)) == {}


def test_structure_has_the_blocks_in_place_of_a_convolution_with_a_stride_and_groups():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, groups=2))

    x = torch.randn(5, 4, 7, 6)
    model = replace_conv(network(), partial(LowRank, rank=2), x)
    structure = json.loads(json.dumps(layer_structure(model)))
    blocks = {"class": "LowRank", "rank": 2}
    sizes = {"size": 42, "in_shape": [7, 6], "out_size": [3, 2]}
    assert structure == {"0": {"class": "BlockStructured", **sizes, "blocks": blocks}}
    again = apply_structure(network(), structure)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x))
    assert again(x).shape == network()(x).shape and apply_structure(again, structure) is again


def test_blocks_of_several_classes_are_listed_one_by_one():
    layers = iter([Circulant, partial(LowRank, rank=2)])
    model = nn.Sequential(BlockStructured(2, 1, 9, lambda *sizes, bias: next(layers)(*sizes, bias=bias)))
    assert list(layer_structure(model)) == ["0.blocks.0", "0.blocks.1"]


def test_classes_of_ones_own_may_have_names_that_others_have():
    theirs = LowRank

    class Doubled(LowRank):
        pass

    def of_the_same_name():
        class LowRank(theirs):
            pass

        class Doubled(theirs):
            pass

        return LowRank, Doubled

    like_theirs, other = of_the_same_name()
    for layer_class in theirs, Doubled, like_theirs, other:
        structure = json.loads(json.dumps(layer_structure(nn.Sequential(layer_class(4, 4, rank=2)))))
        assert type(apply_structure(nn.Sequential(nn.Linear(4, 4)), structure)[0]) is layer_class


def test_structure_of_an_lstm_needs_the_lstm():
    model = nn.Sequential(StructuredLSTM(6, 8, Circulant))
    structure = layer_structure(model)
    again = nn.Sequential(StructuredLSTM(6, 8, Circulant))
    assert apply_structure(again, structure) is again
    with pytest.raises(ValueError, match="but Sequential has a LSTM at '0': .* such as a StructuredLSTM"):
        apply_structure(nn.Sequential(nn.LSTM(6, 8)), structure)
    with pytest.raises(ValueError, match="the structure has BlockStructured for 0, but Sequential has a Linear"):
        apply_structure(nn.Sequential(nn.Linear(4, 4)), {"0": {"class": "BlockStructured", "size": 4, "blocks": {}}})


def test_structure_of_another_model_is_an_error(network, images):
    compress(network, images, budget=0.95, exclude="attention")
    with pytest.raises(ValueError, match="but Sequential has no such layer: make the model"):
        apply_structure(nn.Sequential(nn.Linear(3, 3)), layer_structure(network))


def test_structure_of_an_adapted_model_needs_the_adapters():
    adapted, model = (nn.Sequential(LowRank(8, 8), nn.Linear(8, 4)) for _ in range(2))
    structure = layer_structure(add_adapters(adapted, Circulant))
    with pytest.raises(ValueError, match=r"for 1\.update\.adapter, but .* has a Linear at '1': .*\(add_adapters\)"):
        apply_structure(model, structure)
    apply_structure(add_adapters(model, Circulant), structure).load_state_dict(adapted.state_dict())


def test_low_rank_is_near_to_the_outputs_on_the_data():
    torch.manual_seed(0)
    linear = nn.Linear(24, 24)
    data = torch.randn(200, 24) * torch.logspace(0, -2, 24)[torch.randperm(24)]
    expected = linear(data)
    nearest_weight = LowRank.from_linear(linear, rank=6, refine=0)
    model = compress(linear, [data], budget=24 + 2 * 24 * 6, loss=lambda m, x: (m(x) - expected).square().mean())
    assert isinstance(model, LowRank) and model.rank == 6
    assert (model(data) - expected).norm() < 0.5 * (nearest_weight(data) - expected).norm()
    assert model.approximation_error > nearest_weight.approximation_error


def relative_change(before):
    return lambda model, batch: ((model(batch) - before).square().sum() / before.square().sum()).sqrt()


def test_loss_rises_by_no_more_than_it_may():
    x = batches()[0][0]
    sizes = []
    for allowed in (0.02, 0.3, 100.0):
        model = low_rank_network()
        change = relative_change(model(x).detach())
        compress(model, [x], max_loss_increase=allowed, loss=lambda m, batch, change=change: 5.0 + change(m, batch))
        assert change(model, x) <= allowed
        sizes.append(size(model))
    assert size(low_rank_network()) > sizes[0] > sizes[1] > sizes[2]


def test_no_allowance_leaves_what_costs():
    model = low_rank_network()
    before = model(batches()[0][0]).detach()

    def loss(of, x):
        return (of(x) - before).abs().mean() + float(isinstance(of[2], StructuredLinear))

    compress(model, [batches()[0][0]], max_loss_increase=0.0, loss=loss)
    assert type(model[2]) is nn.Linear


class Activated(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


def test_subclasses_of_linear_with_another_map_stay_unless_they_are_named():
    def compressed(**selection):
        torch.manual_seed(0)
        model = nn.Sequential(Activated(24, 24), nn.Linear(24, 24))
        compress(model, batches(), budget=0.7, **selection)
        return [type(layer).__name__ for layer in model]

    assert compressed() == ["Activated", "LowRank"]
    assert compressed(include="0") == ["LowRank", "Linear"]


def test_report_says_what_compress_has_left_and_why():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1), nn.Linear(1, 3))
    compress(model, batches(), budget=0.7, include=["0", "2"], exclude="3")
    assert isinstance(model[0], LowRank)
    assert replacement_report(model).skipped == {
        "2": "compress: low rank makes it no smaller",
        "3": "compress: exclude has it",
    }
    encoder = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0)
    compress(encoder, batches(), budget=0.9, include=["linear1", "linear2"])
    assert replacement_report(encoder).skipped["self_attn"] == "compress: include does not have it"
    with pytest.raises(ValueError, match="^compress finds no layer .*; 0: it is recurrent$"):
        compress(nn.Sequential(nn.GRU(24, 24)), batches(), budget=0.5)
