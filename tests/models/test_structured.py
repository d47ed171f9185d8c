from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_struct.models import (
    convolution_and_layer,
    lenet,
    pruned,
    single_hidden_layer,
    structured_in_place_of_convolution,
)
from lightning_struct.nn import LowRank


def count(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_counts_are_those_of_the_tables():
    assert count(single_hidden_layer(1024, 6)) == 1_054_726 and count(single_hidden_layer(hidden=44)) == 34_946
    of_lenet = lenet(hidden=45)
    assert count(of_lenet.hidden, of_lenet.output) == 35_785
    for channels, rank in ((True, 16), (False, 48)):
        layers = [partial(LowRank, rank=rank, bias=False), partial(LowRank, rank=16, bias=False, pad="square")]
        network = structured_in_place_of_convolution(*layers, channels=channels)
        assert count(network) - count(network.output) == 393_216


SMALL = partial(LowRank, rank=2, bias=False)
NETWORKS = {
    "single hidden layer": (lambda: single_hidden_layer(36, 3), (36,)),
    "lenet on flat images": (lambda: lenet(8, 1, 3), (64,)),
    "lenet on coloured images": (lambda: lenet(8, 3, 3), (3, 8, 8)),
    "convolution": (lambda: convolution_and_layer(2, False, 5, 3, 6), (3, 6, 6)),
    "convolution and pooling": (lambda: convolution_and_layer(2, True, 5, 3, 6), (3, 6, 6)),
    "matrix": (lambda: structured_in_place_of_convolution(SMALL, SMALL, False, 5, 3, 4), (3, 4, 4)),
    "matrices between channels": (lambda: structured_in_place_of_convolution(SMALL, SMALL, True, 5, 3, 4), (3, 4, 4)),
}


@pytest.mark.parametrize("name", list(NETWORKS))
def test_network_makes_logits_and_all_of_it_is_trained(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = make()
    outputs = network(torch.randn(7, *shape, generator=torch.Generator().manual_seed(0)))
    outputs.square().sum().backward()
    assert outputs.shape == (7, 3) and all(parameter.grad.any() for parameter in network.parameters())


def test_hidden_layers_are_made_by_their_factories():
    network = single_hidden_layer(20, 3, partial(LowRank, rank=2, bias=False), hidden=8)
    assert isinstance(network.hidden, LowRank) and network.hidden.to_dense().shape == (8, 20)
    assert single_hidden_layer(20, 3).hidden.bias is None and lenet(8).hidden.bias is not None
    assert [lenet(size=size).hidden.weight.shape for size in (28, 32)] == [(784, 784), (1024, 1024)]


def test_units_of_the_hidden_layers_are_rectified():
    network = nn.Sequential(*single_hidden_layer(20, 3)[:-1])
    assert network(torch.randn(9, 20)).min() == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: single_hidden_layer(0, 3), "pixels must be at least 1, but is 0"),
        (lambda: single_hidden_layer(9, 3, hidden=0), "hidden must be at least 1"),
        (lambda: lenet(30), "size must be a multiple of 4, .* but is 30"),
        (lambda: lenet(28, channels=0), "channels must be at least 1"),
        (lambda: convolution_and_layer(pool=True, size=7), "size must be even .* but is 7"),
        (lambda: structured_in_place_of_convolution(SMALL, SMALL, hidden=0), "hidden must be at least 1"),
        (lambda: pruned("nowhere.ckpt", 10), "train the network that is to be pruned first"),
    ],
)
def test_wrong_sizes_are_refused(make, message):
    with pytest.raises(MisconfigurationException, match=message):
        make()


def test_file_that_is_no_checkpoint_is_not_pruned(tmp_path):
    (tmp_path / "some.txt").write_text("hello")
    torch.save({"state_dict": {}}, tmp_path / "weights.pt")
    for file in tmp_path.iterdir():
        with pytest.raises(MisconfigurationException, match=f"{file} cannot be read"):
            pruned(str(file), 10)
