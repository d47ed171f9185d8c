from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_struct.functional.layers.gradient_norms import per_sample_gradient_norms
from lightning_struct.optim import RLS
from lightning_struct.optim.rls.recurrent import LevelByLevel

KINDS = [nn.RNN, nn.LSTM, nn.GRU]


@pytest.mark.parametrize(("kind", "batch_first", "packed"), list(product(KINDS, [False, True], [False, True])))
def test_levels_run_one_by_one_are_bitwise_those_of_one_call(kind, batch_first, packed):
    torch.manual_seed(0)
    layer = kind(3, 4, 3, batch_first=batch_first, dropout=0.5, bidirectional=True)
    inputs = torch.randn(5, 5, 3)
    if packed:
        lengths = torch.tensor([3, 2, 5, 1, 2])
        inputs = pack_padded_sequence(inputs, lengths, batch_first=batch_first, enforce_sorted=False)
    torch.manual_seed(1)
    expected, expected_final = layer(inputs)
    torch.manual_seed(1)
    with LevelByLevel() as levels:
        output, final = layer(inputs)
    assert len(levels.runs[0].reads) == 3
    assert torch.equal(output.data, expected.data)
    if kind is nn.LSTM:
        assert all(torch.equal(a, b) for a, b in zip(final, expected_final, strict=True))
    else:
        assert torch.equal(final, expected_final)


def test_inputs_of_a_level_are_those_that_dropout_left():
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, 2, dropout=0.5).double()
    inputs = torch.randn(5, 2, 3, dtype=torch.float64)
    torch.manual_seed(1)
    with LevelByLevel() as levels:
        layer(inputs)
    output, read = levels.runs[0].outputs[0], levels.runs[0].reads[1]
    assert set((read / output).round(decimals=9).unique().tolist()) == {0.0, 2.0}

    optimizer = RLS(layer)
    torch.manual_seed(1)
    layer(inputs)[0].sum().backward()
    optimizer.step()
    mean = torch.cat([read.mean((0, 1)), torch.ones(1, dtype=torch.float64)])
    expected = torch.linalg.inv(torch.eye(5, dtype=torch.float64) + 0.1 * 5 * torch.outer(mean, mean))
    found = optimizer.state["rls"]["weight_ih_l1"]["P"][0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_an_error_within_a_layer_leaves_nothing_behind():
    layer = nn.LSTM(3, 4, 2)
    optimizer = RLS(layer)
    with pytest.raises(RuntimeError):
        layer(torch.randn(5, 2, 4))
    assert torch.overrides._get_current_function_mode_stack() == []
    layer(torch.randn(5, 2, 3))[0].sum().backward()
    optimizer.step()


def test_gradient_norms_are_measured_beside_it():
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True).double()
    optimizer = RLS(layer)
    inputs = torch.randn(6, 5, 3, dtype=torch.float64)
    torch.manual_seed(1)
    with per_sample_gradient_norms(layer) as measured:
        layer(inputs)[0].square().sum().backward()
    assert measured.squared_norms.shape == (6,)
    optimizer.step()
