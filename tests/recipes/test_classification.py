"""A recipe that trains a classifier: what a run leaves, and what its checkpoint says."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.models import Classifier
from lightning_struct.recipes import cifar_cnn
from lightning_struct.recipes.mnist_fnn import main
from tests.recipes.little import run

RUN = Path("results/mnist_fnn/version_0")


@pytest.fixture(scope="module")
def finished_run(finish, conf):
    return finish(main, ["fit", "--config", conf("classifier")])


@pytest.fixture(scope="module")
def checkpoint(finished_run):
    return str(finished_run.directory / RUN / "checkpoints" / "last.ckpt")


def test_fit_ends_with_loss_and_accuracy_of_the_best_checkpoint(finished_run, monkeypatch):
    monkeypatch.chdir(finished_run.directory)
    cli, printed = finished_run.cli, finished_run.printed
    best = Classifier.load_from_checkpoint(cli.trainer.checkpoint_callback.best_model_path)
    for part, label in (("train", "training"), ("val", "validation"), ("test", "test")):
        images, labels = getattr(cli.datamodule.splits, part).tensors
        outputs = best(images)
        loss = torch.nn.functional.cross_entropy(outputs, labels).item()
        accuracy = (outputs.argmax(1) == labels).float().mean().item()
        (row,) = (line for line in printed.splitlines() if line.startswith("│") and line.split()[1] == label)
        cells = [float(cell.strip().rstrip("%")) for cell in row.split("│")[2:4]]
        assert cells == pytest.approx([loss, 100 * accuracy], rel=1e-3)


def test_checkpoint_says_itself_which_network_it_is_of(checkpoint):
    cli = run("mnist_fnn", "test", "--ckpt_path", checkpoint)
    assert cli.model.network[1].weight.shape == (8, 784)
    again = Classifier.load_from_checkpoint(checkpoint)
    assert torch.equal(again.network[1].weight, cli.model.network[1].weight)


def test_predict_writes_classes_of_the_test_images(conf, finished_run, checkpoint):
    expected = Classifier.load_from_checkpoint(checkpoint)(finished_run.cli.datamodule.splits.test.tensors[0]).argmax(1)
    predicted = main(["predict", "--config", conf("classifier"), "--ckpt_path", checkpoint])
    written = torch.load(Path(predicted.trainer.log_dir) / "classes.pt")
    assert torch.equal(written["classes"], expected) and written["indices"].tolist() == list(range(30))


def test_checkpoint_of_another_model_is_one_error(conf, checkpoint):
    other = ["--config", conf("classifier"), "--model.network.layer_sizes=[784,7,10]"]
    with pytest.raises(MisconfigurationException, match="the checkpoint brings its own"):
        main(["test", *other, "--ckpt_path", checkpoint])


def test_checkpoint_of_another_recipe_is_refused_by_name(checkpoint):
    with pytest.raises(MisconfigurationException, match=f"{checkpoint} is of the recipe mnist_fnn, not of"):
        cifar_cnn.main(["fit", "--ckpt_path", checkpoint])


def test_resumed_run_says_which_settings_of_its_optimizer_stay(checkpoint):
    with pytest.warns(match="lr=0.5 may have no effect"):
        main(["fit", "--ckpt_path", checkpoint, "--model.optimizer.lr=0.5"])
