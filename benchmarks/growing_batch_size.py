"""A growing batch against the batches and schedules that a user would take: six tasks with their usual optimizers.

    OMP_NUM_THREADS=1 python benchmarks/growing_batch_size.py --data-dir DIRECTORY [--tasks mnist ...]

The projects are ordinary ones, in which only the batch differs, at a fixed rate, but where a cosine schedule is named.

- ``mnist``: 784-512-10, SGD with momentum 0.9, rate 0.05, from 32;
- ``cifar``: a VGG of 8 to 32 channels on 10,000 images, SGD with momentum 0.9, rate 0.02, from 32;
- ``cifar_all``: the same on 45,000 images, for longer runs; only where it is named;
- ``cifar_cosine``: as ``cifar``, by Adam, 1e-3, falling to 0 by a cosine over 4 epochs, from 32;
- ``characters_cosine``: as ``characters``, the rate falling to 0 by a cosine over 1 epoch; only where it is named;
- ``characters``: a transformer of two blocks of 64 units, 64 characters of Shakespeare, AdamW, 2e-3, from 16;
- ``imdb``: an LSTM of 32 units, the first 50 words of reviews, Adam, 1e-3, from 32;
- ``autoencoder``: 784-256-64-16-64-256-784 with rectifiers, MNIST, Adam, 1e-3, from 64;
- ``usps``: two convolutions of 16 and 32 channels on USPS, AdamW, 1e-3, from 16;
- ``bag``: a bag of embeddings of 32 numbers, the same reviews, Adam, 1e-3, from 32;
- ``gru``: a GRU of 64 units, the same characters, Adam, 2e-3, from 32. Nothing was chosen by these last three; they run
  only where they are named.

The ways are fixed batches of 1, 2, 4 and 8 times that size at the same rate; the doubling of the batch with the rate
times √2 (OLMo, arXiv 2505.23971) after 1/8 and 3/8 of the samples; a linear ramp to 8 times the size at the same rate;
``GrowingBatchSize()``, without arguments and with ``scale_lr="sqrt"``; and, if there is a cosine, ``schedule="auto"``,
by which the batch doubles when the cosine has halved the rate. Schedules know how many samples there will be, the
callback does not.

A run ends after so many CPU seconds of training, validations not counted; that with a cosine after its epochs. The loss
of a run is the lowest validation loss so far, which is what a checkpoint callback would keep; it is measured 32 times
in a run. The last table compares the default with the user's own batch after the same seconds.

With three seeds and the default bounds it takes an hour and a half of one core. ``--longer 4`` gives each run four
times the seconds or the epochs; such runs are kept in a file of their own."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import harness
import style
from harness import Run
from lightning_struct import GrowingBatchSize
from lightning_struct.data import CIFAR10DataModule, IMDBDataModule, MNISTDataModule, USPSDataModule
from lightning_struct.data.in_memory import BatchedTensorDataset, keep_batch
from lightning_struct.models import RecurrentNetwork, fully_connected, mini_vgg

VALIDATIONS = 32
MULTIPLES = (1, 2, 4, 8)
Data = tuple[BatchedTensorDataset, BatchedTensorDataset]


@dataclass(frozen=True)
class Task:
    """A project of a user.

    Attributes:
        data: training and validation set.
        network: made anew for each run.
        optimizer: from the parameters, at the user's rate.
        batch_size: the user's.
        seconds: CPU seconds of a run; the time that the user's own batch takes for the epochs where there is a cosine.
        samples: seen by then with the user's own batch, about.
        epochs: length of the cosine; None for a fixed rate.
        loss: of outputs and targets.
    """

    data: Callable[[argparse.Namespace], Data]
    network: Callable[[], nn.Module]
    optimizer: Callable[..., Optimizer]
    batch_size: int
    seconds: float
    samples: int
    epochs: int | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy

    def lengthened(self, factor: int) -> Task:
        """The same project with so many times the seconds, samples and epochs."""
        epochs = None if self.epochs is None else factor * self.epochs
        return replace(self, seconds=factor * self.seconds, samples=factor * self.samples, epochs=epochs)


class Project(L.LightningModule):
    """The project of a user: a network, a loss, an optimizer, and perhaps a schedule by steps."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.network = task, task.network()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = self.network(inputs)
        return self.task.loss(outputs.movedim(-1, 1) if outputs.ndim > targets.ndim > 1 else outputs, targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.task.optimizer(self.parameters())
        if self.task.epochs is None:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LossCurve(harness.TrainingClock):
    """Validation losses at equal distances of time, with what had been spent until then."""

    def __init__(self, task: Task, validation: BatchedTensorDataset) -> None:
        super().__init__(None if task.epochs else task.seconds)
        self.every, self.validation = task.seconds / VALIDATIONS, validation
        self.samples, self.due = 0, 0.0
        self.points: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *arguments: Any) -> None:
        _, batch, _ = arguments
        self.samples += len(batch[0])
        super().on_train_batch_end(trainer, pl_module)
        if self.seconds >= self.due or trainer.should_stop:
            self.measure(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.measure(trainer, pl_module)

    @torch.no_grad()
    def measure(self, trainer: L.Trainer, module: Any) -> None:
        seconds = self.seconds
        self._before, self._since = seconds, None
        module.eval()
        batches = DataLoader(self.validation, batch_size=500, collate_fn=keep_batch)
        losses = [module.loss(batch).item() * len(batch[0]) for batch in batches]
        module.train()
        loss = sum(losses) / len(self.validation)
        self.points.append({"samples": self.samples, "steps": trainer.global_step, "seconds": seconds, "loss": loss})
        self.due = seconds + self.every
        self._since = self._now()


# --- tasks ------------------------------------------------------------------------------------------------------------


class CharacterTransformer(nn.Module):
    """Two blocks of a causal transformer over characters."""

    def __init__(self, characters: int, length: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.output(self.blocks(self.embedding(text) + self.position, self.mask, is_causal=True))


class CharacterGRU(nn.Module):
    """A recurrent network over characters."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(characters, width), nn.Linear(width, characters)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, text: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(text))[0])


def few_convolutions() -> nn.Module:
    pooled = [nn.ReLU(), nn.MaxPool2d(2)]
    layers = nn.Conv2d(1, 16, 3, padding=1), *pooled, nn.Conv2d(16, 32, 3, padding=1), *pooled, nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 16, 16)), *layers, nn.Linear(512, 10))


def postcodes(options: argparse.Namespace) -> Data:
    return splits(USPSDataModule(options.data_dir, synthetic=options.synthetic))


def digits(options: argparse.Namespace) -> Data:
    return splits(MNISTDataModule(options.data_dir, synthetic=options.synthetic))


def digits_twice(options: argparse.Namespace) -> Data:
    return tuple(BatchedTensorDataset(*2 * [part.tensors[0]]) for part in digits(options))  # type: ignore[return-value]


def images(options: argparse.Namespace, train_size: int = 10_000) -> Data:
    return splits(
        CIFAR10DataModule(options.data_dir, train_size=train_size, val_size=2_000, synthetic=options.synthetic)
    )


def reviews(options: argparse.Namespace) -> Data:
    sizes = {"train_size": 4_000, "val_size": 1_000, "test_size": 2_000, "vocabulary_size": 5_000, "max_length": 50}
    return splits(IMDBDataModule(options.data_dir, synthetic=options.synthetic, **sizes))


def characters(options: argparse.Namespace, length: int = 64) -> Data:
    windows = harness.text_windows(options, length)
    train, validation = windows.split([len(windows) * 9 // 10, len(windows) - len(windows) * 9 // 10])
    return tuple(BatchedTensorDataset(part[:, :-1], part[:, 1:]) for part in (train, validation[::3]))  # type: ignore[return-value]


def splits(data: Any) -> Data:
    found = harness.splits_of(data)
    return found.train, found.val


def rectified_autoencoder() -> nn.Module:
    sizes = (784, 256, 64, 16, 64, 256, 784)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Identity() if outputs in (16, 784) else nn.ReLU()]
    return nn.Sequential(*layers)


SGD = partial(torch.optim.SGD, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=1e-3)
TASKS = {
    "mnist": Task(digits, partial(fully_connected, (784, 512, 10)), partial(SGD, lr=0.05), 32, 12, 90_000),
    "cifar": Task(images, partial(mini_vgg, channels=8, hidden=64), partial(SGD, lr=0.02), 32, 25, 38_000),
    "cifar_cosine": Task(images, partial(mini_vgg, channels=8, hidden=64), ADAM, 32, 26, 40_000, epochs=4),
    "characters": Task(
        characters, partial(CharacterTransformer, 65), partial(torch.optim.AdamW, lr=2e-3), 16, 40, 28_000
    ),
    "imdb": Task(reviews, partial(RecurrentNetwork, 5_000, 32, 32, 1), ADAM, 32, 16, 24_000),
    "autoencoder": Task(
        digits_twice, rectified_autoencoder, ADAM, 64, 16, 110_000, loss=functional.binary_cross_entropy_with_logits
    ),
    "usps": Task(postcodes, few_convolutions, partial(torch.optim.AdamW, lr=1e-3), 16, 16, 60_000),
    "bag": Task(reviews, lambda: nn.Sequential(nn.EmbeddingBag(5_000, 32), nn.Linear(32, 2)), ADAM, 32, 10, 200_000),
    "gru": Task(characters, partial(CharacterGRU, 65), partial(torch.optim.Adam, lr=2e-3), 32, 24, 40_000),
}
TASKS["cifar_all"] = replace(TASKS["cifar"], data=partial(images, train_size=45_000))
TASKS["characters_cosine"] = replace(TASKS["characters"], seconds=20, samples=15_700, epochs=1)

EXTRA = ("cifar_all", "characters_cosine", "usps", "bag", "gru")  # are run where they are named


# --- ways -------------------------------------------------------------------------------------------------------------

FIXED = {f"fixed ×{multiple}": multiple for multiple in MULTIPLES}
DOUBLING, RAMP, DEFAULT = "doubling, rate ×√2", "linear ramp", "`GrowingBatchSize()`"
SCALED, BY_RATE = '`scale_lr="sqrt"`', '`schedule="auto"`'
GROWING = (DEFAULT, SCALED)
LABELS = {
    "fixed ×1": "fixed batch",
    "fixed ×2": "fixed batch, twice as large",
    "fixed ×4": "fixed batch, four times as large",
    SCALED: 'GrowingBatchSize(scale_lr="sqrt")',
}
TITLES = {
    "mnist": "digits (MNIST), SGD",
    "cifar": "images (CIFAR-10), SGD",
    "cifar_all": "images (all of CIFAR-10), SGD",
    "cifar_cosine": "images (CIFAR-10), Adam, cosine schedule",
    "characters": "characters, transformer, AdamW",
    "imdb": "reviews (IMDB), LSTM, Adam",
    "autoencoder": "autoencoder of digits, Adam",
}
DRAWN = ("fixed ×1", "fixed ×2", *GROWING, "fixed ×4")
WAYS = (*FIXED, DOUBLING, RAMP, DEFAULT, SCALED, BY_RATE)


def callback(way: str, task: Task) -> GrowingBatchSize | None:
    """The callback of a way; schedules are made by it, too, which measures nothing then."""
    first, samples = task.batch_size, task.samples
    if way == DOUBLING:
        schedule = f"0:{first} {samples // 8}:{2 * first} {3 * samples // 8}:{4 * first}"
        return GrowingBatchSize(schedule=schedule, scale_lr="sqrt")
    if way == RAMP:
        entries = [f"{samples * i // 8}:{first * (i + 1)}" for i in range(8)]
        return GrowingBatchSize(schedule=" ".join(entries))
    if way == DEFAULT:
        return GrowingBatchSize()
    if way == SCALED:
        return GrowingBatchSize(scale_lr="sqrt")
    if way == BY_RATE:
        return GrowingBatchSize(schedule="auto")
    return None


def train(options: argparse.Namespace, name: str, way: str, seed: int) -> Run:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    L.seed_everything(seed, verbose=False)
    task = TASKS[name].lengthened(options.longer)
    training, validation = task.data(options)
    growing = callback(way, task)
    curve = LossCurve(task, validation)
    callbacks = [curve] if growing is None else [growing, curve]
    trainer = harness.bare_trainer(*callbacks, max_epochs=task.epochs or -1, limit_val_batches=0)
    batch_size = task.batch_size * FIXED.get(way, 1)
    trainer.fit(Project(task), DataLoader(training, batch_size=batch_size, shuffle=True, collate_fn=keep_batch))
    records = growing.records if growing else []
    names = {"samples": "samples", "size": "batch_size", "predicted": "batch_size_predicted"}
    sizes = [{name: record[key] for name, key in names.items() if key in record} for record in records]
    return {"task": name, "way": way, "seed": seed, "points": curve.points, "sizes": sizes}


# --- what came out ----------------------------------------------------------------------------------------------------


def best_until(run: Run, seconds: float = math.inf) -> float:
    """The lowest validation loss that a run had after so many seconds."""
    return min(point["loss"] for i, point in enumerate(run["points"]) if i == 0 or point["seconds"] <= seconds)


def of(runs: Sequence[Run], task: str, way: str) -> list[Run]:
    return [run for run in runs if run["task"] == task and run["way"] == way]


def best_fixed(runs: Sequence[Run], task: str) -> str | None:
    """The fixed batch with the lowest final loss, by its median over seeds; None if none was run."""
    there = [way for way in FIXED if of(runs, task, way)]
    return min(there, key=lambda way: statistics.median(best_until(run) for run in of(runs, task, way)), default=None)


def last_size(run: Run, task: Task) -> float:
    """The size at the end; the very last batch may be what was left of an epoch."""
    sizes = [check["size"] for check in run["sizes"][-2:]]
    return max(sizes, default=task.batch_size * FIXED.get(run["way"], 1))


def report(runs: Sequence[Run]) -> None:
    harness.print_machines(runs)
    tasks = [name for name in TASKS if any(run["task"] == name for run in runs)]
    for name in tasks:
        print(f"\n{name}: medians over seeds (lowest to highest)")
        harness.print_header("batch", "validation loss", "steps", "CPU seconds", "last batch")
        best = best_fixed(runs, name)
        for way in WAYS:
            if chosen := of(runs, name, way):
                harness.print_row(
                    way,
                    harness.spread([best_until(run) for run in chosen], "{:.4f}", bold=way == best),
                    harness.spread([run["points"][-1]["steps"] for run in chosen], "{:,.0f}"),
                    harness.spread([run["points"][-1]["seconds"] for run in chosen], "{:.0f}"),
                    harness.spread([last_size(run, TASKS[name]) for run in chosen], "{:,.0f}"),
                )
    print("\nThe user's own batch and the default after the same CPU seconds: loss, seed by seed")
    harness.print_header("task", "own batch", DEFAULT, "difference of medians", "spread of seeds, own batch")
    for name in tasks:
        own, default = ({run["seed"]: run for run in of(runs, name, way)} for way in ("fixed ×1", DEFAULT))
        seeds = sorted(own.keys() & default.keys())
        if not seeds:
            continue
        ends = {s: min(own[s]["points"][-1]["seconds"], default[s]["points"][-1]["seconds"]) for s in seeds}
        ends = {s: ends[s] if TASKS[name].epochs is None else math.inf for s in seeds}
        mine, theirs = ([best_until(of_way[s], ends[s]) for s in seeds] for of_way in (default, own))
        difference = statistics.median(mine) - statistics.median(theirs)
        losses = [" / ".join(f"{loss:.4f}" for loss in losses) for losses in (theirs, mine)]
        harness.print_row(name, *losses, f"{difference:+.4f}", f"{max(theirs) - min(theirs):.4f}")


@style.readable
def draw(runs: Sequence[Run], name: str) -> Figure:
    """The lowest validation loss so far over seconds, and the size of the batch over samples, of a task."""
    figure = Figure(figsize=(style.WIDTH, 3.4), layout="constrained")
    losses, sizes = figure.subplots(1, 2)
    late: list[float] = []
    for way in DRAWN:
        of_way = of(runs, name, way)
        look: dict[str, Any] = {"color": style.color_of(way.strip("`")), "linestyle": "-" if way in GROWING else "--"}
        points_of = [run["points"] for run in of_way]
        at = [statistics.median(p["seconds"] for p in points) for points in zip(*points_of, strict=False)]
        so_far = [accumulate((point["loss"] for point in points), min) for points in points_of]
        reached = list(zip(*so_far, strict=False))
        low, middle, high = ([of_seeds(found) for found in reached] for of_seeds in (min, statistics.median, max))
        losses.plot(at, middle, label=LABELS.get(way, way.strip("`")), **look)
        losses.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
        late += middle[len(middle) // 4 :]
        for run in of_way if way in GROWING else ():
            grown = list(accumulate((check["size"] for check in run["sizes"]), max))  # an epoch's last batch is smaller
            sizes.plot([s["samples"] for s in run["sizes"]], grown, drawstyle="steps-post", alpha=0.7, **look)
    losses.set(title=TITLES[name], xlabel="CPU seconds", ylabel="validation loss")
    losses.set_ylim(min(late) - 0.1 * (max(late) - min(late)), max(late))
    sizes.set(title="size of the batch", xlabel="samples seen", ylabel="samples in a batch")
    sizes.set_yscale("log", base=2)
    sizes.yaxis.set_major_formatter("{x:.0f}")
    sizes.xaxis.set_major_locator(MaxNLocator(4))
    sizes.xaxis.set_major_formatter(EngFormatter(sep=""))
    sizes.set_ylim(TASKS[name].batch_size / 2**0.5)
    for axes in (losses, sizes):
        axes.grid()
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    style.legend_below(figure, losses, f"medians of seeds {seeds}, lowest to highest; batches of all seeds", columns=2)
    return figure


def main() -> None:
    parser = harness.make_parser(__doc__)
    harness.add_data_options(parser)
    harness.add_run_options(parser, "growing_batch_size")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=[t for t in TASKS if t not in EXTRA])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--longer", type=int, default=1, metavar="FACTOR", help="of the seconds, samples and epochs")
    options = parser.parse_args()
    times = () if options.longer == 1 else (f"times_{options.longer}",)
    output = harness.make_directory(options.output.joinpath(*times))
    runs = {
        harness.run_name(name, WAYS.index(way), seed): partial(train, options, name, way, seed)
        for seed in options.seeds
        for name in options.tasks
        for way in options.ways
        if way != BY_RATE or TASKS[name].epochs is not None  # which needs a schedule
    }
    report(harness.run_all(output, runs, options.report))


if __name__ == "__main__":
    main()
