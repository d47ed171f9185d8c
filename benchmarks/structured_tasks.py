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
the rate that was best in validation on average; these are drawn. A run takes from half a minute (low rank) to six
minutes (LDR-TD) of one core; all of them for one data set take about four hours.

MNIST variants, NORB and rectangles are made by our own generators, unless there is ``--official``. The paper's figures
beside ours are then of other images, and only the order of the classes can be compared.

``language`` compares the rows of Table 2 by test perplexity: SGD with a rate of 20, a quarter of it after an epoch that
is no better, gradients clipped to 0.25, 40 epochs, and of each run the weights of the epoch that was best in
validation. Structured matrices are trained in the units of ``LanguageModel(balanced=True)``; ``--authors`` takes the
initial values of the authors' code, and the same rates for all parameters.

Runs are kept in ``--output``: a benchmark that was stopped goes on where it was, and several processes can share the
runs (``--seeds``). Table and picture are made of all runs that are there.
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
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader

import harness
import structured_language
import style
from harness import Run
from lightning_struct.data import CIFAR10DataModule, InMemoryDataModule, MNISTVariantDataModule
from lightning_struct.data.in_memory import BatchedTensorDataset, Splits, keep_batch
from lightning_struct.models import Classifier, lenet, single_hidden_layer
from lightning_struct.models.structured import LayerOfSizes
from lightning_struct.nn import PrunedLinear, reduced_hidden_units
from norb import NORBDataModule
from paper_tables import DATA, Way, paper_accuracy
from rectangles import RectanglesDataModule
from structured_classes import BUDGETED, CLASSES, LABELS, RANKED, UNRANKED, BestWeights, finished, title, ways_in

DEFAULT_CLASSES = tuple(name for name in CLASSES if name not in ("cauchy_like", *BUDGETED))
DEFAULT_RANKS: dict[str, Sequence[int]] = {"ldr_td": (1,), "ldr_sd": (1,), **dict.fromkeys(BUDGETED, (1,))}
RATES = (0.0002, 0.0005, 0.001, 0.002)  # appendix F.1
TITLES = {
    "background_rotation": "MNIST with background and rotation",
    "noise": "MNIST with noise",
    "cifar": "CIFAR-10",
    "norb": "NORB",
    "rectangles": "rectangles",
}
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
    """Training, validation and test set on the device; the seed draws the training fraction."""
    variant = options.variant in ("background_rotation", "noise")
    arguments: dict[str, Any] = {"data_dir": options.data_dir, "seed": seed, "synthetic": options.synthetic}
    if options.variant == "cifar":
        grey = options.network == "shl"
        data: InMemoryDataModule = CIFAR10DataModule(**arguments, train_size=42_500, val_size=7_500, grey=grey)
    else:
        arguments["train_fraction"] = options.train_fraction
        if options.variant == "norb":
            data = NORBDataModule(**arguments, generate=not options.official)
        elif variant:
            generate = not options.official
            data = MNISTVariantDataModule(options.variant, **arguments, download=False, generate=generate)
        else:
            data = RectanglesDataModule(**arguments, generate=not options.official)
    data.prepare_data()
    data.setup("fit")
    assert data.splits is not None
    return Splits(*(BatchedTensorDataset(*(part.to(options.device) for part in set_.tensors)) for set_ in data.splits))


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
    trainer = harness.bare_trainer(best, max_epochs=options.epochs, accelerator=options.device)
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
    source = "synthetic" if options.synthetic else "official" if options.official else "made"
    folder = f"{options.variant}_{source}_{options.network}_{options.epochs}_epochs_{options.train_fraction:g}"
    output = harness.make_directory((options.output or harness.RESULTS / "structured_tasks") / folder)
    splits: dict[int, Splits] = {}  # the last that were loaded, by their seed

    settings = {key: getattr(options, key) for key in ("variant", "network", "epochs", "train_fraction")}

    def train(way: Way, rate: float, seed: int) -> Run:
        drawn = seed if options.train_fraction < 1 else 0
        if drawn not in splits:
            splits.clear()
            splits[drawn] = load_images(options, drawn)
        result = train_image(way, rate, seed, splits[drawn], options)
        return {**settings, "way": way, "rate": rate, "seed": seed, **result}

    wanted = list(product(options.seeds, ways_of(options.classes, options.ranks), options.rates))
    for seed, way, rate in harness.progress(wanted, len(wanted)):
        run = harness.run_once(output, harness.run_name(*way, f"{rate:g}", seed), partial(train, way, rate, seed))
        if run is not None:
            print(f"{title(way)}, rate {rate:g}, seed {seed}: {summary(run)}", flush=True)
    runs = harness.load_runs(output)
    print_images(runs, options)
    draw(runs, options.variant).savefig(output / "accuracy_against_rank.png")
    print(f"\npicture: {output / 'accuracy_against_rank.png'}")


def summary(result: Run) -> str:
    """Figures at the end of a run."""
    if "error" in result:
        return result["error"]
    return f"test {result['test_accuracy']:.2%}, {result['seconds']:.0f} s"


def best_validation(run: Run) -> float:
    return max(run["val_accuracies"])


def at_best_rate(runs: Sequence[Run]) -> list[Run]:
    """The runs of the rate with the highest average validation accuracy."""
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        by_rate.setdefault(run["rate"], []).append(run)
    rate = max(by_rate, key=lambda rate: statistics.mean(best_validation(run) for run in by_rate[rate]))
    return by_rate[rate]


def print_images(runs: Sequence[Run], options: argparse.Namespace) -> None:
    remade = options.variant != "cifar" and not options.official
    if remade:
        print("\nThe data set is remade by our own generator: it is not the paper's.")
    if options.train_fraction < 1:
        print(
            f"\nTrained on {options.train_fraction:.0%} of the training images; the paper's figures are of all of them."
        )
    harness.print_machines(runs)
    harness.print_header("class", "parameters", "rate", "test %, by seed", "paper", "seconds of a run")
    for way in ways_in(runs):
        if not (of_way := finished(runs, way)):
            harness.print_row(title(way), "", "", "all diverged", "", "")
            continue
        at_best = at_best_rate(of_way)
        paper = paper_accuracy(way, options.variant, options.network)
        harness.print_row(
            title(way),
            f"{at_best[0]['parameters']:,}",
            f"{at_best[0]['rate']:g}",
            ", ".join(f"{100 * run['test_accuracy']:.2f}" for run in at_best),
            "" if paper is None else f"{paper:.2f}",
            f"{statistics.median(run['seconds'] for run in at_best):.0f}",
        )


@style.readable
def draw(runs: Sequence[Run], data: str) -> Figure:
    """Test accuracy against rank, mean and two deviations over seeds (the paper's figure 3)."""
    figure = Figure(figsize=(style.WIDTH, 4.5), layout="constrained")
    axes = figure.subplots()
    ways = [way for way in ways_in(runs) if finished(runs, way)]
    for name in dict.fromkeys(name for name, _ in ways):
        label = LABELS.get(name, name)
        color = style.color_of(label)
        ranks = [rank for other, rank in ways if other == name and rank is not None]
        at_best = [at_best_rate(finished(runs, (name, rank))) for rank in ranks or (None,)]
        accuracies = [[run["test_accuracy"] for run in of_rank] for of_rank in at_best]
        means = [100 * statistics.mean(values) for values in accuracies]
        spread = [200 * statistics.stdev(values) if len(values) > 1 else 0.0 for values in accuracies]
        low, high = ([mean + sign * width for mean, width in zip(means, spread, strict=True)] for sign in (-1, 1))
        if ranks:
            axes.plot(ranks, means, marker="o", color=color, label=label)
            axes.fill_between(ranks, low, high, color=color, alpha=0.2, linewidth=0)
        else:
            axes.axhline(means[0], color=color, linestyle="--", label=label)
            axes.axhspan(low[0], high[0], color=color, alpha=0.1, linewidth=0)
    axes.set(
        title=TITLES[data],
        xlabel="rank of the displacement (low rank: of the matrix)",
        ylabel="test accuracy, %",
        xscale="log",
    )
    ticks = sorted({rank for _, rank in ways if rank is not None})
    axes.set_xticks(ticks, [str(rank) for rank in ticks])
    axes.minorticks_off()
    axes.grid()
    seeds = sorted({run["seed"] for run in runs})
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds, band of two standard deviations"
    style.legend_below(figure, axes, f"{over}; dashed: no rank", columns=4)
    return figure


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
    image.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    image.add_argument("--train-fraction", type=float, default=1.0)
    image.add_argument(
        "--official", action="store_true", help="read the official files of MNIST variants, NORB and rectangles"
    )
    structured_language.add_options(language)
    for command in (image, language):
        harness.add_data_options(command)
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--output", type=Path, help="default: results/benchmarks/structured_tasks")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    {"image": run_images, "language": structured_language.run_language}[options.what](options)


if __name__ == "__main__":
    main()
