"""The learning rate of structured layers beside that of nn.Linear, by class and optimizer.

    OMP_NUM_THREADS=1 python benchmarks/structured_rates.py --data-dir DIRECTORY [--tasks digits ...]

Two networks, in which ``nn.Linear`` or a structured layer stands:

- ``digits``: MNIST, one layer of 784 units, rectified, before an output layer;
- ``characters``: the next one after eight of Shakespeare, embedded in 32 numbers each; one layer of 256 units.

Generators have rank 4, and Monarch 8 blocks; RandomizedHadamard and PrunedLinear have as many parameters as those of
rank 4. Each network trains for 300 steps of 64 samples at a fixed rate, by Adam or by SGD with momentum 0.9; the rates
of a row are each about three times the one before. A run that ends in NaN, or above the loss of the first step, has
diverged. The table has the best rate by the median of the validation loss over seeds, that loss, and the loss at the
best rate of ``nn.Linear``.

With three seeds the rates take about half an hour of one core. Runs are kept in ``--output``, and ``--report`` prints
the tables of those that are there.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import harness
from growing_batch_size import characters, digits
from harness import Run
from lightning_struct.data.in_memory import BatchedTensorDataset
from lightning_struct.nn import STRUCTURED_CLASSES, Monarch
from lightning_struct.nn.classic import GeneratorLinear

STEPS, BATCH, RANK = 300, 64, 4
OPTIMIZERS = {"Adam": torch.optim.Adam, "SGD": partial(torch.optim.SGD, momentum=0.9)}
RATES = {"Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "SGD": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)}
DENSE = "nn.Linear"
Layer = Callable[[int, int], nn.Module]


def layer_of_rank(name: str) -> Layer:
    """A factory of layers of one class, with generators of rank ``RANK`` or as many parameters as LowRank has."""
    layer_class: Any = STRUCTURED_CLASSES[name]

    def make(in_features: int, out_features: int) -> nn.Module:
        parameters = RANK * (in_features + out_features)
        options: dict[str, int] = {}
        if issubclass(layer_class, GeneratorLinear):
            options["rank"] = RANK
        elif name == "RandomizedHadamard":
            options["terms"] = max(1, parameters // max(in_features, out_features))
        elif name == "PrunedLinear":
            options["parameters"] = parameters
        made: nn.Module = layer_class(in_features, out_features, **options)
        return made

    return make


CLASSES: dict[str, Layer] = {
    DENSE: nn.Linear,
    **{name: layer_of_rank(name) for name in STRUCTURED_CLASSES},
    "Monarch": partial(Monarch, blocks=8),
}


# --- tasks ------------------------------------------------------------------------------------------------------------


def one_layer(make: Layer) -> nn.Module:
    return nn.Sequential(make(784, 784), nn.ReLU(), nn.Linear(784, 10))


def next_character(make: Layer) -> nn.Module:
    return nn.Sequential(nn.Embedding(65, 32), nn.Flatten(), make(256, 256), nn.ReLU(), nn.Linear(256, 65))


def contexts(options: argparse.Namespace) -> Iterator[BatchedTensorDataset]:
    """Eight characters, and the one after them."""
    for part in characters(options, length=8):
        inputs, targets = part.tensors
        yield BatchedTensorDataset(inputs, targets[:, -1])


TASKS: dict[str, tuple[Callable[..., Any], Callable[[Layer], nn.Module]]] = {
    "digits": (digits, one_layer),
    "characters": (contexts, next_character),
}


# --- runs -------------------------------------------------------------------------------------------------------------


def train(network: nn.Module, optimizer: torch.optim.Optimizer, data: Any, seed: int) -> float:
    """Loss in validation after the steps; infinite where training diverged."""
    training, validation = data
    generator = torch.Generator().manual_seed(seed)
    first = math.inf
    for step in range(STEPS):
        chosen = torch.randint(len(training), (BATCH,), generator=generator)
        inputs, targets = (tensor[chosen] for tensor in training.tensors)
        loss = F.cross_entropy(network(inputs), targets)
        if step == 0:
            first = loss.item()
        if not loss.isfinite():
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()
    inputs, targets = validation.tensors
    with torch.no_grad():
        outputs = torch.cat([network(part) for part in inputs.split(1000)])
    last = F.cross_entropy(outputs, targets).item()
    return last if last <= first else math.inf


def measure(options: argparse.Namespace, task: str, layer: str, optimizer: str, seeds: Sequence[int]) -> Run:
    """All rates and seeds of one class."""
    torch.set_num_threads(1)
    load, build = TASKS[task]
    data = tuple(load(options))
    losses = {}
    for rate in RATES[optimizer]:
        losses[rate] = []
        for seed in seeds:
            torch.manual_seed(seed)
            network = build(CLASSES[layer])
            losses[rate].append(train(network, OPTIMIZERS[optimizer](network.parameters(), lr=rate), data, seed))
    return {"task": task, "layer": layer, "optimizer": optimizer, "seeds": list(seeds), "losses": list(losses.items())}


# --- what came out ----------------------------------------------------------------------------------------------------


def medians(run: Run) -> dict[float, float]:
    return {rate: statistics.median(losses) for rate, losses in run["losses"]}


def report(runs: Sequence[Run]) -> None:
    harness.print_machines(runs)
    found = {(run["task"], run["optimizer"], run["layer"]): medians(run) for run in runs}
    for task in TASKS:
        columns = [name for name in RATES if (task, name, DENSE) in found]
        if not columns:
            continue
        print(
            f"\n{task}: best rate, its validation loss (medians of seeds), and the loss at the best rate of nn.Linear"
        )
        harness.print_header("class", *columns)
        for layer in CLASSES:
            if any((task, name, layer) in found for name in columns):
                harness.print_row(f"`{layer}`", *(cell(found, task, name, layer) for name in columns))


def cell(found: dict[tuple[str, str, str], dict[float, float]], task: str, optimizer: str, layer: str) -> str:
    by_rate = found.get((task, optimizer, layer))
    if by_rate is None:
        return ""
    dense = found[task, optimizer, DENSE]
    best, usual = min(by_rate, key=by_rate.__getitem__), min(dense, key=dense.__getitem__)
    at_usual = "diverges" if math.isinf(by_rate[usual]) else f"{by_rate[usual]:.3f}"
    return f"{best:g}: {by_rate[best]:.3f}" + ("" if layer == DENSE else f"; {at_usual}")


def main() -> None:
    parser = harness.make_parser(__doc__)
    harness.add_data_options(parser)
    harness.add_run_options(parser, "structured_rates")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    options = parser.parse_args()
    cells = product(options.tasks, CLASSES, RATES)
    runs = {harness.run_name(*cell, *options.seeds): partial(measure, options, *cell, options.seeds) for cell in cells}
    report(harness.run_all(options.output, runs, options.report))


if __name__ == "__main__":
    main()
