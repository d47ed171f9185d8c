"""Structured matrices on the tasks of Thomas et al., "Learning compressed transforms with low displacement rank".

    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py image --variant noise --data-dir DIRECTORY
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py image --variant background_rotation --data-dir DIRECTORY \
        --classes ldr_sd toeplitz_like low_rank unstructured --ranks 1 2 4 8 16 --rates 0.001 --seeds 0 1 2 3 4
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py image --variant rectangles --network lenet
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py language --text-file FILE
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py language --data-dir DIRECTORY_OF_WIKITEXT_2

``image`` compares the classes of structured matrices with an unstructured layer, by test accuracy and number of
parameters:

- the classes of Tables 1, 6 and 13 (``--network lenet``: 7 and 9), each at the ranks of those tables;
- with ``--classes pruned reduced --ranks 1 2 4`` those of Tables 8 and 9, at the budgets of LDR-SD of these ranks;
- with ``--train-fraction`` those of Tables 10 and 11.

The protocol is that of appendix F.1: batches of 50, momentum 0.9, 50 epochs, four learning rates, three seeds, 15 % for
validation, and of each run the weights of the epoch that was best in validation. The table has the test accuracies at
the rate that was best in validation on average. A run takes from half a minute (low rank) to six minutes (LDR-TD) of
one core; all of them for one data set take about four hours.

MNIST variants, NORB and rectangles are made by our own generators: only the order of the classes can be compared with
the paper's.

``language`` compares the rows of Table 2 by test perplexity: SGD with a rate of 20, a quarter of it after an epoch that
is no better, gradients clipped to 0.25, 40 epochs, and of each run the weights of the epoch that was best in
validation. Structured matrices are trained in the units of ``LanguageModel(balanced=True)``.

Runs are kept in ``--output``: a benchmark that was stopped goes on where it was, and several processes can share the
runs (``--seeds``). The table is made of all runs that are there.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

import harness
import structured_language
from harness import Run
from lightning_struct.data import CIFAR10DataModule, InMemoryDataModule, MNISTVariantDataModule
from lightning_struct.data.in_memory import Splits, keep_batch
from lightning_struct.models import Classifier, lenet, single_hidden_layer
from lightning_struct.models.structured import LayerOfSizes
from lightning_struct.nn import PrunedLinear, reduced_hidden_units
from norb import NORBDataModule
from paper_tables import DATA, Way
from rectangles import RectanglesDataModule
from structured_classes import BUDGETED, CLASSES, RANKED, UNRANKED, BestWeights, finished, title, ways_in

DEFAULT_CLASSES = tuple(name for name in CLASSES if name not in ("cauchy_like", *BUDGETED))
DEFAULT_RANKS: dict[str, Sequence[int]] = {"ldr_td": (1,), "ldr_sd": (1,), **dict.fromkeys(BUDGETED, (1,))}
RATES = (0.0002, 0.0005, 0.001, 0.002)  # appendix F.1
OTHER_RANKS: Sequence[int] = (4, 2)  # the budgets of LDR-TD and LDR-SD of rank one


def ways_of(classes: Sequence[str], ranks: Sequence[int] | None) -> list[Way]:
    """Each class with each of the ranks, by default those of the tables."""
    ways: list[Way] = []
    for name in classes:
        if name in UNRANKED:
            ways.append((name, None))
        else:
            ways += [(name, rank) for rank in ranks or DEFAULT_RANKS.get(name, OTHER_RANKS)]
    return ways


# --- images -----------------------------------------------------------------------------------------------------------


def load_images(options: argparse.Namespace, seed: int) -> Splits:
    """Training, validation and test set; the seed draws the training fraction."""
    arguments: dict[str, Any] = {"data_dir": options.data_dir, "seed": seed, "synthetic": options.synthetic}
    if options.variant == "cifar":
        grey = options.network == "shl"
        data: InMemoryDataModule = CIFAR10DataModule(**arguments, train_size=42_500, val_size=7_500, grey=grey)
    else:
        arguments["train_fraction"] = options.train_fraction
        arguments["generate"] = True
        if options.variant == "norb":
            data = NORBDataModule(**arguments)
        elif options.variant == "rectangles":
            data = RectanglesDataModule(**arguments)
        else:
            data = MNISTVariantDataModule(options.variant, **arguments, download=False)
    return harness.splits_of(data)


def make_network(way: Way, options: argparse.Namespace, sample: torch.Tensor, classes: int) -> nn.Sequential:
    """The network of a way; that of ``pruned`` is the one that is trained first."""
    name, rank = way
    shl = options.network == "shl"
    channels = 1 if sample.ndim == 1 else len(sample)
    size = math.isqrt(sample.numel() // channels)
    features = size**2 if shl else 16 * (size // 4) ** 2
    hidden = None
    layer: LayerOfSizes
    if name in RANKED:
        layer = partial(RANKED[name], rank=rank, bias=not shl)
    else:
        layer = partial(UNRANKED.get(name, nn.Linear), bias=not shl)
        if name == "reduced":
            bias = 0 if shl else features
            budget = ldr_sd_parameters(features, rank) + bias + classes * (features + 1)
            hidden = reduced_hidden_units(features, classes, budget, bias=not shl)
    if shl:
        return single_hidden_layer(sample.numel(), classes, layer, hidden)
    return lenet(size, channels, classes, layer, hidden)


def ldr_sd_parameters(features: int, rank: int | None) -> int:
    """Number of parameters of a square LDR-SD matrix."""
    assert rank is not None
    return 2 * features * (1 + rank)


def fit_classifier(network: nn.Sequential, splits: Splits, rate: float, options: argparse.Namespace) -> Run:
    """Train, and measure the weights that were best in validation; the network is left with its last weights."""
    loaders = [DataLoader(part, batch_size=1000, collate_fn=keep_batch) for part in splits]
    output = network.get_submodule("output")
    assert isinstance(output, nn.Linear)
    sgd = partial(torch.optim.SGD, lr=rate, momentum=0.9)
    model = Classifier(network, output.out_features, "cross_entropy", sgd)
    best = BestWeights("val_accuracy", 1)
    trainer = harness.bare_trainer(best, max_epochs=options.epochs)
    training = DataLoader(splits.train, batch_size=50, shuffle=True, collate_fn=keep_batch)
    began = time.process_time()
    trainer.fit(model, training, loaders[1])
    seconds = time.process_time() - began
    last = copy.deepcopy(model.state_dict())
    model.load_state_dict(best.weights)
    accuracies = [trainer.test(model, loader, verbose=False)[0]["test_accuracy"] for loader in (loaders[0], loaders[2])]
    model.load_state_dict(last)
    return {
        "val_accuracies": best.values,
        "train_accuracy": accuracies[0],
        "test_accuracy": accuracies[1],
        "seconds": seconds,
        "parameters": fully_connected_parameters(network),
    }


def fully_connected_parameters(network: nn.Sequential) -> int:
    """Number of parameters of the hidden layer and the output layer, which the paper counts."""
    layers = [network.get_submodule(name) for name in ("hidden", "output")]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def train_image(way: Way, rate: float, seed: int, splits: Splits, options: argparse.Namespace) -> Run:
    """One run; ``pruned`` trains the unstructured network first, then what is left of its last weights at rate / 10."""
    L.seed_everything(seed, verbose=False)
    images = splits.train.tensors[0]
    classes = int(max(part.tensors[1].max() for part in splits)) + 1
    network = make_network(way, options, images[0], classes)
    try:
        result = fit_classifier(network, splits, rate, options)
        name, rank = way
        if name == "pruned":
            hidden = network.hidden
            assert isinstance(hidden, nn.Linear)
            left = ldr_sd_parameters(hidden.in_features, rank)
            network.hidden = PrunedLinear.from_linear(hidden, parameters=left)
            result = fit_classifier(network, splits, rate / 10, options)
    except ValueError as not_finite:  # the way diverged, which is a result
        return {"error": str(not_finite)}
    return result


def run_images(options: argparse.Namespace) -> None:
    source = "synthetic" if options.synthetic else "made"
    folder = f"{options.variant}_{source}_{options.network}_{options.epochs}_epochs_{options.train_fraction:g}"
    splits: dict[int, Splits] = {}  # the last that were loaded, by their seed

    settings = {key: getattr(options, key) for key in ("variant", "network", "epochs", "train_fraction")}

    def train(way: Way, rate: float, seed: int) -> Run:
        drawn = seed if options.train_fraction < 1 else 0
        if drawn not in splits:
            splits.clear()
            splits[drawn] = load_images(options, drawn)
        result = train_image(way, rate, seed, splits[drawn], options)
        return {**settings, "way": way, "rate": rate, "seed": seed, **result}

    wanted = product(options.seeds, ways_of(options.classes, options.ranks), options.rates)
    runs = {harness.run_name(*way, f"{rate:g}", seed): partial(train, way, rate, seed) for seed, way, rate in wanted}
    print_images(harness.run_all(options.output / folder, runs, options.report))


def at_best_rate(runs: Sequence[Run]) -> list[Run]:
    """The runs of the rate with the highest average validation accuracy."""
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        by_rate.setdefault(run["rate"], []).append(run)
    rate = max(by_rate, key=lambda rate: statistics.mean(max(run["val_accuracies"]) for run in by_rate[rate]))
    return by_rate[rate]


def print_images(runs: Sequence[Run]) -> None:
    harness.print_machines(runs)
    harness.print_header("class", "parameters", "rate", "test %, by seed", "seconds of a run")
    for way in ways_in(runs):
        if not (of_way := finished(runs, way)):
            harness.print_row(title(way), "", "", "all diverged", "")
            continue
        at_best = at_best_rate(of_way)
        harness.print_row(
            title(way),
            f"{at_best[0]['parameters']:,}",
            f"{at_best[0]['rate']:g}",
            ", ".join(f"{100 * run['test_accuracy']:.2f}" for run in at_best),
            f"{statistics.median(run['seconds'] for run in at_best):.0f}",
        )


def main() -> None:
    parser = harness.make_parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    image, language = commands.add_parser("image"), commands.add_parser("language")
    image.add_argument("--variant", choices=DATA, default="noise", help="the data set")
    image.add_argument("--network", choices=("shl", "lenet"), default="shl")
    image.add_argument("--classes", nargs="+", choices=CLASSES, default=DEFAULT_CLASSES)
    image.add_argument("--ranks", type=int, nargs="+", help="of all classes that have one; default: those of Table 6")
    image.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    image.add_argument("--epochs", type=int, default=50)
    image.add_argument("--train-fraction", type=float, default=1.0)
    structured_language.add_options(language)
    for command, seeds in ((image, [0, 1, 2]), (language, [0])):
        harness.add_data_options(command)
        harness.add_run_options(command, "structured_tasks", seeds)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    {"image": run_images, "language": structured_language.run_language}[options.what](options)


if __name__ == "__main__":
    main()
