"""RLS against Adam on the tasks of Zhang et al.: accuracy for the same number of epochs, and the cost of a step.

    OMP_NUM_THREADS=1 python benchmarks/rls.py compare mnist --data-dir DIRECTORY [--seeds 0 1] [--epochs 10]
    OMP_NUM_THREADS=1 python benchmarks/rls.py compare cifar --data-dir DIRECTORY
    OMP_NUM_THREADS=1 python benchmarks/rls.py sweep mnist --data-dir DIRECTORY --seeds 0
    OMP_NUM_THREADS=1 python benchmarks/rls.py steps mnist
    python benchmarks/rls.py compare cifar --full --device cuda --data-dir DIRECTORY

``compare`` trains the ways of the paper's figures 2 and 3: Adam and RLS under the squared error, Adam and HRLS (RLS on
the hidden layers, Adam on the output layer) under the cross-entropy; ``sweep`` those of its figures 4 and 5: RLS with
another k or another η. The settings are those of ``recipes/mnist_fnn`` and ``recipes/cifar_cnn``, but that nothing is kept
for validation: MNIST with 784-512-10 on all 60,000 training images, CIFAR-10 with 16 channels and 512 hidden units on
10,000 of them and 2,000 test images, or with ``--full`` the paper's network on all. Ways that share a seed have the same
weights at the start and the same batches. A run is skipped where its file is in ``--output`` already, so that seeds can be
trained by several processes at a time; the table and the picture are made of all files that are there. Training loss: the
average over an epoch, while it is trained. Seconds: CPU time of the process, which another job on the machine changes
little (wall clock on a GPU), without the evaluations.

``steps`` measures a whole step, with gradients clipped to the paper's norm, against the same one with Adam: rounds of both
in turn, and the ratio of each round; Adam's to itself shows the noise. Peak memory is that of a process of its own, over what is taken before the model is
made. ``lstm`` is an embedding of 128, two layers of 512 and sequences of 100.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_struct.data import CIFAR10DataModule, InMemoryDataModule, MNISTDataModule
from lightning_struct.data.in_memory import BatchedTensorDataset, keep_batch
from lightning_struct.models import Classifier, RLSClassifier, fully_connected, mini_vgg
from lightning_struct.optim import RLS

BATCH_SIZE, MAX_GRAD_NORM = 128, 5.0
ADAM = partial(torch.optim.Adam, lr=1e-3)
PAPER = partial(RLS, ratio=0.1, gradient_scale=1.0, max_grad_norm=MAX_GRAD_NORM)
HYBRID = partial(PAPER, exclude=["network.output"], auxiliary=ADAM)
VALUES = (0.01, 0.1, 1.0, 10.0)

# by name the loss, and what makes the RLS from the module: None for Adam alone
Ways = dict[str, tuple[str, Callable[[nn.Module], RLS] | None]]
SQUARED_ERROR: Ways = {
    "Adam": ("mse", None),
    "RLS": ("mse", PAPER),
    "RLS+M": ("mse", partial(PAPER, momentum=0.5)),
    "RLS+M+R": ("mse", partial(PAPER, momentum=0.5, l1=1e-5)),
}
CROSS_ENTROPY: Ways = {
    "Adam, cross-entropy": ("cross_entropy", None),
    "HRLS": ("cross_entropy", HYBRID),
    "HRLS+M": ("cross_entropy", partial(HYBRID, momentum=0.5)),
    "HRLS+M+R": ("cross_entropy", partial(HYBRID, momentum=0.5, l1=1e-5)),
}
RATIOS: Ways = {f"k = {k:g}": ("mse", partial(PAPER, ratio=k)) for k in VALUES}
SCALES: Ways = {f"η = {eta:g}": ("mse", partial(PAPER, gradient_scale=eta)) for eta in VALUES}
COLUMNS: dict[str, dict[str, Ways]] = {
    "compare": {"squared error": SQUARED_ERROR, "cross-entropy": CROSS_ENTROPY},
    "sweep": {"ratio k (η = 1)": RATIOS, "gradient scale η (k = 0.1)": SCALES},
}
LEVELS = {"mnist": 0.98, "cifar": 0.60}  # of accuracy: the table says in which epoch it is first reached
EPOCHS = {"mnist": 10, "cifar": 20}


def synchronized_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


CLOCKS = {"cpu": time.process_time, "cuda": synchronized_clock}


# --- training ---------------------------------------------------------------------------------------------------------


class EpochRecord(L.Callback):
    """What each epoch ended with."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.epochs: list[dict[str, float]] = []
        self._losses: list[Tensor] = []
        self._began = self._seconds = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._losses, self._began = [], self.clock()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"].detach() * len(batch[0]))
        if trainer.is_last_batch:
            self._seconds = self.clock() - self._began

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert trainer.train_dataloader is not None
        metrics, samples = trainer.callback_metrics, len(trainer.train_dataloader.dataset)
        self.epochs.append(
            {
                "seconds": self._seconds,
                "train_loss": (torch.stack(self._losses).sum() / samples).item(),
                "test_loss": metrics["val_loss"].item(),
                "test_accuracy": metrics["val_accuracy"].item(),
            }
        )


def load_data(options: argparse.Namespace) -> tuple[BatchedTensorDataset, BatchedTensorDataset]:
    """All that is not for the test, and the test set."""
    data: InMemoryDataModule
    if options.task == "mnist":
        data = MNISTDataModule(options.data_dir, synthetic=options.synthetic)
    elif options.full:
        data = CIFAR10DataModule(options.data_dir, synthetic=options.synthetic)
    else:
        data = CIFAR10DataModule(
            options.data_dir, train_size=9_000, val_size=1_000, test_size=2_000, synthetic=options.synthetic
        )
    data.prepare_data()
    data.setup("fit")
    assert data.splits is not None
    parts = zip(data.splits.train.tensors, data.splits.val.tensors, strict=True)
    return BatchedTensorDataset(*(torch.cat(tensors) for tensors in parts)), data.splits.test


def make_network(task: str, full: bool) -> nn.Module:
    if task == "mnist":
        return fully_connected((784, 512, 10))
    if task == "cifar":
        return mini_vgg() if full else mini_vgg(channels=16, hidden=512)
    return TwoLSTMs()


def train(
    options: argparse.Namespace,
    loss: str,
    make_rls: Callable[[nn.Module], RLS] | None,
    seed: int,
    data: tuple[BatchedTensorDataset, BatchedTensorDataset],
) -> dict[str, Any]:
    """Losses and accuracies after each epoch, and the error that ended the run if one did."""
    L.seed_everything(seed, verbose=False)
    network = make_network(options.task, options.full)
    model: Classifier
    if make_rls is None:
        model = Classifier(network, loss=loss, optimizer=ADAM)  # type: ignore[arg-type]
    else:
        model = RLSClassifier(network, loss=loss, optimizer=make_rls)  # type: ignore[arg-type]
    record = EpochRecord(CLOCKS[options.device])
    trainer = L.Trainer(
        max_epochs=options.epochs or EPOCHS[options.task],
        gradient_clip_val=MAX_GRAD_NORM if make_rls is None else None,
        accelerator=options.device,
        devices=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[record],
    )
    training, test = data
    error = None
    try:
        trainer.fit(
            model,
            DataLoader(training, batch_size=BATCH_SIZE, shuffle=True, collate_fn=keep_batch),
            DataLoader(test, batch_size=1000, collate_fn=keep_batch),
        )
    except ValueError as not_finite:  # the way diverged, which is a result
        error = str(not_finite)
    return {"epochs": record.epochs, "error": error}


def run_all(options: argparse.Namespace) -> None:
    columns = COLUMNS[options.what]
    name = f"{options.what}_{options.task}{'_full' if options.full else ''}"
    output = (options.output or Path("results/benchmarks/rls")) / name
    output.mkdir(parents=True, exist_ok=True)
    data = None
    for seed in options.seeds:
        for ways in columns.values():
            for way, (loss, make_rls) in ways.items():
                file = output / f"{way.replace(' ', '_')}_{seed}.json"
                if file.exists() or (options.ways and way not in options.ways):
                    continue
                data = data or load_data(options)
                result = {"way": way, "seed": seed, **train(options, loss, make_rls, seed, data)}
                file.write_text(json.dumps(result))
                print(f"{way}, seed {seed}: {result['error'] or 'done'}", flush=True)
    runs = [json.loads(file.read_text()) for file in sorted(output.glob("*.json"))]
    print_table(runs, columns, LEVELS[options.task])
    draw(runs, columns).savefig(output / "curves.png", dpi=150)
    print(f"\ncurves: {output / 'curves.png'}")


def print_table(runs: Sequence[dict[str, Any]], columns: dict[str, Ways], level: float) -> None:
    def cells(of_way: Sequence[dict[str, Any]], value: Callable[[list[dict[str, float]]], str]) -> str:
        return " / ".join(value(run["epochs"]) if run["epochs"] else "-" for run in of_way)

    def first(epochs: list[dict[str, float]]) -> str:
        return next((str(i) for i, epoch in enumerate(epochs, 1) if epoch["test_accuracy"] >= level), "-")

    print(
        f"\n| way | seeds | test % after epoch 1 | best | last | first epoch with {level:.0%} | training loss of the last "
        "| seconds an epoch |\n|---|---|---|---|---|---|---|---|"
    )
    for way in (way for ways in columns.values() for way in ways):
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


def draw(runs: Sequence[dict[str, Any]], columns: dict[str, Ways]) -> Figure:
    """Training loss and test accuracy over epochs, a column for each loss or hyper-parameter; seeds in thin lines."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, len(columns), squeeze=False)
    for (title, ways), losses, accuracies in zip(columns.items(), *panels, strict=True):
        for number, way in enumerate(ways):
            for i, run in enumerate(run for run in runs if run["way"] == way and run["epochs"]):
                epochs = range(1, len(run["epochs"]) + 1)
                style: dict[str, Any] = {
                    "color": f"C{number}",
                    "alpha": 1 - 0.4 * (i > 0),
                    "marker": ".",
                    "label": None if i else way,
                }
                losses.plot(epochs, [epoch["train_loss"] for epoch in run["epochs"]], **style)
                accuracies.plot(epochs, [100 * epoch["test_accuracy"] for epoch in run["epochs"]], **style)
        losses.set(title=title, ylabel="training loss", yscale="log")
        accuracies.set(xlabel="epoch", ylabel="test accuracy, %")
        for axes in (losses, accuracies):
            axes.grid(which="both", alpha=0.25)
            if axes.lines:
                axes.legend()
    return figure


# --- the cost of a step -----------------------------------------------------------------------------------------------


class TwoLSTMs(nn.Module):
    """Tokens (n, T) to logits (n, 2): an embedding, two LSTM layers of 512 units, the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 128)
        self.lstm = nn.LSTM(128, 512, num_layers=2, batch_first=True)
        self.output = nn.Linear(512, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(tokens))[0][:, -1])


TIMED: Ways = {**SQUARED_ERROR, **CROSS_ENTROPY}
SHAPES = {"mnist": (784,), "cifar": (3, 32, 32), "lstm": (100,)}


def make_step(task: str, way: str, device: str) -> Callable[[], None]:
    """One training step on random data of the shapes of a task."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"network": make_network(task, full=True)}).to(device)
    network, (loss, make_rls) = module["network"], TIMED[way]
    classes = 2 if task == "lstm" else 10
    labels = torch.randint(classes, (BATCH_SIZE,), device=device)
    shape = (BATCH_SIZE, *SHAPES[task])
    inputs = torch.randint(10_000, shape, device=device) if task == "lstm" else torch.rand(shape, device=device)
    targets = nn.functional.one_hot(labels, classes).to(torch.float32)
    parameters = list(module.parameters())
    optimizer: torch.optim.Optimizer
    if make_rls is None:
        optimizer = ADAM(parameters)
    else:
        optimizer = make_rls(module, **({"auxiliary": ADAM} if task == "lstm" else {}))  # which trains the embedding

    def step() -> None:
        optimizer.zero_grad()
        outputs = network(inputs)
        if loss == "mse":
            value = (outputs - targets).square().sum() / (2 * BATCH_SIZE)
        else:
            value = nn.functional.cross_entropy(outputs, labels)
        value.backward()
        if make_rls is None:
            nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()

    return step


def time_ratios(options: argparse.Namespace, way: str) -> tuple[list[float], list[float]]:
    """Milliseconds of a step with Adam, and the ratio of a step's to it, in each round."""
    adam = "Adam" if way in SQUARED_ERROR else "Adam, cross-entropy"
    clock = CLOCKS[options.device]
    steps = [make_step(options.task, name, options.device) for name in (adam, way)]
    milliseconds: list[list[float]] = [[], []]
    for number in range(options.rounds + 1):
        for step, of_way in zip(steps, milliseconds, strict=True):
            begin = clock()
            for _ in range(options.steps):
                step()
            if number:  # the first round warms up
                of_way.append(1000 * (clock() - begin) / options.steps)
    return milliseconds[0], [b / a for a, b in zip(*milliseconds, strict=True)]


def peak_memory(task: str, way: str, device: str) -> float:
    """MiB that five steps take at most; on a CPU of this process, which must not have done anything else."""
    before = peak_kibibytes()
    step = make_step(task, way, device)
    for _ in range(5):
        step()
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else (peak_kibibytes() - before) / 2**10


def peak_kibibytes() -> int:
    """Of this process on Linux; ``ru_maxrss`` would begin with what the process had that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measure_steps(options: argparse.Namespace) -> None:
    where = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{options.task}, batch {BATCH_SIZE}, {where}, {torch.get_num_threads()} threads, {options.rounds} rounds\n")
    print("| way | step / step with Adam (lowest to highest) | step, ms | with Adam, ms | peak memory, MiB |")
    print("|---|---|---|---|---|")
    for way in options.ways or TIMED:
        command = [sys.executable, "-W", "ignore", __file__, "steps", options.task, f"--device={options.device}"]
        done = subprocess.run([*command, "--memory-of", way], capture_output=True, text=True, check=True)
        adam, ratios = time_ratios(options, way)
        ratio = statistics.median(ratios)
        milliseconds = statistics.median(a * r for a, r in zip(adam, ratios, strict=True))
        print(
            f"| {way} | **{ratio:.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) | {milliseconds:.2f} "
            f"| {statistics.median(adam):.2f} | {float(done.stdout):.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("compare", "sweep"):
        command = commands.add_parser(what)
        command.add_argument("task", choices=("mnist", "cifar"))
        command.add_argument("--data-dir", default="data", help="where the files of the data set are")
        command.add_argument("--synthetic", action="store_true", help="procedural images, to try the script")
        command.add_argument("--full", action="store_true", help="CIFAR-10: all data, the paper's network")
        command.add_argument("--epochs", type=int, help="default: 10 for mnist, 20 for cifar")
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
        command.add_argument("--output", type=Path, help="default: results/benchmarks/rls")
    command = commands.add_parser("steps")
    command.add_argument("task", choices=tuple(SHAPES))
    command.add_argument("--rounds", type=int, default=9)
    command.add_argument("--steps", type=int, default=20, help="in a round, of each optimizer")
    command.add_argument("--memory-of", help=argparse.SUPPRESS)
    for command in commands.choices.values():
        command.add_argument("--ways", nargs="+", help="names of the tables' rows; default: all")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.what != "steps":
        run_all(options)
    elif options.memory_of:
        print(peak_memory(options.task, options.memory_of, options.device))
    else:
        measure_steps(options)


if __name__ == "__main__":
    main()
