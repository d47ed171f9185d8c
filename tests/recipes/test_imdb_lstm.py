"""The recipe that trains a classifier of texts, on little data."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.models import RLSClassifier
from lightning_struct.recipes.catalogue import config_directory
from lightning_struct.recipes.imdb_lstm import main

WAYS = sorted(path.stem for path in config_directory("imdb_lstm").glob("*.yaml"))
NETWORK = [
    "--model.network.vocabulary_size=50",
    "--model.network.embedding_size=4",
    "--model.network.hidden_size=6",
]


def run(subcommand, *arguments, vocabulary_size=50):
    little = [
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--data.synthetic=true",
        "--data.train_size=60",
        "--data.val_size=20",
        "--data.test_size=20",
        "--data.batch_size=20",
        "--data.max_length=12",
        f"--data.vocabulary_size={vocabulary_size}",
    ]
    return main([subcommand, *arguments, *little])


def config(way):
    return ["--config", str(config_directory("imdb_lstm") / f"{way}.yaml")]


@pytest.mark.parametrize("way", WAYS)
def test_shipped_way_of_training_runs(way):
    cli = run("fit", *config(way), *NETWORK, "--trainer.fast_dev_run=2")
    assert cli.trainer.global_step == 2


def test_the_ways_of_the_paper_and_a_plain_network_are_shipped():
    assert WAYS == ["adam", "hrls", "plain_rnn", "rls", "rls_momentum_l1"]


def test_without_a_config_the_paper_is_followed():
    cli = run("fit", "--trainer.max_epochs=0")
    layers = cli.model.network.recurrent
    assert isinstance(cli.model, RLSClassifier) and isinstance(layers, torch.nn.LSTM)
    assert (layers.hidden_size, layers.num_layers) == (512, 2)


def test_plain_network_has_no_gates():
    cli = run("fit", *config("plain_rnn"), *NETWORK, "--trainer.fast_dev_run=1")
    assert isinstance(cli.model.network.recurrent, torch.nn.RNN)


@pytest.mark.slow
def test_checkpoint_of_another_vocabulary_is_refused():
    run("fit", *config("rls"), *NETWORK, "--trainer.max_epochs=1")
    checkpoint = "results/imdb_lstm/version_0/checkpoints/last.ckpt"
    run("test", "--ckpt_path", checkpoint)
    with pytest.raises(MisconfigurationException, match="another vocabulary"):
        run("test", "--ckpt_path", checkpoint, vocabulary_size=40)
