import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_struct.nn import BlockStructured, LowRank, StructuredLSTM


@contextmanager
def count_of_calls(layer_class):
    calls = []

    def note(module, args):
        if isinstance(module, layer_class):
            calls.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield calls
    finally:
        handle.remove()


def dense_weights_of(lstm, ours):
    """Copy the weights of an nn.LSTM."""
    suffixes = [
        f"l{level}{end}" for level in range(lstm.num_layers) for end in ("", "_reverse")[: 1 + lstm.bidirectional]
    ]
    with torch.no_grad():
        for suffix, direction in zip(suffixes, ours.directions, strict=True):
            gates = len(direction.input_hidden)
            for layers, kind in ((direction.input_hidden, "ih"), (direction.hidden_hidden, "hh")):
                for layer, part in zip(layers, getattr(lstm, f"weight_{kind}_{suffix}").chunk(gates), strict=True):
                    layer.weight.copy_(part)
            if lstm.bias:
                biases = getattr(lstm, f"bias_ih_{suffix}") + getattr(lstm, f"bias_hh_{suffix}")
                for layer, part in zip(direction.input_hidden, biases.chunk(gates), strict=True):
                    layer.bias.copy_(part)


@pytest.mark.covering(2)
@pytest.mark.parametrize("gates", ["separate", "joint"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torch_with_the_same_matrices(gates, bidirectional, batch_first, bias):
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
    theirs = nn.LSTM(5, 7, dtype=torch.float64, **options)
    ours = StructuredLSTM(5, 7, nn.Linear, gates=gates, dtype=torch.float64, **options)
    dense_weights_of(theirs, ours)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    batch = 3 if batch_first else 4
    state = tuple(torch.randn(2 * (1 + bidirectional), batch, 7, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, state), theirs(x, state))
    one = tuple(part[:, 0] for part in state)
    torch.testing.assert_close(ours(x[0], one), theirs(x[0], one))


def test_factories_make_the_matrices_that_they_are_given_for():
    lstm = StructuredLSTM(5, 7, partial(LowRank, rank=3), num_layers=2, hidden_factory=partial(LowRank, rank=2))
    first, second = lstm.directions
    assert [(m.in_features, m.out_features, m.rank) for m in first.input_hidden] == [(5, 7, 3)] * 4
    assert [(m.in_features, m.out_features, m.rank) for m in second.input_hidden] == [(7, 7, 3)] * 4
    assert [(m.in_features, m.out_features, m.rank) for m in second.hidden_hidden] == [(7, 7, 2)] * 4
    lstm(torch.randn(3, 2, 5))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in lstm.parameters())


@pytest.mark.parametrize("bidirectional", [False, True])
def test_hidden_matrices_are_multiplied_at_once_unless_their_layers_are_watched(bidirectional):
    torch.manual_seed(0)
    at_once = StructuredLSTM(5, 7, nn.Linear, bidirectional=bidirectional, dtype=torch.float64)
    watched, x, calls = copy.deepcopy(at_once), torch.randn(3, 2, 5, dtype=torch.float64), []
    for direction in watched.directions:
        for layer in direction.hidden_hidden:
            layer.register_forward_hook(lambda module, *_: calls.append(module))
    torch.testing.assert_close(at_once(x), watched(x))
    assert len(calls) == 3 * 4 * len(watched.directions)
    for lstm in at_once, watched:
        lstm(x)[0].square().sum().backward()
    for ours, theirs in zip(at_once.parameters(), watched.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    with count_of_calls(nn.Linear) as calls:
        at_once(x)
    assert len(calls) == 4 * len(at_once.directions)  # of the inputs alone


def test_dropout_is_between_the_levels_alone():
    torch.manual_seed(0)
    one, two = (StructuredLSTM(5, 7, nn.Linear, num_layers=levels, dropout=1.0) for levels in (1, 2))
    x = torch.randn(3, 2, 5)
    assert torch.equal(one(x)[0], one.eval()(x)[0])
    assert torch.equal(two(x)[0], two(torch.zeros_like(x))[0]) and not torch.equal(two.eval()(x)[0], two.train()(x)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gates": "both"}, "gates must be one of 'separate', 'joint', but is 'both'"),
        ({"dropout": 1.5}, "dropout must be a probability, but is 1.5"),
        ({"hidden_factory": LowRank.from_linear}, "give the class instead of its from_linear"),
        ({"num_layers": 0}, "num_layers must be a positive integer, but is 0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StructuredLSTM(5, 7, nn.Linear, **options)


@pytest.mark.parametrize("make", [partial(StructuredLSTM, 5, 7), partial(BlockStructured, 2, 2, 5)])
def test_layer_in_place_of_a_factory_is_an_error_that_says_so(make):
    with pytest.raises(TypeError, match="^the factory is a layer, but must make layers: give LowRank"):
        make(LowRank(5, 7))


def test_wrong_inputs_are_named():
    lstm = StructuredLSTM(5, 7, nn.Linear)
    with pytest.raises(ValueError, match=r"the input has shape \(3, 2, 6\)"):
        lstm(torch.randn(3, 2, 6))
    with pytest.raises(TypeError, match="packed"):
        lstm(nn.utils.rnn.pack_sequence([torch.randn(3, 5)]))
    with pytest.raises(ValueError, match="at least one step"):
        lstm(torch.randn(0, 2, 5))


@pytest.mark.parametrize("batch_first", [False, True])
def test_wrong_states_are_named(batch_first):
    lstm = StructuredLSTM(5, 7, nn.Linear, num_layers=2, batch_first=batch_first)
    x, right = torch.randn(3, 3, 5), torch.zeros(2, 3, 7)
    for shape in ((2, 1, 7), (1, 3, 7), (3, 3, 7), (2, 3, 1), (2, 7), (2, 4, 7)):
        for name, state in ("h", (torch.zeros(shape), right)), ("c", (right, torch.zeros(shape))):
            with pytest.raises(ValueError, match=rf"takes states \(2, 3, 7\).* but {name} has shape") as error:
                lstm(x, state)
            assert str(error.value).endswith(str(shape))
    with pytest.raises(ValueError, match=r"takes states \(2, 7\).* but h has shape \(2, 3, 7\)"):
        lstm(x[0], (right, right))
    with pytest.raises(TypeError, match=r"a pair \(h, c\)"):
        lstm(x, right)
