"""Structured matrices on the tasks of Thomas et al., "Learning compressed transforms with low displacement rank".

    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py image --variant noise --data-dir DIRECTORY
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py image --variant background_rotation --classes ldr_sd toeplitz_like \
        low_rank unstructured --ranks 1 2 4 8 16 --rates 0.001 --seeds 0 1 2 3 4 --data-dir DIRECTORY
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py image --variant rectangles --network lenet
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py language --text-file FILE
    OMP_NUM_THREADS=1 python benchmarks/structured_tasks.py language --data-dir DIRECTORY_OF_WIKITEXT_2

``image`` trains the classes of Tables 1, 6 and 13 (``--network lenet``: 7 and 9), each at the ranks of those tables; with
``--classes pruned reduced --ranks 1 2 4`` those of Tables 8 and 9, at the budgets of LDR-SD of these ranks; with
``--train-fraction`` those of Tables 10 and 11. Protocol of appendix F.1: batches of 50, momentum .9, 50 epochs, a grid of
four learning rates, three seeds, 15 % for validation; of each run the weights of the epoch that was best in validation.
The table has the test accuracy of the run that was best in validation, the protocol of the paper's tables; and the mean and
deviation over seeds at the rate that was best in validation on average, that of its figure 3, which is drawn. The gap is
training less test accuracy, as in Table 12.

MNIST variants and rectangles are made anew by our generator, unless there is ``--official``: then the paper's figures beside
ours are of other images, and only the order of the classes can be compared.

``language`` trains the rows of Table 2: SGD with a rate of 20, a quarter of it after an epoch that is no better, gradients
clipped to .25, 40 epochs. Structured matrices are trained in the units of ``LanguageModel(balanced=True)``; ``--authors`` takes the
initial values of the authors' code, and these rates for all parameters. Of each run the weights of the best epoch in validation.

A run is skipped where its file is in ``--output`` already, so that several processes can share the runs (``--seeds``); table
and picture are made of all files that are there.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader

from lightning_struct.data import (
    CIFAR10DataModule,
    InMemoryDataModule,
    MNISTVariantDataModule,
    NORBDataModule,
    RectanglesDataModule,
    TextCorpusDataModule,
)
from lightning_struct.data.in_memory import BatchedTensorDataset, Splits, keep_batch
from lightning_struct.models import Classifier, LanguageModel, lenet, single_hidden_layer
from lightning_struct.models.structured import LayerFactory
from lightning_struct.nn import (
    CauchyLike,
    Circulant,
    Fastfood,
    HankelLike,
    LDRSubdiagonal,
    LDRTridiagonal,
    LowRank,
    PrunedLinear,
    ToeplitzLike,
    VandermondeLike,
    reduced_hidden_units,
)

RANKED: dict[str, Callable[..., nn.Module]] = {
    "ldr_td": LDRTridiagonal,
    "ldr_sd": LDRSubdiagonal,
    "toeplitz_like": ToeplitzLike,
    "hankel_like": HankelLike,
    "vandermonde_like": VandermondeLike,
    "cauchy_like": CauchyLike,
    "low_rank": LowRank,
}
UNRANKED: dict[str, Callable[..., nn.Module]] = {
    "unstructured": nn.Linear,
    "fastfood": Fastfood,
    "circulant": Circulant,
}
BUDGETED = ("pruned", "reduced")  # their rank is that of the LDR-SD layer whose parameters they have
CLASSES = ("unstructured", *RANKED, "fastfood", "circulant", *BUDGETED)
DEFAULT_CLASSES = tuple(name for name in CLASSES if name not in ("cauchy_like", *BUDGETED))
DEFAULT_RANKS = {"ldr_td": (1,), "ldr_sd": (1,), **dict.fromkeys(BUDGETED, (1,))}
OTHER_RANKS = (4, 2)  # the budgets of LDR-TD and LDR-SD of rank one

Way = tuple[str, int | None]
DATA = ("background_rotation", "noise", "cifar", "norb", "rectangles")

# test accuracies in per cent, in the order of DATA
TABLES_1_6_13: dict[Way, tuple[float, ...]] = {
    ("unstructured", None): (44.08, 65.15, 46.03, 59.83, 91.94),
    ("ldr_td", 1): (45.81, 78.45, 45.33, 62.75, 98.53),
    ("toeplitz_like", 4): (42.67, 75.75, 41.78, 59.38, 99.29),
    ("hankel_like", 4): (42.23, 73.65, 41.40, 60.09, 97.77),
    ("vandermonde_like", 4): (37.14, 59.80, 33.93, 48.98, 94.11),
    ("low_rank", 4): (35.67, 52.25, 32.28, 43.66, 92.80),
    ("ldr_sd", 1): (44.74, 78.80, 43.29, 63.78, 98.39),
    ("toeplitz_like", 2): (42.07, 74.25, 40.68, 57.27),
    ("hankel_like", 2): (41.01, 71.20, 40.46, 57.95),
    ("vandermonde_like", 2): (33.56, 50.85, 28.99, 43.21),
    ("low_rank", 2): (32.64, 38.85, 24.93, 37.03),
    ("fastfood", None): (38.13, 63.55, 39.64, 59.02, 92.20),
    ("circulant", None): (34.46, 65.35, 34.28, 46.45, 95.58),
    ("toeplitz_like", 1): (41.12, 73.95),  # Table 10
    ("low_rank", 1): (25.06, 26.40),
}
TABLE_7: dict[Way, tuple[float, ...]] = {
    ("unstructured", None): (67.94, 90.30, 68.09, 75.16),
    ("ldr_td", 1): (68.79, 92.55, 66.63, 74.23),
    ("toeplitz_like", 4): (63.23, 91.60, 67.10, 72.25),
    ("hankel_like", 4): (64.21, 90.80, 68.10, 71.23),
    ("vandermonde_like", 4): (61.76, 90.40, 63.63, 72.11),
    ("low_rank", 4): (60.35, 87.30, 60.90, 71.47),
    ("ldr_sd", 1): (67.40, 92.20, 65.48, 73.63),
    ("toeplitz_like", 2): (63.63, 91.45, 67.15, 71.64),
    ("hankel_like", 2): (64.08, 90.65, 67.49, 71.21),
    ("vandermonde_like", 2): (51.38, 86.50, 58.00, 68.08),
    ("low_rank", 2): (41.91, 71.15, 48.48, 65.34),
    ("toeplitz_like", 1): (63.00, 90.95),  # Table 11
    ("low_rank", 1): (29.63, 44.55),
}
BUDGET_RANKS = (1, 2, 4, 8, 12, 16)
TABLE_8 = {
    "ldr_sd": ((44.74, 44.46, 47.72, 48.76, 48.90, 49.51), (78.80, 77.95, 78.32, 78.63, 78.33, 78.08)),
    "pruned": ((40.41, 41.18, 42.45, 43.52, 43.19, 43.58), (67.75, 69.35, 68.25, 67.25, 67.30, 66.95)),
    "reduced": ((37.18, 37.60, 37.98, 39.77, 40.56, 40.70), (62.85, 62.55, 63.40, 64.45, 63.85, 66.10)),
}
TABLE_9 = {
    "ldr_sd": ((67.40, 67.53, 67.96, 67.21, 68.54, 67.00), (92.20, 92.75, 91.30, 91.95, 92.10, 93.20)),
    "pruned": ((64.25, 64.05, 65.50, 64.12, 65.65, 65.59), (90.80, 91.65, 90.60, 91.05, 90.00, 90.55)),
    "reduced": ((64.03, 64.67, 66.37, 64.70, 65.99, 66.47), (90.95, 91.00, 91.25, 90.65, 90.85, 90.40)),
}
LANGUAGE_RANKS = (1, 2, 4, 8, 16, 24)
TABLE_2 = {  # test perplexities at the budgets of LDR-SD of these ranks
    "ldr_sd": (166.97, 154.51, 141.91, 143.60, 132.43, 129.46),
    "toeplitz_like": (186.91, 177.60, 178.07, 186.52, 162.58, 155.73),
    "low_rank": (205.72, 179.46, 172.38, 144.41, 135.65, 133.37),
}
UNSTRUCTURED_PERPLEXITY = 117.74


def paper_accuracy(way: Way, data: str, network: str) -> float | None:
    """The paper's test accuracy in per cent, if it names one."""
    by_budget, by_class = (TABLE_8, TABLES_1_6_13) if network == "shl" else (TABLE_9, TABLE_7)
    name, rank = way
    column = DATA.index(data)
    if name in by_budget and rank in BUDGET_RANKS and column < 2:
        return by_budget[name][column][BUDGET_RANKS.index(rank)]
    row = by_class.get(way, ())
    return row[column] if column < len(row) else None


def title(way: Way) -> str:
    name, rank = way
    return name if rank is None else f"{name} (r={rank})"


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
    """The sets on the device; the seed is that of a training fraction."""
    variant = options.variant in ("background_rotation", "noise")
    arguments: dict[str, Any] = {"data_dir": options.data_dir, "seed": seed, "synthetic": options.synthetic}
    if options.variant == "cifar":
        sizes = {"train_size": 42_500, "val_size": 7_500}
        data: InMemoryDataModule = CIFAR10DataModule(**arguments, **sizes, grey=options.network == "shl")
    else:
        arguments["train_fraction"] = options.train_fraction
        if options.variant == "norb":
            data = NORBDataModule(**arguments)
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
    layer: LayerFactory
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
    """Of a square LDR-SD matrix."""
    assert rank is not None
    return 2 * features * (1 + rank)


class BestWeights(L.Callback):
    """Keeps the weights of the validation that was best so far."""

    def __init__(self, monitor: str, sign: int) -> None:
        self.monitor, self.sign = monitor, sign
        self.values: list[float] = []
        self.weights: dict[str, Any] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        value = trainer.callback_metrics[self.monitor].item()
        if all(self.sign * value > self.sign * other for other in self.values):
            self.weights = copy.deepcopy(pl_module.state_dict())
        self.values.append(value)


def lean_trainer(options: argparse.Namespace, callback: L.Callback, **others: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=options.epochs,
        accelerator=options.device,
        devices=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        **others,
    )


def fit_classifier(network: nn.Sequential, splits: Splits, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train; what is left is the network with its last weights, and what the best ones reach."""
    loaders = [DataLoader(part, batch_size=1000, collate_fn=keep_batch) for part in splits]
    classes = network.output.out_features
    assert isinstance(classes, int)
    model = Classifier(network, classes, "cross_entropy", partial(torch.optim.SGD, lr=rate, momentum=0.9))
    best = BestWeights("val_accuracy", 1)
    trainer = lean_trainer(options, best)
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
    """Of the hidden layer and the output layer, which the paper counts."""
    return sum(parameter.numel() for layer in (network.hidden, network.output) for parameter in layer.parameters())


def train_image(way: Way, rate: float, seed: int, splits: Splits, options: argparse.Namespace) -> dict[str, Any]:
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
    output = (options.output or Path("results/benchmarks/structured_tasks")) / folder
    output.mkdir(parents=True, exist_ok=True)
    splits: dict[int, Splits] = {}
    for seed in options.seeds:
        for way in ways_of(options.classes, options.ranks):
            for rate in options.rates:
                file = output / f"{way[0]}_{way[1]}_{rate:g}_{seed}.json"
                if file.exists():
                    continue
                drawn = seed if options.train_fraction < 1 else 0
                if drawn not in splits:
                    splits = {drawn: load_images(options, drawn)}
                result = train_image(way, rate, seed, splits[drawn], options)
                file.write_text(json.dumps({"way": way, "rate": rate, "seed": seed, **result}))
                print(f"{title(way)}, rate {rate:g}, seed {seed}: {summary(result)}", flush=True)
    runs = [json.loads(file.read_text()) for file in sorted(output.glob("*.json"))]
    print_images(runs, options)
    draw(runs, options.variant).savefig(output / "accuracy_against_rank.png", dpi=150)
    print(f"\npicture: {output / 'accuracy_against_rank.png'}")


def summary(result: dict[str, Any]) -> str:
    if "error" in result:
        return result["error"]
    return f"test {result['test_accuracy']:.2%}, {result['seconds']:.0f} s"


def finished(runs: Sequence[dict[str, Any]], way: Way) -> list[dict[str, Any]]:
    return [run for run in runs if tuple(run["way"]) == way and "error" not in run]


def best_validation(run: dict[str, Any]) -> float:
    return max(run["val_accuracies"])


def mean_at_best_rate(runs: Sequence[dict[str, Any]]) -> tuple[float, list[float]]:
    """The rate with the highest average validation accuracy, and the test accuracies of its runs."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for run in runs:
        by_rate.setdefault(run["rate"], []).append(run)
    rate = max(by_rate, key=lambda rate: statistics.mean(best_validation(run) for run in by_rate[rate]))
    return rate, [run["test_accuracy"] for run in by_rate[rate]]


def ways_in(runs: Sequence[dict[str, Any]]) -> list[Way]:
    found = {(run["way"][0], run["way"][1]) for run in runs}
    return sorted(found, key=lambda way: (CLASSES.index(way[0]), way[1] or 0))


def print_images(runs: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    remade = options.variant in ("background_rotation", "noise", "rectangles") and not options.official
    if remade:
        print("\nThe data set is remade by our own generator: it is not the paper's.")
    if options.train_fraction < 1:
        print(
            f"\nTrained on {options.train_fraction:.0%} of the training images; the paper's figures are of all of them."
        )
    print(
        "\n| class | parameters | test %, best run in validation | its rate | test %, mean and deviation over seeds | gap | paper "
        "| runs | seconds of a run |\n|---|---|---|---|---|---|---|---|---|"
    )
    for way in ways_in(runs):
        of_way = finished(runs, way)
        diverged = sum(tuple(run["way"]) == way and "error" in run for run in runs)
        if not of_way:
            print(f"| {title(way)} | | all {diverged} runs diverged | | | | | | |")
            continue
        best = max(of_way, key=best_validation)
        rate, accuracies = mean_at_best_rate(of_way)
        deviation = f" ± {100 * statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        paper = paper_accuracy(way, options.variant, options.network)
        row = [
            title(way),
            f"{best['parameters']:,}",
            f"**{100 * best['test_accuracy']:.2f}**",
            f"{best['rate']:g}",
            f"{100 * statistics.mean(accuracies):.2f}{deviation} (rate {rate:g})",
            f"{100 * (best['train_accuracy'] - best['test_accuracy']):.2f}",
            "" if paper is None else f"{paper:.2f}",
            f"{len(of_way)}" + (f", {diverged} diverged" if diverged else ""),
            f"{statistics.median(run['seconds'] for run in of_way):.0f}",
        ]
        print(f"| {' | '.join(row)} |")


def draw(runs: Sequence[dict[str, Any]], data: str) -> Figure:
    """Test accuracy against rank, mean and two deviations over seeds (the paper's figure 3)."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    ways = [way for way in ways_in(runs) if finished(runs, way)]
    for number, name in enumerate(dict.fromkeys(name for name, _ in ways)):
        ranks = [rank for other, rank in ways if other == name and rank is not None]
        accuracies = [mean_at_best_rate(finished(runs, (name, rank)))[1] for rank in ranks or [None]]
        means = [100 * statistics.mean(values) for values in accuracies]
        spread = [200 * statistics.stdev(values) if len(values) > 1 else 0.0 for values in accuracies]
        low, high = ([mean + sign * width for mean, width in zip(means, spread, strict=True)] for sign in (-1, 1))
        if ranks:
            axes.plot(ranks, means, marker=".", color=f"C{number}", label=name)
            axes.fill_between(ranks, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
        else:
            axes.axhline(means[0], color=f"C{number}", linestyle="--", label=name)
            axes.axhspan(low[0], high[0], color=f"C{number}", alpha=0.1, linewidth=0)
    axes.set(xlabel="rank", ylabel="test accuracy, %", title=data, xscale="log")
    ticks = sorted({rank for _, rank in ways if rank is not None})
    axes.set_xticks(ticks, [str(rank) for rank in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    if ways:
        axes.legend()
    return figure


# --- language ---------------------------------------------------------------------------------------------------------


def language_ways(classes: Sequence[str], ranks: Sequence[int]) -> list[Way]:
    """The ranks are those of LDR-SD; the classes without operators have one more, which makes the same budget."""
    ways: list[Way] = [("unstructured", None)] if "unstructured" in classes else []
    ways += [(name, rank if name == "ldr_sd" else rank + 1) for name in TABLE_2 if name in classes for rank in ranks]
    return ways


def train_language(way: Way, seed: int, data: TextCorpusDataModule, options: argparse.Namespace) -> dict[str, Any]:
    L.seed_everything(seed, verbose=False)
    name, rank = way
    init = "reference" if options.authors else "variance"
    layer: LayerFactory = nn.Linear if rank is None else partial(RANKED[name], rank=rank, init=init)
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.25, patience=0, threshold=0.0)
    model = LanguageModel(
        data.vocabulary_size,
        layer=layer,
        balanced=not options.authors,
        optimizer=partial(torch.optim.SGD, lr=20.0),
        lr_scheduler=plateau,
    )
    best = BestWeights("val_loss", -1)
    trainer = lean_trainer(options, best, gradient_clip_val=0.25)
    began = time.process_time()
    try:
        trainer.fit(model, datamodule=data)
    except ValueError as not_finite:
        return {"error": str(not_finite)}
    seconds = time.process_time() - began
    model.load_state_dict(best.weights)
    (metrics,) = trainer.test(model, datamodule=data, verbose=False)
    gates = layer(model.hparams["embedding_size"], model.hparams["hidden_size"])
    weights = sum(parameter.numel() for key, parameter in gates.named_parameters() if key != "bias")
    return {
        "val_perplexities": [math.exp(value) for value in best.values],
        "test_perplexity": metrics["test_perplexity"],
        "seconds": seconds,
        "parameters": 4 * weights,
    }


def run_language(options: argparse.Namespace) -> None:
    data = TextCorpusDataModule(options.data_dir, options.text_file, synthetic=options.synthetic)
    source = "synthetic" if options.synthetic else Path(options.text_file).stem if options.text_file else "wikitext-2"
    folder = f"language_{source}_{options.epochs}_epochs" + ("_authors" if options.authors else "")
    output = (options.output or Path("results/benchmarks/structured_tasks")) / folder
    output.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for way in language_ways(options.classes, options.ranks):
            file = output / f"{way[0]}_{way[1]}_{seed}.json"
            if file.exists():
                continue
            result = train_language(way, seed, data, options)
            file.write_text(json.dumps({"way": way, "seed": seed, **result}))
            print(f"{title(way)}, seed {seed}: {result.get('test_perplexity', result.get('error'))}", flush=True)
    runs = [json.loads(file.read_text()) for file in sorted(output.glob("*.json"))]
    print(f"\n{source}: {len(data.corpus.train):,} training words, vocabulary {data.vocabulary_size:,}")
    if source != "wikitext-2":
        print("The paper's figures are of WikiText-2.")
    print(
        "\n| input-hidden matrices | parameters | test perplexity by seed | paper | seconds of a run |\n|---|---|---|---|---|"
    )
    for way in ways_in(runs):
        of_way = finished(runs, way)
        if not of_way:
            print(f"| {title(way)} | | diverged | | |")
            continue
        perplexities = " / ".join(f"{run['test_perplexity']:.2f}" for run in of_way)
        seconds = statistics.median(run["seconds"] for run in of_way)
        parameters = of_way[0]["parameters"]
        print(f"| {title(way)} | {parameters:,} | {perplexities} | {paper_perplexity(way)} | {seconds:.0f} |")


def paper_perplexity(way: Way) -> str:
    name, rank = way
    if rank is None:
        return f"{UNSTRUCTURED_PERPLEXITY}"
    of_ldr_sd = rank if name == "ldr_sd" else rank - 1
    return f"{TABLE_2[name][LANGUAGE_RANKS.index(of_ldr_sd)]}" if of_ldr_sd in LANGUAGE_RANKS else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    image, language = commands.add_parser("image"), commands.add_parser("language")
    image.add_argument("--variant", choices=DATA, default="noise", help="the data set")
    image.add_argument("--network", choices=("shl", "lenet"), default="shl")
    image.add_argument("--classes", nargs="+", choices=CLASSES, default=DEFAULT_CLASSES)
    image.add_argument("--ranks", type=int, nargs="+", help="of all classes that have one; default: those of Table 6")
    image.add_argument("--rates", type=float, nargs="+", default=[0.0002, 0.0005, 0.001, 0.002])
    image.add_argument("--epochs", type=int, default=50)
    image.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    image.add_argument("--train-fraction", type=float, default=1.0)
    image.add_argument(
        "--official", action="store_true", help="read the official files of MNIST variants and rectangles"
    )
    language.add_argument("--text-file", help="a plain text instead of WikiText-2")
    language.add_argument(
        "--classes", nargs="+", choices=("unstructured", *TABLE_2), default=("unstructured", *TABLE_2)
    )
    language.add_argument("--ranks", type=int, nargs="+", default=LANGUAGE_RANKS, help="of LDR-SD, for the budgets")
    language.add_argument("--epochs", type=int, default=40)
    language.add_argument("--seeds", type=int, nargs="+", default=[0])
    language.add_argument("--authors", action="store_true", help="initial values and rates as in the authors' code")
    for command in (image, language):
        command.add_argument("--data-dir", default="data", help="where the files of the data set are")
        command.add_argument("--synthetic", action="store_true", help="procedural data, to try the script")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--output", type=Path, help="default: results/benchmarks/structured_tasks")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    {"image": run_images, "language": run_language}[options.what](options)


if __name__ == "__main__":
    main()
