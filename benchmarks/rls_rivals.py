"""RLS against what people use now, in equal CPU time: the command ``rivals`` of ``benchmarks/rls.py``.

    OMP_NUM_THREADS=1 python benchmarks/rls.py rivals vgg resnet lstm mnist transformer --data-dir DIRECTORY
        [--seeds 0 1 2]

Every run gets the CPU seconds of its task, making the optimizer included, evaluations not; so who takes longer for a
step takes fewer of them. The rate of each way is chosen by one seed and fewer seconds, on validation samples, from the
same grid: a third, one and three times a usual rate, and one more where the best is the first or the last. All rates
follow the same one-cycle schedule over the seconds of the run: up for a tenth of them, then down to zero by a cosine.
Then each seed is trained with that rate and tested once, at the end. Ways alternate, so that all see the same machine.
Runs that share a seed begin with the same weights and see the same batches. Denormal numbers are flushed to zero.

The tasks, small enough for some hundred steps on one core in ten seconds:

- ``vgg``: the paper's mini VGG with 8 channels and 128 hidden units, 20,000 images of CIFAR-10 in batches of 64;
- ``resnet``: a convolution with stride 2, then one residual block of 16, 32 and 64 channels each with batch
  normalisation, the same images and batches;
- ``lstm``: one layer of 32 units, an embedding of 32, the last 40 words of 4,500 reviews of IMDB in batches of 64;
- ``mnist``: 784-512-10 and batches of 128, as in the paper;
- ``transformer``: two layers of 64 units, the next character of tinyshakespeare, 16 texts of 64 characters in a batch.

The ways, and what is not the default of their package (gradients are clipped for ``lstm`` and ``transformer`` only, to
the norm 1, for all):

- AdamW of torch;
- Muon of torch (2.9 or newer) for the hidden matrices, with AdamW's rates (``adjust_lr_fn="match_rms_adamw"``). As in
  its author's code convolutions are matrices of (channels, patch), and AdamW trains embedding, output layer and
  vectors. Its iteration is computed in float32: in torch's bfloat16 it takes thirty times as long on a CPU without such
  arithmetic;
- SOAP of ``pytorch_optimizer``, without the factor of more than 2,048 words of an embedding, whose first eigenvectors
  alone take 16 s;
- HRLS+M: RLS with momentum 0.5 for the hidden layers under the cross-entropy, where AdamW trains the output layer. The
  rate of AdamW is 1e-3 times that of RLS, which is 1 in the middle of the grid. As in the paper there is no bound on
  the gain, and gradients are clipped in all tasks, to 5 where others are not clipped. *Default* has the default bounds
  instead, and no clipping.

``pip install pytorch_optimizer`` for SOAP: a way whose package is missing is left out, which is said. Runs are kept in
``--output``: a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import harness
from harness import Run
from lightning_struct.data import CIFAR10DataModule, IMDBDataModule, InMemoryDataModule, MNISTDataModule
from lightning_struct.models import RecurrentNetwork, fully_connected, mini_vgg
from lightning_struct.optim import RLS

Data = dict[str, tuple[Tensor, Tensor]]  # inputs and labels of "train", "val" and "test"
Optimizers = list[torch.optim.Optimizer]
FACTORS = (1 / 3, 1.0, 3.0)  # by which the usual rate is multiplied
WARM_UP = 0.1  # of the seconds
MARKS = (0.25, 0.5, 0.75, 1.0)  # of the seconds, where the validation samples are looked at
CHARACTERS, LENGTH = 65, 64


# --- networks ---------------------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two convolutions, each followed by batch normalisation, beside a shortcut."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(channels, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3, 1)
        same = stride == 1 and channels == outputs
        self.shortcut = nn.Identity() if same else convolution(channels, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))


def convolution(channels: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(channels, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def resnet() -> nn.Sequential:
    widths = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
    layers = [convolution(3, 16, 3, 2), nn.ReLU(), *(ResidualBlock(*width) for width in widths)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.add_module("output", nn.Linear(64, 10))
    return network


class TransformerLayer(nn.Module):
    """Causal attention and a perceptron, each after a normalisation and beside a shortcut."""

    def __init__(self, units: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(units) for _ in range(2))
        self.projection, self.mixing = nn.Linear(units, 3 * units), nn.Linear(units, units)
        self.perceptron = nn.Sequential(nn.Linear(units, 4 * units), nn.GELU(), nn.Linear(4 * units, units))

    def forward(self, states: Tensor) -> Tensor:
        parts = self.projection(self.norms[0](states)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        states = states + self.mixing(mixed.transpose(1, 2).flatten(2))
        return states + self.perceptron(self.norms[1](states))


class Transformer(nn.Module):
    """Characters (n, length) to scores of the next ones (n, length, characters)."""

    def __init__(self, units: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(CHARACTERS, units), nn.Embedding(LENGTH, units)
        self.layers = nn.Sequential(*(TransformerLayer(units, heads) for _ in range(layers)), nn.LayerNorm(units))
        self.output = nn.Linear(units, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        return self.output(self.layers(self.embedding(characters) + self.places.weight[: characters.shape[1]]))


# --- tasks ------------------------------------------------------------------------------------------------------------


def from_module(make: Callable[..., InMemoryDataModule], options: argparse.Namespace) -> Data:
    splits = harness.splits_of(make(data_dir=options.data_dir, synthetic=options.synthetic))
    return {part: tensors.tensors for part, tensors in splits._asdict().items()}


def next_characters(options: argparse.Namespace) -> Data:
    """Texts of the first 90 %, next 5 % and last 5 % of tinyshakespeare."""
    windows = harness.text_windows(options, LENGTH)
    sizes = [len(windows) * 9 // 10, len(windows) // 20]
    parts = windows.split([*sizes, len(windows) - sum(sizes)])
    return {name: (part[:, :-1], part[:, 1:]) for name, part in zip(("train", "val", "test"), parts, strict=True)}


@dataclass(frozen=True)
class Task:
    """Settings in which the tasks differ.

    Attributes:
        title: in the table.
        data: reads the samples.
        network: makes the network.
        classes: its outputs.
        seconds: of a run; and of one that chooses a rate.
        batch_size: samples in a step.
        max_grad_norm: to which gradients are clipped; None: they are not.
    """

    title: str
    data: Callable[[argparse.Namespace], Data]
    network: Callable[[], nn.Module]
    classes: int
    seconds: tuple[float, float]
    batch_size: int = 128
    max_grad_norm: float | None = None


cifar = partial(from_module, partial(CIFAR10DataModule, train_size=20_000, val_size=1_000, test_size=5_000))
imdb = partial(IMDBDataModule, train_size=4_500, val_size=500, test_size=2_500, max_length=40, vocabulary_size=5_000)
mnist = partial(MNISTDataModule, val_size=2_000)
small_lstm = partial(RecurrentNetwork, vocabulary_size=5_000, embedding_size=32, hidden_size=32, num_layers=1)
TASKS = {
    "vgg": Task("CIFAR-10, mini VGG", cifar, partial(mini_vgg, 8, 128), 10, (8.0, 2.5), 64),
    "resnet": Task("CIFAR-10, ResNet", cifar, resnet, 10, (8.0, 2.5), 64),
    "lstm": Task("IMDB, LSTM", partial(from_module, imdb), small_lstm, 2, (8.0, 2.5), 64, 1.0),
    "mnist": Task("MNIST, 784-512-10", partial(from_module, mnist), fully_connected, 10, (4.0, 1.5)),
    "transformer": Task("characters, transformer", next_characters, Transformer, CHARACTERS, (6.0, 2.0), 16, 1.0),
}


# --- ways -------------------------------------------------------------------------------------------------------------


def adamw(network: nn.Module, rate: float, task: Task) -> Optimizers:
    return [torch.optim.AdamW(network.parameters(), lr=rate)]


def orthogonalized(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Torch's Newton-Schulz iteration of Muon, but in the gradient's own precision."""
    a, b, c = coefficients
    matrix = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
    matrix = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if gradient.shape[0] > gradient.shape[1] else matrix


def muon(network: nn.Module, rate: float, task: Task) -> Optimizers:
    vars(torch.optim._muon)["_zeropower_via_newtonschulz"] = orthogonalized
    others = {p for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    others |= {p for name, p in network.named_parameters() if p.ndim < 2 or name.startswith("output")}
    hidden = [p for p in network.parameters() if p not in others]
    matrices = [nn.Parameter(weight.detach().flatten(1)) for weight in hidden]  # they share the weights' memory
    optimizer = torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw")

    def pass_gradients(*_: object) -> None:
        for weight, matrix in zip(hidden, matrices, strict=True):
            assert weight.grad is not None
            matrix.grad = weight.grad.flatten(1)

    optimizer.register_step_pre_hook(pass_gradients)
    return [optimizer, torch.optim.AdamW([p for p in network.parameters() if p in others], lr=rate)]


def soap(network: nn.Module, rate: float, task: Task) -> Optimizers:
    from pytorch_optimizer import SOAP

    return [SOAP(network.parameters(), lr=rate, max_precondition_dim=2048)]


def rls(network: nn.Module, rate: float, task: Task, **arguments: Any) -> Optimizers:
    auxiliary = partial(torch.optim.AdamW, lr=1e-3 * rate)
    return [RLS(network, lr=rate, momentum=0.5, auxiliary=auxiliary, **arguments)]


def clipped_rls(network: nn.Module, rate: float, task: Task, **arguments: Any) -> Optimizers:
    """With the paper's bound on a step: clipping of the gradients."""
    return rls(network, rate, task, max_gain=None, max_grad_norm=task.max_grad_norm or 5.0, **arguments)


@dataclass(frozen=True)
class Way:
    """A way of training.

    Attributes:
        rate: the usual one, in the middle of the grid.
        make: makes the optimizers.
        needs: package without which it is left out.
    """

    rate: float
    make: Callable[[nn.Module, float, Task], Optimizers]
    needs: str = "torch"


WAYS = {
    "AdamW": Way(1e-3, adamw),
    "Muon": Way(1e-3, muon, needs="torch.optim._muon"),
    "SOAP": Way(3e-3, soap, needs="pytorch_optimizer"),
    "HRLS+M": Way(1.0, partial(clipped_rls, exclude=["output"])),
    "HRLS+M, default": Way(1.0, partial(rls, exclude=["output"])),
}


# --- training ---------------------------------------------------------------------------------------------------------


def schedule(share: float) -> float:
    """The factor of the rate after this share of the seconds."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.01)
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP)))


@torch.no_grad()
def accuracy(network: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    network.eval()
    parts = zip(*(tensor.split(250) for tensor in samples), strict=True)
    right = sum((network(inputs).argmax(-1) == labels).sum().item() for inputs, labels in parts)
    network.train()
    return right / samples[1].numel()


def train(task: Task, way: Way, rate: float, seed: int, seconds: float, data: Data, marks: Sequence[float]) -> Run:
    """Validation accuracy and steps after these shares of the seconds, and the error if it diverged.

    The test accuracy, too, where there are several marks.
    """
    torch.manual_seed(seed)
    network = task.network()
    inputs, labels = data["train"]
    points: list[dict[str, float]] = []
    began, evaluating = time.process_time(), 0.0
    optimizers = way.make(network, rate, task)
    levels = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    left: list[Tensor] = []  # batches of this pass through the samples
    for step in itertools.count(1):
        if not left:
            left = [part for part in torch.randperm(len(inputs)).split(task.batch_size) if len(part) == task.batch_size]
        batch = left.pop()
        for group, level in levels:
            group["lr"] = level * schedule((time.process_time() - began - evaluating) / seconds)
        network.zero_grad()
        loss = F.cross_entropy(network(inputs[batch]).flatten(0, -2), labels[batch].flatten())
        if not torch.isfinite(loss):
            return {"points": points, "test_accuracy": 0.0, "error": f"the loss of step {step} is {loss.item()}"}
        loss.backward()
        if task.max_grad_norm is not None and not isinstance(optimizers[0], RLS):  # RLS clips in its step
            nn.utils.clip_grad_norm_(network.parameters(), task.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        now = time.process_time()
        if (spent := now - began - evaluating) >= marks[len(points)] * seconds:
            point = {"seconds": spent, "steps": step, "train_loss": loss.item()}
            points.append({**point, "val_accuracy": accuracy(network, data["val"])})
            evaluating += time.process_time() - now
            if len(points) == len(marks):
                break
    tested = {"test_accuracy": accuracy(network, data["test"])} if len(marks) > 1 else {}
    return {"points": points, "error": None, **tested}


def last_accuracy(run: Run) -> float:
    """Validation accuracy at the end; zero if it diverged."""
    return 0.0 if run["error"] else run["points"][-1]["val_accuracy"]


def missing_factors(known: dict[float, float]) -> list[float]:
    """Factors of the grid that are still to be tried, by the accuracies of those that were.

    Where the best of the grid is its first or its last, the next one follows.
    """
    if missing := [factor for factor in FACTORS if factor not in known]:
        return missing
    if len(known) > len(FACTORS):
        return []
    best = max(known, key=known.__getitem__)
    return {FACTORS[0]: [FACTORS[0] / 3], FACTORS[-1]: [FACTORS[-1] * 3]}.get(best, [])


# --- the command ------------------------------------------------------------------------------------------------------


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("tasks", nargs="+", choices=tuple(TASKS))
    harness.add_data_options(command)
    harness.add_run_options(command, "rls_rivals")


def run_all(options: argparse.Namespace) -> None:
    torch.set_flush_denormal(True)
    output = harness.make_directory(options.output)
    missing = {name for name, way in WAYS.items() if find_spec(way.needs) is None}
    for name in sorted(missing):
        print(f"{name} is left out: {WAYS[name].needs} is not installed")
    for task in () if options.report else options.tasks:
        run_task(task, [name for name in WAYS if name not in missing], options, output)
    if runs := {task: found for task in options.tasks if (found := harness.load_runs(output / task))}:
        print_tables(runs)


def run_task(name: str, ways: Sequence[str], options: argparse.Namespace, output: Path) -> None:
    """Choose the rates, then train all seeds; a run that is there is not repeated."""
    task, data = TASKS[name], TASKS[name].data(options)
    of_rates, of_seeds = output / f"{name}_rates", output / name

    def run(
        part: Path, run_name: str, way: str, factor: float, seed: int, seconds: float, marks: Sequence[float]
    ) -> None:
        def answer() -> Run:
            found = train(task, WAYS[way], factor * WAYS[way].rate, seed, seconds, data, marks)
            return {"way": way, "factor": factor, "seed": seed, **found}

        if (found := harness.run_once(part, run_name, answer)) is not None:
            print(f"{name}, {way}, {factor:.2g} times its rate, seed {seed}: {last_accuracy(found):.2%}", flush=True)

    def tried(way: str) -> dict[float, float]:
        return {run["factor"]: last_accuracy(run) for run in harness.load_runs(of_rates) if run["way"] == way}

    while wanted := [(factor, way) for way in ways for factor in missing_factors(tried(way))]:
        for factor, way in sorted(wanted, key=lambda pair: pair[0]):
            run(of_rates, harness.run_name(way, f"{factor:.2g}"), way, factor, 0, task.seconds[1], MARKS[-1:])
    for seed, way in product(options.seeds, ways):
        found = tried(way)
        best = max(found, key=found.__getitem__)
        run(of_seeds, harness.run_name(way, seed), way, best, seed, task.seconds[0], MARKS)


def print_tables(runs: dict[str, Sequence[Run]]) -> None:
    """Test accuracies, then steps and rates; a column for each task."""
    harness.print_machines(run for found in runs.values() for run in found)
    titles = [f"{TASKS[task].title}, {TASKS[task].seconds[0]:g} s" for task in runs]

    def table(what: str, cell: Callable[[Way, Sequence[Run]], str]) -> None:
        harness.print_header(what, *titles)
        for name, way in WAYS.items():
            of_way = [[run for run in found if run["way"] == name] for found in runs.values()]
            if any(of_way):
                harness.print_row(name, *(cell(way, found) if found else "" for found in of_way))

    def steps(way: Way, found: Sequence[Run]) -> str:
        ended = [run["points"][-1]["steps"] for run in found if not run["error"]]
        diverged = f", {len(found) - len(ended)} diverged" if len(ended) < len(found) else ""
        return f"{statistics.median(ended or [0]):.0f}, {found[0]['factor'] * way.rate:.2g}{diverged}"

    table(
        "test %", lambda way, found: harness.spread([100 * run["test_accuracy"] for run in found], "{:.1f}", bold=True)
    )
    table("steps, and rate", steps)
