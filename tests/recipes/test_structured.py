"""The recipes with structured matrices, on little data."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.models import Classifier, LanguageModel
from lightning_struct.models.structured import LayerOfSizes
from lightning_struct.nn import PrunedLinear
from lightning_struct.recipes.catalogue import config_directory

pytestmark = pytest.mark.usefixtures("without_pictures")  # test_cli.py looks at those
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--data.synthetic=true",
]
LITTLE = {
    "structured_image": ["--data.train_size=40", "--data.test_size=10", "--data.batch_size=10"],
    "structured_conv": ["--data.train_size=4", "--data.val_size=2", "--data.test_size=2", "--data.batch_size=2"],
    "wikitext_lstm": [
        "--data.synthetic_vocabulary=30",
        "--data.train_size=1500",
        "--data.val_size=400",
        "--data.test_size=400",
    ],
}
IMAGE_PARAMETERS = {  # Tables 1, 8 and 9
    "ldr_sd": 10_986,
    "ldr_td": 14_122,
    "toeplitz_like": 14_122,
    "hankel_like": 14_122,
    "vandermonde_like": 14_122,
    "cauchy_like": 14_122,
    "low_rank": 14_122,
    "fastfood": 10_202,
    "circulant": 8_634,
    "unstructured": 622_506,
    "reduced": 11_126,
    "lenet_ldr_sd": 11_770,
    "lenet_ldr_td": 14_906,
    "lenet_unstructured": 623_290,
}
CONV_PARAMETERS = {  # Table 3
    "convolution": 1_573_089,
    "convolution_pool": 393_441,
    "convolution_pool_4": 524_588,
    "toeplitz_like_channels": 393_216,
    "ldr_sd_channels": 417_792,
    "toeplitz_like": 393_216,
    "ldr_sd": 405_504,
}
LSTM_PARAMETERS = {"ldr_sd": 2_048, "toeplitz_like": 2_048, "low_rank": 2_048, "unstructured": 65_536}  # Table 2


def shipped(name):
    return {path.stem for path in config_directory(name).glob("*.yaml")}


def config(name, way):
    return ["--config", str(config_directory(name) / f"{way}.yaml")]


def run(name, subcommand, *arguments):
    program = import_module(f"lightning_struct.recipes.{name}")
    return program.main([subcommand, *arguments, *QUIET, *LITTLE[name]])


def configured(name, way, key):
    """What the config says of an argument of the model, made."""
    content = yaml.safe_load((config_directory(name) / f"{way}.yaml").read_text())
    parser = ArgumentParser()
    parser.add_argument(f"--{key}", type=LayerOfSizes if key == "layer" else torch.nn.Module)
    parsed = parser.parse_object({key: content["model"]["init_args"][key]})
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before jsonargparse 4.49
    return make(parsed)[key]


def count(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_all_tables_have_their_configs():
    assert shipped("structured_image") == {*IMAGE_PARAMETERS, "pruned"}
    assert shipped("structured_conv") == set(CONV_PARAMETERS) and shipped("wikitext_lstm") == set(LSTM_PARAMETERS)


@pytest.mark.parametrize("way", list(IMAGE_PARAMETERS))
def test_layers_of_structured_image_have_the_parameters_of_the_paper(way):
    network = configured("structured_image", way, "network")
    assert count(network.hidden, network.output) == IMAGE_PARAMETERS[way]


@pytest.mark.parametrize("way", list(CONV_PARAMETERS))
def test_hidden_layers_of_structured_conv_have_the_parameters_of_the_paper(way):
    network = configured("structured_conv", way, "network")
    assert count(network.first, network.hidden) == CONV_PARAMETERS[way]


@pytest.mark.parametrize("way", list(LSTM_PARAMETERS))
def test_input_hidden_matrices_of_wikitext_lstm_have_the_parameters_of_the_paper(way):
    gate = configured("wikitext_lstm", way, "layer")(128, 128)
    assert 4 * (count(gate) - gate.bias.numel()) == LSTM_PARAMETERS[way]


QUICK = [("structured_image", "ldr_sd"), ("structured_conv", "ldr_sd"), ("wikitext_lstm", "ldr_sd")]
SHIPPED = [
    (name, way) if (name, way) in QUICK else pytest.param(name, way, marks=pytest.mark.slow)
    for name, ways in (
        ("structured_image", IMAGE_PARAMETERS),
        ("structured_conv", CONV_PARAMETERS),
        ("wikitext_lstm", LSTM_PARAMETERS),
    )
    for way in ways
]


@pytest.mark.parametrize(("name", "way"), SHIPPED)
def test_shipped_way_of_training_runs(name, way):
    cli = run(name, "fit", *config(name, way), "--trainer.fast_dev_run=2")
    assert cli.trainer.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "pixels", "classes"),
    [
        (["--data.variant=noise"], 784, 10),
        (["--data=RectanglesDataModule", "--model.num_classes=2", "--model.network.num_classes=2"], 784, 2),
        (
            ["--data=CIFAR10DataModule", "--data.grey=true", "--data.val_size=7", "--model.network.pixels=1024"],
            1024,
            10,
        ),
        (
            [
                "--data=NORBDataModule",
                "--model.num_classes=6",
                "--model.network.num_classes=6",
                "--model.network.pixels=1024",
            ],
            1024,
            6,
        ),
    ],
    ids=["noise", "rectangles", "cifar", "norb"],
)
def test_other_data_sets_are_options(arguments, pixels, classes):
    cli = run(
        "structured_image", "fit", *config("structured_image", "low_rank"), *arguments, "--trainer.fast_dev_run=1"
    )
    assert cli.model.network.hidden.in_features == pixels and cli.model.network.output.out_features == classes


def test_other_networks_and_ranks_are_options():
    arguments = ["--model.network=lightning_struct.models.lenet", "--model.network.layer.bias=true"]
    cli = run(
        "structured_image",
        "fit",
        *config("structured_image", "low_rank"),
        *arguments,
        "--model.network.layer.rank=3",
        "--model.optimizer.lr=0.0005",
        "--trainer.fast_dev_run=1",
    )
    hidden = cli.model.network.hidden
    assert isinstance(cli.model.network[2], torch.nn.Conv2d) and hidden.rank == 3 and hidden.bias is not None
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.0005


@pytest.mark.slow
def test_pruned_network_keeps_the_largest_weights_of_a_trained_one():
    run("structured_image", "fit", *config("structured_image", "unstructured"), "--trainer.max_epochs=1")
    checkpoint = "results/structured_image/version_0/checkpoints/last.ckpt"
    trained = Classifier.load_from_checkpoint(checkpoint).network.hidden.weight
    cli = run(
        "structured_image",
        "fit",
        *config("structured_image", "pruned"),
        f"--model.network.checkpoint={checkpoint}",
        "--model.optimizer.lr=0",
        "--trainer.fast_dev_run=1",
    )
    hidden = cli.model.network.hidden
    left = trained.where(trained.abs() >= trained.abs().flatten().topk(3136).values[-1], 0)
    assert isinstance(hidden, PrunedLinear) and torch.equal(hidden.to_dense(), left)
    assert count(hidden, cli.model.network.output) == 10_986


def test_network_that_is_to_be_pruned_must_be_named():
    with pytest.raises(
        (MisconfigurationException, ValueError), match=r"FILE cannot be read.*--model\.network\.checkpoint"
    ):
        run("structured_image", "fit", *config("structured_image", "pruned"), "--trainer.fast_dev_run=1")


def test_fit_ends_with_the_generalization_gap(capsys):
    cli = run("structured_image", "fit", *config("structured_image", "low_rank"), "--trainer.max_epochs=1")
    accuracy = {}
    for part in ("train", "test"):
        images, labels = getattr(cli.datamodule.splits, part).tensors
        accuracy[part] = (cli.model.eval()(images).argmax(1) == labels).float().mean().item()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("generalization gap"))
    assert float(line.split()[2].rstrip("%")) == pytest.approx(100 * (accuracy["train"] - accuracy["test"]), abs=0.01)


def test_language_model_has_the_vocabulary_of_its_text(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("a b c d e f g h i j\n" * 300)
    text = [*QUIET[:-1], f"--data.text_file={path}", "--trainer.fast_dev_run=1"]
    cli = import_module("lightning_struct.recipes.wikitext_lstm").main(
        ["fit", *config("wikitext_lstm", "low_rank"), *text]
    )
    assert cli.model.embedding.num_embeddings == 12  # <eos> and <unk>


@pytest.mark.parametrize("name", ["structured_image", "wikitext_lstm"])
def test_missing_files_are_one_error_that_names_the_remedies(name, tmp_path):
    with pytest.raises(MisconfigurationException, match="Remedies:(.|\n)*--data.synthetic=true"):
        import_module(f"lightning_struct.recipes.{name}").main(["fit", *QUIET[:-1], f"--data.data_dir={tmp_path}"])


@pytest.mark.slow
def test_language_model_is_trained_tested_and_predicts_by_its_checkpoint(capsys):
    small = ["--model.hidden_size=8", "--model.embedding_size=8"]
    cli = run("wikitext_lstm", "fit", *config("wikitext_lstm", "low_rank"), *small, "--trainer.max_epochs=1")
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
