"""The harness of the benchmarks: a line for each run, a clock and tables.

A run is a dict. The runs of an experiment ``X`` are the lines of ``X.jsonl``, each with the run's name, its command and
its machine; pictures are in the folder ``X``. A run whose line is there is not repeated, so a stopped benchmark goes on
where it was, and several processes (with other ``--seeds``, say) can share its runs.

Tables go to standard output in Markdown, row by row; the progress bar to standard error, on a terminal alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from lightning_struct.data import InMemoryDataModule
from lightning_struct.data.in_memory import Splits

Run = dict[str, Any]
T = TypeVar("T")
CONFIGS = Path(__file__).resolve().parents[1] / "recipes"
RESULTS = Path("results/benchmarks")


# --- the command line -------------------------------------------------------------------------------------------------


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """The parser of a script, whose help begins with the script's docstring as it stands."""
    return argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """``--data-dir`` and ``--synthetic``."""
    parser.add_argument("--data-dir", default="data", help="where the files of the data set are")
    parser.add_argument("--synthetic", action="store_true", help="procedural data without files, to try the script")


def add_run_options(parser: argparse.ArgumentParser, experiment: str | None, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """``--seeds``, ``--output``, by default a folder of this name, and ``--report``."""
    output = None if experiment is None else RESULTS / experiment
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--output", type=Path, default=output, help="where the runs are kept")
    parser.add_argument("--report", action="store_true", help="print the runs that are there, without new ones")


# --- runs -------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, str | int]:
    """The machine behind a time: processor, versions, and the threads that this process computes with."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    found: dict[str, str | int] = {
        "cpu": next(models, platform.processor() or platform.machine()),
        "threads": torch.get_num_threads(),
        **{package: version(package) for package in ("torch", "lightning", "lightning-struct")},
    }
    if torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def machine_line(found: Mapping[str, str | int] | None = None) -> str:
    """A machine on one line, by default this one."""
    found = found or machine()
    threads = f"{found['threads']} thread{'' if found['threads'] == 1 else 's'}"
    packages = (f"{package} {found[package]}" for package in ("torch", "lightning", "lightning-struct"))
    return ", ".join([str(found[kind]) for kind in ("gpu", "cpu") if kind in found] + [threads, *packages])


def print_machines(runs: Iterable[Run]) -> None:
    """The machines of the runs, a line each; runs of older files do not say theirs."""
    for line in dict.fromkeys(machine_line(run["machine"]) for run in runs if "machine" in run):
        print(line)


def make_directory(path: Path) -> Path:
    """The folder, made if it is not there, as an absolute path."""
    path = path.resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def run_name(*parts: object) -> str:
    """The name of a run in its experiment: the parts that tell it from the others, joined by underscores."""
    return "_".join(str(part) for part in parts).replace(" ", "_")


def command() -> str:
    """The command of this process as a page shows it: files and folders outside of the current one by what they are."""

    def shown(argument: str) -> str:
        path = Path(argument).resolve()
        if argument.startswith("-") or not path.exists() or path.is_relative_to(Path.cwd()):
            return argument
        return "DIRECTORY" if path.is_dir() else path.name

    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(shown, sys.argv[1:])])


def file_of(experiment: Path) -> Path:
    """The file of an experiment's runs."""
    return experiment.with_name(f"{experiment.name}.jsonl")


def keep_run(experiment: Path, name: str, run: Run) -> None:
    """Append a run with its name, command and machine; in one write, since other processes may append as well."""
    line = json.dumps({"run": name, **run, "command": command(), "machine": machine()})
    file = file_of(experiment)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b", buffering=0) as stream:
        is_empty = stream.tell() == 0
        stream.seek(0 if is_empty else -1, os.SEEK_END)
        ends_torn = not is_empty and stream.read() != b"\n"  # a process was stopped while it wrote
        stream.write(("\n" * ends_torn + line + "\n").encode())


def run_once(experiment: Path, name: str, run: Callable[[], Run]) -> Run | None:
    """Run and keep the result; None if the experiment has a run of this name, and then nothing is run."""
    if name in named_runs(experiment):
        return None
    keep_run(experiment, name, result := run())
    return result


def named_runs(experiment: Path) -> dict[str, Run]:
    """The runs of an experiment by name, in the order of the names; the last line of a name counts."""
    file, found = file_of(experiment), {}
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        if not line:  # of a process that found the line of another half written
            continue
        try:
            run = json.loads(line)
        except ValueError:
            warnings.warn(f"line {number} of {file} is incomplete and ignored", stacklevel=2)
        else:
            found[run["run"]] = run
    return dict(sorted(found.items()))


def load_runs(experiment: Path) -> list[Run]:
    """The runs of an experiment, in the order of their names."""
    return list(named_runs(experiment).values())


def run_all(experiment: Path, runs: Mapping[str, Callable[[], Run]], is_report: bool = False) -> list[Run]:
    """Run what is missing, one after the other, and say how it ended.

    Args:
        experiment: keeps the runs.
        runs: by their names.
        is_report: run nothing.

    Returns:
        All runs that the experiment has.
    """
    wanted = {} if is_report else runs
    for name, run in progress(wanted.items(), len(wanted)):
        try:
            done = run_once(experiment, name, run)
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
        else:
            if done is not None:
                print(f"{name}: {done.get('error') or 'done'}", flush=True)
    return load_runs(experiment)


def splits_of(data: InMemoryDataModule) -> Splits:
    """The sets of a data module, which is set up for them."""
    data.prepare_data()
    data.setup("fit")
    assert data.splits is not None
    return data.splits


def text_windows(options: argparse.Namespace, length: int) -> Tensor:
    """Windows of tinyshakespeare, numbers of ``length`` characters and of the one after them; of 65 characters."""
    if options.synthetic:
        codes = torch.randint(0, 65, (200_000,), generator=torch.Generator().manual_seed(0))
    else:
        text = (Path(options.data_dir) / "tinyshakespeare.txt").read_text()
        number = {character: i for i, character in enumerate(sorted(set(text)))}
        codes = torch.tensor([number[character] for character in text])
    return codes.unfold(0, length + 1, length)


# --- processes --------------------------------------------------------------------------------------------------------


def measure_apart(*arguments: str) -> Any:
    """Run this script in a new process, whose memory and caches are its own.

    Returns:
        Its last line, read as JSON.

    Raises:
        ChildProcessError: it failed; the message is the last line of its errors.
    """
    script = [sys.executable, "-W", "ignore", str(Path(sys.argv[0]).resolve()), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ChildProcessError(lines[-1].replace("|", "/")[:160])
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def fitted_recipe(name: str, arguments: Sequence[str], callback: str, **options: object) -> Iterator[tuple[Any, Any]]:
    """Train by a recipe with one more callback, in a temporary folder that is the current one until the context ends.

    Args:
        name: of the recipe.
        arguments: of its command line, after ``fit``.
        callback: its class with its module, as in ``autoencoders.ErrorCurve``.
        options: arguments of the callback.

    Yields:
        The recipe's command line after the fit, and the callback.
    """
    run = import_module(f"lightning_struct.recipes.{name}").main
    given = [f"--trainer.callbacks.{key}={'null' if value is None else value}" for key, value in options.items()]
    added = ["--trainer.enable_progress_bar=false", f"--trainer.callbacks+={callback}", *given]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            cli = run(["fit", *arguments, *added])
            # By name: the script that runs is __main__, and its classes are others than those of the module.
            (found,) = (c for c in cli.trainer.callbacks if type(c).__name__ == callback.rsplit(".", 1)[1])
            yield cli, found
        finally:
            os.chdir(before)


def bare_trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A Trainer that writes nothing and shows nothing, on one device."""
    return L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, **options},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


# --- time -------------------------------------------------------------------------------------------------------------


class TrainingClock(L.Callback):
    """Seconds of training so far, from the start of the fit on, and its end when they reach a bound.

    CPU time of the process, by default: another job on the machine changes it little.

    Args:
        bound: ends the training with the step that is under way then; None for no bound.
        count_validation: whether validations take time.
        now: the clock.
    """

    def __init__(
        self, bound: float | None = None, *, count_validation: bool = True, now: Callable[[], float] = time.process_time
    ) -> None:
        self.bound, self.count_validation = bound, count_validation
        self._now = now
        self._before = 0.0
        self._since: float | None = None  # when what is counted now began

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        return self._before + (0.0 if self._since is None else self._now() - self._since)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = self._now()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self.bound is not None and self.seconds > self.bound:
            trainer.should_stop = True

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.count_validation:
            self._before, self._since = self.seconds, None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.count_validation and not trainer.sanity_checking:
            self._since = self._now()


def progress(items: Iterable[T], total: int, description: str = "runs") -> Iterator[T]:
    """The items, with a bar on standard error that counts them; without one where that is no terminal."""
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal or total == 0
    with Progress(*columns, console=console, disable=hidden, redirect_stdout=sys.stdout.isatty()) as bar:
        yield from bar.track(items, total=total)


# --- tables -----------------------------------------------------------------------------------------------------------


def header(*columns: object) -> str:
    """The head of a Markdown table."""
    return f"{row(*columns)}\n|{'---|' * len(columns)}"


def row(*cells: object) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def print_header(*columns: object) -> None:
    """The head of a Markdown table, after an empty line."""
    print(f"\n{header(*columns)}", flush=True)


def print_row(*cells: object) -> None:
    """One row of a Markdown table."""
    print(row(*cells), flush=True)


def spread(values: Sequence[float], form: str = "{:.2f}", bold: bool = False) -> str:
    """The median, with the lowest and the highest in brackets where they differ from it."""
    middle, low, high = (form.format(value) for value in (statistics.median(values), min(values), max(values)))
    shown = f"**{middle}**" if bold else middle
    return shown if low == high else f"{shown} ({low} to {high})"
