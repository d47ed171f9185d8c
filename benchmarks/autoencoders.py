"""SHF against Adam on the paper's autoencoders, both by the recipes that users run.

    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py usps --data-dir DIRECTORY [--seeds 0 1] [--jobs 2]
    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py mnist --data-dir DIRECTORY --seeds 0 --minutes 10
    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py curves --seeds 0 --minutes 10
    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py usps --data-dir DIRECTORY --kronecker --cpu-seconds 120

Runs SHF as in the paper (``recipes/TASK_autoencoder/shf.yaml``), SHF damped around the origin instead of the start (USPS
only), and Adam over the rates, all from the same sparse start for a seed. With ``--kronecker`` SHF with Kronecker factors
(``recipes/TASK_autoencoder/kronecker.yaml``), with its guards set by hand and measured, from weak damping, and with the
curvature of whole batches (MNIST), against Adam at constant and at falling rates (to a hundredth at epoch
``--adam-epochs``), SGD with momentum, L-BFGS and, where ``pytorch_optimizer`` is installed, SOAP (Shampoo with Adam in its
eigenbasis), all with its L2 but L-BFGS and SOAP, which have none, and SHF and HF as in the papers; ``--only`` names the
ways that are run. Each run is a process of its own with one thread, and is skipped where its file is in ``--output``
already; the tables and the pictures are made of all files that are there. Time is CPU time of the process, which another
job on the machine changes little. Errors are in full units, ‖x̂ - x‖² averaged over samples, twice those of the paper.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

ITERATIONS = (50, 100, 150, 200, 250, 300, 350, 390)
CPU_SECONDS = (15, 30, 60, 120, 240, 480, 960)
# What is drawn, in this order: the beginning of a way's name -> its colour and label; of several ways the best.
DRAWN = {
    "kronecker": ("C3", "SHF, Kronecker factors"),
    "adam": ("C1", "Adam"),
    "soap": ("C4", "SOAP"),
    "sgd": ("C2", "SGD with momentum"),
    "l-bfgs": ("C5", "L-BFGS"),
    "shf": ("C0", "SHF of the paper"),
    "hf": ("C7", "HF (Martens)"),
}


class ProcessClock(L.Callback):
    """CPU seconds of the process at each step and each validation, from the start of training on, which it ends."""

    def __init__(self, bound: float | None = None) -> None:
        self.bound = bound
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self._begin = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        names = ("batch_size", "damping", "solver_iterations", "train_loss")
        values = {name: float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics}
        cpu = time.process_time() - self._begin
        self.steps.append({"step": trainer.global_step, "cpu": cpu, **values})
        if self.bound is not None and cpu > self.bound:
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.global_step:
            error = float(trainer.callback_metrics["val_squared_error"])
            cpu = time.process_time() - self._begin
            self.validations.append({"step": trainer.global_step, "cpu": cpu, "error": error})


def run_job(task: str, name: str, seed: int, arguments: list[str], bound: float | None, output: Path) -> None:
    recipe = import_module(f"lightning_struct.recipes.{task}_autoencoder").main
    fit = ["fit", *arguments, f"--seed_everything={seed}", f"--data.seed={seed}"]
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        clock_arguments = [
            "--trainer.callbacks+=autoencoders.ProcessClock",
            f"--trainer.callbacks.bound={bound or 'null'}",
        ]
        cli = recipe([*fit, "--trainer.enable_progress_bar=false", *clock_arguments])
        (clock,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "ProcessClock")
        (tested,) = cli.trainer.test(cli.model, cli.datamodule, ckpt_path="best", verbose=False)
    result = {
        "name": name,
        "seed": seed,
        "arguments": arguments,
        "steps": clock.steps if name.startswith(("shf", "hf", "kronecker")) else clock.steps[-1:],
        "validations": clock.validations,
        "test_at_best": tested["test_squared_error"],
    }
    output.write_text(json.dumps(result))


def guarded(config: Path, directory: Path, *, held_out: bool, norm_test: bool) -> Path:
    """The YAML with its hand-set guards replaced: the floor of λ by ρ on samples held out, the growth by the norm test."""
    settings = yaml.safe_load(config.read_text())
    callbacks = {c["class_path"].rsplit(".", 1)[1]: c for c in settings["trainer"]["callbacks"]}
    if held_out:
        settings["model"]["init_args"]["optimizer"]["init_args"]["held_out"] = 0.2
        drop = callbacks["LevenbergMarquardtDamping"]["init_args"]["drop"]
        callbacks["LevenbergMarquardtDamping"]["init_args"] = {"drop": drop, "lower": 0.1, "upper": 0.3}
    if norm_test:
        largest = callbacks["GrowingBatchSize"]["init_args"]["max_batch_size"]
        callbacks["GrowingBatchSize"]["init_args"] = {"max_batch_size": largest, "theta": 0.35}
    file = directory / f"kronecker_{held_out}_{norm_test}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def kronecker_jobs(task: str, options: argparse.Namespace, output: Path) -> list[tuple[str, int, list[str]]]:
    configs = Path(__file__).resolve().parents[1] / "recipes" / f"{task}_autoencoder"
    data = [f"--data.data_dir={Path(options.data_dir).resolve()}"] if task != "curves" else []
    config = configs / "kronecker.yaml"
    settings = yaml.safe_load(config.read_text())["model"]["init_args"]["optimizer"]["init_args"]
    l2 = settings["l2"]
    optimizer = "--model.init_args.optimizer"
    first_order = [f"--config={configs / 'adam.yaml'}", *data, f"--trainer.max_epochs={options.adam_epochs}"]
    falling = [
        "--model.init_args.lr_scheduler=torch.optim.lr_scheduler.LinearLR",
        "--model.init_args.lr_scheduler.init_args.start_factor=1",
        "--model.init_args.lr_scheduler.init_args.end_factor=0.01",
        f"--model.init_args.lr_scheduler.init_args.total_iters={options.adam_epochs}",
    ]
    ways = {
        "kronecker": [f"--config={config}", *data],
        "kronecker weak-start": [f"--config={config}", *data, f"{optimizer}.init_args.damping=1.0"],
        "kronecker held-out": [f"--config={guarded(config, output, held_out=True, norm_test=False)}", *data],
        "kronecker norm-test": [f"--config={guarded(config, output, held_out=False, norm_test=True)}", *data],
        "kronecker held-out norm-test": [f"--config={guarded(config, output, held_out=True, norm_test=True)}", *data],
        "shf": [f"--config={configs / 'shf.yaml'}", *data],
        "hf": [f"--config={configs / 'hf.yaml'}", *data],
    }
    if "curvature_share" in settings:
        ways["kronecker whole-curvature"] = [*ways["kronecker"], f"{optimizer}.init_args.curvature_share=1.0"]
    for rate in options.rates:
        adam = [*first_order, f"{optimizer}.init_args.lr={rate}", f"{optimizer}.init_args.weight_decay={l2}"]
        ways[f"adam {rate}"] = adam
        ways[f"adam {rate} falling"] = [*adam, *falling]
    for rate in ("1e-2", "3e-2"):
        sgd = [
            f"{optimizer}=torch.optim.SGD",
            f"{optimizer}.init_args.lr={rate}",
            f"{optimizer}.init_args.momentum=0.9",
        ]
        ways[f"sgd {rate}"] = [*first_order, *sgd, f"{optimizer}.init_args.weight_decay={l2}"]
    lbfgs = [
        f"{optimizer}=torch.optim.LBFGS",
        f"{optimizer}.init_args.line_search_fn=strong_wolfe",
        "--data.batch_size=2000",
    ]
    ways["l-bfgs"] = [*first_order, *lbfgs]
    if find_spec("pytorch_optimizer") is not None:
        for rate in ("1e-3", "3e-3"):
            soap = [
                f"{optimizer}=pytorch_optimizer.SOAP",
                f"{optimizer}.init_args.lr={rate}",
                f"{optimizer}.init_args.weight_decay=0",
            ]
            ways[f"soap {rate} falling"] = [*first_order, *soap, *falling]
    if unknown := set(options.only or ()) - set(ways):
        raise SystemExit(f"--only names {', '.join(unknown)}; there are: {', '.join(ways)}")
    return [(name, seed, ways[name]) for seed in options.seeds for name in options.only or ways]


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
    for name in (n for n in by_name if n.startswith(("shf", "kronecker"))):
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
    if by_name.keys() & {"kronecker"}:
        compare_with_adam(by_name)
    draw_errors(by_name).savefig(output / "errors.png", dpi=150)
    if "shf" in by_name:
        draw_sizes(by_name["shf"]).savefig(output / "sizes.png", dpi=150)


def lowest(run: dict[str, Any], seconds: float = float("inf")) -> float:
    """Validation error reached in so many CPU seconds."""
    return min((v["error"] for v in run["validations"] if v["cpu"] <= seconds), default=float("inf"))


def best_of(by_name: dict[str, list[dict[str, Any]]], kind: str) -> str | None:
    """The way of a kind whose lowest error is the best, on the mean over seeds, of those with the most seeds."""
    names = [
        name for name in by_name if name == kind or (name.startswith(f"{kind} ") and kind not in ("kronecker", "shf"))
    ]
    most = max((len(by_name[name]) for name in names), default=0)
    complete = [name for name in names if len(by_name[name]) == most]
    return min(complete, key=lambda name: statistics.mean(map(lowest, by_name[name])), default=None)


def compare_with_adam(by_name: dict[str, list[dict[str, Any]]]) -> None:
    """For each seed: seconds to the lowest error that Adam's best way ever has, for both."""
    adam = best_of(by_name, "adam")
    if adam is None:
        return

    def seconds_to(run: dict[str, Any], error: float) -> float:
        return min((v["cpu"] for v in run["validations"] if v["error"] <= error), default=float("inf"))

    print(f"\n| seed | {adam}: lowest error | at CPU s | ways: CPU s to that error, lowest error |\n|---|---|---|---|")
    for run in by_name[adam]:
        error = lowest(run)
        others = []
        for name in (n for n in by_name if n.startswith("kronecker")):
            others += [
                f"{name} {seconds_to(other, error):.0f}, {lowest(other):.3f}"
                for other in by_name[name]
                if other["seed"] == run["seed"]
            ]
        print(f"| {run['seed']} | {error:.3f} | {seconds_to(run, error):.0f} | {'; '.join(others)} |")


def draw_errors(by_name: dict[str, list[dict[str, Any]]]) -> Figure:
    """Validation error against CPU seconds, the best way of each kind; a line for each seed."""
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind, (color, label) in DRAWN.items():
        name = best_of(by_name, kind)
        for i, run in enumerate(by_name.get(name or "", [])):
            cpu, error = zip(*((v["cpu"], v["error"]) for v in run["validations"]), strict=True)
            details = f" {name[len(kind) + 1 :]}" if name and len(name) > len(kind) else ""
            axes.plot(cpu, error, color=color, alpha=0.8, linewidth=1.2, label=None if i else label + details)
    axes.set(xlabel="CPU seconds, one thread", ylabel="validation error ‖x̂ - x‖²", xscale="log", yscale="log")
    axes.set_xlim(left=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.grid(which="both", alpha=0.25)
    figure.legend(loc="outside right upper")
    return figure


def draw_sizes(runs: list[dict[str, Any]]) -> Figure:
    """Batch size and solver iterations of SHF against CPU seconds."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for i, run in enumerate(runs):
        columns = ((s["cpu"], s["batch_size"], s["solver_iterations"]) for s in run["steps"])
        cpu, size, iterations = zip(*columns, strict=True)
        axes.plot(cpu, size, color="C0", alpha=1 - 0.4 * (i > 0), label=None if i else "samples in a batch")
        axes.plot(cpu, iterations, color="C3", alpha=1 - 0.4 * (i > 0), label=None if i else "LSMR iterations")
    axes.set(xlabel="CPU seconds, one thread", xscale="log", yscale="log")
    axes.set_xlim(left=1)
    axes.grid(which="both", alpha=0.25)
    axes.legend()
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
    parser.add_argument("--rates", nargs="+", default=["5e-4", "1e-3", "2e-3", "3e-3"], help="of Adam")
    parser.add_argument("--kronecker", action="store_true", help="SHF with Kronecker factors and its rivals")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="run these ways of --kronecker only, e.g. 'adam 1e-3'")
    parser.add_argument("--cpu-seconds", type=float, help="bound for each run, CPU time")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        name, seed, arguments, bound, file = json.loads(options.job)
        run_job(options.task, name, seed, arguments, bound, Path(file))
        return
    output = (options.output or Path("results/benchmarks") / options.task).resolve()
    output.mkdir(parents=True, exist_ok=True)

    def start(job: tuple[str, int, list[str]]) -> Path:
        name, seed, arguments = job
        file = output / f"{name.replace(' ', '_')}_{seed}.json"
        if not file.exists():
            call = json.dumps([name, seed, arguments, options.cpu_seconds, str(file)])
            command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), options.task, "--job", call]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(f"{name}, seed {seed}: {'done' if done.returncode == 0 else done.stderr[-2000:]}", flush=True)
        return file

    with ThreadPoolExecutor(options.jobs) as pool:
        listed = kronecker_jobs(options.task, options, output) if options.kronecker else jobs(options.task, options)
        files = list(pool.map(start, listed))
    report([json.loads(file.read_text()) for file in files if file.exists()], output)


if __name__ == "__main__":
    main()
