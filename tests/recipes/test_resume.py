"""Recipes are resumed by their checkpoints alone: to the config and the weights of the uninterrupted run."""

import errno
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.recipes.checkpoints import (
    CONFIG_IN_CHECKPOINT,
    WholeCheckpointIO,
    compare_optimizers,
    keep_what_is_there,
)
from tests.recipes.little import QUIET


def run(recipe, *arguments):
    return import_module(f"lightning_struct.recipes.{recipe}").main(["fit", *arguments])


def printed_config(capsys, recipe, *arguments):
    with pytest.raises(SystemExit):
        run(recipe, *arguments, "--print_config")
    return yaml.safe_load(capsys.readouterr().out)


def test_options_and_a_named_config_win_over_the_checkpoint(capsys):
    original = printed_config(capsys, "mnist_fnn", "--config", "adam")
    torch.save({CONFIG_IN_CHECKPOINT: yaml.safe_dump(original)}, "some.ckpt")
    longer = printed_config(capsys, "mnist_fnn", "--ckpt_path", "some.ckpt", "--trainer.max_epochs=7")
    other = printed_config(capsys, "mnist_fnn", "--ckpt_path", "some.ckpt", "--config", "hrls")
    assert longer["trainer"] == original["trainer"] | {"max_epochs": 7} and longer["model"] == original["model"]
    assert other["model"]["class_path"] == "lightning_struct.models.RLSClassifier"


@pytest.mark.parametrize("config", [("--config=adam",), ("-c", "adam")])
def test_options_win_over_a_config_that_is_named_behind_them(config, capsys):
    printed = printed_config(capsys, "usps_autoencoder", "--trainer.max_epochs=1", *config, "--data.batch_size=7")
    assert printed["model"]["class_path"] == "lightning_struct.models.Autoencoder"
    assert (printed["trainer"]["max_epochs"], printed["data"]["batch_size"]) == (1, 7)


class Worse(L.Callback):
    """An accuracy that is worst at last."""

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log("val_accuracy", 1.0 - trainer.current_epoch)


def test_resumed_run_remembers_the_best_score(conf, capsys):
    main, one = import_module("lightning_struct.recipes.mnist_fnn").main, [*QUIET, "--trainer.limit_test_batches=0"]
    options = ["--trainer.callbacks+=tests.recipes.test_resume.Worse", "--trainer.max_epochs=1", *one]
    first = main(["fit", "--config", conf("classifier"), *options]).trainer.checkpoint_callback
    last = "results/mnist_fnn/version_0/checkpoints/last.ckpt"
    resumed = main(["fit", "--ckpt_path", last, "--trainer.max_epochs=2"]).trainer.checkpoint_callback
    assert resumed.best_model_path == first.best_model_path and resumed.best_model_score == first.best_model_score == 1
    assert f"best checkpoint  {first.best_model_path}\n" in capsys.readouterr().out.partition("best checkpoint")[2]
    assert Path(first.best_model_path).exists()


@pytest.mark.parametrize(
    ("gone", "save_top_k", "kept"), [(None, -1, "abc"), (None, 2, "ab"), ("a", 2, "bc"), ("b", 1, "a"), ("c", 3, "ab")]
)
def test_scores_of_checkpoints_that_are_there_are_kept(gone, save_top_k, kept):
    scores = {name: torch.tensor(float(number)) for number, name in enumerate("abc")}
    for name in scores:
        Path(name).touch()
    if gone is not None:
        Path(gone).unlink()
    state = {"best_model_path": "a", "best_k_models": scores}
    callback = ModelCheckpoint("here", monitor="val_loss", save_top_k=save_top_k)
    with pytest.warns(match="The best checkpoint so far, a, is not there") if gone == "a" else nullcontext():
        keep_what_is_there(state, callback)
    assert state["dirpath"] == callback.dirpath
    assert "".join(state["best_k_models"]) == kept
    assert (state["best_model_path"], state["kth_best_model_path"]) == (kept[0], kept[-1])
    assert (state["best_model_score"], state["kth_value"]) == (scores[kept[0]], scores[kept[-1]])


ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1, "eps": 1e-8}}


def config_of(optimizer):
    return {"model": {"class_path": "Classifier", "init_args": {"optimizer": optimizer}}}


@pytest.mark.parametrize("other", [{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, "some.function"])
def test_another_optimizer_cannot_go_on_from_a_checkpoint(other):
    with pytest.raises(MisconfigurationException, match=r"the state of Adam, from which (SGD|function) cannot go on"):
        compare_optimizers(config_of(ADAM), config_of(other))


def test_settings_of_the_optimizer_that_a_checkpoint_keeps_are_named():
    now = {**ADAM, "init_args": {"lr": 0.2, "eps": 1e-8}}
    with pytest.warns(match="The checkpoint has the settings of Adam, which stay: .*lr=0.2 may have no effect"):
        compare_optimizers(config_of(ADAM), config_of(now))


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    def half(self, checkpoint, path, storage_options=None):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", path)

    path = tmp_path / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"step": 1}, path)
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", half)
    with pytest.raises(OSError, match="No space left"):
        WholeCheckpointIO().save_checkpoint({"step": 2}, path)
    assert [*tmp_path.iterdir()] == [path] and torch.load(path) == {"step": 1}
