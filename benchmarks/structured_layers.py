"""Speed of a layer of low displacement rank against a dense layer (LDR-SD, Thomas et al., Table 14).

    OMP_NUM_THREADS=1 python benchmarks/structured_layers.py [--rounds 9]

Measured in float32 are the forward pass in evaluation, with all kept that depends on the weights alone, and forward and
backward in training, to all parameters and to the input. The corners are learned. The entries of the operators are near
to what training leaves (1 + 0.01 N): the more their products spread, and the larger n, the more precision
``method="auto"`` takes. Each round times the dense layer (``nn.Linear``) and ours, one after the other, in CPU time on
one thread; the ratios of the rounds are given as median (lowest to highest). Above 1, ours is faster. All sizes take
about ten minutes and 9 GiB of memory.

``--classes`` times other classes of structured layers beside, at equal numbers of parameters, and in evaluation the
dense layer in int8 (``torch.ao.quantization.quantize_dynamic``):

    OMP_NUM_THREADS=1 python benchmarks/structured_layers.py --classes --sizes 512 1024 2048 4096 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import harness
import style
from lightning_struct.nn import (
    LDRSubdiagonal,
    LowRank,
    Monarch,
    StructuredLinear,
    ToeplitzLike,
)
from paper_tables import TABLE_14

SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LARGEST_TRAINED = 4096
Product = Callable[[], object]


def layer_of(size: int, rank: int) -> LDRSubdiagonal:
    torch.manual_seed(0)
    layer = LDRSubdiagonal(size, size, rank=rank, bias=False)
    with torch.no_grad():
        for subdiagonal in (layer.subdiagonal_a, layer.subdiagonal_b):
            subdiagonal.add_(0.01 * torch.randn_like(subdiagonal))
    return layer


def seconds(product: Product, at_least: float) -> float:
    """CPU seconds of one call: the mean over ``at_least`` seconds."""
    calls, begin = 0, time.process_time()
    while (passed := time.process_time() - begin) < at_least or not calls:
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


def product_of(layer: nn.Module, inputs: Tensor, cotangent: Tensor, train: bool) -> Product:
    """The forward pass of a layer, or with its backward pass to parameters and inputs."""
    if not train:
        return torch.no_grad()(lambda: layer(inputs))
    inputs = inputs.clone().requires_grad_()
    to = [*layer.parameters(), inputs]
    return lambda: torch.autograd.grad(layer(inputs), to, cotangent)


def classes_of(size: int) -> dict[str, StructuredLinear]:
    """Layers to compare, in two groups of about as many parameters: low rank is in each."""
    torch.manual_seed(0)
    layers: dict[str, StructuredLinear] = {
        "LDR-SD, r = 1": layer_of(size, 1),
        "Toeplitz-like, r = 2": ToeplitzLike(size, size, 2, bias=False),
        "low rank, r = 2": LowRank(size, size, 2, bias=False),
        "Monarch": Monarch(size, size, bias=False),
    }
    rank = layers["Monarch"].weight_parameters // (2 * size)
    layers[f"low rank, r = {rank}"] = LowRank(size, size, rank, bias=False)
    return dict(sorted(layers.items(), key=lambda named: named[1].weight_parameters))


def int8(dense: nn.Linear) -> nn.Module:
    """The dense layer with weights in int8, and inputs that are rounded to int8 as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to move it to another package
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(dense), {nn.Linear}, dtype=torch.qint8)


def table(train: bool, batches: Sequence[int], options: argparse.Namespace) -> None:
    """Print the milliseconds of the dense product, and how many times faster each layer is."""
    print(f"\n### {'Forward + backward, training' if train else 'Forward, eval'}")
    harness.print_header("n", "layer", "parameters", *(f"batch {batch}" for batch in batches))
    for size in [size for size in options.sizes if not train or size <= LARGEST_TRAINED]:
        dense = nn.Linear(size, size, bias=False)
        if options.classes:
            ours = classes_of(size)
        else:
            ours = {f"LDR-SD, r = {rank}": layer_of(size, rank) for rank in options.ranks}
        counts = {"dense, ms": size**2} | {name: layer.weight_parameters for name, layer in ours.items()}
        layers: dict[str, nn.Module] = {"dense, ms": dense, **{name: ours[name].train(train) for name in ours}}
        if options.classes and not train:
            layers["dense, int8"], counts["dense, int8"] = int8(dense), size**2
        cells: dict[str, list[str]] = {name: [] for name in layers}
        for batch in batches:
            x, cotangent = torch.randn(batch, size), torch.randn(batch, size)
            times = paired({name: product_of(layers[name], x, cotangent, train) for name in layers}, options.rounds)
            cells["dense, ms"].append(f"{1e3 * statistics.median(times['dense, ms']):.3f}")
            for name in [name for name in layers if name != "dense, ms"]:
                ratios = [a / b for a, b in zip(times["dense, ms"], times[name], strict=True)]
                cells[name].append(harness.spread(ratios))
        for name, row in cells.items():
            harness.print_row(f"{size:,}", name, f"{counts[name]:,}", *row)


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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 64))
    parser.add_argument(
        "--classes", action="store_true", help="other classes beside, in place of LDR-SD at several ranks"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{harness.machine_line()}, float32; {options.rounds} rounds; medians (lowest to highest)")
    for train in (False, True):
        table(train, options.batches, options)


if __name__ == "__main__":
    main()
