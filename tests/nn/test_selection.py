"""Names, patterns, modules and functions that select modules: the same for all that replaces or adapts layers."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_struct.nn import LowRank, add_adapters, compress, replace_conv, replace_linear
from lightning_struct.nn.selection import Selection, is_at_or_below

FACTORY = partial(LowRank, rank=1)
REPLACING = {
    "replace_linear": partial(replace_linear, factory=FACTORY),
    "replace_conv": partial(replace_conv, factory=FACTORY, example=torch.zeros(1, 2, 4, 4)),
    "add_adapters": partial(add_adapters, factory=FACTORY),
    "compress": partial(compress, data=[torch.zeros(1, 2, 4, 4)], budget=0.9),
}


def network():
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2)))


def selected(model, **arguments):
    selection = Selection(model, **arguments)
    return [name for name, module in model.named_modules() if selection.has(name, module)]


@pytest.mark.parametrize(
    ("of_argument", "expected"),
    [
        ("2", ["2", "2.0", "2.1"]),
        ("2.*", ["2.0", "2.1"]),
        (["0", "*.1"], ["0", "2.1"]),
        (nn.Linear, ["2.0", "2.1"]),
        ([nn.Flatten, nn.Conv2d], ["0", "1"]),
        (lambda name, module: isinstance(module, nn.Linear), ["2.0", "2.1"]),
        ([lambda name, module: name == "1", "2.0"], ["1", "2.0"]),
    ],
)
def test_include_and_exclude_mean_the_same(of_argument, expected):
    model = network()
    every = [name for name, _ in model.named_modules()]
    assert selected(model) == every
    assert selected(model, include=of_argument) == expected
    assert selected(model, exclude=of_argument) == [name for name in every if name not in expected]
    assert selected(model, include=of_argument, exclude=of_argument) == []


@pytest.mark.parametrize("selector", [0, [2], int, [nn.Linear, 0]])
def test_numbers_and_other_classes_are_no_selectors(selector):
    for argument in "include", "exclude":
        with pytest.raises(TypeError, match=f"{argument} takes names such as .*, but has "):
            selected(network(), **{argument: selector})


def test_a_class_that_the_model_does_not_have_is_an_error():
    with pytest.raises(ValueError, match="exclude has Embedding, and Sequential has none"):
        selected(network(), exclude=nn.Embedding)


def test_class_stands_for_all_below_its_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 8))
    names = selected(model, include=nn.TransformerEncoderLayer)
    assert names[0] == "1" and "1.self_attn.out_proj" in names and "0" not in names
    assert Selection(model, nn.MultiheadAttention).has("1.self_attn.q_proj", nn.Linear(4, 4), model[1].self_attn)


def test_module_stands_for_all_below_it():
    model = network()
    assert selected(model, include=model[2], exclude=[model[2][0]]) == ["2", "2.1"]
    assert selected(model, exclude=model) == []


def test_projections_are_selected_by_their_names_and_by_their_attention():
    model = nn.Sequential(nn.MultiheadAttention(4, 1))
    projection = nn.Linear(4, 4)
    for argument, of_query in (("0.q_proj", True), ("*.k_proj", False), ("0", True), (model[0], True)):
        assert Selection(model, argument).has("0.q_proj", projection, model[0]) is of_query
    assert Selection(model[0], "q_proj").has("q_proj", projection, model[0])


def test_names_are_read_as_they_are_before_they_are_read_as_patterns():
    model = nn.ModuleDict({"x[0]": nn.Sequential(nn.Linear(4, 4)), "x0": nn.Linear(4, 4), "x1": nn.Linear(4, 4)})
    assert selected(model, include="x[0]") == ["x[0]", "x[0].0"]
    assert selected(model, include="x[01]") == ["x0", "x1"]
    assert is_at_or_below("x[0].weight", "x[0]")


def test_who_writes_a_full_name_or_gives_a_module_means_that_one():
    model = network()
    selection = Selection(model, include=["2.0", model[0], "1*"])
    assert [name for name, module in model.named_modules() if selection.names(name, module)] == ["0", "2.0"]
    assert not Selection(model).names("0", model[0])


def test_names_are_those_at_or_above():
    assert is_at_or_below("a.b.weight", "a.b") and is_at_or_below("a.b", "*.b") and is_at_or_below("a.b", "a.b")
    assert not is_at_or_below("a.bc", "a.b") and not is_at_or_below("a", "a.b") and not is_at_or_below("", "*")


@pytest.mark.parametrize("call", REPLACING.values(), ids=REPLACING)
@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_what_is_not_in_the_model_is_refused(call, argument):
    with pytest.raises(ValueError, match=f"^{argument} names '3.*', which is not in Sequential$"):
        call(network(), **{argument: ["0", "3.*"]})
    nested = nn.ModuleDict({"layers": nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})})
    with pytest.raises(ValueError, match=rf"^{argument} names 'q', which is not in ModuleDict: '\*.q' names layers.q$"):
        call(nested, **{argument: "q"})
    with pytest.raises(ValueError, match=f"^{argument} has a module that is not in Sequential: Linear"):
        call(network(), **{argument: nn.Linear(32, 4)})
