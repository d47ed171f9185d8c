"""RLS against Adam on the tasks of Zhang et al.: accuracy after the same number of epochs, and the cost of a step.

    OMP_NUM_THREADS=1 python benchmarks/rls.py compare mnist --data-dir DIRECTORY [--seeds 0 1] [--epochs 10]
    OMP_NUM_THREADS=1 python benchmarks/rls.py compare cifar --data-dir DIRECTORY
    OMP_NUM_THREADS=1 python benchmarks/rls.py sweep mnist --data-dir DIRECTORY --seeds 0
    OMP_NUM_THREADS=1 python benchmarks/rls.py rivals vgg resnet lstm mnist transformer --data-dir DIRECTORY
    OMP_NUM_THREADS=1 python benchmarks/rls.py speed [mnist cifar imdb]

``compare`` trains the ways of the paper's figures 2 and 3: Adam and RLS under the squared error, Adam and HRLS (RLS on
the hidden layers, Adam on the output layer) under the cross-entropy; M is momentum, R the L1 term. ``sweep`` trains
those of its figures 4 and 5: RLS with another k or another η. The settings are those of ``recipes/mnist_fnn``,
``recipes/cifar_cnn`` and ``recipes/imdb_lstm``, but the validation images are trained on, too. Two of the tasks are
smaller, for a CPU:

- ``mnist``: 784-512-10 and all 60,000 training images, as in the paper;
- ``cifar``: 16 channels, 512 hidden units, 10,000 training and 2,000 test images;
- ``imdb``: two layers of 64 units, embedding of 64, 100 words, 5,000 training and 2,500 test reviews.

Ways that share a seed begin with the same weights and see the same batches. All batches have 128 samples: what is left
over at the end of an epoch is dropped, since RLS would take as large a step from a few samples as from 128. The
training loss is the mean over an epoch, while it is trained. The whole of ``compare`` takes about half an hour. Runs
are kept in ``--output``, and the table is made of all that are there.

``rivals`` trains RLS and what people use now in equal CPU time; ``rls_rivals.py`` says how.

``speed`` measures whole training steps of RLS with its default settings over those of Adam, on the paper's networks as
the recipes have them, with batches of 128 under the cross-entropy. Rounds of all ways take turns, in CPU time on one
thread; the ratio of each round is to the Adam of that round. Both clip to the norm 5. Denormal numbers are flushed to
zero.
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
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
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
        subset: its arguments.
        network: makes the network.
        narrow: its arguments.
        classes: outputs of the network.
        l1, max_grad_norm: the paper's.
        batch: random inputs of a full network, for ``speed``.
        steps: of a round of ``speed``.
    """

    data: Callable[..., InMemoryDataModule]
    subset: dict[str, int]
    network: Callable[..., nn.Module]
    narrow: dict[str, int]
    classes: int
    l1: float
    max_grad_norm: float
    batch: Callable[[], Tensor]
    steps: int = 1


TASKS = {
    "mnist": Task(MNISTDataModule, {}, fully_connected, {}, 10, 1e-5, 5.0, lambda: torch.rand(128, 784), 20),
    "cifar": Task(
        CIFAR10DataModule,
        {"train_size": 9_000, "val_size": 1_000, "test_size": 2_000},
        mini_vgg,
        {"channels": 16, "hidden": 512},
        10,
        1e-5,
        5.0,
        lambda: torch.rand(128, 3, 32, 32),
    ),
    "imdb": Task(
        IMDBDataModule,
        {"train_size": 4_500, "val_size": 500, "test_size": 2_500, "max_length": 100},
        RecurrentNetwork,
        {"hidden_size": 64, "embedding_size": 64},
        2,
        1e-6,
        1.0,
        lambda: torch.randint(2, 20_000, (128, 200)),
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


def sweep() -> Ways:
    both = "k = 0.1, η = 1"
    ratios: Ways = {both if k == 0.1 else f"k = {k:g}": ("mse", {"ratio": k}) for k in VALUES}
    return ratios | {both if eta == 1 else f"η = {eta:g}": ("mse", {"gradient_scale": eta}) for eta in VALUES}


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


# --- training ---------------------------------------------------------------------------------------------------------


class EpochCurve(harness.TrainingClock):
    """Losses, accuracy and seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__(count_validation=False)
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
    splits = harness.splits_of(task.data(data_dir=options.data_dir, synthetic=options.synthetic, **task.subset))
    parts = zip(splits.train.tensors, splits.val.tensors, strict=True)
    return BatchedTensorDataset(*(torch.cat(tensors) for tensors in parts)), splits.test


def train(
    task: Task,
    way: Way,
    seed: int,
    data: tuple[BatchedTensorDataset, BatchedTensorDataset],
    options: argparse.Namespace,
) -> Run:
    """Losses and accuracies after each epoch, and the error that ended the run if one did."""
    L.seed_everything(seed, verbose=False)
    network = task.network(**task.narrow)
    loss, arguments = way
    kind, optimizer = (
        (Classifier, ADAM) if arguments is None else (RLSClassifier, partial(make_rls, task=task, arguments=arguments))
    )
    curve = EpochCurve()
    trainer = harness.bare_trainer(
        curve,
        max_epochs=options.epochs,
        gradient_clip_val=task.max_grad_norm if arguments is None else None,
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
    ways = sweep() if options.what == "sweep" else squared_error(task) | cross_entropy(task)
    folder = f"{options.what}_{options.task}_{options.epochs}_epochs"
    data: list[tuple[BatchedTensorDataset, BatchedTensorDataset]] = []  # loaded for the first run that is missing

    def run(name: str, seed: int) -> Run:
        if not data:
            data.append(load_data(task, options))
        return {"way": name, "seed": seed, **train(task, ways[name], seed, data[0], options)}

    wanted = product(options.seeds, (name for name in ways if not options.ways or name in options.ways))
    runs = {harness.run_name(name, seed): partial(run, name, seed) for seed, name in wanted}
    print_table(harness.run_all(options.output / folder, runs, options.report), ways)


def print_table(runs: Sequence[Run], ways: Ways) -> None:
    columns: dict[str, Callable[[list[dict[str, float]]], str]] = {
        "test % after epoch 1": lambda epochs: f"{100 * epochs[0]['test_accuracy']:.2f}",
        "best": lambda epochs: f"{100 * max(epoch['test_accuracy'] for epoch in epochs):.2f}",
        "training loss of the last epoch": lambda epochs: f"{epochs[-1]['train_loss']:.3g}",
    }
    harness.print_machines(runs)
    harness.print_header("way", "seeds", *columns, "errors")
    for way in ways:
        if of_way := [run for run in runs if run["way"] == way]:
            finished = [run["epochs"] for run in of_way if run["epochs"]]
            cells = (" / ".join(map(cell, finished)) for cell in columns.values())
            seeds = " / ".join(str(run["seed"]) for run in of_way)
            errors = " / ".join(run["error"] for run in of_way if run["error"])
            harness.print_row(way, seeds, *cells, errors)


# --- the cost of a step -----------------------------------------------------------------------------------------------


def make_step(task: Task, arguments: dict[str, Any] | None) -> Callable[[], None]:
    """One training step by RLS, or by Adam where there are no arguments."""
    torch.manual_seed(0)
    network, inputs, labels = task.network(), task.batch(), torch.randint(task.classes, (BATCH_SIZE,))
    if arguments is None:
        optimizer: torch.optim.Optimizer = ADAM(network.parameters())
    else:
        optimizer = RLS(network, auxiliary=ADAM, max_grad_norm=5.0, **arguments)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        if arguments is None:
            nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None], number: int) -> float:
    begin = time.process_time()
    for _ in range(number):
        step()
    return 1000 * (time.process_time() - begin) / number


def print_speed(options: argparse.Namespace) -> None:
    torch.set_flush_denormal(True)
    ways: dict[str, dict[str, Any]] = {"RLS": {}, "RLS, l1": {"l1": 1e-5}, "RLS, max_gain=None": {"max_gain": None}}
    print(harness.machine_line())
    harness.print_header("network", "way", "step / step with Adam (lowest to highest)", "with Adam, ms")
    for name in options.tasks:
        task = TASKS[name]
        steps = [make_step(task, arguments) for arguments in (None, *ways.values())]
        rounds = [[milliseconds(step, task.steps) for step in steps] for _ in range(options.rounds + 1)][1:]
        of_adam, *of_ways = zip(*rounds, strict=True)
        for way, times in zip(ways, of_ways, strict=True):
            ratios = [mine / adam for mine, adam in zip(times, of_adam, strict=True)]
            harness.print_row(name, way, harness.spread(ratios, bold=True), f"{statistics.median(of_adam):.1f}")


def main() -> None:
    parser = harness.make_parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("compare", "sweep"):
        command = commands.add_parser(what)
        command.add_argument("task", choices=tuple(TASKS))
        command.add_argument("--ways", nargs="+", help="names of the tables' rows; default: all")
        harness.add_data_options(command)
        command.add_argument("--epochs", type=int, default=10)
        harness.add_run_options(command, "rls", seeds=[0, 1])
    rls_rivals.add_options(commands.add_parser("rivals"))
    command = commands.add_parser("speed")
    command.add_argument("tasks", nargs="*", choices=tuple(TASKS), default=tuple(TASKS))
    command.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if options.what == "speed":
        print_speed(options)
    elif options.what == "rivals":
        rls_rivals.run_all(options)
    else:
        run_all(TASKS[options.task], options)


if __name__ == "__main__":
    main()
