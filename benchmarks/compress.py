"""Compression: accuracy against size of trained networks, beside low rank, magnitude pruning and int8.

    python benchmarks/compress.py --data-dir data
    python benchmarks/compress.py --data-dir data --networks resnet --picture docs/images/compress.png

A small ResNet learns CIFAR-10 (files of images in data/train and data/test, or the official ones), a small transformer
the characters of a text (data/tinyshakespeare.txt), a perceptron MNIST at 16 x 16 pixels. Each is then made smaller by

- ``compress``, which measures on samples that are neither trained nor tested on (128 images, 64 texts, 256 digits),
- low rank by truncated singular values, one share of the numbers for all layers that compress may replace,
- low rank near the outputs, as compress has it, one share for all of these layers but the last one, which stays,
- magnitude pruning of these layers, one share for all (the places of the weights that are left are not counted), and
- rounding of all weights to 8 bits, with a scale for each row: a quarter of the bytes,

and trained on for 80 to 200 steps of 32 samples. What the first ones give is rounded to 8 bits, too, before and after.
``--sizes`` has the bytes of checkpoint, frozen model and ONNX file instead.
"""

from __future__ import annotations

import argparse
import copy
import io
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils import prune

import adapters
import style
from harness import (
    RESULTS,
    Run,
    load_runs,
    make_directory,
    make_parser,
    print_header,
    print_machines,
    print_row,
    progress,
    run_name,
    run_once,
    spread,
)
from lightning_struct.data.cifar import CIFAR10DataModule
from lightning_struct.models import CharacterTransformer, residual_network
from lightning_struct.nn import compress, freeze, replacement_report
from lightning_struct.nn.attention import with_own_projections
from lightning_struct.nn.candidates import low_rank_near_outputs, observed_outputs
from lightning_struct.nn.channels import as_matrix, in_place_of
from lightning_struct.nn.classic import LowRank
from lightning_struct.nn.replace import put_in_place

BUDGETS = (0.5, 0.25, 0.125)
WAYS = ("compress", "low rank", "equal shares", "pruning")
Sample = tuple[Tensor, Tensor]


# --- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A network, its data, and how it is trained.

    Attributes:
        network: makes it.
        data: reads samples to train on, to measure on and to test.
        steps: of the first training.
        more_steps: of training on.
        batch: samples of a step.
        rates: of Adam in the first training, and in training on.
    """

    network: Callable[[], nn.Module]
    data: Callable[[Path], tuple[Sample, Sample, Sample]]
    steps: int
    more_steps: int
    batch: int
    rates: tuple[float, float]


def cifar(directory: Path) -> tuple[Sample, Sample, Sample]:
    """12,000, 128 and 1,000 images (n, 3, 32, 32), and labels."""
    module = CIFAR10DataModule(str(directory), train_size=12_000, val_size=128, test_size=1000, download=False)
    module.setup("fit")
    assert module.splits is not None
    train, val, test = ((split.tensors[0], split.tensors[1]) for split in module.splits)
    return train, val, test


def characters(directory: Path) -> tuple[Sample, Sample, Sample]:
    """Windows of 64 characters, and those that follow each: 90 % of the text, 64 windows and 500 of the rest."""
    text = torch.tensor(list((directory / "tinyshakespeare.txt").read_bytes())).clamp(max=127)
    windows = text[: len(text) // 65 * 65].view(-1, 65)
    first = len(windows) * 9 // 10
    parts = (windows[:first], windows[first : first + 64], windows[first + 256 : first + 756])
    train, val, test = ((part[:, :-1], part[:, 1:]) for part in parts)
    return train, val, test


def digits(directory: Path) -> tuple[Sample, Sample, Sample]:
    """59,744, 256 and 10,000 images (n, 16, 16), and labels."""
    (images, labels), (test_images, test_labels) = (adapters.digits(str(directory), train) for train in (True, False))
    small = adapters.small(images)
    return (small[256:], labels[256:]), (small[:256], labels[:256]), (adapters.small(test_images), test_labels)


TASKS = {
    "resnet": Task(residual_network, cifar, 500, 80, 32, (4e-3, 1e-3)),
    "transformer": Task(partial(CharacterTransformer, width=96), characters, 700, 100, 32, (4e-3, 1e-3)),
    "perceptron": Task(adapters.Perceptron, digits, 3000, 200, 32, (2e-3, 1e-3)),
}


def fit(network: nn.Module, task: Task, sample: Sample, steps: int, rate: float, seed: int) -> None:
    """Training as in ``adapters.py``, at one rate."""
    groups = [{"params": list(network.parameters()), "lr": rate}]
    adapters.fit(network, groups, sample, steps, seed, batch_size=task.batch)


@torch.no_grad()
def accuracy(network: nn.Module, sample: Sample) -> float:
    """Per cent of the labels that are found."""
    network.eval()
    found = [network(x).argmax(1) == y for x, y in zip(sample[0].split(250), sample[1].split(250), strict=True)]
    return 100 * torch.cat(found).float().mean().item()


def trained(name: str, sample: Sample, results: Path) -> nn.Module:
    """The network after its first training, kept in a file."""
    task, file = TASKS[name], results / f"{name}.pt"
    torch.manual_seed(0)
    network = task.network()
    if not file.exists():
        fit(network, task, sample, task.steps, task.rates[0], 0)
        torch.save(network.state_dict(), file)
    network.load_state_dict(torch.load(file))
    return network


# --- ways -------------------------------------------------------------------------------------------------------------


def count(network: nn.Module) -> int:
    """Numbers that are trained and not pruned."""
    masks = [mask for name, mask in network.named_buffers() if name.endswith("weight_mask")]
    pruned = sum(int((mask == 0).sum()) for mask in masks)
    return sum(parameter.numel() for parameter in network.parameters()) - pruned


def replaceable(network: nn.Module) -> dict[str, nn.Module]:
    """The layers that compress may replace; attention as it calls its projections."""
    return {name: layer for name, layer in network.named_modules() if as_matrix(layer) is not None}


def with_called_attention(network: nn.Module) -> nn.Module:
    """The network with the projections of attention as layers of their own."""
    at = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.MultiheadAttention)]
    put_in_place(network, [(name, with_own_projections(layer)) for name, layer in at])
    return network


def with_one_share(network: nn.Module, allowed: int) -> nn.Module:
    """All layers of the largest rank within one share of their numbers: truncated singular values."""
    layers = replaceable(network)
    others = count(network) - sum(as_matrix(layer).weight.numel() for layer in layers.values())  # type: ignore[union-attr]
    numbers = count(network) - others
    new = []
    for name, layer in layers.items():
        linear = as_matrix(layer)
        assert linear is not None
        m, n = linear.weight.shape
        rank = int((allowed - others) / numbers * m * n / (m + n))
        new.append((name, in_place_of(layer, LowRank.from_linear(linear, rank=max(1, rank), refine=0))))
    put_in_place(network, new)
    return network


def with_equal_shares(network: nn.Module, allowed: int, x: Tensor) -> nn.Module:
    """All layers but the last one of the largest rank within one share of their numbers, near to their outputs."""
    layers = dict(list(replaceable(network).items())[:-1])
    linear = {name: as_matrix(layer) for name, layer in layers.items()}
    numbers = sum(of.weight.numel() for of in linear.values())  # type: ignore[union-attr]
    share = (allowed - (count(network) - numbers)) / numbers
    with observed_outputs(layers.values()) as moments, torch.no_grad():
        network.eval()(x)
    new = []
    for name, of in linear.items():
        assert of is not None
        m, n = of.weight.shape
        (factory,) = low_rank_near_outputs(of, [max(1, int(share * m * n / (m + n)))], moments.get(layers[name]))
        new.append((name, in_place_of(layers[name], factory(of))))
    put_in_place(network, new)
    return network


@torch.no_grad()  # so that the pruned network can be copied
def pruned(network: nn.Module, allowed: int) -> nn.Module:
    """All layers with one share of their weights, the largest."""
    layers = list(replaceable(network).values())
    numbers = sum(layer.weight.numel() for layer in layers)
    share = 1 - (allowed - (count(network) - numbers)) / numbers
    for layer in layers:
        prune.l1_unstructured(layer, "weight", share)
    return network


@torch.no_grad()
def in_8_bits(network: nn.Module) -> nn.Module:
    """Weights rounded to -127, ..., 127 times a scale of their row."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            rows = parameter.flatten(1)
            scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            rows.copy_((rows / scale).round() * scale)
    return network


def bytes_of_weights(network: nn.Module) -> int:
    """Bytes of all trained numbers after :func:`in_8_bits`: one for each of a matrix, four for all others."""
    matrices = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    numbers = sum(matrix.numel() for matrix in matrices)
    return numbers + 4 * (
        sum(len(matrix) for matrix in matrices) + sum(p.numel() for p in network.parameters()) - numbers
    )


def smaller(way: str, network: nn.Module, budget: float, measured: Sample) -> nn.Module:
    """A copy of the network, made smaller."""
    network = copy.deepcopy(network)
    if way == "compress":
        return compress(network, list(zip(measured[0].split(64), measured[1].split(64), strict=True)), budget=budget)
    network = with_called_attention(network)
    allowed = int(budget * count(network))
    if way == "equal shares":
        return with_equal_shares(network, allowed, measured[0])
    return with_one_share(network, allowed) if way == "low rank" else pruned(network, allowed)


def measure(name: str, arguments: argparse.Namespace, results: Path) -> None:
    """All missing runs of a network."""
    task = TASKS[name]
    train, measured, test = task.data(Path(arguments.data_dir))
    network = trained(name, train, results)
    run_once(
        results,
        run_name("whole", name),
        lambda: {
            "kind": "whole",
            "network": name,
            "parameters": count(network),
            "accuracy": accuracy(network, test),
            "in_8_bits": accuracy(in_8_bits(copy.deepcopy(network)), test),
            "bytes_in_8_bits": bytes_of_weights(network),
        },
    )
    jobs = [(seed, budget, way) for seed in arguments.seeds for budget in arguments.budgets for way in arguments.ways]
    made: dict[tuple[float, str], tuple[nn.Module, float]] = {}
    for seed, budget, way in progress(jobs, len(jobs), name):

        def run(seed: int = seed, budget: float = budget, way: str = way) -> Run:
            if (budget, way) not in made:
                start = time.process_time()
                model = smaller(way, network, budget, measured)
                made[budget, way] = model, time.process_time() - start
            model, seconds = copy.deepcopy(made[budget, way][0]), made[budget, way][1]
            before = accuracy(model, test)
            before_8 = accuracy(in_8_bits(copy.deepcopy(model)), test)
            fit(model, task, train, task.more_steps, task.rates[1], seed)
            after = accuracy(model, test)
            after_8 = accuracy(in_8_bits(copy.deepcopy(model)), test)
            found = {"parameters": count(model), "before": before, "after": after, "seconds": seconds}
            found |= {"before_8": before_8, "after_8": after_8, "bytes_in_8_bits": bytes_of_weights(model)}
            return {"kind": "smaller", "network": name, "way": way, "budget": budget, "seed": seed, **found}

        run_once(results, run_name("smaller", name, way, budget, seed), run)


# --- report -----------------------------------------------------------------------------------------------------------


def report(runs: Sequence[Run], networks: Sequence[str]) -> None:
    """A table for each network."""
    for name in networks:
        of_network = [run for run in runs if run["network"] == name]
        (whole,) = (run for run in of_network if run["kind"] == "whole") if of_network else (None,)
        if whole is None:
            continue
        print(
            f"\n{name}: {whole['parameters']:,} parameters, {4 * whole['parameters']:,} bytes, "
            f"{whole['accuracy']:.2f} %; in 8 bits {whole['bytes_in_8_bits']:,} bytes, {whole['in_8_bits']:.2f} %"
        )
        in_8 = ("bytes in 8 bits", "accuracy", "after fine-tuning")
        print_header("budget", "way", "bytes", "accuracy", "after fine-tuning", *in_8, "seconds to make it")
        for budget in sorted({run["budget"] for run in of_network if run["kind"] == "smaller"}, reverse=True):
            for way in WAYS:
                of_way = [r for r in of_network if r["kind"] == "smaller" and (r["way"], r["budget"]) == (way, budget)]
                if of_way:
                    after, after_8 = (spread([run[key] for run in of_way]) for key in ("after", "after_8"))
                    seconds = statistics.median(run["seconds"] for run in of_way)
                    first = of_way[0]
                    figures = f"{4 * first['parameters']:,}", f"{first['before']:.2f}", after
                    figures += f"{first['bytes_in_8_bits']:,}", f"{first['before_8']:.2f}", after_8
                    print_row(budget, way, *figures, f"{seconds:.1f}")
    print()
    print_machines(runs)


TITLES = {"resnet": "residual network, CIFAR-10", "transformer": "transformer, characters"}


@style.readable
def draw(runs: Sequence[Run], networks: Sequence[str]) -> Figure:
    """Accuracy after fine-tuning against bytes, a panel for each network; low and high of the seeds as a band."""
    figure = Figure(figsize=(style.WIDTH, 4.0), layout="constrained")
    panels = figure.subplots(1, len(networks), squeeze=False)[0]
    for axes, name in zip(panels, networks, strict=True):
        of_network = [run for run in runs if run["network"] == name]
        whole = next(run for run in of_network if run["kind"] == "whole")
        for way, marker in zip(WAYS, "osv^", strict=True):
            points = []
            for budget in BUDGETS:
                of_way = [r for r in of_network if r["kind"] == "smaller" and (r["way"], r["budget"]) == (way, budget)]
                if of_way:
                    after = [run["after"] for run in of_way]
                    points.append((4 * of_way[0]["parameters"], statistics.median(after), min(after), max(after)))
            if not points:
                continue
            sizes, middle, low, high = zip(*points, strict=True)
            color = style.color_of(way)
            axes.plot(sizes, middle, marker=marker, color=color, label=way)
            axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(whole["parameters"], whole["in_8_bits"], "D", color=style.INK, label="8 bits, not fine-tuned")
        axes.axhline(whole["accuracy"], color=style.INK, linestyle="--", label="not compressed")
        axes.set_xscale("log")
        axes.set_xlabel("bytes of the weights")
        axes.set_title(TITLES[name])
        style.plain_ticks(axes.xaxis)
    panels[0].set_ylabel("test accuracy, %, after fine-tuning")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def sizes(networks: Sequence[str], arguments: argparse.Namespace, results: Path) -> None:
    """Print the bytes of what is kept of each network, as it was and at a quarter of its parameters."""
    print_header("network", "parameters", "checkpoint", "frozen", "frozen dense", "ONNX", "ONNX dense")
    for name in networks:
        train, measured, test = TASKS[name].data(Path(arguments.data_dir))
        network = trained(name, train, results).eval()
        row = (bytes_of(network), "", "", exported(network, test[0][:1]), "")
        print_row(name, f"{count(network):,}", *row)
        small = smaller("compress", network, 0.25, measured).eval()
        print(replacement_report(small)) if arguments.verbose else None
        forms = [freeze(small), freeze(small, dense=True)]
        row = (bytes_of(small), *map(bytes_of, forms), *(exported(form, test[0][:1]) for form in forms))
        print_row(f"{name}, compressed", f"{count(small):,}", *row)


def bytes_of(model: nn.Module) -> str:
    """kB of the file of a state_dict."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return f"{len(file.getvalue()) / 1000:,.0f} kB"


def exported(model: nn.Module, example: Tensor) -> str:
    """kB of the ONNX file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(model, (example,), file, dynamo=True, external_data=False, verbose=False)
        return f"{file.stat().st_size / 1000:,.0f} kB"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data-dir", default="data", help="where the files are")
    parser.add_argument("--networks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS), help="parts of the parameters")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the orders of the samples")
    parser.add_argument("--sizes", action="store_true", help="bytes of checkpoints, frozen models and ONNX files")
    parser.add_argument("--verbose", action="store_true", help="what became of which layer")
    parser.add_argument("--report", action="store_true", help="print what is there, without new runs")
    parser.add_argument("--picture", type=Path, help="draw the runs to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    results = make_directory(RESULTS / "compress")
    if arguments.sizes:
        sizes(arguments.networks, arguments, results)
        return
    if not arguments.report:
        for name in arguments.networks:
            measure(name, arguments, results)
    runs = load_runs(results)
    report(runs, arguments.networks)
    if arguments.picture is not None:
        draw(runs, arguments.networks).savefig(arguments.picture)


if __name__ == "__main__":
    main()
