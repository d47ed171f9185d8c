import logging
from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.nn import LowRank, PrunedLinear, StructuredLinear, replace_linear, replacement_report

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


def test_model_that_is_a_linear_gives_the_new_layer():
    assert isinstance(replace_linear(nn.Linear(6, 5), FACTORY), LowRank)


@pytest.mark.parametrize(
    ("selection", "selected"),
    [
        ("head", ["head"]),
        ("encoder", ["encoder.0", "encoder.2"]),
        ("encoder.*", ["encoder.0", "encoder.2"]),
        (["encoder.2", "h*"], ["encoder.2", "head"]),
        (lambda name, module: module.in_features > 4, ["encoder.0", "encoder.2"]),
    ],
)
def test_selection(selection, selected):
    assert structured(replace_linear(Net(), FACTORY, include=selection)) == selected
    others = [name for name in ["encoder.0", "encoder.2", "head"] if name not in selected]
    assert structured(replace_linear(Net(), FACTORY, exclude=selection)) == others


def test_modules_select():
    model = Net()
    assert structured(replace_linear(model, FACTORY, exclude=[model.encoder[0], model.head])) == ["encoder.2"]
    model = Net()
    assert structured(replace_linear(model, FACTORY, include=model.encoder)) == ["encoder.0", "encoder.2"]


def test_weights_are_kept_as_nearly_as_the_class_can():
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(7, 6)
    before = model(x)
    replace_linear(model, partial(PrunedLinear.from_linear, parameters=12))
    assert [model.get_submodule(name).approximation_error for name in structured(model)][
        2
    ] == 0  # all of its 12 weights
    model = Net()
    nn.init.normal_(model.head.weight)
    model.head.weight.data[2] = model.head.weight.data[0] + model.head.weight.data[1]
    before = model(x)
    replace_linear(model, partial(LowRank.from_linear, rank=2), include="head")
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_class_by_itself_is_a_factory():
    assert structured(replace_linear(Net(), LowRank)) and structured(replace_linear(Net(), LowRank.from_linear))


def test_shared_layer_stays_shared():
    linear = nn.Linear(4, 4)
    model = replace_linear(nn.Sequential(linear, nn.ReLU(), linear), FACTORY)
    assert model[0] is model[2] and isinstance(model[0], LowRank)


@pytest.mark.parametrize("factory", [FACTORY, partial(LowRank.from_linear, rank=2)])
def test_dtype_and_mode_are_kept(factory):
    model = replace_linear(Net().double().eval(), factory)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layer_works_on(training):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    replace_linear(model, FACTORY)
    assert structured(model) == ["linear1", "linear2"] and type(model.self_attn.out_proj) is not LowRank
    x = torch.randn(2, 3, 8)
    outputs = model(x)
    with torch.no_grad():  # in eval mode torch reads the weights here instead of calling the layers
        torch.testing.assert_close(model(x), outputs, rtol=1e-4, atol=1e-5)


def test_what_is_done_is_logged(caplog):
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 3))
    with caplog.at_level(logging.INFO, "lightning_struct"):
        replace_linear(model, partial(LowRank.from_linear, rank=2), exclude="0.linear2")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "0.self_attn.out_proj is left as it is: nn.MultiheadAttention reads its weight" in messages
    assert any(message.startswith("0.linear1: Linear(") and "relative error 0." in message for message in messages)


def test_tied_weights_are_named(caplog):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    model[2].weight = model[0].weight
    with caplog.at_level(logging.WARNING, "lightning_struct"):
        replace_linear(model, FACTORY)
    assert [record.getMessage() for record in caplog.records] == ["2 had its weight together with 0, and no longer has"]


def test_report_lists_structured_layers():
    model = Net()
    replace_linear(model, partial(LowRank.from_linear, rank=2), include="head")
    replace_linear(model, FACTORY)
    lines = replacement_report(model).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["encoder.0", "LowRank", "22", "30", "1.4"]
    assert lines[3].split()[:5] == ["head", "LowRank", "14", "12", "0.9"] and float(lines[3].split()[5]) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "tail"}, "include names 'tail', which is not in Net"),
        ({"exclude": ["head", "encoder.7"]}, "exclude names 'encoder.7', which is not in Net"),
        ({"exclude": nn.Linear(2, 2)}, "exclude has a module that is not in Net"),
        ({"exclude": "*"}, "replace_linear replaces nothing"),
    ],
)
def test_wrong_selections_are_named(options, message):
    model = Net()
    with pytest.raises(ValueError, match=message):
        replace_linear(model, FACTORY, **options)
    assert not structured(model)


def test_rank_that_a_layer_cannot_have_is_named_and_leaves_the_model_as_it_was():
    model = Net()
    with pytest.raises(ValueError, match="rank must be at most .* = 3, but is 4"):
        replace_linear(model, partial(LowRank, rank=4))
    assert not structured(model)
