"""Samples, steps and CPU seconds to the same validation loss: a small batch, a large one, and one that grows.

    OMP_NUM_THREADS=1 python benchmarks/growing_batch_size.py mnist --data-dir DIRECTORY [--rates 0.02 0.1] [--jobs 2]
    OMP_NUM_THREADS=1 python benchmarks/growing_batch_size.py cifar --data-dir DIRECTORY

The project is an ordinary one, in which only the batch differs: a ``Classifier`` in Lightning's automatic optimization, SGD
with momentum 0.9 at a fixed rate, and a shuffling ``DataLoader``. Its batches have 32 samples, or 1,024, or begin with 32 and
grow by ``GrowingBatchSize()``; this also with ``theta=1`` (the error of the gradient may be as long as the gradient, not half
as long), and with ``theta=1`` and a measurement at every tenth step only. The networks are those of ``recipes/mnist_fnn``
(784-512-10, on 50,000 images) and of ``recipes/cifar_cnn`` narrowed to 16 channels and 128 hidden units (on 10,000 images).
The validation loss is measured five times an epoch. A run ends when it is at the target, or at a bound on CPU seconds. A rate
that suits one batch may not suit another: hence several rates, so that each way can be judged by its best.

Each run is a process of its own with one thread, and is kept in ``--output``: a benchmark that was stopped goes on where it
was. Seconds are CPU time of training, without the validations. The default is 30 runs of at most two minutes, about 40
minutes of one core.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

import harness
from harness import Run
from lightning_struct import GrowingBatchSize
from lightning_struct.data import CIFAR10DataModule, InMemoryDataModule, MNISTDataModule
from lightning_struct.data.in_memory import keep_batch
from lightning_struct.models import Classifier, fully_connected, mini_vgg

SMALL, LARGE = 32, 1024
# The size at the start, and the arguments of GrowingBatchSize where the batch grows.
WAYS: dict[str, tuple[int, dict[str, Any] | None]] = {
    f"fixed {SMALL}": (SMALL, None),
    f"fixed {LARGE}": (LARGE, None),
    "growing": (SMALL, {}),
    "growing, theta 1": (SMALL, {"theta": 1.0}),
    "growing, theta 1, every 10 steps": (SMALL, {"theta": 1.0, "every_n_steps": 10}),
}
TARGETS = {"mnist": 0.1, "cifar": 1.2}
COLORS = dict(zip(WAYS, ("C1", "C2", "C3", "C0", "C4"), strict=True))
MEASURES = {"samples": "samples seen", "steps": "optimizer steps", "seconds": "CPU seconds of training"}


class LossCurve(harness.TrainingClock):
    """Validation losses, with what had been spent until then; ends the run at a target or a bound."""

    def __init__(self, target: float, seconds: float) -> None:
        super().__init__(seconds, count_validation=False)
        self.target = target
        self.samples = 0
        self.validations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        _, batch, _ = arguments
        self.samples += len(batch[0])
        super().on_train_batch_end(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss, accuracy = (trainer.callback_metrics[name].item() for name in ("val_loss", "val_accuracy"))
        spent = {"samples": self.samples, "steps": trainer.global_step, "seconds": self.seconds}
        self.validations.append({**spent, "loss": loss, "accuracy": accuracy})
        if loss <= self.target:
            trainer.should_stop = True
        super().on_validation_end(trainer, pl_module)


def data_and_network(task: str, options: argparse.Namespace) -> tuple[InMemoryDataModule, torch.nn.Module]:
    if task == "mnist":
        return MNISTDataModule(options.data_dir, synthetic=options.synthetic), fully_connected((784, 512, 10))
    data = CIFAR10DataModule(options.data_dir, train_size=10_000, val_size=2_000, synthetic=options.synthetic)
    return data, mini_vgg(channels=16, hidden=128)


def train(options: argparse.Namespace, way: str, rate: float, seed: int) -> Run:
    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)
    data, network = data_and_network(options.task, options)
    data.prepare_data()
    data.setup("fit")
    assert data.splits is not None
    batch_size, arguments = WAYS[way]
    growing = [] if arguments is None else [GrowingBatchSize(**arguments)]
    curve = LossCurve(options.target or TARGETS[options.task], options.seconds)
    trainer = harness.bare_trainer(*growing, curve, max_epochs=-1, val_check_interval=0.2)
    trainer.fit(
        Classifier(network, optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9)),
        DataLoader(data.splits.train, batch_size=batch_size, shuffle=True, collate_fn=keep_batch),
        DataLoader(data.splits.val, batch_size=1000, collate_fn=keep_batch),
    )
    records = growing[0].records if growing else []
    largest = accumulate((record["batch_size"] for record in records), max)  # smaller ones are the rest of an epoch
    sizes = [{"samples": record["samples"], "size": size} for record, size in zip(records, largest, strict=True)]
    sizes = [*sizes[::10], *sizes[-1:]]
    return {"way": way, "rate": rate, "seed": seed, "validations": curve.validations, "sizes": sizes}


def reached(run: Run, target: float) -> dict[str, float] | None:
    """The first validation at the target."""
    return next((validation for validation in run["validations"] if validation["loss"] <= target), None)


def report(runs: Sequence[Run], target: float) -> None:
    print(f"\nTo a validation loss of {target}: medians over seeds (lowest to highest)")
    harness.print_machines(runs)
    harness.print_header("batch", "rate", "samples", "steps", "CPU seconds", "accuracy there", "last batch")
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
                harness.print_row(way, f"{rate:g}", count, "", "", "", "")
                continue
            harness.print_row(
                way,
                f"{rate:g}",
                harness.spread([point["samples"] for point in there], "{:,.0f}"),
                harness.spread([point["steps"] for point in there], "{:,.0f}"),
                harness.spread([point["seconds"] for point in there], "{:.1f}"),
                harness.spread([100 * point["accuracy"] for point in there], "{:.1f} %"),
                harness.spread([run["sizes"][-1]["size"] if run["sizes"] else start for run in chosen], "{:,.0f}"),
            )


@harness.readable
def draw(runs: Sequence[Run], target: float) -> Figure:
    """Validation loss over samples, steps and seconds, and the size of the batch; a column for each rate."""
    rates = sorted({run["rate"] for run in runs})
    figure = Figure(figsize=(harness.WIDTH, 11), layout="constrained")
    rows = figure.subplots(4, len(rates), squeeze=False)
    for rate, column in zip(rates, rows.T, strict=True):
        *losses, sizes = column
        for way, (start, _) in WAYS.items():
            for i, run in enumerate(run for run in runs if run["way"] == way and run["rate"] == rate):
                style: dict[str, Any] = {**harness.seed_style(i), "color": COLORS[way], "label": None if i else way}
                values = [validation["loss"] for validation in run["validations"]]
                for axes, name in zip(losses, MEASURES, strict=True):
                    axes.plot([validation[name] for validation in run["validations"]], values, **style)
                end = run["validations"][-1]["samples"]
                steps = run["sizes"] or [{"samples": samples, "size": start} for samples in (0, end)]
                sizes.plot([s["samples"] for s in steps], [s["size"] for s in steps], drawstyle="steps-post", **style)
        for axes, label in zip(losses, MEASURES.values(), strict=True):
            axes.set(xlabel=label, ylabel="validation loss, nats", xscale="log", yscale="log")
            axes.axhline(target, color="grey", linewidth=1, linestyle="--")
        sizes.set(xlabel="samples seen", ylabel="samples in a batch", xscale="log", yscale="log")
        sizes.set_xlim(losses[0].get_xlim())
        losses[0].set_title(f"learning rate {rate:g}")
        for axes in column:
            harness.plain_ticks(axes.xaxis, axes.yaxis)
            axes.grid(alpha=0.25)
    seeds = harness.explain_seeds({run["seed"] for run in runs})
    harness.legend_below(figure, rows[0][0], f"{seeds}; dashed: the loss aimed at, {target:g}", columns=3)
    return figure


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("task", choices=tuple(TARGETS))
    harness.add_data_options(parser)
    parser.add_argument("--output", type=Path, help="default: results/benchmarks/growing_TASK")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.1], help="of SGD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, help="validation loss; default: 0.1 for mnist, 1.2 for cifar")
    parser.add_argument("--seconds", type=float, default=120, help="bound for each run, CPU time of training")
    harness.add_job_options(parser)
    options = parser.parse_args()
    if options.job:
        harness.answer_job(options.job, partial(train, options))
        return
    output = harness.make_directory(options.output or harness.RESULTS / f"growing_{options.task}")
    jobs = [
        harness.Job(
            f"{way}, rate {rate:g}, seed {seed}",
            output / harness.file_name(way.replace(",", ""), f"{rate:g}", seed),
            {"way": way, "rate": rate, "seed": seed},
        )
        for seed in options.seeds
        for rate in options.rates
        for way in options.ways
    ]
    if runs := harness.run_jobs(jobs, options.jobs):
        target = options.target or TARGETS[options.task]
        report(runs, target)
        draw(runs, target).savefig(output / "growing_batch_size.png")
        print(f"\npicture: {output / 'growing_batch_size.png'}")


if __name__ == "__main__":
    main()
