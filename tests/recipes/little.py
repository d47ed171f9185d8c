"""Every recipe on little data."""

from importlib import import_module

import torch

from lightning_struct.data import AllenCahn, Burgers, Heat, KortewegDeVries, Poisson
from lightning_struct.models import SHFPhysicsInformedNetwork
from lightning_struct.recipes.catalogue import RECIPES

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
SAMPLES = ["--data.train_size=40", "--data.val_size=10", "--data.test_size=10", "--data.batch_size=10"]
POINTS = ["--model.hidden_sizes=[5]", "--data.steps_per_epoch=3", "--data.eval_count=5", "--data.predict_count=25"]
THREE_REGIONS = [*POINTS, "--data.redraw_every_n_steps=2", "--data.counts={interior: 12, boundary: 6, initial: 6}"]
SMALL = {  # networks
    "curves_autoencoder": ["--model.layer_sizes=[784,8,3]"],
    "mnist_autoencoder": ["--model.layer_sizes=[784,8,3]"],
    "usps_autoencoder": ["--model.layer_sizes=[256,8,3]"],
    "mnist_fnn": ["--model.network.layer_sizes=[784,8,10]"],
    "cifar_cnn": ["--model.network.channels=2", "--model.network.hidden=8"],
    "imdb_lstm": [f"--model.network.{size}" for size in ("vocabulary_size=50", "embedding_size=4", "hidden_size=6")],
    "wikitext_lstm": ["--model.hidden_size=8", "--model.embedding_size=8"],
}
WORDS = ["--data.synthetic_vocabulary=30", "--data.train_size=1500", "--data.val_size=400", "--data.test_size=400"]
DATA = {
    **dict.fromkeys(RECIPES, SAMPLES),
    "imdb_lstm": [*SAMPLES, "--data.vocabulary_size=50", "--data.max_length=12"],
    "structured_image": ["--data.train_size=40", "--data.test_size=10", "--data.batch_size=10"],
    "structured_conv": ["--data.train_size=4", "--data.val_size=2", "--data.test_size=2", "--data.batch_size=2"],
    "wikitext_lstm": WORDS,
    "poisson_pinn": [*POINTS, "--data.redraw_every_n_steps=2", "--data.counts={interior: 12, boundary: 6}"],
    "heat_pinn": THREE_REGIONS,
    "burgers_pinn": THREE_REGIONS,
    "allen_cahn_pinn": [*POINTS, "--data.counts={interior: 12, initial: 6}"],
    "kdv_pinn": [*POINTS, "--data.counts={interior: 12, initial: 6}"],
}
LITTLE = {name: [*DATA[name], *SMALL.get(name, [])] for name in RECIPES}
RUNS = {  # the recipes, one of each kind, that are run, interrupted and resumed, and in which way
    "curves_autoencoder": "shf",
    "structured_image": "ldr_sd",
    "wikitext_lstm": "low_rank",
    "burgers_pinn": "shf",
}
PAPER = {"rls": ("mse", 0, 0), "rls_momentum_l1": ("mse", 0.5, 1e-5), "hrls": ("cross_entropy", 0, 0)}
EQUATIONS = {
    "poisson_pinn": Poisson,
    "heat_pinn": Heat,
    "burgers_pinn": Burgers,
    "allen_cahn_pinn": AllenCahn,
    "kdv_pinn": KortewegDeVries,
}


def synthetic(recipe):
    """The option that makes its data, where these are files otherwise."""
    return [] if recipe.endswith("_pinn") else ["--data.synthetic=true"]


def run(recipe, subcommand, *arguments):
    """The command line of a recipe after its run, on data that are made."""
    main = import_module(f"lightning_struct.recipes.{recipe}").main
    return main([subcommand, *QUIET, *synthetic(recipe), *DATA[recipe], *arguments])


def check_paper(cli, name, way):
    """What the papers say of the optimizer, or the equation that is solved."""
    if name in ("mnist_fnn", "cifar_cnn") and way in PAPER:
        loss, momentum, l1 = PAPER[way]
        (optimizer,) = cli.trainer.optimizers
        paper = {"ratio": 0.1, "gradient_scale": 1, "momentum": momentum, "l1": l1}
        assert paper.items() <= optimizer.param_groups[0].items()
        assert optimizer.settings.max_grad_norm == 5 and cli.model.loss == loss
    if name in EQUATIONS:
        assert isinstance(cli.model.equation, EQUATIONS[name]) and cli.model.equation is cli.datamodule.equation
        assert isinstance(cli.model, SHFPhysicsInformedNetwork) == (way not in ("adam", "lbfgs"))
        assert cli.model.dtype == torch.float64
    if name == "wikitext_lstm":
        assert cli.model.embedding.num_embeddings == cli.datamodule.vocabulary_size == 30
    if way == "plain_rnn":
        assert isinstance(cli.model.network.recurrent, torch.nn.RNN)
