"""A recipe that trains a classifier: what a run leaves, and what its checkpoint says."""

from pathlib import Path

import pytest
import torch

from lightning_struct.models import Classifier
from lightning_struct.recipes.mnist_fnn import main
from tests.recipes.little import run

RUN = Path("results/mnist_fnn/version_0")


@pytest.fixture(scope="module")
def finished_run(finish, conf):
    return finish(main, ["fit", "--config", conf("classifier")])


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


def test_checkpoint_says_itself_which_network_it_is_of(finished_run):
    checkpoint = str(finished_run.directory / RUN / "checkpoints" / "last.ckpt")
    cli = run("mnist_fnn", "test", "--ckpt_path", checkpoint)
    assert cli.model.network[1].weight.shape == (8, 784)
    again = Classifier.load_from_checkpoint(checkpoint)
    assert torch.equal(again.network[1].weight, cli.model.network[1].weight)


def test_predict_writes_classes_of_the_test_images(conf, finished_run):
    checkpoint = str(finished_run.directory / RUN / "checkpoints" / "last.ckpt")
    expected = Classifier.load_from_checkpoint(checkpoint)(finished_run.cli.datamodule.splits.test.tensors[0]).argmax(1)
    predicted = main(["predict", "--config", conf("classifier"), "--ckpt_path", checkpoint])
    written = torch.load(Path(predicted.trainer.log_dir) / "classes.pt")
    assert torch.equal(written["classes"], expected) and written["indices"].tolist() == list(range(30))
