from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct.models import Classifier, RecurrentNetwork, RLSClassifier
from lightning_struct.optim import RLS
from tests.models.test_classifier import trainer

TEXTS = [[5, 3, 8, 2], [4], [2, 2, 7]]


def padded(texts, length=6):
    return torch.tensor([text + [0] * (length - len(text)) for text in texts])


def small_network(**arguments):
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 9, "embedding_size": 4, "hidden_size": 5} | arguments
    return RecurrentNetwork(**sizes)


@pytest.fixture
def samples():
    """Texts whose last word is their label."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2, 9, (40, 6), generator=generator)
    lengths = torch.randint(1, 7, (40, 1), generator=generator)
    labels = torch.arange(40) % 2
    words.scatter_(1, lengths - 1, 2 + labels.unsqueeze(1))
    return TensorDataset(words.where(torch.arange(6) < lengths, 0), labels)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cell", ["lstm", "rnn"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_outputs_are_those_of_each_text_alone_after_its_last_word(cell, num_layers):
    network = small_network(cell=cell, num_layers=num_layers, num_classes=3).double()
    outputs = network(padded(TEXTS))
    for text, output in zip(TEXTS, outputs, strict=True):
        states, _ = network.recurrent(network.embedding(torch.tensor(text)))
        assert torch.allclose(output, network.output(states[-1]), rtol=0, atol=1e-12)


def test_default_network_is_that_of_the_paper():
    with torch.device("meta"):
        network = RecurrentNetwork()
    shapes = [tuple(parameter.shape) for name, parameter in network.named_parameters() if "weight" in name]
    assert shapes == [(20_000, 128), (2048, 128), (2048, 512), (2048, 512), (2048, 512), (2, 512)]


@pytest.mark.parametrize("name", ["vocabulary_size", "embedding_size", "hidden_size", "num_layers", "num_classes"])
def test_sizes_that_make_no_network_are_refused(name):
    with pytest.raises(MisconfigurationException, match=f"{name} must be at least 1, but is 0"):
        RecurrentNetwork(**{name: 0})
    with pytest.raises(MisconfigurationException, match="cell must be 'lstm' or 'rnn', but is 'gru'"):
        RecurrentNetwork(cell="gru")
    with pytest.raises(MisconfigurationException, match="Word 9 is not below the network's vocabulary_size=9"):
        small_network()(torch.tensor([[3, 9]]))


ADAM = partial(torch.optim.Adam, lr=0.02)


@pytest.mark.parametrize(
    ("model_class", "loss", "optimizer"),
    [(Classifier, "cross_entropy", ADAM), (RLSClassifier, "mse", partial(RLS, auxiliary=ADAM))],
)
def test_texts_are_recognised_after_training(tmp_path, samples, model_class, loss, optimizer):
    model = model_class(small_network(), num_classes=2, loss=loss, optimizer=optimizer)
    run = trainer(tmp_path, max_epochs=10, check_val_every_n_epoch=10)
    run.fit(model, DataLoader(samples, batch_size=10), DataLoader(samples, batch_size=40))
    assert run.callback_metrics["val_accuracy"].item() >= 0.95
