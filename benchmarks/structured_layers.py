"""Speed of a layer of low displacement rank against a dense layer (LDR-SD, Thomas et al., Table 14).

    OMP_NUM_THREADS=1 python benchmarks/structured_layers.py [--output DIRECTORY] [--rival FILE] [--rounds 9]

Measured in float32 are the forward pass in evaluation, with all kept that depends on the weights alone, and forward and
backward in training, to all parameters and to the input. The corners are learned. The entries of the operators are near
to what training leaves (1 + 0.01 N, see ``--deviation``): the more their products spread, and the larger n, the more
precision ``method="auto"`` takes. Each round times the dense layer (``nn.Linear``) and ours, one after the other, in
CPU time (with ``--threads`` above 1, in passed time); the ratios of the rounds are given as median (lowest to highest).
Above 1, ours is faster. Tables go to standard output, the picture to ``--output``. All sizes take about ten minutes and
9 GiB of memory.

``--classes`` times other classes of structured layers beside, at equal numbers of parameters, and in evaluation the
dense layer in int8 (``torch.ao.quantization.quantize_dynamic``):

    OMP_NUM_THREADS=1 python benchmarks/structured_layers.py --classes --sizes 512 1024 2048 4096 --rounds 5

``--rival`` is a Python file with a function ``matmul(a_subdiagonal, b_subdiagonal, G, H, x)``, without corners,
differentiable, which is timed beside.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import harness
import style
from lightning_struct.nn import (
    LDRSubdiagonal,
    LowRank,
    Monarch,
    RandomizedHadamard,
    StructuredLinear,
    ToeplitzLike,
)
from paper_tables import TABLE_14

SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LARGEST_TRAINED = 4096
Product = Callable[[], object]


def layer_of(size: int, rank: int, deviation: float) -> LDRSubdiagonal:
    torch.manual_seed(0)
    layer = LDRSubdiagonal(size, size, rank=rank, bias=False)
    with torch.no_grad():
        for subdiagonal in (layer.subdiagonal_a, layer.subdiagonal_b):
            subdiagonal.add_(deviation * torch.randn_like(subdiagonal))
    return layer


def seconds(product: Product, at_least: float) -> float:
    """Seconds of one call, CPU time or with several threads passed time: the mean over ``at_least`` seconds."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    calls, begin = 0, clock()
    while (passed := clock() - begin) < at_least or not calls:
        product()
        calls += 1
    return passed / calls


def paired(products: dict[str, Product], rounds: int, at_least: float = 0.01) -> dict[str, list[float]]:
    """CPU seconds of each product, by rounds, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in products}
    for counted in range(-1, rounds):
        for name, product in products.items():
            measured = seconds(product, at_least)
            if counted >= 0:
                times[name].append(measured)
    return times


def products_of(
    layer: StructuredLinear, batch: int, train: bool, dense: nn.Linear, rival: Callable[..., Tensor] | None
) -> dict[str, Product]:
    x, cotangent = torch.randn(batch, layer.in_features), torch.randn(batch, layer.out_features)
    weights: list[Tensor] = list(layer.parameters())

    def with_backward(forward: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> Product:
        inputs = x.clone().requires_grad_()
        return lambda: torch.autograd.grad(forward(inputs), [*parameters, inputs], cotangent)

    def without(forward: Callable[[Tensor], Tensor]) -> Product:
        return torch.no_grad()(lambda: forward(x))

    ours: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {
        "dense": (dense, [dense.weight]),
        "ours": (layer, weights),
    }
    if rival is not None and isinstance(layer, LDRSubdiagonal):
        entries = (layer.subdiagonal_a, layer.subdiagonal_b, layer.G, layer.H)
        ours["rival"] = (lambda inputs: rival(*entries, inputs), list(entries))
    return {name: with_backward(*pair) if train else without(pair[0]) for name, pair in ours.items()}


def table(train: bool, batches: list[int], options: argparse.Namespace) -> dict[tuple[int, int, int], float]:
    """Print it; median speed-ups over dense by (size, batch, rank)."""
    rival = None if options.rival is None else load(options.rival)
    print(f"\n### {'Forward + backward, training' if train else 'Forward, eval'}")
    ratios = ["dense / ours", *(["rival / ours"] if rival else [])]
    harness.print_header("n", "batch", "r", "method", "dense, ms", "ours, ms", *ratios)
    found = {}
    for size in [size for size in options.sizes if not train or size <= LARGEST_TRAINED]:
        dense = nn.Linear(size, size, bias=False)
        for batch in batches:
            for rank in options.ranks:
                layer = layer_of(size, rank, options.deviation).train(train)
                times = paired(products_of(layer, batch, train, dense, rival), options.rounds)
                speedups = {
                    name: [a / b for a, b in zip(times[name], times["ours"], strict=True)]
                    for name in times
                    if name != "ours"
                }
                found[size, batch, rank] = statistics.median(speedups["dense"])
                milliseconds = (f"{1e3 * statistics.median(times[name]):.3f}" for name in ("dense", "ours"))
                cells = [*milliseconds, *(harness.spread(of_rounds) for of_rounds in speedups.values())]
                harness.print_row(size, batch, rank, layer.method_in_use, *cells)
    return found


def classes_of(size: int) -> dict[str, StructuredLinear]:
    """Layers to compare, in two groups of about as many parameters: low rank is in each."""
    torch.manual_seed(0)
    layers: dict[str, StructuredLinear] = {
        "LDR-SD, r = 1": layer_of(size, 1, 0.01),
        "Toeplitz-like, r = 2": ToeplitzLike(size, size, 2, bias=False),
        "randomized Hadamard, t = 4": RandomizedHadamard(size, size, bias=False, terms=4),
        "low rank, r = 2": LowRank(size, size, 2, bias=False),
        "Monarch": Monarch(size, size, bias=False),
    }
    rank = layers["Monarch"].weight_parameters // (2 * size)
    layers[f"low rank, r = {rank}"] = LowRank(size, size, rank, bias=False)
    return dict(sorted(layers.items(), key=lambda named: named[1].weight_parameters))


def int8_product(dense: nn.Linear, batch: int) -> Product:
    """The forward pass of the dense layer with weights in int8, and inputs that are rounded to int8 as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to move it to another package
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(dense), {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(batch, dense.in_features)
    return torch.no_grad()(lambda: model(x))


def class_table(train: bool, batches: list[int], options: argparse.Namespace) -> None:
    """Print the milliseconds of the dense product, and how many times faster each class is."""
    print(f"\n### {'Forward + backward, training' if train else 'Forward, eval'}")
    harness.print_header("n", "class", "parameters", *(f"batch {batch}" for batch in batches))
    for size in options.sizes:
        dense = nn.Linear(size, size, bias=False)
        layers = {name: layer.train(train) for name, layer in classes_of(size).items()}
        int8 = () if train else ("dense, int8",)
        cells: dict[str, list[str]] = {name: [] for name in ("dense, ms", *int8, *layers)}
        for batch in batches:
            products = {name: products_of(layer, batch, train, dense, None) for name, layer in layers.items()}
            ours = {name: both["ours"] for name, both in products.items()}
            others = {"dense": next(iter(products.values()))["dense"]}
            if not train:
                others["dense, int8"] = int8_product(dense, batch)
            times = paired(ours | others, options.rounds)
            cells["dense, ms"].append(f"{1e3 * statistics.median(times['dense']):.3f}")
            for name in [name for name in times if name != "dense"]:
                ratios = [a / b for a, b in zip(times["dense"], times[name], strict=True)]
                cells[name].append(harness.spread(ratios))
        counts = {"dense, ms": size**2, "dense, int8": size**2} | {
            name: layer.weight_parameters for name, layer in layers.items()
        }
        for name, row in cells.items():
            harness.print_row(f"{size:,}", name, f"{counts[name]:,}", *row)


def load(path: Path) -> Callable[..., Tensor]:
    specification = importlib.util.spec_from_file_location("rival", path)
    if specification is None or specification.loader is None:
        raise ValueError(f"--rival must be a Python file, not {path}")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.matmul


@style.readable
def draw(forward: dict[tuple[int, int, int], float]) -> Figure:
    """Speed-up of the forward pass of one vector against the size, a curve for each rank."""
    figure = Figure(figsize=(style.WIDTH, 5.0), layout="constrained")
    axes = figure.subplots()
    for rank, color in zip(sorted({rank for _, _, rank in forward}), style.DATA, strict=False):
        points = sorted((size, ratio) for (size, batch, r), ratio in forward.items() if batch == 1 and r == rank)
        axes.loglog(*zip(*points, strict=True), marker="o", color=color, label=f"LDR-SD here, rank {rank}")
    axes.loglog(list(TABLE_14), list(TABLE_14.values()), "x", color=style.INK, markersize=8, label="the paper, rank 1")
    axes.axhline(1, color=style.INK, linewidth=1)
    axes.set(xlabel="inputs and outputs of the layer", ylabel="times faster than a dense layer")
    axes.set_title("Forward pass of one vector, one CPU thread")
    style.plain_ticks(axes.yaxis, unit="×")
    sizes = sorted({size for size, _, _ in forward})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid()
    axes.legend()
    return figure


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--output", type=Path, help="directory of the picture, structured_speed.png")
    parser.add_argument("--rival", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--deviation", type=float, default=0.01, help="of the entries of the operators")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 64))
    parser.add_argument(
        "--classes", action="store_true", help="other classes beside, in place of LDR-SD at several ranks"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{harness.machine_line()}, float32, threads: {options.threads}")
    print(f"{options.rounds} rounds; medians (lowest to highest)")
    if options.classes:
        for train in (False, True):
            class_table(train, list(options.batches), options)
        return
    forward = table(False, list(options.batches), options)
    if options.output is not None:
        draw(forward).savefig(harness.make_directory(options.output) / "structured_speed.png")
    table(True, list(options.batches), options)


if __name__ == "__main__":
    main()
