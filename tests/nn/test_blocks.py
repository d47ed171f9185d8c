from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_struct.nn import BlockStructured, LowRank


def test_images_and_flat_channels_are_multiplied_by_the_block_matrix():
    torch.manual_seed(0)
    layer = BlockStructured(3, 2, 20, partial(LowRank, rank=2), dtype=torch.float64)
    nn.init.normal_(layer.bias)
    dense = layer.to_dense()
    assert dense.shape == (40, 60)
    x = torch.randn(5, 3, 4, 5, dtype=torch.float64)
    expected = (x.flatten(1) @ dense.T).view(5, 2, 20) + layer.bias
    torch.testing.assert_close(layer(x), expected.view(5, 2, 4, 5))
    torch.testing.assert_close(layer(x.flatten(2)), expected)
    torch.testing.assert_close(layer(x.flatten(2)[0]), expected[0])


def test_block_of_an_output_and_an_input_channel_is_at_its_place():
    layer = BlockStructured(3, 2, 4, LowRank)
    rows = [torch.cat([block.to_dense() for block in layer.blocks[at : at + 3]], 1) for at in (0, 3)]
    torch.testing.assert_close(layer.to_dense(), torch.cat(rows))


@pytest.mark.parametrize(("out_size", "shape"), [(6, (6,)), (np.int64(6), (6,)), ((2, 3), (2, 3)), (None, (4, 5))])
def test_groups_and_channels_of_another_size_are_multiplied_by_the_block_matrix(out_size, shape):
    torch.manual_seed(0)
    factory = partial(LowRank, rank=2)
    layer = BlockStructured(6, 4, 20, factory, out_size=out_size, groups=2, dtype=torch.float64)
    nn.init.normal_(layer.bias)
    dense = layer.to_dense()
    out = layer.out_size
    assert dense.shape == (4 * out, 120) and len(layer.blocks) == 12
    assert not dense[: 2 * out, 60:].any() and not dense[2 * out :, :60].any()
    x = torch.randn(5, 6, 4, 5, dtype=torch.float64)
    expected = (x.flatten(1) @ dense.T).view(5, 4, out) + layer.bias
    torch.testing.assert_close(layer(x), expected.view(5, 4, *shape))
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert layer.compression_ratio == dense.numel() / 2 / layer.weight_parameters


def test_initial_weights_keep_the_variance_of_the_input_and_there_need_be_no_bias():
    torch.manual_seed(0)
    layer = BlockStructured(16, 4, 64, partial(LowRank, rank=8), bias=False)
    assert layer.bias is None and 0.7 < layer(torch.randn(100, 16, 64)).var() < 1.4
    assert BlockStructured(3, 2, 20, partial(LowRank, rank=2)).weight_parameters == 6 * 80  # the bias aside


def test_wrong_inputs_are_named():
    layer = BlockStructured(3, 2, 20, LowRank)
    for shape in ((5, 2, 20), (5, 3, 4, 4), (5, 20)):
        with pytest.raises(ValueError, match=r"takes \(batch, 3, ...\) or \(3, ...\) with 20 entries"):
            layer(torch.randn(*shape))
    with pytest.raises(TypeError, match="makes Linear"):
        BlockStructured(3, 2, 20, nn.Linear)
    with pytest.raises(ValueError, match="must be multiples of groups=3, but are 3 and 2"):
        BlockStructured(3, 2, 20, LowRank, groups=3)
    with pytest.raises(ValueError, match="out_size must be a positive integer, but is 0"):
        BlockStructured(3, 2, 20, LowRank, out_size=(4, 0))
    with pytest.raises(ValueError, match=r"in_shape must have size=20 entries, but is \(4, 4\)"):
        BlockStructured(3, 2, 20, LowRank, in_shape=(4, 4))
