"""All pictures of measurements in the documentation, drawn anew without a measurement: into docs/images.

    python benchmarks/pictures.py [NAME ...]

Curves are those of the runs under docs/results/data. Where no runs are kept, the points are the figures of a table of
the page that shows the picture.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import autoencoders
import compress
import growing_batch_size
import harness
import papers
import structured_layers
import style
from paper_tables import paper_accuracy
from structured_classes import LABELS, finished, ways_in
from structured_tasks import at_best_rate

DOCS, DATA = papers.DOCS, papers.DATA
NUMBER = r"[\d,]*\.?\d+(?:e-?\d+)?"


# --- tables of pages --------------------------------------------------------------------------------------------------


def rows_of(page: str, head: str, number: int = 0) -> list[list[str]]:
    """The cells of a table, without bold type and code marks.

    Args:
        page: below ``docs``.
        head: the beginning of the table's first row, which is the first of the result.
        number: of the table among those of the page that begin so.
    """
    text = (DOCS / page).read_text()
    block = re.findall(rf"^\| {re.escape(head)}.*\n(?:\|.*\n)+", text, flags=re.MULTILINE)[number]
    first, _, *others = re.sub(r"\*\*|`", "", block).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (first, *others)]


def numbers(cell: str) -> list[float]:
    """The numbers of a cell, such as ``3.1 / 3.2`` or ``2e-6 (1e-6 to 3e-6)``."""
    return [float(found.replace(",", "")) for found in re.findall(NUMBER, cell)]


def plot_seeds(axes: Axes, row: Sequence[str], times: Sequence[float], label: str) -> None:
    """A curve for each seed of a row whose cells are errors after some times."""
    by_time = [numbers(cell) for cell in row[1 : len(times) + 1]]
    for seed in range(max(map(len, by_time))):
        points = [(time, errors[seed]) for time, errors in zip(times, by_time, strict=True) if len(errors) > seed]
        look = {**style.seed_style(seed), "color": style.color_of(label), "marker": ".", "markersize": 6}
        axes.plot(*zip(*points, strict=True), label=None if seed else label, **look)


def label_errors(axes: Axes, title: str) -> None:
    """Logarithmic axes for the validation error of an autoencoder over seconds."""
    axes.set(title=title, xlabel="CPU seconds, one thread", ylabel="validation error, mean of ‖x̂ - x‖²")
    axes.set(xscale="log", yscale="log")
    style.plain_ticks(axes.xaxis, axes.yaxis)
    axes.grid()


@style.readable
def autoencoder_errors(head: str, title: str, drawn: dict[str, str]) -> Figure:
    """Errors of an autoencoder after some seconds: the row that begins so -> the method."""
    (_, *columns), *rows = rows_of("results/shf.md", head)
    times = [numbers(column)[0] for column in columns if column.endswith(" s")]
    figure = Figure(figsize=(style.WIDTH, 4.5), layout="constrained")
    axes = figure.subplots()
    for start, label in drawn.items():
        row = next(row for row in rows if row[0].startswith(start))
        plot_seeds(axes, row, times, label)
    label_errors(axes, title)
    style.legend_below(figure, axes, style.explain_seeds({0, 1, 2}), columns=4)
    return figure


@style.readable
def usps_of_the_paper() -> Figure:
    """Errors over time, and along the way of SHF the samples in a batch and the iterations of LSMR."""
    (_, *columns), *rows = rows_of("results/shf.md", "| 15 s | 30 s | 60 s | 120 s")
    times = [float(column.removesuffix(" s")) for column in columns if column.endswith(" s")]
    along = {
        row[0]: [numbers(cell)[0] for cell in row[1:]]
        for row in rows_of("results/shf.md", "iteration | 50 | 100 | 150 | 200 | 250")
    }
    figure = Figure(figsize=(style.WIDTH, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for start, label in {"SHF": "SHF of the paper", "Adam 1e-3": "Adam"}.items():
        plot_seeds(left, next(row for row in rows if row[0].startswith(start)), times, label)
    label_errors(left, "Autoencoder of USPS digits")
    left.legend()
    looks = {"batch size": (style.SHF, "samples in a batch"), "LSMR iterations": (style.RLS, "LSMR iterations")}
    for row, (color, label) in looks.items():
        right.plot(along["CPU seconds"], along[row], marker=".", color=color, label=label)
    right.set(title="Steps of SHF, seed 0", xlabel="CPU seconds, one thread", ylabel="number in a step")
    right.set(xscale="log", yscale="log")
    style.plain_ticks(right.xaxis, right.yaxis)
    right.grid()
    right.legend(loc="center left")
    return figure


def plot_problems(panels: Sequence[Axes]) -> tuple[list[Axes], dict[str, Line2D]]:
    """Relative errors after some seconds, a problem in each panel: the panels left, and a curve of each method."""
    (_, _, *columns), *rows = rows_of("results/least_squares.md", "problem | method | 10 s")
    times = [float(column.removesuffix(" s")) for column in columns if column.endswith(" s")]
    left, curves, axes = list(panels), dict[str, Line2D](), panels[0]
    for title, method, *cells in rows:
        if title and not left:
            break
        if title:
            axes = left.pop(0)
            axes.set(title=title, xscale="log", yscale="log", xlabel="CPU seconds, one thread", ylabel="relative error")
            axes.grid()
        points = [(time, *numbers(cell)) for time, cell in zip(times, cells, strict=False) if cell]
        seconds = [point[0] for point in points]
        color = style.color_of(method)
        (curves[method],) = axes.plot(seconds, [point[1] for point in points], marker=".", color=color)
        low, high = ([point[end] if len(point) > 2 else point[1] for point in points] for end in (2, -1))
        axes.fill_between(seconds, low, high, color=color, alpha=0.2, linewidth=0)
        style.plain_ticks(axes.xaxis)
    return left, curves


@style.readable
def least_squares_errors() -> Figure:
    """All problems: medians, and lowest to highest if there are several seeds."""
    figure = Figure(figsize=(style.WIDTH, 10.5), layout="constrained")
    left, curves = plot_problems(figure.subplots(4, 2).flatten())
    for axes in left:
        axes.set_axis_off()
    left[0].legend(curves.values(), curves, loc="center", title="medians; band: lowest to highest of the seeds")
    return figure


@style.readable
def poisson() -> Figure:
    """The first problem, with the name of each method at the end of its curve."""
    figure = Figure(figsize=(style.WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    _, curves = plot_problems([axes])
    height = 0.0
    for method, curve in sorted(curves.items(), key=lambda item: item[1].get_ydata()[-1]):
        height = max(curve.get_ydata()[-1], 6 * height)  # names keep their distance
        axes.text(62, height, method, color=curve.get_color(), verticalalignment="center")
    axes.set_title("Poisson's equation, 257 weights; band: lowest to highest of three seeds")
    axes.set_xlim(right=110)
    axes.set_xticks([10, 20, 30, 60], ["10", "20", "30", "60"])
    return figure


@style.readable
def classes_that_arrive() -> Figure:
    """Accuracies over phases."""
    (_, *columns), *rows = rows_of("guides/continual.md", "| phase 1")
    phases = range(1, 1 + columns.index("mean"))
    figure = Figure(figsize=(style.WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    for way, *cells in rows:
        look = {"color": style.color_of(way), "linestyle": "--" if "together" in way else "-", "marker": "o"}
        axes.plot(phases, [numbers(cell)[0] for cell in cells[: len(phases)]], label=way, **look)
    axes.set(title="CIFAR-10", xlabel="phase", ylabel="accuracy so far, %", ylim=(0, 103), xticks=phases)
    axes.grid()
    style.legend_below(figure, axes, "", columns=2)
    return figure


@style.readable
def growing_batches() -> Figure:
    """Final losses of the six tasks against steps: medians, and lines from the lowest to the highest seed."""
    figure = Figure(figsize=(style.WIDTH, 8.5), layout="constrained")
    panels = figure.subplots(3, 2).flatten()
    rows = rows_of("results/growing_batch_size.md", "task | batch | validation loss")[1:]
    for task, axes in zip(GROWING, panels, strict=True):
        for way, losses, steps, *_ in [row[1:] for row in rows if row[0] == task]:
            loss, *ends = numbers(losses)
            extent = [[loss - min(ends)], [max(ends) - loss]] if ends else None
            label = growing_batch_size.LABELS.get(way, growing_batch_size.LABELS.get(f"`{way}`", way))
            marker = "D" if f"`{way}`" in growing_batch_size.GROWING else "o"
            look = {"color": style.color_of(way), "marker": marker, "linestyle": "", "label": label}
            axes.errorbar(numbers(steps)[0], loss, yerr=extent, capsize=3, **look)
        axes.set(title=growing_batch_size.TITLES[task], xlabel="steps", ylabel="validation loss", xlim=(0, None))
        axes.grid()
    pairs = [pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    title = "after the same CPU seconds; medians, lowest to highest of the seeds"
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, title=title)
    return figure


@style.readable
def rls_on_cifar() -> Figure:
    """Test accuracies of the first epoch and of the best, and training losses of the last; a mark for each seed."""
    rows = [row[1:] for row in rows_of("results/rls.md", "task | way | test % after epoch 1") if row[0] == "CIFAR-10"]
    figure = Figure(figsize=(style.WIDTH, 3.6), layout="constrained")
    accuracies, losses = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        look = {"color": style.color_of(row[0]), "linestyle": "", "markersize": 8}
        for axes, column, fill in ((accuracies, 1, "none"), (accuracies, 2, "full"), (losses, 3, "full")):
            values = numbers(row[column])
            axes.plot(values, [place] * len(values), marker="o", fillstyle=fill, **look)
    accuracies.set_yticks(range(len(rows)), [row[0] for row in rows])
    accuracies.invert_yaxis()
    accuracies.set(title="open: after one epoch, full: the best of ten", xlabel="test accuracy, %")
    losses.set(title="mean of the tenth epoch", xlabel="training loss", xscale="log")
    style.plain_ticks(losses.xaxis)
    for axes in (accuracies, losses):
        axes.grid()
    return figure


def speed() -> Figure:
    """How many times faster LDR-SD is than a dense layer."""
    rows = rows_of("results/structured.md", "n | one vector in eval mode")[1:]
    ratios = {
        (int(numbers(row[0])[0]), 1, rank): numbers(row[column])[0]
        for row in rows
        for column, rank in ((1, 1), (2, 4), (3, 16))
    }
    return structured_layers.draw(ratios)


def compressed() -> Figure:
    """Accuracy of compressed networks against bytes."""
    runs: list[harness.Run] = []
    network = ""
    for name, row, size, before, after, size_8, after_8 in rows_of("layers/compressing.md", "| | bytes | per cent")[1:]:
        network = name or network
        way, _, budget = row.partition(", ")
        run = {"network": network, "way": way, "budget": float(budget or 1), "before": numbers(before)[0]}
        run |= {
            "parameters": numbers(size)[0] / 4,
            "bytes_in_8_bits": numbers(size_8)[0],
            "after_8": numbers(after_8)[0],
        }
        runs += [{**run, "after": each} for each in numbers(after)]
    return compress.draw(runs, list(compress.TASKS)[:3])


# --- runs that are kept -----------------------------------------------------------------------------------------------


def growing() -> Figure:
    return growing_batch_size.draw(harness.load_runs(DATA / "growing_batch_size/times_8"), "cifar_all")


@style.readable
def ranks() -> Figure:
    """Test accuracy on noise against rank, mean and two deviations over seeds (the paper's figure 3)."""
    drawn = [
        ["unstructured", None],
        *([name, r] for name in ("ldr_sd", "toeplitz_like", "low_rank") for r in (1, 2, 4, 8, 16)),
    ]
    runs = [run for run in papers.image_runs("noise") if run["way"] in drawn]
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
        title="MNIST with noise",
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


@style.readable
def papers_of_matrices() -> Figure:
    """Mean test accuracies of each class and rank, at one rate, against the paper's: a mark for each."""
    figure = Figure(figsize=(style.WIDTH, 6.0), layout="constrained")
    axes = figure.subplots()
    networks = {"shl": ("o", "one hidden layer"), "lenet": ("^", "LeNet")}
    titles = {**papers.VARIANTS, "rectangles": "rectangles"}
    colors = dict(zip(titles, style.DATA, strict=False))
    for variant, (network, (marker, _)) in product(titles, networks.items()):
        runs = papers.image_runs(variant, network=network)
        for way in ways_in(runs):
            of_seeds, paper = finished(runs, way), paper_accuracy(way, variant, network)
            if of_seeds and paper:
                look = {"color": colors[variant], "markersize": 6}
                look["markerfacecolor"] = "none" if way[0] == "unstructured" else colors[variant]
                axes.plot(paper, statistics.mean(map(papers.accuracy, of_seeds)), marker, **look)
    ends = [20.0, 100.0]
    axes.plot(ends, ends, color=style.INK, linewidth=1, zorder=0)
    axes.set(title="Test accuracy of a class of matrices", xlabel="the paper, %", ylabel="here, %")
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    axes.grid()
    handles = [Line2D([], [], marker="s", linestyle="", color=colors[of], label=titles[of]) for of in titles]
    look = {"linestyle": "", "color": style.INK}
    handles += [Line2D([], [], marker=marker, label=label, **look) for marker, label in networks.values()]
    handles += [Line2D([], [], marker="o", markerfacecolor="none", label="unstructured layer", **look)]
    axes.legend(handles=handles, loc="upper left")
    return figure


def of_autoencoder(data: str, draw: Callable[..., Figure], title: str) -> Figure:
    by_name = {run["name"]: [run] for run in harness.load_runs(DATA / f"autoencoders/{data}")}
    figure = draw(by_name["shf"] if draw is autoencoders.draw_sizes else by_name)
    figure.axes[0].set_title(f"Autoencoder of {title}")
    return figure


USPS = {
    "SHF, Kronecker": "SHF, Kronecker factors",
    "Adam 2e-3": "Adam",
    "SOAP": "SOAP",
    "SGD": "SGD with momentum",
    "L-BFGS": "L-BFGS",
    "SHF as in": "SHF of the paper",
    "HF": "Martens' method",
}
MNIST = {"MNIST, SHF, Kronecker": "SHF, Kronecker factors", "MNIST, Adam 3e-3, falling": "Adam"}
GROWING = tuple(task for task in growing_batch_size.TASKS if task not in growing_batch_size.EXTRA)
PICTURES: dict[str, Callable[[], Figure]] = {
    "compress": compressed,
    "continual": classes_that_arrive,
    "growing_batch_size": growing_batches,
    "growing_batch_size_cifar_all": growing,
    "least_squares": least_squares_errors,
    "poisson": poisson,
    "papers_ldr": papers_of_matrices,
    "rls_cifar": rls_on_cifar,
    "papers_shf_curves": partial(of_autoencoder, "curves", autoencoders.draw_errors, "CURVES"),
    "papers_shf_curves_sizes": partial(of_autoencoder, "curves", autoencoders.draw_sizes, "CURVES"),
    "papers_shf_mnist": partial(of_autoencoder, "mnist", autoencoders.draw_errors, "MNIST digits"),
    "shf_usps": partial(autoencoder_errors, "| 15 s | 30 s | 60 s | 90 s", "Autoencoder of USPS digits", USPS),
    "shf_mnist": partial(autoencoder_errors, "| 30 s | 60 s", "Autoencoder of MNIST digits", MNIST),
    "structured_ranks": ranks,
    "structured_speed": speed,
    "usps": usps_of_the_paper,
}


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    for name in parser.parse_args().names or PICTURES:
        PICTURES[name]().savefig(DOCS / f"images/{name}.png")


if __name__ == "__main__":
    main()
