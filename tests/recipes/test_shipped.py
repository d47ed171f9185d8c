"""Every recipe in every shipped way of training it, on little data, and what the papers say of each."""

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import ClassVar

import lightning as L
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct import data
from lightning_struct.data import Box, DifferentialEquation, Faces
from lightning_struct.models import Classifier, RLSClassifier
from lightning_struct.models.structured import LayerOfSizes
from lightning_struct.nn import PrunedLinear
from lightning_struct.optim import LowRankP
from lightning_struct.recipes.catalogue import RECIPES, config_directory, config_names, default_config
from tests.recipes.little import EQUATIONS, SMALL, check_paper, run

AUTOENCODERS, CLASSIFIERS = ("curves_autoencoder", "mnist_autoencoder", "usps_autoencoder"), ("mnist_fnn", "cifar_cnn")
WAYS = {
    **{name: {"shf", "adam", "hf", "kronecker"} for name in AUTOENCODERS},
    **{name: {"adam", "rls", "rls_momentum_l1", "hrls", "kronecker"} for name in CLASSIFIERS},
    "imdb_lstm": {"adam", "hrls", "plain_rnn", "rls", "rls_momentum_l1"},
}
ENCODERS = {  # Table 1
    "curves_autoencoder": [784, 400, 200, 100, 50, 25, 6],
    "mnist_autoencoder": [784, 1000, 500, 250, 30],
    "usps_autoencoder": [256, 400, 200, 100, 50, 25],
}
PARAMETERS = {
    "structured_image": {  # of the hidden layer and the output: Tables 1, 8 and 9
        **dict.fromkeys(("ldr_td", "toeplitz_like", "hankel_like", "vandermonde_like", "cauchy_like"), 14_122),
        "low_rank": 14_122,
        "ldr_sd": 10_986,
        "fastfood": 10_202,
        "circulant": 8_634,
        "unstructured": 622_506,
        "reduced": 11_126,
        "lenet_ldr_sd": 11_770,
        "lenet_ldr_td": 14_906,
        "lenet_unstructured": 623_290,
    },
    "structured_conv": {  # of the first and the hidden layer: Table 3
        "convolution": 1_573_089,
        "convolution_pool": 393_441,
        "convolution_pool_4": 524_588,
        "toeplitz_like_channels": 393_216,
        "ldr_sd_channels": 417_792,
        "toeplitz_like": 393_216,
        "ldr_sd": 405_504,
    },
    # of the input-hidden matrices: Table 2
    "wikitext_lstm": {"ldr_sd": 2_048, "toeplitz_like": 2_048, "low_rank": 2_048, "unstructured": 65_536},
}
LAYERS = {"structured_image": ("hidden", "output"), "structured_conv": ("first", "hidden")}


# Besides those of RUNS, which train for longer; the others differ from a way that trains as the next tests say.
TRAINED = [
    *(("usps_autoencoder", "hf"), ("mnist_fnn", "rls_momentum_l1"), ("cifar_cnn", "kronecker")),
    *(("imdb_lstm", "plain_rnn"), ("structured_conv", "ldr_sd_channels"), ("poisson_pinn", "lbfgs")),
    *(("heat_pinn", "shf"), ("kdv_pinn", "adam")),
]
EVERY = [(name, way) for name in RECIPES for way in config_names(name)]
# Ways of other data that are those of a recipe: with numbers of their own, or the same ones.
ALIKE = {
    **dict.fromkeys(AUTOENCODERS[1:], ("curves_autoencoder", {"shf", "adam", "hf"}, "other numbers")),
    "cifar_cnn": ("mnist_fnn", {"rls", "adam", "hrls", "rls_momentum_l1"}, "the same numbers"),
    "allen_cahn_pinn": ("kdv_pinn", {"adam", "shf"}, "other numbers"),
}


OF_DATA = ("network", "data_dir", "equation")


@pytest.mark.parametrize(("name", "way"), TRAINED)
def test_shipped_way_of_training_runs(name, way):
    cli = run(name, "fit", "--config", way, *SMALL.get(name, []), "--trainer.fast_dev_run=2")
    assert cli.trainer.global_step == 2 and not Path("results").exists()
    check_paper(cli, name, way)


def contents(name, way):
    return yaml.safe_load((config_directory(name) / f"{way}.yaml").read_text())


def comparable(value, numbers):
    """A config without what its data decide, and perhaps without numbers."""
    if isinstance(value, dict):
        return {key: comparable(item, numbers) for key, item in value.items() if key not in OF_DATA}
    if isinstance(value, list):
        return [comparable(item, numbers) for item in value if isinstance(item, dict)]
    return value if isinstance(value, str) or numbers == "the same numbers" else None


def check_arguments(value):
    """Refuse arguments that the class or function of a config does not take."""
    if isinstance(value, dict):
        if "class_path" in value:
            home, _, name = value["class_path"].rpartition(".")
            made_by = getattr(import_module(home), name)
            signature(made_by).bind_partial(**value.get("init_args", {}))
        for item in value.values():
            check_arguments(item)
    elif isinstance(value, list):
        for item in value:
            check_arguments(item)


@pytest.mark.parametrize(("name", "way"), EVERY)
def test_classes_of_a_config_take_its_arguments(name, way):
    config = contents(name, way)
    check_arguments(config)
    assert config["model"]["class_path"].endswith(RECIPES[name].model_class)
    signature(L.Trainer).bind_partial(**config["trainer"])
    if "class_path" not in config["data"]:
        signature(getattr(data, RECIPES[name].data_class)).bind_partial(**config["data"])


@pytest.mark.parametrize("name", ALIKE)
def test_ways_with_other_data_are_alike_in_all_else(name):
    other, ways, numbers = ALIKE[name]
    assert ways == {*config_names(name)} - {"kronecker", "demo"}
    for way in ways:
        assert comparable(contents(name, way), numbers) == comparable(contents(other, way), numbers)


def test_every_task_has_the_ways_of_training_that_are_compared():
    for name, ways in WAYS.items():
        assert ways <= set(config_names(name))
    for name, ways in PARAMETERS.items():
        assert set(ways) == set(config_names(name)) - {"pruned"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_ways_with_other_layers_are_alike_in_all_else(name):
    def rest(way):
        config = contents(name, way)
        model, trainer = config["model"]["init_args"], config["trainer"]
        del model["layer" if name == "wikitext_lstm" else "network"], model["optimizer"]["init_args"]["lr"]
        trainer["callbacks"] = [each for each in trainer["callbacks"] if "OperatorMonitor" not in each["class_path"]]
        return config

    assert all(rest(way) == rest("ldr_sd") for way in config_names(name))


@pytest.mark.parametrize("name", EQUATIONS)
def test_points_are_drawn_anew_but_for_lbfgs(name):
    for way in config_names(name):
        data = contents(name, way)["data"]
        assert data.get("redraw_every_n_steps", 5) == (None if way == "lbfgs" else 5)


@pytest.mark.parametrize("name", ENCODERS)
def test_autoencoders_are_those_of_table_1(name):
    model = contents(name, default_config(name).stem)["model"]
    assert model["init_args"]["layer_sizes"] == ENCODERS[name]
    assert model["class_path"].endswith("SHFAutoencoder")


def test_networks_of_rls_are_those_of_the_paper():
    assert default_config("mnist_fnn").stem == default_config("imdb_lstm").stem == "rls"
    assert count(configured("mnist_fnn", "rls", "network")) == 407_050
    network = configured("imdb_lstm", "rls", "network").recurrent
    assert isinstance(network, torch.nn.LSTM) and (network.hidden_size, network.num_layers) == (512, 2)


@pytest.mark.parametrize(
    ("values", "form"),
    [(["=low_rank"], "low_rank"), (["=lightning_struct.optim.LowRankP", ".rank=3"], LowRankP(rank=3))],
)
def test_the_form_of_p_is_a_value_on_the_command_line_and_the_default_is_that_of_the_paper(values, form):
    chosen = [f"--model.optimizer.form{value}" for value in values]
    cli = run("mnist_fnn", "fit", *SMALL["mnist_fnn"], *chosen, "--trainer.fast_dev_run=1")
    assert isinstance(cli.model, RLSClassifier) and cli.trainer.optimizers[0].settings.form == form
    check_paper(cli, "mnist_fnn", "rls")


def test_hybrid_leaves_the_output_layer_alone_to_adam():
    network = "--model.network.layer_sizes=[784,8,6,10]"
    cli = run("mnist_fnn", "fit", "--config", "hrls", network, "--trainer.fast_dev_run=1")
    check_paper(cli, "mnist_fnn", "hrls")
    hidden, output = cli.trainer.optimizers[0].param_groups
    names = {p: n for n, p in cli.model.named_parameters()}
    assert [names[p] for p in output["params"]] == ["network.output.weight", "network.output.bias"]
    assert len(hidden["params"]) == len(names) - 2 and "betas" in output and "betas" not in hidden


def configured(name, way, key):
    """What the config says of an argument of the model, made."""
    parser = ArgumentParser()
    parser.add_argument(f"--{key}", type=LayerOfSizes if key == "layer" else torch.nn.Module)
    parsed = parser.parse_object({key: contents(name, way)["model"]["init_args"][key]})
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before jsonargparse 4.49
    return make(parsed)[key]


def count(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in PARAMETERS.items() for way in ways])
def test_structured_layers_have_the_parameters_of_the_paper(name, way):
    if name == "wikitext_lstm":
        gate = configured(name, way, "layer")(128, 128)
        found = 4 * (count(gate) - gate.bias.numel())
    else:
        network = configured(name, way, "network")
        found = count(*(getattr(network, layer) for layer in LAYERS[name]))
    assert found == PARAMETERS[name][way]


class Unsolved(DifferentialEquation):
    """An equation of a user, whose solution is not known."""

    domain = Box([0.0], [1.0])
    regions: ClassVar = {"interior": domain, "boundary": Faces(domain)}
    coordinates = ("x",)

    def residual(self, block, u, points):
        return u(points) - 1


def test_fit_of_an_equation_without_a_known_solution_reports_the_loss(capsys):
    run("poisson_pinn", "fit", "--config", "adam", f"--data.equation={__name__}.Unsolved", "--trainer.max_epochs=1")
    printed = capsys.readouterr().out
    assert "Σ ½ mean r²" in printed and "relative L² error" not in printed and "best checkpoint" in printed


def test_other_networks_ranks_and_data_are_options():
    few = ["--data.train_size=40", "--data.val_size=7", "--data.test_size=10"]  # --data=CLASS begins anew
    grey = ["--data=CIFAR10DataModule", "--data.grey=true", *few]
    network = [f"--model.network{option}" for option in ("=lightning_struct.models.lenet", ".size=32", ".layer.rank=3")]
    options = [*grey, *network, "--model.network.layer.bias=true", "--model.optimizer.lr=0.0005"]
    cli = run("structured_image", "fit", "--config", "low_rank", *options, "--trainer.fast_dev_run=1")
    hidden = cli.model.network.hidden
    assert isinstance(cli.model.network[2], torch.nn.Conv2d) and hidden.rank == 3 and hidden.bias is not None
    assert hidden.in_features == 1024 and cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.0005


@pytest.mark.slow
def test_pruned_network_keeps_the_largest_weights_of_a_trained_one():
    fit = ["structured_image", "fit", "--config"]
    run(*fit, "unstructured", "--model.network.hidden=10", "--trainer.max_epochs=1", "--trainer.limit_test_batches=0")
    checkpoint = "results/structured_image/version_0/checkpoints/last.ckpt"
    trained = Classifier.load_from_checkpoint(checkpoint).network.hidden.weight
    options = [f"--model.network.checkpoint={checkpoint}", "--model.optimizer.lr=0", "--trainer.fast_dev_run=1"]
    hidden = run(*fit, "pruned", *options).model.network.hidden
    left = trained.where(trained.abs() >= trained.abs().flatten().topk(3136).values[-1], 0)
    assert isinstance(hidden, PrunedLinear) and torch.equal(hidden.to_dense(), left) and count(hidden) == 3136


def test_network_that_is_to_be_pruned_must_be_named():
    with pytest.raises(
        (MisconfigurationException, ValueError), match=r"FILE cannot be read.*--model\.network\.checkpoint"
    ):
        run("structured_image", "fit", "--config", "pruned", "--trainer.fast_dev_run=1")


@pytest.mark.slow
def test_two_processes_end_where_one_process_ends(tmp_path):
    arguments = ["--config", "shf", *SMALL["usps_autoencoder"], "--trainer.precision=64-true", "--trainer.max_epochs=1"]
    arguments += ["--data.draws_per_epoch=3", "--trainer.callbacks=null", "--trainer.logger=false"]
    weights = []
    for processes in ([], ["--trainer.devices=2", "--trainer.strategy={class_path: tests.processes.TwoProcesses}"]):
        directory = tmp_path / f"{len(processes)}"
        run("usps_autoencoder", "fit", *arguments, f"--trainer.default_root_dir={directory}", *processes)
        weights.append(torch.load(next(directory.rglob("*.ckpt")))["state_dict"])
    assert all(torch.allclose(weights[0][key], weights[1][key], rtol=0, atol=1e-9) for key in weights[0])
