"""SHF against Adam and other optimizers on the paper's autoencoders, both by the recipes that users run.

    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py usps --data-dir DIRECTORY [--seeds 0 1]
    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py curves --seeds 0 --cpu-seconds 600
    OMP_NUM_THREADS=1 python benchmarks/autoencoders.py usps --data-dir DIRECTORY --kronecker --cpu-seconds 120

Without ``--kronecker`` it compares SHF as in the paper (``recipes/TASK_autoencoder/shf.yaml``), the same with damping
around the origin instead of the start (USPS only), Martens' method, the paper's rival (``hf.yaml``), and Adam at each
of ``--rates``. All begin with the same sparse weights for a seed. On USPS a seed takes about 40 minutes of one core.

With ``--kronecker`` it compares SHF with Kronecker factors (``recipes/TASK_autoencoder/kronecker.yaml``) with

- variants of itself: growth by the norm test instead of a fixed factor, and weak damping at the start;
- Adam at constant rates and at rates that fall to a hundredth until epoch ``--adam-epochs``, SGD with momentum, L-BFGS
  and, where ``pytorch_optimizer`` is installed, SOAP (Shampoo with Adam in its eigenbasis). All have the L2 of SHF but
  L-BFGS and SOAP, which have none;
- SHF and HF as in the papers.

``--only`` names the ways that are run. Each way takes ``--cpu-seconds`` a seed: with 120 all of them take about 40
minutes.

Runs are kept in ``--output``: a benchmark that was stopped goes on where it was. Time is CPU time of the process,
validations included. Errors are ‖x̂ - x‖² averaged over samples, twice those of the paper.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import yaml  # type: ignore[import-untyped]
from matplotlib.figure import Figure

import harness
import style
from harness import Run
from lightning_struct.callbacks.growing_batch_size import GradientStatistics
from lightning_struct.models import SHFAutoencoder

ITERATIONS = (50, 100, 150, 200, 250, 300, 350, 390)
CPU_SECONDS = (15, 30, 60, 120, 240, 480, 960)
DRAWN = {"adam 1e-3": "Adam", "shf": "SHF of the paper", "hf": "Martens' method"}


class PrintedNormTest(SHFAutoencoder):
    """The norm test as printed (equations 13 and 14): the norm of the gradient where Byrd et al. square it."""

    def gradient_statistics(self) -> GradientStatistics | None:
        found = super().gradient_statistics()
        return found and replace(found, gradient_squared_norm=math.sqrt(found.gradient_squared_norm))


class ErrorCurve(harness.TrainingClock):
    """CPU seconds at each step and each validation, with what was reached then."""

    def __init__(self, bound: float | None = None) -> None:
        super().__init__(bound)
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        names = ("batch_size", "damping", "solver_iterations", "train_loss")
        values = {name: float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics}
        self.steps.append({"step": trainer.global_step, "cpu": self.seconds, **values})
        super().on_train_batch_end(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.global_step:
            error = float(trainer.callback_metrics["val_squared_error"])
            self.validations.append({"step": trainer.global_step, "cpu": self.seconds, "error": error})


def train(task: str, bound: float | None, name: str, seed: int, arguments: list[str]) -> Run:
    seeds = [f"--seed_everything={seed}", f"--data.seed={seed}"]
    with harness.fitted_recipe(f"{task}_autoencoder", [*arguments, *seeds], "autoencoders.ErrorCurve", bound=bound) as (
        cli,
        curve,
    ):
        (tested,) = cli.trainer.test(cli.model, cli.datamodule, ckpt_path="best", verbose=False)
    return {
        "name": name,
        "seed": seed,
        "seconds": curve.seconds,
        "bound": bound,
        "steps": curve.steps if name.startswith(("shf", "hf", "kronecker")) else curve.steps[-1:],
        "validations": curve.validations,
        "test_at_best": tested["test_squared_error"],
    }


def data_arguments(task: str, options: argparse.Namespace) -> list[str]:
    """The recipe's arguments for where its data come from."""
    if task == "curves":  # made by the recipe itself
        return []
    return [f"--data.data_dir={Path(options.data_dir).resolve()}", f"--data.synthetic={str(options.synthetic).lower()}"]


def by_norm_test(config: Path, directory: Path) -> Path:
    """A copy of the YAML in ``directory`` in which the norm test decides on growth, not a fixed factor."""
    settings = yaml.safe_load(config.read_text())
    callbacks = {c["class_path"].rsplit(".", 1)[1]: c for c in settings["trainer"]["callbacks"]}
    largest = callbacks["GrowingBatchSize"]["init_args"]["max_batch_size"]
    callbacks["GrowingBatchSize"]["init_args"] = {"max_batch_size": largest, "theta": 0.35}
    file = directory / "kronecker_norm_test.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def kronecker_ways(task: str, options: argparse.Namespace, output: Path) -> dict[str, list[str]]:
    """The ways of ``--kronecker``: name -> arguments of the recipe."""
    configs, data = harness.CONFIGS / f"{task}_autoencoder", data_arguments(task, options)
    config = configs / "kronecker.yaml"
    settings = yaml.safe_load(config.read_text())["model"]["init_args"]["optimizer"]["init_args"]
    l2 = settings["l2"]
    first_order = [f"--config={configs / 'adam.yaml'}", *data, f"--trainer.max_epochs={options.adam_epochs}"]
    decay = {"start_factor": 1, "end_factor": 0.01, "total_iters": options.adam_epochs}
    falling = init_arguments("lr_scheduler", **decay, class_path="torch.optim.lr_scheduler.LinearLR")
    ways = {
        "kronecker": [f"--config={config}", *data],
        "kronecker weak-start": [f"--config={config}", *data, *init_arguments("optimizer", damping=1.0)],
        "kronecker norm-test": [f"--config={by_norm_test(config, output)}", *data],
        "shf": [f"--config={configs / 'shf.yaml'}", *data],
        "hf": [f"--config={configs / 'hf.yaml'}", *data],
    }
    for rate in options.rates:
        ways[f"adam {rate}"] = [*first_order, *init_arguments("optimizer", lr=rate, weight_decay=l2)]
        ways[f"adam {rate} falling"] = [*ways[f"adam {rate}"], *falling]
    for rate in ("1e-2", "3e-2"):
        sgd = init_arguments("optimizer", "torch.optim.SGD", lr=rate, momentum=0.9, weight_decay=l2)
        ways[f"sgd {rate}"] = [*first_order, *sgd]
    lbfgs = init_arguments("optimizer", "torch.optim.LBFGS", line_search_fn="strong_wolfe")
    ways["l-bfgs"] = [*first_order, *lbfgs, "--data.batch_size=2000"]
    if find_spec("pytorch_optimizer") is not None:
        for rate in ("1e-3", "3e-3"):
            soap = init_arguments("optimizer", "pytorch_optimizer.SOAP", lr=rate, weight_decay=0)
            ways[f"soap {rate} falling"] = [*first_order, *soap, *falling]
    return ways


def init_arguments(of: str, class_path: str | None = None, **settings: object) -> list[str]:
    """Arguments of the recipe for the model's optimizer or scheduler: another class, and its settings."""
    path = f"--model.init_args.{of}"
    return [f"{path}={class_path}"] * (class_path is not None) + [
        f"{path}.init_args.{name}={value}" for name, value in settings.items()
    ]


def paper_ways(task: str, options: argparse.Namespace, output: Path) -> dict[str, list[str]]:
    """The ways without ``--kronecker``: name -> arguments of the recipe."""
    configs, data = harness.CONFIGS / f"{task}_autoencoder", data_arguments(task, options)
    shf, hf, adam = ([f"--config={configs / name}", *data] for name in ("shf.yaml", "hf.yaml", "adam.yaml"))
    bound = f"--trainer.max_steps={options.iterations}"
    ways = {"shf": [*shf, bound], "hf": [*hf, bound]}
    for rate in options.rates:
        change = [*init_arguments("optimizer", lr=rate), f"--trainer.max_epochs={options.adam_epochs}"]
        ways[f"adam {rate}"] = [*adam, *change]
    if task == "usps":
        rule = "{class_path: LevenbergMarquardt, init_args: {initial: 7.5, center: origin}}"
        change = [f"--model.init_args.optimizer.init_args.damping={rule}", "--trainer.max_steps=200"]
        ways["shf origin"] = [*shf, *change]
        ways["shf printed-norm-test"] = [*ways["shf"], "--model=autoencoders.PrintedNormTest"]
    return ways


def report(runs: Sequence[Run]) -> None:
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run["name"], []).append(run)

    harness.print_machines(runs)
    harness.print_header("run", "seed", "best validation", "at iteration", "CPU seconds there", "test there")
    for run in (run for of_name in by_name.values() for run in of_name):
        best = min(run["validations"], key=lambda v: v["error"])
        errors = (f"{best['error']:.2f}", best["step"], f"{best['cpu']:.0f}", f"{run['test_at_best']:.2f}")
        harness.print_row(run["name"], run["seed"], *errors)

    harness.print_header("SHF at iteration", *ITERATIONS)
    for name in (n for n in by_name if n.startswith(("shf", "kronecker"))):
        for run in by_name[name]:
            at = {int(v["step"]): v for v in run["validations"]}
            steps = {int(s["step"]): s for s in run["steps"]}
            cells = [progress_of(at[k], steps[k]) if k in at else "" for k in ITERATIONS]
            harness.print_row(f"{name}, seed {run['seed']}", *cells)

    harness.print_header("validation error after CPU seconds", *CPU_SECONDS)
    for name, of_name in by_name.items():
        cells = []
        for seconds in CPU_SECONDS:
            errors_then = (lowest(run, seconds) for run in of_name)
            cell = " / ".join(f"{error:.2f}" for error in errors_then if error < float("inf"))
            finished = all(run["validations"][-1]["cpu"] < seconds for run in of_name)
            cells.append(f"({cell})" if finished else cell)
        harness.print_row(name, *cells)
    if "kronecker" in by_name:
        compare_with_adam(by_name)


def progress_of(validation: dict[str, float], step: dict[str, float]) -> str:
    """Error, seconds, batch size and solver iterations of SHF at an iteration."""
    return (
        f"{validation['error']:.2f}; {validation['cpu']:.0f} s; n {step['batch_size']:.0f}; "
        f"{step['solver_iterations']:.0f} its; λ {step['damping']:.2f}"
    )


def lowest(run: Run, seconds: float = float("inf")) -> float:
    """The lowest validation error within so many CPU seconds; infinite before the first validation."""
    return min((v["error"] for v in run["validations"] if v["cpu"] <= seconds), default=float("inf"))


def compare_with_adam(by_name: dict[str, list[Run]]) -> None:
    """For each seed, the lowest error that Adam has with any rate, and who reaches it after which seconds."""
    runs = [run for of_name in by_name.values() for run in of_name]
    harness.print_header("seed", "Adam: lowest error", "ways: CPU s to that error, lowest error")
    for seed in sorted({run["seed"] for run in runs if run["name"].startswith("adam")}):
        of_seed = [run for run in runs if run["seed"] == seed]
        adam = min((run for run in of_seed if run["name"].startswith("adam")), key=lowest)
        error, cells = lowest(adam), []
        for run in (adam, *(run for run in of_seed if run["name"].startswith("kronecker"))):
            reached = min((v["cpu"] for v in run["validations"] if v["error"] <= error), default=float("inf"))
            cells.append(f"{run['name']} {reached:.0f}, {lowest(run):.3f}")
        harness.print_row(seed, f"{error:.3f}", "; ".join(cells))


@style.readable
def draw_errors(by_name: dict[str, list[Run]]) -> Figure:
    """Validation error against CPU seconds of the papers' ways; a curve for each seed."""
    figure = Figure(figsize=(style.WIDTH, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label in DRAWN.items():
        for i, run in enumerate(by_name.get(name, [])):
            cpu, error = zip(*((v["cpu"], v["error"]) for v in run["validations"]), strict=True)
            shown = None if i else label + name.replace("adam", ",") * name.startswith("adam")
            axes.plot(cpu, error, color=style.color_of(label), label=shown, **style.seed_style(i))
    drawn = [run for name in DRAWN for run in by_name.get(name, [])]
    axes.set(xlabel="CPU seconds, one thread", ylabel="validation error, mean of ‖x̂ - x‖²")
    axes.set(xscale="log", yscale="log")
    axes.set_xlim(left=max(2.0, 0.9 * min((run["validations"][0]["cpu"] for run in drawn), default=0.0)))
    style.plain_ticks(axes.xaxis, axes.yaxis)
    axes.grid()
    style.legend_below(figure, axes, style.explain_seeds({run["seed"] for run in drawn}), columns=3)
    return figure


@style.readable
def draw_sizes(runs: Sequence[Run]) -> Figure:
    """Batch size and solver iterations of SHF against CPU seconds."""
    figure = Figure(figsize=(style.WIDTH, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, run in enumerate(runs):
        columns = ((s["cpu"], s["batch_size"], s["solver_iterations"]) for s in run["steps"])
        cpu, size, iterations = zip(*columns, strict=True)
        look = style.seed_style(i)
        axes.plot(cpu, size, color=style.SHF, label=None if i else "samples in a batch", **look)
        axes.plot(cpu, iterations, color=style.RLS, label=None if i else "LSMR iterations of a step", **look)
    axes.set(xlabel="CPU seconds, one thread", ylabel="number of samples or iterations", xscale="log", yscale="log")
    axes.set_xlim(left=1)
    style.plain_ticks(axes.xaxis, axes.yaxis)
    axes.grid()
    style.legend_below(figure, axes, style.explain_seeds({run["seed"] for run in runs}), columns=2)
    return figure


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("task", choices=("usps", "mnist", "curves"), help="curves needs no data files")
    harness.add_data_options(parser)
    harness.add_run_options(parser, None, seeds=[0, 1])
    parser.add_argument("--iterations", type=int, default=390, help="bound for SHF")
    parser.add_argument("--adam-epochs", type=int, default=800, help="bound for Adam")
    parser.add_argument("--rates", nargs="+", default=["5e-4", "1e-3", "2e-3", "3e-3"], help="of Adam")
    parser.add_argument("--kronecker", action="store_true", help="SHF with Kronecker factors and its rivals")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="run these ways only, e.g. 'adam 1e-3'")
    parser.add_argument("--cpu-seconds", type=float, help="bound for each run, CPU time")
    options = parser.parse_args()
    output = harness.make_directory(options.output or harness.RESULTS / options.task)
    make = kronecker_ways if options.kronecker else paper_ways
    ways = make(options.task, options, output)
    if unknown := set(options.only or ()) - set(ways):
        raise SystemExit(f"--only names {', '.join(unknown)}; there are: {', '.join(ways)}")
    runs = {
        harness.run_name(name, seed): partial(train, options.task, options.cpu_seconds, name, seed, arguments)
        for seed in options.seeds
        for name, arguments in ways.items()
        if name in (options.only or ways)
    }
    report(harness.run_all(output, runs, options.report))


if __name__ == "__main__":
    main()
