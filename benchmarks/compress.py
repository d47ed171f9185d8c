"""Compression: accuracy against bytes of trained networks, beside SVD, pruning and int8.

    python benchmarks/compress.py --data-dir data
    python benchmarks/compress.py --data-dir data --networks perceptron

A perceptron of 784-256-256-10 units learns MNIST, a small CNN CIFAR-10 at 16 x 16 pixels (files of images in data/train
and data/test, or the official ones), and a small transformer the characters of a text (data/tinyshakespeare.txt).
EfficientNet-lite0 of ImageNet (--networks EfficientNet, see foreign_adapters.py) learns 1,000 images of CIFAR-10. Each
is then made smaller by

- ``compress``: low rank near the outputs, with one share of the parameters for all layers,
- SVD: the same layers by truncated singular values,
- pruning: the weights that are smallest in all of these layers together are zero, and stay zero (the places of the
  weights that are left are not counted).

Then the smaller network is trained on for an epoch. Its weights are rounded to 8 bits, too, with a scale for each row,
before and after. compress measures on samples that are neither trained nor tested on (256 images, 64 texts). Each seed
trains its own network.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from torch import Tensor, nn
from torch.nn.utils import prune

import adapters
import foreign_adapters
import harness
import style
from adapters import accuracy
from harness import Run
from lightning_struct.data.cifar import CIFAR10DataModule
from lightning_struct.nn import LowRank, compress
from lightning_struct.nn.attention import with_own_projections
from lightning_struct.nn.channels import as_matrix, in_place_of
from lightning_struct.nn.replace import put_in_place

WAYS = ("compress", "SVD", "pruning")
Sample = tuple[Tensor, Tensor]


# --- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A network, its data, and how it is trained.

    Attributes:
        network: makes it.
        data: reads samples to train on, to measure on and to test.
        epochs: of the first training.
        batch: samples of a step.
        rates: of Adam in the first training, and in the epoch after.
        budgets: parts of the parameters.
    """

    network: Callable[[], nn.Module]
    data: Callable[[Path], tuple[Sample, Sample, Sample]]
    epochs: int
    batch: int
    rates: tuple[float, float]
    budgets: tuple[float, ...]


def perceptron() -> nn.Module:
    """Two hidden layers of 256 units."""
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def convolutions() -> nn.Module:
    """Three convolutions of 24, 48 and 96 channels, each with a batch norm, and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in pairwise((3, 24, 48, 96)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 4, 10))


class CharacterTransformer(nn.Module):
    """Two blocks of a causal transformer over windows of 64 characters, for the character after each."""

    causal: Tensor

    def __init__(self, width: int = 64, steps: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.places = nn.Parameter(0.02 * torch.randn(steps, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 128)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(steps), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.places
        for block in self.blocks:
            x = block(x, self.causal, is_causal=True)
        return self.output(self.norm(x)).mT


def efficient() -> nn.Module:
    """EfficientNet-lite0 with the weights of ImageNet and a new head."""
    network = foreign_adapters.efficient()
    network.set_submodule("1._fc", nn.Linear(1280, 10))
    return network


def digits(directory: Path) -> tuple[Sample, Sample, Sample]:
    """20,000, 256 and 10,000 images (n, 28, 28), and labels."""
    (images, labels), test = (adapters.digits(str(directory), train) for train in (True, False))
    return (images[256:20256], labels[256:20256]), (images[:256], labels[:256]), test


def cifar(directory: Path) -> tuple[Sample, Sample, Sample]:
    """12,000, 256 and 4,000 images (n, 3, 16, 16), and labels."""
    module = CIFAR10DataModule(str(directory), train_size=12_000, val_size=256, test_size=4000, download=False)
    module.setup("fit")
    assert module.splits is not None
    train, val, test = ((nn.functional.avg_pool2d(s.tensors[0], 2), s.tensors[1]) for s in module.splits)
    return train, val, test


def pictures(directory: Path) -> tuple[Sample, Sample, Sample]:
    """1,000, 256 and 1,000 images (n, 3, 32, 32), and labels."""
    kept = harness.make_directory(harness.RESULTS / "foreign_adapters")
    _, (images, labels), test = foreign_adapters.pictures(str(directory), 1256, 0, kept)
    return (images[256:], labels[256:]), (images[:256], labels[:256]), test


def characters(directory: Path) -> tuple[Sample, Sample, Sample]:
    """Windows of 64 characters, and those that follow each: 3,200 of the text, 64 and 500 of its end."""
    text = torch.tensor(list((directory / "tinyshakespeare.txt").read_bytes())).clamp(max=127)
    windows = text[: len(text) // 65 * 65].view(-1, 65)
    parts = (windows[:3200], windows[-1000:-936], windows[-500:])
    train, val, test = ((part[:, :-1], part[:, 1:]) for part in parts)
    return train, val, test


TASKS = {
    "perceptron": Task(perceptron, digits, 5, 64, (2e-3, 1e-3), (0.25, 0.1)),
    "CNN": Task(convolutions, cifar, 5, 64, (4e-3, 1e-3), (0.5, 0.25)),
    "transformer": Task(CharacterTransformer, characters, 6, 16, (4e-3, 1e-3), (0.5, 0.25)),
    "EfficientNet": Task(efficient, pictures, 2, 20, (1e-3, 3e-4), (0.75, 0.5)),
}


def fit(network: nn.Module, task: Task, sample: Sample, epochs: int, rate: float, seed: int) -> None:
    """Training as in ``adapters.py``, at one rate."""
    groups = [{"params": list(network.parameters()), "lr": rate}]
    steps = epochs * len(sample[0]) // task.batch
    adapters.fit(network, groups, sample, steps, seed, batch_size=task.batch)


def trained(name: str, sample: Sample, results: Path, seed: int) -> nn.Module:
    """The network after its first training, kept in a file."""
    task, file = TASKS[name], results / f"{name}_{seed}.pt"
    torch.manual_seed(seed)
    network = task.network()
    if not file.exists():
        fit(network, task, sample, task.epochs, task.rates[0], seed)
        torch.save(network.state_dict(), file)
    network.load_state_dict(torch.load(file))
    return network


# --- ways -------------------------------------------------------------------------------------------------------------


def count(network: nn.Module) -> int:
    """Numbers that are trained and not pruned."""
    masks = [mask for name, mask in network.named_buffers() if name.endswith("weight_mask")]
    pruned = sum(int((mask == 0).sum()) for mask in masks)
    return sum(parameter.numel() for parameter in network.parameters()) - pruned


def with_called_attention(network: nn.Module) -> nn.Module:
    """The network with the projections of attention as layers of their own."""
    at = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.MultiheadAttention)]
    put_in_place(network, [(name, with_own_projections(layer)) for name, layer in at])
    return network


def by_singular_values(network: nn.Module, compressed: nn.Module) -> nn.Module:
    """The network with low ranks in the layers of its compressed copy, of the same ranks."""
    ranks = {name: layer.rank for name, layer in compressed.named_modules() if isinstance(layer, LowRank)}
    new = []
    for name, rank in ranks.items():
        layer = network.get_submodule(name.removesuffix(".linear"))
        linear = as_matrix(layer)
        assert linear is not None
        low_rank = LowRank.from_linear(linear, rank=rank, refine=0)
        new.append((name.removesuffix(".linear"), in_place_of(layer, low_rank)))
    put_in_place(network, new)
    return network


@torch.no_grad()  # so that the pruned network can be copied
def pruned(network: nn.Module, compressed: nn.Module) -> nn.Module:
    """The network without the smallest weights of the layers of its compressed copy, with as many parameters."""
    low_ranks = [name for name, layer in compressed.named_modules() if isinstance(layer, LowRank)]
    layers = [network.get_submodule(name.removesuffix(".linear")) for name in low_ranks]
    amount = count(network) - count(compressed)
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=amount)
    return network


@torch.no_grad()
def in_8_bits(network: nn.Module) -> nn.Module:
    """Weights rounded to -127, ..., 127 times a scale of their row."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            rows = parameter.flatten(1)
            scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            parameter.copy_(((rows / scale).round() * scale).view(parameter.shape))
    return network


def bytes_of_weights(network: nn.Module) -> int:
    """Bytes of all numbers after :func:`in_8_bits`: one for each of a matrix, four for its scales and all others."""
    matrices = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    numbers = sum(matrix.numel() for matrix in matrices)
    others = sum(p.numel() for p in network.parameters()) - numbers + sum(len(matrix) for matrix in matrices)
    return count(network) - sum(p.numel() for p in network.parameters()) + numbers + 4 * others


def smaller(way: str, network: nn.Module, budget: float, measured: Sample) -> nn.Module:
    """A copy of the network, made smaller."""
    network = with_called_attention(copy.deepcopy(network))
    compressed = compress(copy.deepcopy(network), measured[0].split(64), budget=budget)
    if way == "compress":
        return compressed
    return (by_singular_values if way == "SVD" else pruned)(network, compressed)


def jobs_of(name: str, arguments: argparse.Namespace, results: Path) -> dict[str, Callable[[], Run]]:
    """The runs of a network by their names."""
    task = TASKS[name]
    train, measured, test = task.data(Path(arguments.data_dir))

    def run(way: str, budget: float, seed: int) -> Run:
        model = trained(name, train, results, seed)
        if way != "whole":
            model = smaller(way, model, budget, measured)
        found = {"network": name, "way": way, "budget": budget, "seed": seed}
        found |= {"parameters": count(model), "bytes_in_8_bits": bytes_of_weights(model)}
        for when in ("before", "after"):
            if when == "after":
                fit(model, task, train, 1, task.rates[1], seed + 100)
            found[when] = accuracy(model, test)
            found[f"{when}_8"] = accuracy(in_8_bits(copy.deepcopy(model)), test)
        return found

    cells = [("whole", 1.0), *((way, budget) for budget in task.budgets for way in arguments.ways)]
    wanted = [(*cell, seed) for seed in arguments.seeds for cell in cells]
    return {harness.run_name(name, *each): partial(run, *each) for each in wanted}


# --- report -----------------------------------------------------------------------------------------------------------


def report(runs: Sequence[Run], networks: Sequence[str]) -> None:
    """A table for each network: the median of the seeds, lowest and highest in brackets."""
    for name in networks:
        print()
        in_8 = ("bytes in 8 bits", "in 8 bits", "in 8 bits, after an epoch")
        harness.print_header(name, "bytes", "accuracy", "after an epoch", *in_8)
        of_network = [run for run in runs if run["network"] == name]
        for budget in sorted({run["budget"] for run in of_network}, reverse=True):
            for way in ("whole", *WAYS):
                cell = [run for run in of_network if (run["way"], run["budget"]) == (way, budget)]
                if cell:
                    columns = ("before", "after", "before_8", "after_8", "parameters", "bytes_in_8_bits")
                    before, after, before_8, after_8 = (
                        harness.spread([run[key] for run in cell], "{:.1f}") for key in columns[:4]
                    )
                    size, size_8 = (statistics.median(run[key] for run in cell) for key in columns[4:])
                    row = f"{4 * size:,.0f}", before, after, f"{size_8:,.0f}", before_8, after_8
                    harness.print_row(f"{way}, {budget:g}" if budget < 1 else way, *row)
    print()
    harness.print_machines(runs)


@style.readable
def draw(runs: Sequence[Run], networks: Sequence[str]) -> Figure:
    """Accuracy after an epoch against bytes, a panel for each network; low and high of the seeds as a band."""
    figure = Figure(figsize=(style.WIDTH, 4.0), layout="constrained")
    panels = figure.subplots(1, len(networks), squeeze=False)[0]
    for axes, name in zip(panels, networks, strict=True):
        of_network = [run for run in runs if run["network"] == name]
        whole = next(run for run in of_network if run["way"] == "whole")
        for way, marker in zip(WAYS, "osv", strict=True):
            points = []
            for budget in TASKS[name].budgets:
                of_way = [run for run in of_network if (run["way"], run["budget"]) == (way, budget)]
                after = [run["after"] for run in of_way]
                points.append((4 * of_way[0]["parameters"], statistics.median(after), min(after), max(after)))
            sizes, middle, low, high = zip(*points, strict=True)
            color = style.color_of(way)
            axes.plot(sizes, middle, marker=marker, color=color, label=way)
            axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(whole["bytes_in_8_bits"], whole["after_8"], "D", color=style.INK, label="whole, in 8 bits")
        axes.axhline(whole["before"], color=style.INK, linestyle="--", label="whole")
        axes.set_xlabel("bytes of the weights")
        axes.set_title(name)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(EngFormatter())
    panels[0].set_ylabel("test accuracy, %, after an epoch")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--data-dir", default="data", help="where the files are")
    parser.add_argument("--networks", nargs="+", choices=list(TASKS), default=list(TASKS)[:3])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    harness.add_run_options(parser, "compress")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = harness.make_directory(arguments.output)
    runs: list[Run] = []
    for name in arguments.networks:
        runs = harness.run_all(results, jobs_of(name, arguments, results), arguments.report)
    report(runs, arguments.networks)


if __name__ == "__main__":
    main()
