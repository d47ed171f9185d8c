"""One run for each recipe and its resumption from within, read by many tests."""

import csv
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml

from lightning_struct.models import Autoencoder, Classifier, LanguageModel, PhysicsInformedNetwork
from lightning_struct.recipes.catalogue import RECIPES
from lightning_struct.recipes.cli import RecipeCLI
from tests.recipes.little import LITTLE, QUIET, RUNS, check_paper, synthetic

KEEP_ALL = [  # a mode of its own: Lightning tells the states of checkpoint callbacks apart by it
    "--trainer.callbacks+=ModelCheckpoint",
    "--trainer.callbacks.save_top_k=-1",
    "--trainer.callbacks.mode=max",
    "--trainer.callbacks.filename={epoch}",
]
FILES = {"checkpoints", "config.yaml", "metrics.csv", "training_curves.csv", "training_curves.png"}
NOISE = ("Tip:", "LeafSpec", "smaller than the logging interval", "dirpath has changed", "many workers")
PARTS = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class Runs:
    """A run of two epochs, and its resumption from the end of the first one."""

    recipe: str
    whole: RecipeCLI
    printed: str
    said: list[str]
    resumed: RecipeCLI
    directory: Path

    def folder(self, number):
        return self.directory / f"results/{self.recipe}/version_{number}"

    def row(self, part):
        """The numbers that the run has printed of a set."""
        (row,) = (line for line in self.printed.splitlines() if line.startswith("│") and line.split()[1] == PARTS[part])
        return [float(cell.strip().rstrip("%")) for cell in row.split("│")[2:-1]]


@pytest.fixture(scope="module", params=RUNS)
def runs(request, finish):
    recipe, main = request.param, import_module(f"lightning_struct.recipes.{request.param}").main
    arguments = ["--config", RUNS[recipe], *LITTLE[recipe], *QUIET, *synthetic(recipe), *KEEP_ALL]
    whole = finish(main, ["fit", *arguments, "--trainer.max_epochs=2", "--trainer.log_every_n_steps=1"])
    first = f"results/{recipe}/version_0/checkpoints/epoch=0.ckpt"
    resumed = finish(main, ["fit", "--ckpt_path", first, "--trainer.limit_test_batches=0"], whole.directory)
    return Runs(recipe, whole.cli, whole.printed, whole.said + resumed.said, resumed.cli, whole.directory)


pytestmark = pytest.mark.slow


def test_a_recipe_trains_as_its_paper_says(runs):
    check_paper(runs.whole, runs.recipe, RUNS[runs.recipe])


def test_results_are_in_one_folder_and_their_paths_are_printed(runs):
    written = {path.name for path in runs.folder(0).iterdir()}
    assert written >= FILES
    assert ("reconstructions.png" in written) == isinstance(runs.whole.model, Autoencoder)
    assert ("solution.png" in written) == isinstance(runs.whole.model, PhysicsInformedNetwork)
    folder = f"results/{runs.recipe}/version_0"
    best = runs.whole.trainer.checkpoint_callback.best_model_path
    shown = [
        f"log              {folder}\n",
        f"best checkpoint  {best}\n",
        f"picture          {folder}/training_curves.png",
    ]
    assert all(line in runs.printed for line in shown) and (runs.directory / best).is_file()
    assert not [message for message in runs.said if any(noise in message for noise in NOISE)]


def test_the_fit_ends_with_the_errors_of_the_best_checkpoint_of_which_those_of_the_test_are_logged(runs):
    metrics = RECIPES[runs.recipe].results.metrics
    with (runs.folder(0) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for number, (name, (_, form)) in enumerate(metrics.items()):
        logged = float([row[name] for row in rows if row.get(name)][-1])
        assert logged == runs.whole.trainer.callback_metrics[name].item()
        assert runs.row("test")[number] == pytest.approx(100 * logged if "%" in form else logged, rel=6e-3, abs=6e-3)


def expected_errors(model, splits):
    if isinstance(model, Autoencoder):
        error = (model(splits[0]) - splits[0]).square().sum(dim=1).mean().item()
        return [error / 2, error]
    images, labels = splits
    _, targets = model.inputs_and_targets(splits)
    outputs = model(images)
    loss = torch.nn.functional.cross_entropy(outputs, labels)
    if model.loss == "mse":
        loss = 0.5 * (outputs - targets).square().sum() / len(images)
    return [loss.item(), 100 * (outputs.argmax(1) == labels).float().mean().item()]


def test_the_errors_are_those_of_all_samples(runs):
    model, data = runs.whole.model.eval(), runs.whole.datamodule
    if not isinstance(model, Autoencoder | Classifier):
        pytest.skip("the models of the other recipes are tested by themselves")
    with torch.no_grad():
        found = {part: expected_errors(model, getattr(data.splits, part).tensors) for part in PARTS}
    for part, errors in found.items():
        assert runs.row(part) == pytest.approx(errors, rel=6e-3, abs=6e-3)
    gaps = [float(gap) for gap in re.findall(r"^generalization gap (\S+)%", runs.printed, re.MULTILINE)]
    structured = RECIPES[runs.recipe].results.gap is not None
    assert gaps == ([pytest.approx(found["train"][1] - found["test"][1], abs=0.01)] if structured else [])


def test_the_resumed_run_has_the_config_and_ends_where_the_uninterrupted_one_ends(runs):
    config, of_resumed = (yaml.safe_load((runs.folder(number) / "config.yaml").read_text()) for number in (0, 1))
    changed = {"ckpt_path": f"results/{runs.recipe}/version_0/checkpoints/epoch=0.ckpt"}
    assert of_resumed == config | changed | {"trainer": config["trainer"] | {"limit_test_batches": 0}}
    assert runs.resumed.trainer.global_step == runs.whole.trainer.global_step
    for of in ("optimizers", "lr_scheduler_configs"):
        kinds = [[type(each) for each in getattr(cli.trainer, of)] for cli in (runs.whole, runs.resumed)]
        assert kinds[0] == kinds[1]
    weights, of_resumed = (torch.load(runs.folder(n) / "checkpoints/epoch=1.ckpt")["state_dict"] for n in (0, 1))
    assert weights.keys() == of_resumed.keys()
    assert [name for name in weights if not torch.equal(weights[name], of_resumed[name])] == []


def test_a_checkpoint_says_itself_which_recipe_and_network_it_is_of(runs):
    path = runs.folder(0) / "checkpoints/last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["recipe"] == runs.recipe
    assert yaml.safe_load(checkpoint["recipe_config"]) == yaml.safe_load((runs.folder(0) / "config.yaml").read_text())
    if not isinstance(runs.whole.model, PhysicsInformedNetwork):
        again = type(runs.whole.model).load_from_checkpoint(path)
        assert all(map(torch.equal, again.state_dict().values(), checkpoint["state_dict"].values()))


def test_predictions_of_the_test_set_are_written(runs, monkeypatch):
    monkeypatch.chdir(runs.directory)
    model, data, name = runs.resumed.model, runs.resumed.datamodule, RECIPES[runs.recipe].results.predictions
    runs.resumed.trainer.predict(model, data.predict_dataloader(), return_predictions=False)
    written = torch.load(runs.folder(1) / f"{name}.pt")
    with torch.no_grad():
        batches = enumerate(data.predict_dataloader())
        expected = torch.cat([model.eval().predict_step(batch, number) for number, batch in batches])
    torch.testing.assert_close(written[name], expected, check_dtype=False)
    assert isinstance(model, LanguageModel) or written["indices"].tolist() == list(range(len(expected)))
