"""The recipes with structured matrices, on little data."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.models import Classifier, LanguageModel
from lightning_struct.nn import PrunedLinear
from tests.recipes.little import QUIET, SMALL, run


def image(subcommand, way, *arguments):
    return run("structured_image", subcommand, "--config", way, *arguments)


def size(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "pixels", "classes"),
    [
        (["--data.variant=noise"], 784, 10),
        (["--data=benchmarks.rectangles.RectanglesDataModule"], 784, 2),
        (["--data=CIFAR10DataModule", "--data.grey=true", "--data.val_size=7"], 1024, 10),
        (["--data=benchmarks.norb.NORBDataModule"], 1024, 6),
    ],
    ids=["noise", "rectangles", "cifar", "norb"],
)
def test_other_data_sets_are_options(data, pixels, classes):
    sizes = [f"--model.num_classes={classes}", f"--model.network.num_classes={classes}"]
    few = ["--data.train_size=40", "--data.test_size=10", "--data.batch_size=10"]  # --data=CLASS begins anew
    cli = image("fit", "low_rank", *data, *few, *sizes, f"--model.network.pixels={pixels}", "--trainer.fast_dev_run=1")
    assert cli.model.network.hidden.in_features == pixels and cli.model.network.output.out_features == classes


def test_other_networks_and_ranks_are_options():
    network = ["--model.network=lightning_struct.models.lenet", "--model.network.layer.bias=true"]
    options = ["--model.network.layer.rank=3", "--model.optimizer.lr=0.0005", "--trainer.fast_dev_run=1"]
    cli = image("fit", "low_rank", *network, *options)
    hidden = cli.model.network.hidden
    assert isinstance(cli.model.network[2], torch.nn.Conv2d) and hidden.rank == 3 and hidden.bias is not None
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.0005


@pytest.mark.slow
def test_pruned_network_keeps_the_largest_weights_of_a_trained_one():
    image("fit", "unstructured", "--trainer.max_epochs=1")
    checkpoint = "results/structured_image/version_0/checkpoints/last.ckpt"
    trained = Classifier.load_from_checkpoint(checkpoint).network.hidden.weight
    options = [f"--model.network.checkpoint={checkpoint}", "--model.optimizer.lr=0", "--trainer.fast_dev_run=1"]
    network = image("fit", "pruned", *options).model.network
    left = trained.where(trained.abs() >= trained.abs().flatten().topk(3136).values[-1], 0)
    assert isinstance(network.hidden, PrunedLinear) and torch.equal(network.hidden.to_dense(), left)
    assert size(network.hidden, network.output) == 10_986


def test_network_that_is_to_be_pruned_must_be_named():
    with pytest.raises(
        (MisconfigurationException, ValueError), match=r"FILE cannot be read.*--model\.network\.checkpoint"
    ):
        image("fit", "pruned", "--trainer.fast_dev_run=1")


def test_fit_ends_with_the_generalization_gap(capsys):
    cli = image("fit", "low_rank", "--trainer.max_epochs=1")
    accuracy = {}
    for part in ("train", "test"):
        images, labels = getattr(cli.datamodule.splits, part).tensors
        accuracy[part] = (cli.model.eval()(images).argmax(1) == labels).float().mean().item()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("generalization gap"))
    assert float(line.split()[2].rstrip("%")) == pytest.approx(100 * (accuracy["train"] - accuracy["test"]), abs=0.01)


def test_language_model_has_the_vocabulary_of_its_text(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("a b c d e f g h i j\n" * 300)
    text = [*QUIET, f"--data.text_file={path}", "--trainer.fast_dev_run=1"]
    cli = import_module("lightning_struct.recipes.wikitext_lstm").main(["fit", "--config", "low_rank", *text])
    assert cli.model.embedding.num_embeddings == 12  # <eos> and <unk>


@pytest.mark.slow
def test_language_model_is_trained_tested_and_predicts_by_its_checkpoint(capsys):
    small = SMALL["wikitext_lstm"]
    cli = run("wikitext_lstm", "fit", "--config", "low_rank", *small, "--trainer.max_epochs=1")
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("│ test"))
    perplexity = float(row.split("│")[3])
    assert perplexity == pytest.approx(cli.trainer.callback_metrics["test_perplexity"].item(), abs=0.01)
    assert 5 < perplexity < 35
    checkpoint = "results/wikitext_lstm/version_0/checkpoints/last.ckpt"
    again = LanguageModel.load_from_checkpoint(checkpoint)
    predicted = run("wikitext_lstm", "predict", "--ckpt_path", checkpoint)
    assert predicted.model.recurrent.hidden_size == 8
    assert torch.equal(again.output.weight, predicted.model.output.weight)
    written = torch.load(Path(predicted.trainer.log_dir) / "words.pt")["words"]
    table = predicted.datamodule.evaluation_dataloader("test").table[:-1]
    assert torch.equal(written, predicted.model.eval()(table)[0].argmax(-1))


@pytest.mark.slow
def test_checkpoint_of_another_vocabulary_is_refused():
    run("imdb_lstm", "fit", "--config", "rls", *SMALL["imdb_lstm"], "--trainer.max_epochs=1")
    checkpoint = "results/imdb_lstm/version_0/checkpoints/last.ckpt"
    run("imdb_lstm", "test", "--ckpt_path", checkpoint)
    with pytest.raises(MisconfigurationException, match="another vocabulary"):
        run("imdb_lstm", "test", "--ckpt_path", checkpoint, "--data.vocabulary_size=40")
