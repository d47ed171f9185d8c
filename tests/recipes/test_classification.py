"""The recipes that train classifiers, on little data."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from lightning_struct.models import Classifier, RLSClassifier
from lightning_struct.optim import RLS, LowRankP, RankOneP
from lightning_struct.recipes.catalogue import config_directory
from lightning_struct.recipes.mnist_fnn import main

RUN = Path("results/mnist_fnn/version_0")
NETWORKS = {
    "mnist_fnn": ["--model.network.layer_sizes=[784,8,10]"],
    "cifar_cnn": ["--model.network.channels=2", "--model.network.hidden=8"],
}
PAPER = {"rls": ("mse", 0, 0), "rls_momentum_l1": ("mse", 0.5, 1e-5), "hrls": ("cross_entropy", 0, 0)}
SHIPPED = [(name, path.stem) for name in NETWORKS for path in sorted(config_directory(name).glob("*.yaml"))]


def run(name, *arguments):
    little = [
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--data.synthetic=true",
        "--data.train_size=60",
        "--data.val_size=20",
        "--data.test_size=20",
        "--data.batch_size=20",
    ]
    return import_module(f"lightning_struct.recipes.{name}").main([*arguments, *little])


@pytest.fixture(scope="module")
def finished_run(finish, conf):
    return finish(main, ["fit", "--config", conf("classifier")])


def test_without_a_config_rls_trains_the_network_of_the_paper():
    cli = run("mnist_fnn", "fit", "--trainer.fast_dev_run=1")
    assert isinstance(cli.model, RLSClassifier) and isinstance(cli.trainer.optimizers[0], RLS)
    assert sum(p.numel() for p in cli.model.parameters()) == 407_050


@pytest.fixture
def finished(finished_run, monkeypatch):
    """A finished run in the working directory."""
    monkeypatch.chdir(finished_run.directory)
    return finished_run


@pytest.mark.parametrize(("name", "way"), SHIPPED)
def test_shipped_way_of_training_runs(name, way):
    config = str(config_directory(name) / f"{way}.yaml")
    cli = run(name, "fit", "--config", config, *NETWORKS[name], "--trainer.fast_dev_run=2")
    assert cli.trainer.global_step == 2
    if way in PAPER:
        loss, momentum, l1 = PAPER[way]
        (optimizer,) = cli.trainer.optimizers
        paper = {"ratio": 0.1, "gradient_scale": 1, "momentum": momentum, "l1": l1}
        assert paper.items() <= optimizer.param_groups[0].items()
        assert optimizer.settings.max_grad_norm == 5 and cli.model.loss == loss


def test_every_task_has_the_same_ways_of_training():
    ways = ("adam", "rls", "rls_momentum_l1", "hrls", "kronecker")
    assert {(name, way) for name in NETWORKS for way in ways} == set(SHIPPED)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (["=low_rank"], "low_rank"),
        (["=lightning_struct.optim.LowRankP", ".rank=3"], LowRankP(rank=3)),
        (["=lightning_struct.optim.RankOneP", ".interval=2"], RankOneP(interval=2)),
    ],
)
def test_the_form_of_p_is_a_name_or_a_value_on_the_command_line(given, form):
    config = str(config_directory("mnist_fnn") / "rls.yaml")
    chosen = [f"--model.optimizer.form{argument}" for argument in given]
    cli = run("mnist_fnn", "fit", "--config", config, *NETWORKS["mnist_fnn"], *chosen, "--trainer.fast_dev_run=1")
    assert cli.trainer.optimizers[0].settings.form == form


def test_hybrid_leaves_the_output_layer_alone_to_adam():
    network = "--model.network.layer_sizes=[784,8,6,10]"
    cli = run("mnist_fnn", "fit", "--config", "hrls", network, "--trainer.fast_dev_run=1")
    hidden, output = cli.trainer.optimizers[0].param_groups
    names = {p: n for n, p in cli.model.named_parameters()}
    assert [names[p] for p in output["params"]] == ["network.output.weight", "network.output.bias"]
    assert len(hidden["params"]) == len(names) - 2 and "betas" in output and "betas" not in hidden


def test_fit_ends_with_loss_and_accuracy_of_the_best_checkpoint(finished):
    cli, printed = finished.cli, finished.printed
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
