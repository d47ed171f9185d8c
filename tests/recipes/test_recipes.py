"""Every recipe in every shipped way of training it, on little data."""

from importlib import import_module

import pytest
import torch

from lightning_struct.models import SHFAutoencoder
from lightning_struct.optim import SHF
from lightning_struct.recipes.cli import config_directory

PIXELS = {"curves_autoencoder": 784, "mnist_autoencoder": 784, "usps_autoencoder": 256}
SHIPPED = [(name, path.stem) for name in PIXELS for path in sorted(config_directory(name).glob("*.yaml"))]
ENCODERS = {
    "curves_autoencoder": [784, 400, 200, 100, 50, 25, 6],
    "mnist_autoencoder": [784, 1000, 500, 250, 30],
    "usps_autoencoder": [256, 400, 200, 100, 50, 25],
}


def little(name):
    """Arguments that make a recipe small."""
    return [
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        f"--model.layer_sizes=[{PIXELS[name]},8,3]",
        "--data.synthetic=true",
        "--data.train_size=60",
        "--data.val_size=20",
        "--data.test_size=20",
        "--data.batch_size=20",
    ]


def run(name, *arguments):
    return import_module(f"lightning_struct.recipes.{name}").main([*arguments, *little(name)])


@pytest.mark.parametrize(("name", "way"), SHIPPED)
def test_shipped_way_of_training_runs(name, way):
    config = str(config_directory(name) / f"{way}.yaml")
    cli = run(name, "fit", "--config", config, "--trainer.fast_dev_run=2")
    assert cli.trainer.global_step == 2


def test_every_task_has_the_same_ways_of_training():
    assert {(name, way) for name in PIXELS for way in ("shf", "adam", "hf")} <= set(SHIPPED)


@pytest.mark.parametrize("name", PIXELS)
def test_without_a_config_the_paper_is_followed(name):
    cli = run(name, "fit", "--trainer.fast_dev_run=1")
    assert isinstance(cli.model, SHFAutoencoder) and isinstance(cli.trainer.optimizers[0], SHF)


@pytest.mark.parametrize("name", PIXELS)
def test_networks_are_those_of_table_1(name):
    config = str(config_directory(name) / "shf.yaml")
    program = import_module(f"lightning_struct.recipes.{name}")
    cli = program.main(["fit", "--config", config, "--trainer.max_epochs=0", "--data.synthetic=true", *sizes()])
    weights = [layer.weight for layer in cli.model.encoder if isinstance(layer, torch.nn.Linear)]
    assert [weights[0].shape[1], *(weight.shape[0] for weight in weights)] == ENCODERS[name]


def sizes():
    return ["--data.train_size=20", "--data.val_size=4", "--data.test_size=4", "--data.batch_size=4"]
