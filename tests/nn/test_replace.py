import logging
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_struct.functional import register_layer, unregister_layer
from lightning_struct.nn import (
    BlockStructured,
    LowRank,
    StructuredLinear,
    add_adapters,
    compress,
    replace_conv,
    replace_linear,
    replacement_report,
)
from tests.nn.layers import Conv1D

FACTORY = partial(LowRank, rank=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


def structured(model):
    return [name for name, module in model.named_modules() if isinstance(module, StructuredLinear)]


def test_every_linear_is_replaced_in_place():
    model = Net()
    assert replace_linear(model, FACTORY) is model
    assert structured(model) == ["encoder.0", "encoder.2", "head"]
    assert model.encoder[2].bias is None and model.encoder[0].bias is not None and model.head.rank == 2
    assert model(torch.randn(7, 6)).shape == (7, 3)


WRONG_FACTORIES = {
    "the factory is a layer.*give LowRank, or functools.partial": LowRank(4, 3),
    "the factory cannot be called as .*'ranks'.*with arguments of that class": partial(LowRank, ranks=2),
    "the factory cannot be called as .* bias=...\\): .*'bias'. Give a class": lambda n, m: LowRank(n, m),
    "head: the factory has made no layer, but None": lambda n, m, bias: None,
    "head: .* asked for out_features=3, but has made Low": lambda n, m, bias: LowRank(n, m + 1, bias=bias),
    "head: .* asked for in_features=4, but has made Low": lambda n, m, bias: LowRank(n + 1, m, bias=bias),
    "head: .* asked for bias=True.*let it hand bias on": lambda n, m, bias: LowRank(n, m, bias=False),
    "head: rank must be at most .* = 3, but is 4: .*; exclude='head' leaves": partial(LowRank, rank=4),
}


@pytest.mark.parametrize("message", WRONG_FACTORIES)
def test_factories_that_do_not_fit_are_named_and_leave_the_model_as_it_was(message):
    for call in (replace_linear,) if message.startswith("head") else (replace_linear, add_adapters):
        model = Net()
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call(model, WRONG_FACTORIES[message], exclude=[] if "rank" in message else "encoder")
        assert not structured(model)


CONV, LAZY = nn.Sequential(nn.Conv2d(1, 2, 3)), nn.Sequential(nn.LazyLinear(8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace_linear(LAZY, LowRank), "0: .* no shape yet: run the model once"),
        (lambda: compress(LAZY, torch.zeros(3, 4), budget=0.5), "parameter '0.* has no shape yet: run the model once"),
        (lambda: replace_linear(nn.Linear(64, 1), FACTORY), "the model: rank must be at most .* = 1, but is 2: "),
        (lambda: add_adapters(nn.Linear(64, 1), FACTORY), "no adapter for the model: rank .*nn.Linear$"),
        (lambda: replace_linear(Net(), FACTORY, exclude="*"), "replace_linear replaces nothing"),
    ],
)
def test_calls_that_mean_nothing_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


def test_shared_layer_stays_shared():
    linear = nn.Linear(4, 4)
    model = replace_linear(nn.Sequential(linear, nn.ReLU(), linear), FACTORY)
    assert model[0] is model[2] and isinstance(model[0], LowRank)


@pytest.mark.parametrize("factory", [FACTORY, partial(LowRank.from_linear, rank=2)])
def test_dtype_and_mode_are_kept(factory):
    model = replace_linear(Net().double().eval(), factory)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert not any(module.training for module in model.modules())


PARTS = ["q_proj", "k_proj", "v_proj", "out_proj"]


def exactly(linear):
    """A structured layer with the weight of the layer."""
    return LowRank.from_linear(linear, min(linear.weight.shape), refine=0)


exactly.__name__ = "from_linear"

CAUSAL = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
IGNORED = torch.tensor([[False, False, True], [False, True, False]])


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({"bias": False, "batch_first": True}, {"need_weights": False}),
        ({"kdim": 5, "vdim": 7}, {"average_attn_weights": False}),
        ({"batch_first": True}, {"key_padding_mask": IGNORED}),
        ({"batch_first": True}, {"key_padding_mask": IGNORED, "attn_mask": CAUSAL > -1, "need_weights": False}),
        ({"batch_first": True}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
        ({"batch_first": True}, {"attn_mask": torch.randn(4, 3, 3, dtype=torch.float64)}),
    ],
)
def test_attention_computes_the_same_from_the_same_projections(options, call):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, **options, dtype=torch.float64).eval()
    if attention.in_proj_bias is not None:
        nn.init.normal_(attention.in_proj_bias)
    steps_first = (3, 2) if not attention.batch_first else (2, 3)
    inputs = [torch.randn(*steps_first, size, dtype=torch.float64) for size in (8, attention.kdim, attention.vdim)]
    ours = replace_linear(nn.Sequential(attention), exactly)[0]
    for shape in ("batched", "alone") if not call.keys() - {"need_weights", "average_attn_weights"} else ("batched",):
        given = inputs if shape == "batched" else [x[:, 0] if not attention.batch_first else x[0] for x in inputs]
        torch.testing.assert_close(ours(*given, **call), attention(*given, **call))


def test_transformer_encoder_computes_the_same_with_padding():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    padding = torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        ours = replace_linear(model, exactly)(x, src_key_padding_mask=padding)
    torch.testing.assert_close(ours[~padding], expected[~padding])


@pytest.mark.parametrize(
    ("selection", "selected"),
    [("*.out_proj", ["out_proj"]), (["0.k_proj", "0.q_proj"], ["q_proj", "k_proj"]), ("0", PARTS)],
)
def test_projections_of_attention_are_selected_by_name(selection, selected):
    torch.manual_seed(0)
    model = nn.Sequential(nn.MultiheadAttention(8, 2, dropout=0.0), nn.Linear(8, 8))
    x = torch.randn(3, 2, 8)
    expected = model[0](x, x, x)
    replace_linear(model, exactly, include=selection)
    assert structured(model) == [f"0.{part}" for part in selected]
    torch.testing.assert_close(model[0](x, x, x), expected, rtol=1e-4, atol=1e-5)
    assert len(list(model[0].parameters())) == 8 + len(selected)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Conv1D(5, 6), (2, 3, 6)),
        (nn.Conv2d(6, 5, 1, stride=(2, 1)), (2, 6, 4, 5)),
        (nn.Conv2d(6, 5, 1, bias=False), (6, 4, 5)),
        (nn.Conv1d(6, 5, 1, stride=3), (2, 6, 7)),
    ],
)
def test_layers_that_are_linear_by_another_name_are_replaced(layer, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = replace_linear(nn.Sequential(layer), exactly)
    assert len(structured(model)) == 1
    torch.testing.assert_close(model(x), layer(x), rtol=1e-4, atol=1e-5)


def said_of(function):
    """The messages of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def test_what_is_done_is_logged(caplog):
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), attention, nn.Linear(8, 3))
    with caplog.at_level(logging.INFO, "lightning_struct"):
        replace_linear(model, partial(LowRank.from_linear, rank=2), exclude=["0.linear2", "0.self_attn"])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "1 is left as it is: add_bias_kv=True" in messages
    assert any(message.startswith("0.linear1: Linear(") and "relative error 0." in message for message in messages)


def test_frozen_layers_that_lose_their_weights_are_named():
    def teacher_and_student():
        return nn.ModuleDict({"teacher": nn.Linear(8, 8).requires_grad_(False), "student": nn.Linear(8, 8)})

    assert said_of(lambda: replace_linear(teacher_and_student(), partial(LowRank.from_linear, rank=2))) == []
    (message,) = said_of(lambda: replace_linear(teacher_and_student(), partial(LowRank, rank=2)))
    assert message.startswith("teacher: frozen weights were replaced by random ones")


LARGER = "its kernel is larger than one pixel"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), f"{LARGER}: replace_conv and compress take it"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), f"{LARGER}: replace_conv takes it"),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), f"{LARGER}: replace_conv takes it"),
        (nn.Conv2d(4, 4, 1, groups=4), "it has 4 groups"),
        (nn.Conv2d(4, 4, 1, padding=1), "it has padding (1, 1): compress takes it"),
        (nn.Conv2d(4, 4, 1), "nothing has replaced it"),
        (nn.ConvTranspose2d(4, 4, 3), "it is a transposed convolution"),
        (nn.Bilinear(4, 4, 4), "it is bilinear: it has a matrix for each output"),
        (nn.GRU(4, 4), "it is recurrent"),
        (nn.LSTMCell(4, 4), "it is recurrent"),
        (nn.MultiheadAttention(4, 2, add_zero_attn=True), "add_zero_attn=True"),
        (nn.Linear(4, 4), "nothing has replaced it"),
    ],
)
def test_each_kind_of_layer_has_its_reason(layer, reason):
    assert replacement_report(nn.Sequential(layer)).skipped == {"0": reason}


def test_reason_is_that_of_the_call_that_left_a_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    replace_linear(model, FACTORY, include=["1.q_proj", "3"])
    left = "replace_linear: include does not have it"
    assert replacement_report(model).skipped == dict.fromkeys(["0", "1.k_proj", "1.v_proj", "1.out_proj", "2"], left)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2))
    replace_conv(model, FACTORY, torch.randn(1, 2, 12, 12))
    pixel = "its kernel is one pixel: replace_linear takes it"
    assert replacement_report(model).skipped == {"1": pixel, "2": "it has 2 groups"}


def test_error_where_nothing_is_replaced_says_why():
    attention = nn.Sequential(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(ValueError, match="^replace_linear replaces nothing: .*; 0: add_bias_kv=True$"):
        replace_linear(attention, FACTORY)
    with pytest.raises(ValueError, match="; 0: it is recurrent; .*; 4: it is recurrent; and 2 more$"):
        replace_linear(nn.Sequential(*(nn.GRU(4, 4) for _ in range(7))), FACTORY)
    with pytest.raises(ValueError, match="; 0: it is structured$"):
        replace_linear(nn.Sequential(LowRank(4, 4)), FACTORY)


def test_hooks_and_requires_grad_are_carried_over():
    model, seen = nn.Sequential(nn.Linear(6, 5), nn.Conv2d(5, 4, 1), nn.MultiheadAttention(4, 2)), []
    handles = [layer.register_forward_hook(lambda *_: seen.append("forward")) for layer in model]
    model[0].register_forward_pre_hook(lambda *_, **__: seen.append("before"), with_kwargs=True)
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    for layer in model:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("bias" in name)
    replace_linear(model, FACTORY)
    assert all(p.requires_grad == name.endswith("bias") for name, p in model.named_parameters())
    x = model[0](torch.randn(3, 6))
    x.sum().backward()
    model[1](torch.randn(2, 5, 3, 3))
    model[2](*[torch.randn(3, 2, 4)] * 3)
    assert seen == ["before", "forward", "backward", "forward", "forward"]
    for handle in handles:
        handle.remove()
    model[1](torch.randn(2, 5, 3, 3))
    assert len(seen) == 5


@pytest.mark.parametrize("at", [f"{of}state_dict_{when}" for of in ("", "load_") for when in ("pre", "post")])
def test_hooks_of_state_are_named_where_they_go(at):
    model = nn.Sequential(nn.Linear(6, 5), nn.utils.spectral_norm(nn.Linear(5, 5)))
    getattr(model[0], f"register_{at}_hook")(lambda *_: None)
    assert said_of(lambda: replace_linear(model, FACTORY)) == [
        "0: hooks of state_dict and load_state_dict are not carried over to the new layer",
        "1: SpectralNorm of its weight is not carried over to the new layer",
    ]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("change", "made_by"),
    [
        (nn.utils.spectral_norm, "SpectralNorm"),
        (nn.utils.weight_norm, "WeightNorm"),
        (partial(prune.l1_unstructured, name="weight", amount=0.5), "L1Unstructured"),
        (parametrizations.weight_norm, "WeightNorm"),
        (parametrizations.spectral_norm, "SpectralNorm"),
        (parametrizations.orthogonal, "Orthogonal"),
    ],
)
def test_what_makes_a_weight_is_named_where_it_goes_and_the_new_layer_is_near_to_that(change, made_by):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), change(nn.Linear(5, 5)).eval())
    weight = model[1].weight.detach().clone()
    said = said_of(lambda: replace_linear(model, exactly))
    assert said == [f"1: {made_by} of its weight is not carried over to the new layer"]
    torch.testing.assert_close(model[1].to_dense(), weight)
    assert model(torch.randn(2, 6)).shape == (2, 5)


def test_tied_weights_are_named():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9), nn.Linear(4, 4))
    model[2].weight, model[3].weight = model[0].weight, model[1].weight
    assert said_of(lambda: replace_linear(model, FACTORY)) == [
        "2: the weight is no longer shared with 0",
        "1 and 3 no longer share one weight",
    ]


class Masked(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones_like(self.weight).tril())

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class Activated(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize("layer_type", [Masked, Activated])
def test_subclasses_of_linear_with_another_map_stay(layer_type, caplog):
    torch.manual_seed(0)
    model, x = nn.Sequential(layer_type(6, 6), nn.Linear(6, 6)), torch.randn(3, 6)
    expected = model(x)
    with caplog.at_level(logging.INFO, "lightning_struct"):
        replace_linear(model, exactly)
    assert structured(model) == ["1"]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    reason = f"{layer_type.__name__} has a forward of its own"
    assert any(record.getMessage().startswith(f"0 is left as it is: {reason}") for record in caplog.records)
    report = replacement_report(model)
    assert reason in report.skipped["0"] and "register_layer" in report.skipped["0"] and "include" in str(report)
    with pytest.raises(ValueError, match=f"^replace_linear replaces nothing: .*{reason}"):
        replace_linear(layer_type(6, 6), exactly)


@pytest.mark.parametrize("select", [lambda model: "0", lambda model: model[0]])
def test_subclasses_of_linear_that_are_named_are_replaced(select):
    model = nn.Sequential(Activated(6, 6), Activated(6, 6))
    assert structured(replace_linear(model, exactly, include=[select(model), "*"])) == ["0"]
    register_layer(Activated, like=nn.Linear)
    try:
        assert structured(replace_linear(model, exactly)) == ["0", "1"]
    finally:
        unregister_layer(Activated)


def test_report_lists_structured_layers():
    model = Net()
    replace_linear(model, partial(LowRank.from_linear, rank=2), include="head")
    replace_linear(model, FACTORY)
    lines = replacement_report(model).splitlines()
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert replacement_report(model).skipped == {}
    assert lines[1].split() == ["encoder.0", "LowRank(rank=2)", "22", "30", "1.4"]
    assert lines[3].split()[:5] == ["head", "LowRank(rank=2)", "14", "12", "0.9"] and float(lines[3].split()[5]) < 1
    assert lines[4].split()[:4] == ["the", "whole", "model", f"{sum(p.numel() for p in model.parameters())}"]


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 3, 3, stride=2, groups=3),
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv2d(3, 3, 1),
    )


def test_adapters_take_the_place_of_nothing():
    model = add_adapters(nn.Sequential(nn.Linear(8, 8), LowRank(8, 8, bias=False)), partial(LowRank, rank=2))
    rows = [line.split() for line in replacement_report(model).splitlines()[1:4]]
    assert [row[0] for row in rows[:2]] == ["0.update.adapter", "1"]
    now = 72 + 32 + 16
    assert rows[2] == ["the", "whole", "model", str(now), str(now + 64 - 16), f"{(now + 48) / now:.1f}"]


def test_convolutions_are_replaced_by_blocks(caplog):
    model = convolutions()
    model[3].weight.requires_grad_(False)
    before = model[1].running_mean.clone()
    with caplog.at_level(logging.INFO, "lightning_struct"):
        assert replace_conv(model, FACTORY, torch.randn(1, 2, 9, 9)) is model
    assert len(caplog.records) == 3
    blocks = "BlockStructured"
    assert [type(layer).__name__ for layer in model] == [blocks, "BatchNorm2d", blocks, blocks, "Conv2d"]
    assert model(torch.randn(4, 2, 9, 9)).shape == (4, 3, 4, 4)
    assert [model[i].size for i in (0, 2, 3)] == [81, 81, 16] and model[2].out_shape == (4, 4)
    assert model.training and model[1].training and torch.equal(before, torch.zeros(3))
    assert {name for name, p in model[3].named_parameters() if p.requires_grad} == {"bias"}
    assert list(replacement_report(model).skipped) == ["4"]


def test_report_has_one_row_for_blocks_that_are_alike():
    torch.manual_seed(0)
    model = replace_conv(convolutions(), partial(LowRank.from_linear, rank=2), torch.randn(1, 2, 9, 9), include="0")
    row, whole = (line.split() for line in replacement_report(model).splitlines()[1:3])
    assert row[:7] == ["0.blocks.0-5", "6", "x", "LowRank(rank=2)", f"{6 * 2 * 162:,}", f"{6 * 81 * 81:,}", "20.2"]
    errors = [block.approximation_error for block in model[0].blocks]
    assert row[7:] == [f"{max(errors):.3g}"] and whole[:3] == ["the", "whole", "model"]
    model[0].blocks[5] = LowRank(81, 81, bias=False, rank=1)
    rows = [line.split()[0] for line in replacement_report(model).splitlines()[1:3]]
    assert rows == ["0.blocks.0-4", "0.blocks.5"]


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 5)),
        (nn.Conv2d(2, 3, (3, 1), padding=(1, 0), bias=False), (2, 4, 5)),
        (nn.Conv1d(2, 3, 3, padding="same", dilation=2), (2, 9)),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 4, 5)),
        (nn.Conv2d(2, 3, (2, 3), stride=(2, 1)), (2, 4, 5)),
        (nn.Conv2d(2, 4, 3, padding=2, groups=2, padding_mode="replicate"), (2, 4, 5)),
        (nn.Conv1d(6, 9, 4, stride=3, groups=3), (6, 11)),
    ],
)
def test_blocks_near_to_a_convolution_compute_what_it_does(convolution, shape):
    torch.manual_seed(0)
    x = torch.randn(3, *shape)
    blocks = replace_conv(convolution, exactly, x)
    for images in (x, x[0]):
        torch.testing.assert_close(blocks(images), convolution(images), rtol=1e-4, atol=1e-4)


def test_the_example_gives_lazy_convolutions_their_shape():
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d())
    replace_conv(model, FACTORY, torch.zeros(1, 2, 9, 9))
    assert type(model[0]) is BlockStructured and model(torch.randn(2, 2, 9, 9)).shape == (2, 3, 7, 7)


def test_blocks_refuse_images_of_another_shape_with_as_many_pixels():
    blocks = replace_conv(nn.Conv2d(2, 3, 3, padding=1), LowRank, torch.zeros(1, 2, 4, 6))
    for shape in ((5, 2, 6, 4), (5, 2, 3, 8), (5, 2, 24), (2, 6, 4)):
        with pytest.raises(ValueError, match=r"takes \(batch, 2, 4, 6\) or \(2, 4, 6\), but the input has shape"):
            blocks(torch.zeros(shape))


def test_a_convolution_with_very_many_pairs_of_channels_is_named_before_its_blocks_are_made():
    model = nn.Sequential(nn.Conv2d(128, 256, 3, groups=2))
    with (
        pytest.warns(UserWarning, match="^0 becomes 16,384 blocks.*exclude"),
        pytest.raises(ValueError, match="^0: rank must be at most"),
    ):
        replace_conv(model, partial(LowRank, rank=99), torch.zeros(1, 128, 4, 4))


def test_convolutions_are_selected_and_errors_name_them():
    model = convolutions()
    replace_conv(model, FACTORY, torch.zeros(1, 2, 9, 9), exclude="3")
    assert isinstance(model[0], BlockStructured) and isinstance(model[3], nn.Conv2d)
    with pytest.raises(ValueError, match="replaces nothing: .*; 4: its kernel is one pixel: replace_linear takes it"):
        replace_conv(convolutions(), FACTORY, torch.zeros(1, 2, 9, 9), include="4")
    with pytest.raises(ValueError, match="^2: rank must be at most .* = 16, but is 20: .*exclude='2'"):
        replace_conv(convolutions(), partial(LowRank, rank=20), torch.zeros(1, 2, 9, 9))
