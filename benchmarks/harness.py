"""The harness of the benchmarks: a line for each run, a process for each run, a clock and tables.

A run is a dict. The runs of an experiment ``X`` are the lines of ``X.jsonl``, each with the run's name, its command and
its machine; pictures are in the folder ``X``. A run whose line is there is not repeated, so a stopped benchmark goes on
where it was, and several processes can share its runs. Two ways of running:

- :func:`run_jobs` starts the script anew for each run that is missing, with ``--job``; there :func:`answer_job` runs
  it.
- :func:`run_once` runs it in this process.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """``--jobs``, ``--report`` for none, and ``--job`` for the processes that :func:`run_jobs` starts."""
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--report", dest="jobs", action="store_const", const=0, help="print the runs that are there, without new ones"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)


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

    arguments = sys.argv[1 : sys.argv.index("--job") if "--job" in sys.argv else None]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(shown, arguments)])


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


@dataclass(frozen=True)
class Job:
    """A run in a process of its own.

    Attributes:
        title: as it is printed.
        name: of its run.
        arguments: by name, of the function that runs it; what JSON can hold.
        bound: CPU seconds that it may take. A run that a lower bound has ended is run anew.
    """

    title: str
    name: str
    arguments: Mapping[str, Any]
    bound: float | None = None

    def is_missing(self, runs: Mapping[str, Run]) -> bool:
        """Whether the runs have none of the job, or one that was ended sooner than it would be now."""
        if self.name not in runs:
            return True
        run = runs[self.name]
        ended_by = run.get("bound")
        return ended_by is not None and run["seconds"] >= ended_by and (self.bound is None or ended_by < self.bound)


def run_jobs(experiment: Path, jobs: Sequence[Job], workers: int, command: Sequence[str] = ()) -> list[Run]:
    """Run the jobs that have no run yet.

    Args:
        experiment: keeps the runs.
        jobs: what is to be run.
        workers: how many at a time; 0 runs none.
        command: what is started for a job, with ``--job`` added; by default this script with its own arguments.

    Returns:
        The runs of all jobs that have one, in the order of the jobs. A job that failed has printed its error.
    """
    command = command or this_script(*sys.argv[1:])

    def start(job: Job) -> None:
        call = json.dumps({"experiment": str(experiment), "name": job.name, "arguments": job.arguments})
        done = subprocess.run([*command, "--job", call], capture_output=True, text=True, check=False)
        print(f"{job.title}: {'done' if done.returncode == 0 else done.stderr[-2000:]}", flush=True)

    before = named_runs(experiment)
    missing = [job for job in jobs if workers and job.is_missing(before)]
    pool = ThreadPoolExecutor(max(workers, 1))
    try:
        for _ in progress(pool.map(start, missing), len(missing)):
            pass
    finally:  # where the benchmark is stopped, no further job begins
        pool.shutdown(cancel_futures=True)
    runs = named_runs(experiment)
    return [runs[job.name] for job in jobs if job.name in runs]


def answer_job(call: str, run: Callable[..., Run]) -> None:
    """Do the job that ``--job`` describes: call ``run`` with the job's arguments, and keep what it returns."""
    job = json.loads(call)
    keep_run(Path(job["experiment"]), job["name"], run(**job["arguments"]))


# --- processes --------------------------------------------------------------------------------------------------------


def this_script(*arguments: str) -> list[str]:
    """The command that runs this script with other arguments, in silence about warnings."""
    return [sys.executable, "-W", "ignore", str(Path(sys.argv[0]).resolve()), *arguments]


def measure_apart(*arguments: str, threads: int | None = None) -> Any:
    """Run this script in a new process, whose memory and caches are its own.

    Returns:
        Its last line, read as JSON.

    Raises:
        ChildProcessError: it failed; the message is the last line of its errors.
    """
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    done = subprocess.run(this_script(*arguments), capture_output=True, text=True, check=False, env=environment)
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
