"""SHF against Adam on the paper's autoencoders, both by the recipes that users run.

    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py usps --data-dir DIRECTORY [--seeds 0 1] [--jobs 2]
    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py mnist --data-dir DIRECTORY --seeds 0 --minutes 10
    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py curves --seeds 0 --minutes 10

Runs SHF as in the paper (``recipes/TASK_autoencoder/shf.yaml``), SHF damped around the origin instead of the start (USPS
only), and Adam over the rates, all from the same sparse start for a seed. Each run is a process of its own with one
thread, and is skipped where its file is in ``--output`` already; the tables and the picture are made of all files that are
there. Time is CPU time of the process, which another job on the machine changes little. Errors are in full units,
‖x̂ - x‖² averaged over samples, twice those of the paper.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

ITERATIONS = (50, 100, 150, 200, 250, 300, 350, 390)
CPU_SECONDS = (15, 30, 60, 120, 240, 480, 960)


class ProcessClock(L.Callback):
    """CPU seconds of the process at each step and each validation, from the start of training on."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self._begin = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        names = ("batch_size", "damping", "solver_iterations", "train_loss")
        values = {name: float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics}
        self.steps.append({"step": trainer.global_step, "cpu": time.process_time() - self._begin, **values})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.global_step:
            error = float(trainer.callback_metrics["val_squared_error"])
            cpu = time.process_time() - self._begin
            self.validations.append({"step": trainer.global_step, "cpu": cpu, "error": error})


def run_job(task: str, name: str, seed: int, arguments: list[str], output: Path) -> None:
    recipe = import_module(f"lightning_struct.recipes.{task}_autoencoder").main
    fit = ["fit", *arguments, f"--seed_everything={seed}", f"--data.seed={seed}"]
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        cli = recipe([*fit, "--trainer.enable_progress_bar=false", "--trainer.callbacks+=autoencoders.ProcessClock"])
        (clock,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "ProcessClock")
        (tested,) = cli.trainer.test(cli.model, cli.datamodule, ckpt_path="best", verbose=False)
    result = {
        "name": name,
        "seed": seed,
        "arguments": arguments,
        "steps": clock.steps if "adam" not in name else clock.steps[-1:],
        "validations": clock.validations,
        "test_at_best": tested["test_squared_error"],
    }
    output.write_text(json.dumps(result))


def jobs(task: str, options: argparse.Namespace) -> list[tuple[str, int, list[str]]]:
    configs = Path(__file__).resolve().parents[1] / "recipes" / f"{task}_autoencoder"
    shf, adam = (f"--config={configs / name}" for name in ("shf.yaml", "adam.yaml"))
    data = [f"--data.data_dir={Path(options.data_dir).resolve()}"] if task != "curves" else []
    until = [f"--trainer.max_time=00:00:{options.minutes:02d}:00"] if options.minutes else []
    listed = [
        ("shf", seed, [shf, *data, *until, f"--trainer.max_steps={options.iterations}"]) for seed in options.seeds
    ]
    for seed in options.seeds:
        for rate in options.rates:
            change = [f"--model.init_args.optimizer.init_args.lr={rate}", f"--trainer.max_epochs={options.adam_epochs}"]
            listed.append((f"adam {rate}", seed, [adam, *data, *until, *change]))
    if task == "usps":
        change = ["--model.init_args.optimizer.init_args.damping_center=origin", "--trainer.max_steps=200"]
        listed += [("shf origin", seed, [shf, *data, *change]) for seed in options.seeds]
    return listed


def report(results: list[dict[str, Any]], output: Path) -> None:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_name.setdefault(result["name"], []).append(result)

    print("\n| run | seed | best validation | at iteration | CPU seconds there | test there |")
    print("|---|---|---|---|---|---|")
    for name, runs in by_name.items():
        for run in runs:
            best = min(run["validations"], key=lambda v: v["error"])
            print(
                f"| {name} | {run['seed']} | {best['error']:.2f} | {best['step']} | {best['cpu']:.0f} "
                f"| {run['test_at_best']:.2f} |"
            )

    print("\n| SHF at iteration | " + " | ".join(map(str, ITERATIONS)) + " |")
    print("|---" * (len(ITERATIONS) + 1) + "|")
    for name in (n for n in by_name if n.startswith("shf")):
        for run in by_name[name]:
            at = {int(v["step"]): v for v in run["validations"]}
            step = {int(s["step"]): s for s in run["steps"]}
            cells = []
            for k in ITERATIONS:
                if k in at:
                    s = step[k]
                    cells.append(
                        f"{at[k]['error']:.2f}; {at[k]['cpu']:.0f} s; n {s['batch_size']:.0f}; "
                        f"{s['solver_iterations']:.0f} its; λ {s['damping']:.2f}"
                    )
                else:
                    cells.append("")
            print(f"| {name}, seed {run['seed']} | " + " | ".join(cells) + " |")

    print("\n| validation error after CPU seconds | " + " | ".join(map(str, CPU_SECONDS)) + " |")
    print("|---" * (len(CPU_SECONDS) + 1) + "|")
    for name, runs in by_name.items():
        cells = []
        for seconds in CPU_SECONDS:
            reached = [min((v["error"] for v in r["validations"] if v["cpu"] <= seconds), default=None) for r in runs]
            finished = all(r["validations"][-1]["cpu"] < seconds for r in runs)
            known = [value for value in reached if value is not None]
            cell = " / ".join(f"{value:.2f}" for value in known)
            cells.append(f"({cell})" if finished else cell)
        print(f"| {name} | " + " | ".join(cells) + " |")
    draw(by_name).savefig(output / "errors.png", dpi=150)


def draw(by_name: dict[str, list[dict[str, Any]]]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    errors, sizes = figure.subplots(1, 2)
    best_adam = min(
        (n for n in by_name if n.startswith("adam")),
        key=lambda n: statistics.mean(min(v["error"] for v in r["validations"]) for r in by_name[n]),
        default=None,
    )
    styles = {"shf": ("C0", "SHF"), "shf origin": ("C2", "SHF, damped around the origin"), best_adam: ("C1", "")}
    for name, (color, label) in styles.items():
        for i, run in enumerate(by_name.get(name, [])):
            cpu, error = zip(*((v["cpu"], v["error"]) for v in run["validations"]), strict=True)
            text = label or f"Adam, rate {str(name).split()[1]}"
            errors.plot(cpu, error, color=color, alpha=1 - 0.4 * (i > 0), label=None if i else text)
    errors.set(xlabel="CPU seconds, one thread", ylabel="validation error ‖x̂ - x‖²", xscale="log", yscale="log")
    errors.set_xlim(left=1)
    errors.yaxis.set_major_formatter(ScalarFormatter())
    errors.yaxis.set_minor_formatter(ScalarFormatter())
    errors.grid(which="both", alpha=0.25)
    errors.legend()
    for i, run in enumerate(by_name.get("shf", [])):
        cpu, size, iterations = zip(
            *((s["cpu"], s["batch_size"], s["solver_iterations"]) for s in run["steps"]), strict=True
        )
        sizes.plot(cpu, size, color="C0", alpha=1 - 0.4 * (i > 0), label=None if i else "samples in a batch")
        sizes.plot(cpu, iterations, color="C3", alpha=1 - 0.4 * (i > 0), label=None if i else "LSMR iterations")
    sizes.set(xlabel="CPU seconds, one thread", xscale="log", yscale="log")
    sizes.set_xlim(left=1)
    sizes.grid(which="both", alpha=0.25)
    sizes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("usps", "mnist", "curves"))
    parser.add_argument("--data-dir", default="data", help="where the files of the data set are; curves needs none")
    parser.add_argument("--output", type=Path, help="default: results/benchmarks/TASK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--iterations", type=int, default=390, help="bound for SHF")
    parser.add_argument("--adam-epochs", type=int, default=800, help="bound for Adam")
    parser.add_argument("--minutes", type=int, help="bound for each run, wall time")
    parser.add_argument("--rates", nargs="+", default=["5e-4", "1e-3", "2e-3"], help="of Adam")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        name, seed, arguments, file = json.loads(options.job)
        run_job(options.task, name, seed, arguments, Path(file))
        return
    output = (options.output or Path("results/benchmarks") / options.task).resolve()
    output.mkdir(parents=True, exist_ok=True)

    def start(job: tuple[str, int, list[str]]) -> Path:
        name, seed, arguments = job
        file = output / f"{name.replace(' ', '_')}_{seed}.json"
        if not file.exists():
            call = json.dumps([name, seed, arguments, str(file)])
            command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), options.task, "--job", call]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(f"{name}, seed {seed}: {'done' if done.returncode == 0 else done.stderr[-2000:]}", flush=True)
        return file

    with ThreadPoolExecutor(options.jobs) as pool:
        files = list(pool.map(start, jobs(options.task, options)))
    report([json.loads(file.read_text()) for file in files if file.exists()], output)


if __name__ == "__main__":
    main()
