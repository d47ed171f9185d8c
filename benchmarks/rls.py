"""RLS against Adam on the tasks of Zhang et al.: accuracy after the same number of epochs, and the cost of a step.

    OMP_NUM_THREADS=1 python benchmarks/rls.py compare mnist --data-dir DIRECTORY [--seeds 0 1] [--epochs 10]
    OMP_NUM_THREADS=1 python benchmarks/rls.py compare cifar --data-dir DIRECTORY
    OMP_NUM_THREADS=1 python benchmarks/rls.py sweep mnist --data-dir DIRECTORY --seeds 0
    OMP_NUM_THREADS=1 python benchmarks/rls.py rivals vgg resnet lstm mnist transformer --data-dir DIRECTORY
    python benchmarks/rls.py compare cifar --full-network --full-data --device cuda --data-dir DIRECTORY

``compare`` trains the ways of the paper's figures 2 and 3: Adam and RLS under the squared error, Adam and HRLS (RLS on
the hidden layers, Adam on the output layer) under the cross-entropy; M is momentum, R the L1 term. ``sweep`` trains
those of its figures 4 and 5: RLS with another k or another η. The settings are those of ``recipes/mnist_fnn``,
``recipes/cifar_cnn`` and ``recipes/imdb_lstm``, but the validation images are trained on, too. Two of the tasks are
smaller, for a CPU:

- ``mnist``: 784-512-10 and all 60,000 training images, as in the paper;
- ``cifar``: 16 channels, 512 hidden units, 10,000 training and 2,000 test images;
- ``imdb``: two layers of 64 units, embedding of 64, 100 words, 5,000 training and 2,500 test reviews.

``--full-network`` is the recipe's, ``--full-data`` all data. Ways that share a seed begin with the same weights and see
the same batches. All batches have 128 samples: what is left over at the end of an epoch is dropped, since RLS would
take as large a step from a few samples as from 128. The training loss is the mean over an epoch, while it is trained.
Seconds are CPU time of training (wall time on a GPU), without the evaluations. The whole of ``compare`` takes about
half an hour. Runs are kept in ``--output``, and the table is made of all that are there.

``rivals`` trains RLS and what people use now in equal CPU time; ``rls_rivals.py`` says how.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

import harness
import rls_rivals
from harness import Run
from lightning_struct.data import CIFAR10DataModule, IMDBDataModule, InMemoryDataModule, MNISTDataModule
from lightning_struct.data.in_memory import BatchedTensorDataset, keep_batch
from lightning_struct.models import Classifier, RecurrentNetwork, RLSClassifier, fully_connected, mini_vgg
from lightning_struct.optim import RLS

BATCH_SIZE = 128
VALUES = (0.01, 0.1, 1.0, 10.0)
ADAM = partial(torch.optim.Adam, lr=1e-3)


@dataclass(frozen=True)
class Task:
    """Settings in which the tasks differ.

    Attributes:
        data: makes the data module.
        subset: its arguments without ``--full-data``.
        network: makes the network.
        narrow: its arguments without ``--full-network``.
        classes: outputs of the network.
        level: the test accuracy whose first epoch the table names.
        epochs: by default.
        l1, max_grad_norm: the paper's.
    """

    data: Callable[..., InMemoryDataModule]
    subset: dict[str, int]
    network: Callable[..., nn.Module]
    narrow: dict[str, int]
    classes: int
    level: float
    epochs: int
    l1: float
    max_grad_norm: float


TASKS = {
    "mnist": Task(MNISTDataModule, {}, fully_connected, {}, 10, 0.98, 10, 1e-5, 5.0),
    "cifar": Task(
        CIFAR10DataModule,
        {"train_size": 9_000, "val_size": 1_000, "test_size": 2_000},
        mini_vgg,
        {"channels": 16, "hidden": 512},
        10,
        0.60,
        10,
        1e-5,
        5.0,
    ),
    "imdb": Task(
        IMDBDataModule,
        {"train_size": 4_500, "val_size": 500, "test_size": 2_500, "max_length": 100},
        RecurrentNetwork,
        {"hidden_size": 64, "embedding_size": 64},
        2,
        0.75,
        10,
        1e-6,
        1.0,
    ),
}

Way = tuple[str, dict[str, Any] | None]  # the loss, and the arguments of RLS: None for Adam alone
Ways = dict[str, Way]


def squared_error(task: Task) -> Ways:
    return {
        "Adam": ("mse", None),
        "RLS": ("mse", {}),
        "RLS+M": ("mse", {"momentum": 0.5}),
        "RLS+M+R": ("mse", {"momentum": 0.5, "l1": task.l1}),
    }


def cross_entropy(task: Task) -> Ways:
    hybrid = {"exclude": ["network.output"]}
    return {
        "Adam, cross-entropy": ("cross_entropy", None),
        "HRLS": ("cross_entropy", hybrid),
        "HRLS+M": ("cross_entropy", {**hybrid, "momentum": 0.5}),
        "HRLS+M+R": ("cross_entropy", {**hybrid, "momentum": 0.5, "l1": task.l1}),
    }


def columns_of(what: str, task: Task) -> dict[str, Ways]:
    """The ways by the title of their column in the picture."""
    if what == "compare":
        return {"squared error": squared_error(task), "cross-entropy": cross_entropy(task)}
    both = "k = 0.1, η = 1"  # trained once, shown in both columns
    return {
        "ratio k (η = 1)": {both if k == 0.1 else f"k = {k:g}": ("mse", {"ratio": k}) for k in VALUES},
        "gradient scale η (k = 0.1)": {
            both if eta == 1.0 else f"η = {eta:g}": ("mse", {"gradient_scale": eta}) for eta in VALUES
        },
    }


def make_rls(module: nn.Module, task: Task, arguments: dict[str, Any]) -> RLS:
    """RLS in the paper's settings but for the arguments; Adam trains what it does not."""
    paper: dict[str, Any] = {
        "ratio": 0.1,
        "gradient_scale": 1.0,
        "max_grad_norm": task.max_grad_norm,
        "max_gain": None,
        "form": "full",
        "auxiliary": ADAM,
    }
    return RLS(module, **(paper | arguments))


def synchronized_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


CLOCKS = {"cpu": time.process_time, "cuda": synchronized_clock}


# --- training ---------------------------------------------------------------------------------------------------------


class EpochCurve(harness.TrainingClock):
    """Losses, accuracy and seconds of each epoch."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(count_validation=False, now=now)
        self.epochs: list[dict[str, float]] = []
        self._loss = torch.zeros(())  # a sum over batches
        self._began = self._seconds = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._loss, self._began = torch.zeros((), device=pl_module.device), self.seconds

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        outputs, *_ = arguments
        self._loss += outputs["loss"].detach()
        if trainer.is_last_batch:
            self._seconds = self.seconds - self._began

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        self.epochs.append(
            {
                "seconds": self._seconds,
                "train_loss": self._loss.item() / trainer.num_training_batches,
                "test_loss": metrics["val_loss"].item(),
                "test_accuracy": metrics["val_accuracy"].item(),
            }
        )
        super().on_validation_end(trainer, pl_module)


def load_data(task: Task, options: argparse.Namespace) -> tuple[BatchedTensorDataset, BatchedTensorDataset]:
    """Training and validation set as one, and the test set."""
    sizes = {} if options.full_data else task.subset
    data = task.data(data_dir=options.data_dir, synthetic=options.synthetic, **sizes)
    data.prepare_data()
    data.setup("fit")
    assert data.splits is not None
    parts = zip(data.splits.train.tensors, data.splits.val.tensors, strict=True)
    return BatchedTensorDataset(*(torch.cat(tensors) for tensors in parts)), data.splits.test


def train(
    task: Task,
    way: Way,
    seed: int,
    data: tuple[BatchedTensorDataset, BatchedTensorDataset],
    options: argparse.Namespace,
) -> Run:
    """Losses and accuracies after each epoch, and the error that ended the run if one did."""
    L.seed_everything(seed, verbose=False)
    network = task.network(**({} if options.full_network else task.narrow))
    loss, arguments = way
    kind, optimizer = (
        (Classifier, ADAM) if arguments is None else (RLSClassifier, partial(make_rls, task=task, arguments=arguments))
    )
    curve = EpochCurve(CLOCKS[options.device])
    trainer = harness.bare_trainer(
        curve,
        max_epochs=options.epochs or task.epochs,
        gradient_clip_val=task.max_grad_norm if arguments is None else None,
        accelerator=options.device,
    )
    training, test = data
    error = None
    try:
        trainer.fit(
            kind(network, task.classes, loss, optimizer),  # type: ignore[arg-type]
            DataLoader(training, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, collate_fn=keep_batch),
            DataLoader(test, batch_size=500, collate_fn=keep_batch),
        )
    except ValueError as not_finite:  # the way diverged, which is a result
        error = str(not_finite)
    return {"epochs": curve.epochs, "seconds": curve.seconds, "error": error}


def run_all(task: Task, options: argparse.Namespace) -> None:
    columns = columns_of(options.what, task)
    full = [f"full_{what}" for what in ("network", "data") if getattr(options, f"full_{what}")]
    folder = "_".join([options.what, options.task, f"{options.epochs or task.epochs}_epochs", *full])
    output = harness.make_directory((options.output or harness.RESULTS / "rls") / folder)
    data: list[tuple[BatchedTensorDataset, BatchedTensorDataset]] = []  # loaded for the first run that is missing

    def run(name: str, way: Way, seed: int) -> Run:
        if not data:
            data.append(load_data(task, options))
        return {"way": name, "seed": seed, **train(task, way, seed, data[0], options)}

    ways = {name: way for ways in columns.values() for name, way in ways.items()}
    wanted = list(product(options.seeds, (name for name in ways if not options.ways or name in options.ways)))
    for seed, name in harness.progress(wanted, len(wanted)):
        result = harness.run_once(output, harness.run_name(name, seed), partial(run, name, ways[name], seed))
        if result is not None:
            print(f"{name}, seed {seed}: {result['error'] or 'done'}", flush=True)
    runs = harness.load_runs(output)
    print_table(runs, columns, task.level)


def print_table(runs: Sequence[Run], columns: dict[str, Ways], level: float) -> None:
    def cells(of_way: Sequence[Run], value: Callable[[list[dict[str, float]]], str]) -> str:
        return " / ".join(value(run["epochs"]) if run["epochs"] else "-" for run in of_way)

    def first(epochs: list[dict[str, float]]) -> str:
        return next((str(i) for i, epoch in enumerate(epochs, 1) if epoch["test_accuracy"] >= level), "-")

    harness.print_machines(runs)
    harness.print_header(
        "way",
        "seeds",
        "test % after epoch 1",
        "best",
        "last",
        f"first epoch with {level:.0%}",
        "training loss of the last",
        "seconds an epoch",
    )
    for way in dict.fromkeys(way for ways in columns.values() for way in ways):
        of_way = [run for run in runs if run["way"] == way]
        if not of_way:
            continue
        row = [
            way,
            " / ".join(str(run["seed"]) for run in of_way),
            cells(of_way, lambda epochs: f"{epochs[0]['test_accuracy']:.2%}"),
            cells(of_way, lambda epochs: f"{max(epoch['test_accuracy'] for epoch in epochs):.2%}"),
            cells(of_way, lambda epochs: f"{epochs[-1]['test_accuracy']:.2%}"),
            cells(of_way, first),
            cells(of_way, lambda epochs: f"{epochs[-1]['train_loss']:.3g}"),
            cells(of_way, lambda epochs: f"{statistics.median(epoch['seconds'] for epoch in epochs):.1f}"),
        ]
        diverged = [f"seed {run['seed']} diverged in epoch {len(run['epochs']) + 1}" for run in of_way if run["error"]]
        print(f"| {' | '.join(row)} |{' ' + ', '.join(diverged) if diverged else ''}")


def main() -> None:
    parser = harness.make_parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("compare", "sweep"):
        command = commands.add_parser(what)
        command.add_argument("task", choices=tuple(TASKS))
        command.add_argument("--ways", nargs="+", help="names of the tables' rows; default: all")
        command.add_argument("--device", choices=tuple(CLOCKS), default="cpu")
        harness.add_data_options(command)
        command.add_argument("--full-network", action="store_true", help="the recipe's, also for cifar and imdb")
        command.add_argument("--full-data", action="store_true", help="all data, also for cifar and imdb")
        command.add_argument("--epochs", type=int, help="default: 10")
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
        command.add_argument("--output", type=Path, help="default: results/benchmarks/rls")
    rls_rivals.add_options(commands.add_parser("rivals"))
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if options.what == "rivals":
        rls_rivals.run_all(options)
    else:
        run_all(TASKS[options.task], options)


if __name__ == "__main__":
    main()
