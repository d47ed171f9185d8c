"""Samples, steps and CPU seconds to the same validation loss: a small batch, a large one, and one that grows.

    OMP_NUM_THREADS=1 python benchmarks/growing_batch_size.py mnist --data-dir DIRECTORY [--rates 0.02 0.1] [--jobs 2]
    OMP_NUM_THREADS=1 python benchmarks/growing_batch_size.py cifar --data-dir DIRECTORY

An ordinary project, in which only the batch differs: a ``Classifier`` in Lightning's automatic optimization, SGD with
momentum 0.9 at a fixed rate, an ordinary shuffling ``DataLoader`` of batches of 32 or of 1024, and batches of 32 with
``GrowingBatchSize()`` in the callbacks, also with theta=1 (the gradient may err by its own length, not by half of it) and
with a look at every tenth step only. The networks are those of ``recipes/mnist_fnn`` (784-512-10, on 50,000 images)
and of ``recipes/cifar_cnn`` narrowed to 16 channels and 128 hidden units (on 10,000 images). The validation loss is taken
five times an epoch; a run ends when it is at the target, or at a bound on CPU seconds. A rate that suits one batch may not
suit another: hence several, and each way may be judged at its best.

Each run is a process of its own with one thread, and is skipped where its file is in ``--output`` already; the table and
the picture are made of all files that are there. Seconds are CPU time of the process from the start of training on,
without the validations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from lightning_struct.data import CIFAR10DataModule, InMemoryDataModule, MNISTDataModule
from lightning_struct.data.in_memory import keep_batch
from lightning_struct.models import Classifier, fully_connected, mini_vgg

SMALL, LARGE = 32, 1024
WAYS: dict[
    str, tuple[int, dict[str, Any] | None]
] = {  # size at the start, arguments of GrowingBatchSize if there is one
    f"fixed {SMALL}": (SMALL, None),
    f"fixed {LARGE}": (LARGE, None),
    "growing": (SMALL, {}),
    "growing, theta 1": (SMALL, {"theta": 1.0}),
    "growing, theta 1, every 10 steps": (SMALL, {"theta": 1.0, "every_n_steps": 10}),
}
TARGETS = {"mnist": 0.1, "cifar": 1.2}
COLORS = dict(zip(WAYS, ("C1", "C2", "C3", "C0", "C4"), strict=True))
MEASURES = {"samples": "samples seen", "steps": "optimizer steps", "seconds": "CPU seconds"}


class Progress(L.Callback):
    """Validation loss against what was spent on it; ends the run at a target or a bound."""

    def __init__(self, target: float, seconds: float) -> None:
        self.target, self.bound = target, seconds
        self.samples = 0
        self.seconds = 0.0
        self.validations: list[dict[str, float]] = []
        self._running_since = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._running_since = time.process_time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += len(batch[0])
        if self.seconds + time.process_time() - self._running_since > self.bound:
            trainer.should_stop = True

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds += time.process_time() - self._running_since

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss, accuracy = (trainer.callback_metrics[name].item() for name in ("val_loss", "val_accuracy"))
        spent = {"samples": self.samples, "steps": trainer.global_step, "seconds": self.seconds}
        self.validations.append({**spent, "loss": loss, "accuracy": accuracy})
        if loss <= self.target:
            trainer.should_stop = True
        self._running_since = time.process_time()


def data_and_network(task: str, options: argparse.Namespace) -> tuple[InMemoryDataModule, torch.nn.Module]:
    if task == "mnist":
        return MNISTDataModule(options.data_dir, synthetic=options.synthetic), fully_connected((784, 512, 10))
    data = CIFAR10DataModule(options.data_dir, train_size=10_000, val_size=2_000, synthetic=options.synthetic)
    return data, mini_vgg(channels=16, hidden=128)


def run_job(options: argparse.Namespace, way: str, rate: float, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)
    data, network = data_and_network(options.task, options)
    data.prepare_data()
    data.setup("fit")
    assert data.splits is not None
    batch_size, arguments = WAYS[way]
    growing = [] if arguments is None else [GrowingBatchSize(**arguments)]
    progress = Progress(options.target or TARGETS[options.task], options.seconds)
    trainer = L.Trainer(
        max_epochs=-1,
        val_check_interval=0.2,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*growing, progress],
    )
    trainer.fit(
        Classifier(network, optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9)),
        DataLoader(data.splits.train, batch_size=batch_size, shuffle=True, collate_fn=keep_batch),
        DataLoader(data.splits.val, batch_size=1000, collate_fn=keep_batch),
    )
    records = growing[0].records if growing else []
    largest = accumulate((record["batch_size"] for record in records), max)  # what is smaller is the rest of an epoch
    sizes = [{"samples": record["samples"], "size": size} for record, size in zip(records, largest, strict=True)]
    sizes = [*sizes[::10], *sizes[-1:]]
    return {"way": way, "rate": rate, "seed": seed, "validations": progress.validations, "sizes": sizes}


def reached(run: dict[str, Any], target: float) -> dict[str, float] | None:
    """What had been spent at the first validation at the target."""
    return next((validation for validation in run["validations"] if validation["loss"] <= target), None)


def report(runs: list[dict[str, Any]], target: float) -> None:
    print(f"\nTo a validation loss of {target}: medians over seeds (lowest to highest)\n")
    print("| batch | rate | samples | steps | CPU seconds | accuracy there | last batch |")
    print("|---|---|---|---|---|---|---|")
    for rate in sorted({run["rate"] for run in runs}):
        for way, (start, _) in WAYS.items():
            chosen = [run for run in runs if run["way"] == way and run["rate"] == rate]
            if not chosen:
                continue
            there = [point for run in chosen if (point := reached(run, target)) is not None]
            if len(there) < len(chosen):
                best = statistics.median(min(v["loss"] for v in run["validations"]) for run in chosen)
                seconds = statistics.median(run["validations"][-1]["seconds"] for run in chosen)
                count = f"{len(there)} of {len(chosen)} seeds got there; best {best:.3f} in {seconds:.0f} CPU seconds"
                print(f"| {way} | {rate:g} | {count} | | | | |")
                continue
            last = [run["sizes"][-1]["size"] if run["sizes"] else start for run in chosen]
            cells = [spread([point[name] for point in there], "{:,.0f}") for name in ("samples", "steps")]
            cells.append(spread([point["seconds"] for point in there], "{:.1f}"))
            cells.append(spread([100 * point["accuracy"] for point in there], "{:.1f} %"))
            print(f"| {way} | {rate:g} | " + " | ".join(cells) + f" | {spread(last, '{:,.0f}')} |")


def spread(values: list[float], form: str) -> str:
    middle, low, high = (form.format(value) for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def draw(runs: list[dict[str, Any]], target: float) -> Figure:
    rates = sorted({run["rate"] for run in runs})
    figure = Figure(figsize=(15, 3.6 * len(rates)), layout="constrained")
    rows = figure.subplots(len(rates), 4, squeeze=False)
    for rate, row in zip(rates, rows, strict=True):
        for way, (start, _) in WAYS.items():
            for i, run in enumerate(run for run in runs if run["way"] == way and run["rate"] == rate):
                style: dict[str, Any] = {
                    "color": COLORS[way],
                    "alpha": 1 - 0.35 * min(i, 2),
                    "label": None if i else way,
                }
                losses = [validation["loss"] for validation in run["validations"]]
                for axes, name in zip(row, MEASURES, strict=False):
                    axes.plot([validation[name] for validation in run["validations"]], losses, **style)
                end = run["validations"][-1]["samples"]
                sizes = run["sizes"] or [{"samples": samples, "size": start} for samples in (0, end)]
                row[3].plot([s["samples"] for s in sizes], [s["size"] for s in sizes], drawstyle="steps-post", **style)
        for axes, label in zip(row, MEASURES.values(), strict=False):
            axes.set(xlabel=label, ylabel=f"validation loss, rate {rate:g}", xscale="log", yscale="log")
            axes.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        row[3].set(xlabel="samples seen", ylabel="samples in a batch", xscale="log", yscale="log")
        row[3].set_xlim(row[0].get_xlim())
        for axes in row:
            axes.grid(which="both", alpha=0.25)
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(WAYS))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=tuple(TARGETS))
    parser.add_argument("--data-dir", default="data", help="where the files of the data set are")
    parser.add_argument("--synthetic", action="store_true", help="procedurally made images instead of the files")
    parser.add_argument("--output", type=Path, help="default: results/benchmarks/growing_TASK")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.1], help="of SGD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, help="validation loss; default: 0.1 for mnist, 1.2 for cifar")
    parser.add_argument("--seconds", type=float, default=120, help="bound for each run, CPU time of training")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        way, rate, seed, file = json.loads(options.job)
        Path(file).write_text(json.dumps(run_job(options, way, rate, seed)))
        return
    output = (options.output or Path("results/benchmarks") / f"growing_{options.task}").resolve()
    output.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:]

    def start(job: tuple[str, float, int]) -> Path:
        way, rate, seed = job
        file = output / f"{way.replace(',', '').replace(' ', '_')}_{rate:g}_{seed}.json"
        if not file.exists():
            call = json.dumps([way, rate, seed, str(file)])
            command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *given, "--job", call]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(
                f"{way}, rate {rate:g}, seed {seed}: {'done' if done.returncode == 0 else done.stderr[-2000:]}",
                flush=True,
            )
        return file

    jobs = [(way, rate, seed) for seed in options.seeds for rate in options.rates for way in options.ways]
    with ThreadPoolExecutor(options.jobs) as pool:
        files = list(pool.map(start, jobs))
    runs = [json.loads(file.read_text()) for file in files if file.exists()]
    if runs:
        target = options.target or TARGETS[options.task]
        report(runs, target)
        draw(runs, target).savefig(output / "growing_batch_size.png", dpi=150)
        print(f"\npicture: {output / 'growing_batch_size.png'}")


if __name__ == "__main__":
    main()
