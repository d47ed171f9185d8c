"""Tables of docs/results/papers.md, made from the runs that are kept under docs/results/data.

    python benchmarks/papers.py
    python benchmarks/papers.py --commands ldr_table_1

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; the last one has the machines of all runs.
``--commands`` prints the commands of a table's runs, as few as there can be. To add seeds, change theirs: they write
under docs/results/data, and repeat no run that is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import harness
import rls
from harness import Run
from paper_tables import (
    BUDGET_RANKS,
    FRACTIONS,
    SHF_TABLE_2,
    TABLE_3,
    TABLE_8,
    TABLE_9,
    TABLE_10,
    TABLE_11,
    TABLE_12,
    Way,
    paper_accuracy,
    paper_perplexity,
)
from paper_tables import DATA as IMAGES
from structured_classes import BUDGETED, LABELS, finished, ways_in
from structured_tasks import RATES, at_best_rate

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "results/papers.md"
DATA = DOCS / "results/data"
BLOCK = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
SEEDS = re.compile(r"(?<=--seeds )\d+(?: \d+)*")
SWEPT = {"mnist": "MNIST", "cifar": "CIFAR-10", "imdb": "IMDB"}
RATE = 0.001  # of most runs on images
VARIANTS = {
    "noise": "noise",
    "background_rotation": "background and rotation",
    "cifar": "CIFAR-10 in grey",
    "norb": "toys as in NORB",
}
PAIR = {"noise": "noise", "background_rotation": "rotation"}  # as the tables of both name them
LANGUAGE = {
    "SGD, 6,477 words": "tinyshakespeare_4_epochs",
    "Adam, embedding frozen, 1,046 words": "tinyshakespeare_1_epochs_count_20_frozen_adam_0.01",
    "Adam, 23,334 words": "reviews_1_epochs_normal_adam_0.01",
}


@dataclass(frozen=True)
class Table:
    """A table of runs.

    Attributes:
        head: titles of its columns.
        rows: their cells.
        runs: what it was made from.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    runs: Sequence[Run]

    def markdown(self) -> str:
        return "\n".join([harness.header(*self.head), *(harness.row(*cells) for cells in self.rows)])


def commands_of(runs: Iterable[Run]) -> list[str]:
    """The commands of the runs; those that differ in their seeds are one."""
    seeds: dict[str, set[str]] = {}
    for run in runs:
        found = SEEDS.search(run["command"])
        seeds.setdefault(SEEDS.sub("…", run["command"]), set()).update(found[0].split() if found else ())
    return sorted(command.replace("…", " ".join(sorted(of))) for command, of in seeds.items())


def machines() -> Table:
    """The machines of all runs, each with the number of its runs and the CPU seconds that they took."""
    runs = [run for name, table in TABLES.items() if name != "machines" for run in table().runs]
    different = {(run["command"], run["run"]): run for run in runs}
    seconds: dict[str, list[float]] = {}
    for run in different.values():
        seconds.setdefault(harness.machine_line(run["machine"]), []).append(run.get("seconds", 0.0))
    rows = [[line, str(len(of)), f"{min(of):.0f} to {max(of):.0f}"] for line, of in sorted(seconds.items())]
    return Table(["machine", "runs", "CPU seconds of a run"], rows, [])


def by_seed(runs: Iterable[Run], value: Callable[[Run], float], form: str = "{:.2f}") -> str:
    """A figure of each run, in the order of the seeds."""
    ordered = sorted(runs, key=lambda run: run["seed"])
    return ", ".join(form.format(value(run)) if not run.get("error") else "diverged" for run in ordered)


def of_way(runs: Iterable[Run], way: Way) -> list[Run]:
    """The runs of a class of matrices with its rank."""
    return [run for run in runs if tuple(run["way"]) == way]


def named(way: Way) -> str:
    """A class of matrices with its rank, as the tables of the paper name it."""
    name, rank = way
    return LABELS.get(name, name) + ("" if rank is None else f", r = {rank}")


# --- tables -----------------------------------------------------------------------------------------------------------


def shf_table_2() -> Table:
    titles = {"shf": "SHF", "hf": "Martens' method", "adam 1e-3": "Adam, 0.001"}
    rows, used = [], []
    for task, papers in SHF_TABLE_2.items():
        runs = harness.load_runs(DATA / "autoencoders" / task)
        for name, title in titles.items():
            if not (found := [run for run in runs if run["name"] == name]):
                continue
            used += found
            cells = (
                by_seed(found, lambda run: run["seconds"], "{:.0f}"),
                by_seed(found, lambda run: 0.5 * run["test_at_best"], "{:.3f}"),
            )
            rows.append([task.upper(), title, *cells, f"{papers[name][1]:.3f}" if name in papers else ""])
    return Table(["data", "method", "CPU seconds", "test ½‖x̂ - x‖²", "the paper"], rows, used)


def sweep_runs(task: str) -> list[Run]:
    return harness.load_runs(DATA / f"rls/sweep_{task}_3_epochs")


def figures_4_and_5() -> Table:
    runs = {task: sweep_runs(task) for task in SWEPT}
    rows = []
    for way in rls.sweep():
        of_tasks = [[run for run in found if run["way"] == way] for found in runs.values()]
        rows.append([way, *(by_seed(of, lambda run: 100 * run["epochs"][-1]["test_accuracy"]) for of in of_tasks)])
    titles = [f"{title}, test %" for title in SWEPT.values()]
    return Table(["RLS with", *titles], rows, [run for found in runs.values() for run in found])


def figure_3() -> Table:
    """The ways under the cross-entropy on IMDB; those on the other tasks stand on the page of RLS."""
    runs = harness.load_runs(DATA / "rls/compare_imdb_10_epochs")
    columns: dict[str, tuple[Callable[[Run], float], str]] = {
        "best test %": (lambda run: 100 * max(epoch["test_accuracy"] for epoch in run["epochs"]), "{:.2f}"),
        "training loss of the last epoch": (lambda run: run["epochs"][-1]["train_loss"], "{:.3g}"),
    }
    rows = []
    for way in rls.cross_entropy(rls.TASKS["imdb"]):
        if found := [run for run in runs if run["way"] == way]:
            rows.append([way, *(by_seed(found, value, form) for value, form in columns.values())])
    return Table(["IMDB, cross-entropy", *columns], rows, runs)


def table_2() -> Table:
    """Test perplexities."""
    runs_of = {title: harness.load_runs(DATA / f"structured_tasks/language_{name}") for title, name in LANGUAGE.items()}
    runs = [run for found in runs_of.values() for run in found]
    rows = []
    for way in ways_in(runs):
        cells = [
            by_seed(of_way(found, way), lambda run: run["test_perplexity"], "{:.1f}") for found in runs_of.values()
        ]
        rows.append([named(way), f"{of_way(runs, way)[0]['parameters']:,}", *cells, paper_perplexity(way)])
    return Table(["input-hidden matrices", "parameters", *LANGUAGE, "the paper, WikiText-2"], rows, runs)


def image_runs(variant: str, fraction: float = 1.0, network: str = "shl", rate: float | None = RATE) -> list[Run]:
    """The runs of a network on a data set of images, with this part of the samples; at one rate, or at all."""
    runs = harness.load_runs(DATA / f"structured_tasks/{variant}_made_{network}_50_epochs_{fraction:g}")
    return [run for run in runs if rate is None or run["rate"] == rate]


def accuracy(run: Run) -> float:
    return 100 * run["test_accuracy"]


def tables_1_and_7(network: str) -> Table:
    """Test accuracies of all classes at one rate."""
    columns = {
        variant: [run for run in image_runs(variant, network=network) if run["way"][0] not in BUDGETED]
        for variant in VARIANTS
    }
    columns = {variant: runs for variant, runs in columns.items() if runs}
    rows, used = [], []
    for way in ways_in([run for runs in columns.values() for run in runs]):
        if way[0] == "ldr_sd" and way[1] != 1:  # Tables 8 and 9 have it
            continue
        cells = []
        for variant, runs in columns.items():
            found, paper = of_way(runs, way), paper_accuracy(way, variant, network)
            cells += [by_seed(found, accuracy), f"{paper:.2f}" if paper else ""]
            used += found
        rows.append([named(way), *cells])
    head = [cell for variant in columns for cell in (f"{VARIANTS[variant]}, test %", "the paper")]
    return Table(["hidden layer", *head], rows, used)


def best_rates(variants: dict[str, str]) -> Table:
    """Test accuracies at the one of the paper's four rates that was best in validation.

    Args:
        variants: data set -> its title.
    """
    columns = {title: image_runs(variant, rate=None) for variant, title in variants.items()}
    rows, used = [], []
    for way in ways_in([run for runs in columns.values() for run in runs]):
        cells, parameters = [], 0
        for variant, runs in zip(variants, columns.values(), strict=True):
            of_rates = finished(runs, way)
            if len({run["rate"] for run in of_rates}) < len(RATES):
                cells += [""] * 3
                continue
            found, parameters = at_best_rate(of_rates), of_rates[0]["parameters"]
            paper = paper_accuracy(way, variant, "shl")
            if variant == "rectangles" and not paper:
                continue
            cells += [f"{found[0]['rate']:g}", by_seed(found, accuracy), f"{paper:.2f}" if paper else ""]
            used += of_rates
        if any(cells):
            rows.append([named(way), f"{parameters:,}", *cells])
    prefixes = [f"{title}: " if len(columns) > 1 else "" for title in columns]
    head = [cell for prefix in prefixes for cell in (f"{prefix}rate", f"{prefix}test %", f"{prefix}the paper")]
    return Table(["hidden layer", "parameters", *head], rows, used)


def table_3() -> Table:
    short, long = (harness.load_runs(DATA / f"structured_convolution/{epochs}_epochs") for epochs in (2, 10))
    rows = []
    for network, (title, paper) in TABLE_3.items():
        found, longer = ([run for run in runs if run["network"] == network] for runs in (short, long))
        parameters = f"{found[0]['parameters']:,}"
        rows.append([title, parameters, by_seed(found, accuracy), by_seed(longer, accuracy), f"{paper:.2f}"])
    columns = ["first hidden layer", "parameters", "test %, 2 epochs", "10 epochs", "the paper, 50 epochs"]
    return Table(columns, rows, [*short, *long])


def tables_8_and_9(network: str) -> Table:
    papers = TABLE_8 if network == "shl" else TABLE_9
    titles = {"ldr_sd": "LDR-SD", "pruned": "pruned", "reduced": "fewer hidden units"}
    rows, used = [], []
    for variant, title in PAIR.items():
        runs = image_runs(variant, network=network)
        for number, rank in enumerate(BUDGET_RANKS):
            if network == "lenet" and rank not in (1, 4, 16):
                continue
            of_rank = {name: of_way(runs, (name, rank)) for name in titles}
            cells = []
            for name, of_class in of_rank.items():
                cells += [by_seed(of_class, accuracy), f"{papers[name][IMAGES.index(variant)][number]:.2f}"]
                used += of_class
            rows.append([title, str(rank), *cells])
    columns = [cell for name in titles.values() for cell in (f"{name}, test %", "the paper")]
    return Table(["data", "rank of LDR-SD", *columns], rows, used)


def tables_10_and_11(network: str) -> Table:
    """With parts of the samples; all of them are in Tables 1 and 7."""
    rows, used = [], []
    fractions = FRACTIONS[:3] if network == "shl" else FRACTIONS[:2]
    for variant, title in PAIR.items():
        for way, of_variants in (TABLE_10 if network == "shl" else TABLE_11).items():
            cells = []
            for number, fraction in enumerate(fractions):
                found = of_way(image_runs(variant, fraction, network), way)
                used += found
                cells += [by_seed(found, accuracy), f"{of_variants[IMAGES.index(variant)][number]:.2f}"]
            rows.append([title, named(way), *cells])
    head = [cell for fraction in fractions for cell in (f"{fraction:.0%} of the samples", "the paper")]
    return Table(["data", "hidden layer", *head], rows, used)


def table_12() -> Table:
    """Training less test accuracy, in points."""
    rows, used = [], []
    for way, papers in TABLE_12.items():
        cells = []
        for variant in VARIANTS:
            found = of_way(image_runs(variant), way)
            used += found
            gap = by_seed(found, lambda run: 100 * (run["train_accuracy"] - run["test_accuracy"]))
            cells += [gap, f"{papers[IMAGES.index(variant)]:.2f}"]
        rows.append([named(way), *cells])
    head = [cell for title in VARIANTS.values() for cell in (title, "the paper")]
    return Table(["hidden layer", *head], rows, used)


TABLES: dict[str, Callable[[], Table]] = {
    "shf_table_2": shf_table_2,
    "rls_figure_3": figure_3,
    "rls_figures_4_and_5": figures_4_and_5,
    "ldr_table_1": partial(tables_1_and_7, "shl"),
    "ldr_table_1_rates": partial(best_rates, {variant: VARIANTS[variant] for variant in PAIR}),
    "ldr_table_2": table_2,
    "ldr_table_3": table_3,
    "ldr_table_7": partial(tables_1_and_7, "lenet"),
    "ldr_table_8": partial(tables_8_and_9, "shl"),
    "ldr_table_9": partial(tables_8_and_9, "lenet"),
    "ldr_table_10": partial(tables_10_and_11, "shl"),
    "ldr_table_11": partial(tables_10_and_11, "lenet"),
    "ldr_table_12": table_12,
    "ldr_table_13": partial(best_rates, {"rectangles": "rectangles"}),
    "machines": machines,
}


# --- the page ---------------------------------------------------------------------------------------------------------


def filled(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        KeyError: a mark names a table that there is not.
    """
    return BLOCK.sub(lambda block: f"{block[1]}{block[2]}\n{TABLES[block[1]]().markdown()}\n\n", page)


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--commands", choices=TABLES, metavar="TABLE", help="print the commands of this table's runs")
    if table := parser.parse_args().commands:
        print("\n".join(commands_of(TABLES[table]().runs)))
        return
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
