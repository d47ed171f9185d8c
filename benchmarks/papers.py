"""Tables and pictures of docs/results/papers.md, made from the runs that are kept under docs/results/data.

    python benchmarks/papers.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. Below it stand the commands and the machines that its runs
name. To add seeds, give its commands others: they write under docs/results/data, where no run is repeated that is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import rls
from harness import Run
from paper_tables import FRACTIONS, TABLE_8, TABLE_10, TABLE_12, Way, paper_accuracy, paper_perplexity
from structured_classes import LABELS, ways_in

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "results/papers.md"
DATA = DOCS / "results/data"
PICTURE = DOCS / "images/papers_rls_sweep.png"
BLOCK = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
SEEDS = re.compile(r"(?<=--seeds )\d+(?: \d+)*")
NORM_TEST_STEPS = (5, 10, 20, 30, 40, 60, 80, 100)
SWEEP = rls.columns_of("sweep", rls.TASKS["mnist"])


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
        """The table, the commands of its runs, and their machines."""
        rows = "\n".join([harness.header(*self.head), *(harness.row(*cells) for cells in self.rows)])
        commands = "\n".join(["```console", *commands_of(self.runs), "```"])
        return "\n\n".join([rows, commands, *machines_of(self.runs)])


def commands_of(runs: Iterable[Run]) -> list[str]:
    """The commands of the runs; those that differ in their seeds alone are one."""
    seeds: dict[str, set[str]] = {}
    for run in runs:
        found = SEEDS.search(run["command"])
        seeds.setdefault(SEEDS.sub("…", run["command"]), set()).update(found[0].split() if found else ())
    return [command.replace("…", " ".join(sorted(of_command))) for command, of_command in sorted(seeds.items())]


def machines_of(runs: Iterable[Run]) -> list[str]:
    """The machines, each with the number of its runs and the CPU seconds that they took."""
    seconds: dict[str, list[float]] = {}
    for run in runs:
        seconds.setdefault(harness.machine_line(run["machine"]), []).append(run.get("seconds", 0.0))
    return [
        f"{machine}: {len(of_machine)} runs of {min(of_machine):.0f} to {max(of_machine):.0f} CPU seconds."
        for machine, of_machine in seconds.items()
    ]


def by_seed(runs: Iterable[Run], value: Callable[[Run], float], form: str = "{:.2f}") -> str:
    """A figure of each run, in the order of the seeds."""
    ordered = sorted(runs, key=lambda run: run["seed"])
    return " / ".join(form.format(value(run)) if not run.get("error") else "diverged" for run in ordered)


def of_way(runs: Iterable[Run], way: Way) -> list[Run]:
    """The runs of a class of matrices with its rank."""
    return [run for run in runs if tuple(run["way"]) == way]


def named(way: Way) -> str:
    """A class of matrices with its rank, as the tables of the paper name it."""
    name, rank = way
    return LABELS.get(name, name) + ("" if rank is None else f", r = {rank}")


def per_cent(key: str) -> Callable[[Run], float]:
    return lambda run: 100 * run[key]


def generalisation_error(run: Run) -> float:
    """Training less test accuracy, in points."""
    return 100 * (run["train_accuracy"] - run["test_accuracy"])


# --- tables -----------------------------------------------------------------------------------------------------------


def sweep_runs() -> list[Run]:
    return harness.load_runs(DATA / "rls/sweep_mnist")


def with_alias(runs: Sequence[Run]) -> list[Run]:
    """The runs, and those with k = 0.1 as η = 1 once more: the settings are the same."""
    return [*runs, *(run | {"way": "η = 1"} for run in runs if run["way"] == "k = 0.1")]


def figures_4_and_5() -> Table:
    runs = sweep_runs()

    def cells(way: str) -> list[str]:
        found = [run for run in with_alias(runs) if run["way"] == way]
        accuracies = [by_seed(found, lambda run: 100 * run["epochs"][i]["test_accuracy"]) for i in (0, -1)]  # noqa: B023
        return [way, *accuracies, by_seed(found, lambda run: run["epochs"][-1]["train_loss"], "{:.3g}")]

    rows = [cells(way) for ways in SWEEP.values() for way in ways]
    return Table(["RLS with", "test % after epoch 1", "after epoch 3", "training loss of epoch 3"], rows, runs)


def norm_test() -> Table:
    """Batch sizes of SHF on USPS by the two readings of the norm test (Figure 3)."""
    runs = harness.load_runs(DATA / "usps_norm_test")
    readings = {"shf": "θ²‖g‖², the default", "shf printed-norm-test": "θ²‖g‖, as printed"}
    rows = []
    for name, reading in readings.items():
        for run in (run for run in runs if run["name"] == name):
            sizes = {step["step"]: step["batch_size"] for step in run["steps"]}
            errors = {validation["step"]: validation["error"] for validation in run["validations"]}
            cells = [f"{sizes[step]:.0f}" for step in NORM_TEST_STEPS]
            last = f"{errors[NORM_TEST_STEPS[-1]]:.2f} after {run['steps'][-1]['cpu']:.0f} s"
            rows.append([reading, str(run["seed"]), *cells, last])
    head = [
        "variance at most",
        "seed",
        *(f"n, step {step}" for step in NORM_TEST_STEPS),
        "validation error at the last",
    ]
    return Table(head, rows, runs)


def table_2() -> Table:
    trained, frozen = (
        harness.load_runs(DATA / f"structured_tasks/language_tinyshakespeare_2_epochs_count_20{kind}")
        for kind in ("", "_frozen")
    )
    rows = [
        [
            named(way),
            f"{of_way(trained, way)[0]['parameters']:,}",
            *(by_seed(of_way(runs, way), lambda run: run["test_perplexity"], "{:.1f}") for runs in (trained, frozen)),
            paper_perplexity(way),
        ]
        for way in ways_in(trained)
    ]
    head = ["input-hidden matrices", "parameters", "embedding trained", "embedding frozen", "the paper, WikiText-2"]
    return Table(head, rows, [*trained, *frozen])


def noise_runs(fraction: float) -> list[Run]:
    """The same number of steps with each share of the samples."""
    return harness.load_runs(DATA / f"structured_tasks/noise_made_shl_{10 / fraction:.0f}_epochs_{fraction:g}")


def table_8() -> Table:
    runs = [run for run in noise_runs(1.0) if (run["way"][0] in TABLE_8)]
    ranks = sorted({run["way"][1] for run in runs})
    rows = []
    for rank in ranks:
        of_rank = [(of_way(runs, (name, rank)), paper_accuracy((name, rank), "noise", "shl")) for name in TABLE_8]
        cells = [(by_seed(ours, per_cent("test_accuracy")), f"{paper:.2f}") for ours, paper in of_rank]
        rows.append([f"{of_rank[0][0][0]['parameters']:,}", *(cell for pair in cells for cell in pair)])
    names = ("LDR-SD", "pruning", "fewer hidden units")
    return Table(["parameters", *(title for name in names for title in (name, "the paper"))], rows, runs)


def tables_10_and_12() -> Table:
    by_fraction = {
        fraction: [run for run in noise_runs(fraction) if tuple(run["way"]) in TABLE_10] for fraction in FRACTIONS
    }
    by_fraction = {fraction: runs for fraction, runs in by_fraction.items() if runs}
    rows = []
    for way in ways_in(by_fraction[1.0]):
        accuracies = [
            f"{by_seed(of_way(runs, way), per_cent('test_accuracy'))} ({TABLE_10[way][FRACTIONS.index(fraction)]:.2f})"
            for fraction, runs in by_fraction.items()
        ]
        gap = by_seed(of_way(by_fraction[1.0], way), generalisation_error)
        rows.append([named(way), *accuracies, f"{gap} ({TABLE_12[way]:.2f})"])
    head = [
        "hidden layer",
        *(f"test %, {fraction:.0%} of the samples" for fraction in by_fraction),
        "training less test, all samples",
    ]
    return Table(head, rows, [run for runs in by_fraction.values() for run in runs])


def table_13() -> Table:
    runs = harness.load_runs(DATA / "structured_tasks/rectangles_made_shl_50_epochs_1")
    rows = []
    for way in ways_in(runs):
        found = of_way(runs, way)
        paper = paper_accuracy(way, "rectangles", "shl")
        cells = [
            f"{found[0]['parameters']:,}",
            by_seed(found, per_cent("test_accuracy")),
            f"{paper:.2f}" if paper else "",
        ]
        rows.append([named(way), *cells])
    return Table(["hidden layer", "parameters", "test %", "the paper"], rows, runs)


TABLES: dict[str, Callable[[], Table]] = {
    "rls_figures_4_and_5": figures_4_and_5,
    "ldr_table_13": table_13,
}


# --- the page ---------------------------------------------------------------------------------------------------------


def filled(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        KeyError: a mark names a table that there is not.
    """
    return BLOCK.sub(lambda block: f"{block[1]}{block[2]}\n{TABLES[block[1]]().markdown()}\n\n", page)


def main() -> None:
    harness.make_parser(__doc__).parse_args()
    PAGE.write_text(filled(PAGE.read_text()))
    rls.draw(with_alias(sweep_runs()), SWEEP).savefig(PICTURE, dpi=100)


if __name__ == "__main__":
    main()
