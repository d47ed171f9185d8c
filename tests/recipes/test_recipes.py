"""Every recipe in every shipped way of training it, on little data."""

import runpy
import subprocess
import sys
from importlib import import_module

import pytest
import torch
import yaml

from lightning_struct.recipes.catalogue import config_directory, default_config

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
def test_networks_are_those_of_table_1(name):
    model = yaml.safe_load(default_config(name).read_text())["model"]
    assert model["init_args"]["layer_sizes"] == ENCODERS[name]
    assert model["class_path"].endswith("SHFAutoencoder")


def command(name, *arguments):
    module = f"lightning_struct.recipes.{name}"
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=False, capture_output=True, text=True, timeout=300
    )


def test_missing_data_is_one_message_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe", "fit", "--data.download=false", f"--data.data_dir={tmp_path}/nowhere"])
    monkeypatch.delitem(sys.modules, "lightning_struct.recipes.mnist_autoencoder", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lightning_struct.recipes.mnist_autoencoder", run_name="__main__")
    assert end.value.code.startswith(f"error: MNIST is not in {tmp_path}/nowhere")  # printed; the status is 1


def test_wrong_option_is_a_short_message(capsys):
    with pytest.raises(SystemExit) as end:
        run("usps_autoencoder", "fit", "--data.download=perhaps")
    message = capsys.readouterr().err
    assert end.value.code == 2 and 'Parser key "data.download"' in message
    assert len(message.splitlines()) < 10


@pytest.mark.slow
def test_two_processes_end_where_one_process_ends(tmp_path):
    arguments = [*little("usps_autoencoder"), "--trainer.precision=64-true", "--trainer.max_epochs=1"]
    arguments += ["--data.draws_per_epoch=3", "--trainer.callbacks=null", "--trainer.logger=false"]
    weights = []
    import_module("lightning_struct.recipes.usps_autoencoder").main(
        ["fit", *arguments, "--trainer.devices=1", f"--trainer.default_root_dir={tmp_path / 'one'}"]
    )
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.default_root_dir={tmp_path / 'two'}"]
    outcome = command("usps_autoencoder", "fit", *arguments, *two)
    assert outcome.returncode == 0, outcome.stderr
    for directory in ("one", "two"):
        weights.append(torch.load(next((tmp_path / directory).rglob("*.ckpt")))["state_dict"])
    assert all(torch.allclose(weights[0][key], weights[1][key], rtol=0, atol=1e-9) for key in weights[0])
