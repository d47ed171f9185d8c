"""SHF and RLS without settings against Adam: eleven tasks with one rule for all, after the same CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/defaults.py --data-dir DIRECTORY [--seconds 20] [--seeds 0 1 2]
        [--tasks classifier lstm ...]

Each network is trained by ``SHF(module, loss)``, by RLS and by Adam with rates of 1e-3 and 3e-3, on the same batches
from the same weights: epochs without replacement, float32, denormal numbers flushed to zero. RLS is ``RLS(module)``
under the squared error. For classifiers it is what the README has: momentum 0.5, and Adam, 1e-3, for the last layer and
for vectors.

- ``classifier``: MNIST, 784-128-64-10, ReLU, batches of 256;
- ``lstm``: MNIST, row by row, 64 units, batches of 128;
- ``resnet``: MNIST at half the resolution, two residual blocks of 16 channels with GroupNorm, batches of 128;
- ``transformer``: MNIST, row by row, two layers of 48 units and 4 heads, batches of 128;
- ``logistic``, ``tanh``: USPS autoencoders, 256-400-200-100-50-25 and back, batches of 600; the logistic one from the
  paper's sparse start, the other from torch's;
- ``one_hot``: two classes by five categories of 200 values each, one-hot, 1000-64-64-2, ReLU, batches of 128;
- ``adding``: the sum of two marked numbers in a sequence of 30, by a GRU of 48 units, batches of 64;
- ``adding_all``: the same in sequences of 20, by an LSTM of 16 units, all 512 sequences in each step;
- ``friedman``: a function of five of ten uniform numbers, with noise of a fifth of its spread (Friedman, 1991),
  10-32-1, ReLU, all 500 samples in each step;
- ``regression``: two functions of ten normal numbers, without noise, 10-64-64-2, ReLU, batches of 64;
- ``deep``: the same by eight layers of 64 units, from torch's initial values.

SHF stood still on ``one_hot``, ``adding``, ``regression`` and ``deep`` once. How its damping changes in short steps was
chosen on the last two, on ``lstm``, ``resnet`` and ``classifier``, and on tasks with noise that are not here.

Seconds are CPU time of the process without the validations, which come 15 times in a run, at equal times. All runs
take 50 minutes of one core. Runs are kept in ``--output``; a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import harness
from harness import Run
from lightning_struct.data import MNISTDataModule, USPSDataModule
from lightning_struct.nn.baselines import sparse_normal_
from lightning_struct.optim import RLS, SHF

VALIDATIONS = 15
RATES = {"adam 1e-3": 1e-3, "adam 3e-3": 3e-3}
WAYS = ("shf", "rls", *RATES)


class LastState(nn.Module):
    """A linear layer on the last state of a recurrent one, which reads rows of so many numbers."""

    def __init__(self, recurrent: type[nn.LSTM | nn.GRU], inputs: int, units: int, outputs: int) -> None:
        super().__init__()
        self.recurrent = recurrent(inputs, units, batch_first=True)
        self.head = nn.Linear(units, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x.view(len(x), -1, self.recurrent.input_size))[0][:, -1])


class SmallResNet(nn.Module):
    """Two residual blocks with GroupNorm."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()

        def block() -> nn.Module:
            layers = [
                (nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2)
            ]
            return nn.Sequential(*layers[0], *layers[1])

        self.stem = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(F.avg_pool2d(x.view(-1, 1, 28, 28), 2))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.relu().mean((2, 3)))


class RowsThroughTransformer(nn.Module):
    """Classifies an image by the mean of a transformer's outputs for its rows."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.rows = nn.Linear(28, width)
        self.positions = nn.Parameter(0.02 * torch.randn(28, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.rows(x.view(-1, 28, 28)) + self.positions).mean(1))


def perceptron(*sizes: int) -> nn.Module:
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def autoencoder(activation: type[nn.Module], last: type[nn.Module]) -> nn.Sequential:
    sizes = (256, 400, 200, 100, 50, 25, 50, 100, 200, 400, 256)
    layers: list[nn.Module] = []
    for i, (rows, columns) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(rows, columns))
        if columns != min(sizes):
            layers.append(activation() if i < len(sizes) - 2 else last())
    return nn.Sequential(*layers)


def logistic() -> nn.Module:
    network = autoencoder(nn.Sigmoid, nn.Sigmoid)
    for layer in network:
        if isinstance(layer, nn.Linear):
            sparse_normal_(layer.weight, 10, 1.5)
            nn.init.zeros_(layer.bias)
    return network


def tanh() -> nn.Module:
    return autoencoder(nn.Tanh, nn.Identity)


# Inputs and targets for training and for validation.
Data = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def digits(data_dir: str, synthetic: bool) -> Data:
    return of_module(MNISTDataModule(data_dir=data_dir, synthetic=synthetic), target=1)


def digits_twice(data_dir: str, synthetic: bool) -> Data:
    return of_module(USPSDataModule(data_dir=data_dir, synthetic=synthetic), target=0)


def of_module(module: MNISTDataModule | USPSDataModule, target: int) -> Data:
    module.prepare_data()
    training, validation = ((data.tensors[0], data.tensors[target]) for data in module.load_splits()[:2])
    return training, validation


def categories(data_dir: str, synthetic: bool, samples: int = 12_000) -> Data:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 200, (samples, 5), generator=generator)
    scores = torch.randn(5, 200, generator=generator)[torch.arange(5), values].sum(1)
    labels = (scores + 0.5 * torch.randn(samples, generator=generator) > 0).long()
    return cut(F.one_hot(values, 200).float().flatten(1), labels, 10_000)


def marked_numbers(data_dir: str, synthetic: bool, samples: int = 9_000, length: int = 30) -> Data:
    generator = torch.Generator().manual_seed(0)
    numbers, marks = torch.rand(samples, length, generator=generator), torch.zeros(samples, length)
    for half in range(2):
        places = torch.randint(half * length // 2, (half + 1) * length // 2, (samples, 1), generator=generator)
        marks.scatter_(1, places, 1.0)
    return cut(torch.stack([numbers, marks], 2), (numbers * marks).sum(1, keepdim=True), samples - 2_000)


def two_functions(data_dir: str, synthetic: bool, samples: int = 7_000) -> Data:
    x = torch.randn(samples, 10, generator=torch.Generator().manual_seed(0))
    values = torch.stack([(2 * x[:, 0]).sin() + x[:, 1] * x[:, 2], (x[:, 3] + x[:, 4]).cos() * x[:, 5]], 1)
    return cut(x, (values - values.mean(0)) / values.std(0), 5_000)


def friedman(data_dir: str, synthetic: bool) -> Data:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.rand(2_500, 10, generator=generator), torch.randn(2_500, generator=generator)
    values = 10 * (torch.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4] + noise
    return cut(x, ((values - values.mean()) / values.std())[:, None], 500)


def cut(inputs: Tensor, targets: Tensor, first: int) -> Data:
    return (inputs[:first], targets[:first]), (inputs[first:], targets[first:])


@dataclass(frozen=True)
class Task:
    """A network, the size of its batches and its data; under the squared error or the cross-entropy."""

    build: Callable[[], nn.Module]
    batch_size: int
    data: Callable[[str, bool], Data] = digits
    is_squared: bool = False


TASKS = {
    "classifier": Task(partial(perceptron, 784, 128, 64, 10), 256),
    "lstm": Task(partial(LastState, nn.LSTM, 28, 64, 10), 128),
    "resnet": Task(SmallResNet, 128),
    "transformer": Task(RowsThroughTransformer, 128),
    "logistic": Task(logistic, 600, digits_twice, is_squared=True),
    "tanh": Task(tanh, 600, digits_twice, is_squared=True),
    "one_hot": Task(partial(perceptron, 1000, 64, 64, 2), 128, categories),
    "adding": Task(partial(LastState, nn.GRU, 2, 48, 1), 64, marked_numbers, is_squared=True),
    "adding_all": Task(
        partial(LastState, nn.LSTM, 2, 16, 1), 512, partial(marked_numbers, samples=2_512, length=20), is_squared=True
    ),
    "friedman": Task(partial(perceptron, 10, 32, 1), 500, friedman, is_squared=True),
    "regression": Task(partial(perceptron, 10, 64, 64, 2), 64, two_functions, is_squared=True),
    "deep": Task(partial(perceptron, 10, *[64] * 8, 2), 64, two_functions, is_squared=True),
}


def train(task: str, way: str, seed: int, seconds: float, data_dir: str, synthetic: bool) -> Run:
    """One run: after each validation its seconds, steps, loss, and accuracy in per cent (None of a squared error)."""
    torch.set_flush_denormal(True)
    of = TASKS[task]
    training, validation = of.data(data_dir, synthetic)
    torch.manual_seed(seed)
    network = of.build()
    step = stepper(network, way, of)
    batches = draw(len(training[0]), of.batch_size, seed)
    spent, steps, curve = 0.0, 0, []
    while spent < seconds:
        rows = next(batches)
        inputs, targets = training[0][rows], training[1][rows]
        begin = time.process_time()
        step(inputs, targets)
        spent, steps = spent + time.process_time() - begin, steps + 1
        if spent >= seconds * (len(curve) + 1) / VALIDATIONS:
            curve.append((spent, steps, *evaluate(network, of, *validation)))
    return {"task": task, "way": way, "seed": seed, "curve": curve}


def stepper(network: nn.Module, way: str, task: Task) -> Callable[[Tensor, Tensor], Any]:
    """Takes a step on a batch."""
    if way == "shf":
        shf = SHF(network, "mse" if task.is_squared else "cross_entropy")
        return lambda inputs, targets: shf.step(inputs=inputs, targets=targets)
    optimizer = rls(network, task) if way == "rls" else torch.optim.Adam(network.parameters(), lr=RATES[way])

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(network(inputs), targets, task).backward()
        optimizer.step()

    return step


def rls(network: nn.Module, task: Task) -> RLS:
    if task.is_squared:
        return RLS(network)
    *_, head = (module for module in network.modules() if isinstance(module, nn.Linear))
    return RLS(network, momentum=0.5, exclude=[head], auxiliary=partial(torch.optim.Adam, lr=1e-3))


def loss_of(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    if task.is_squared:
        return (outputs - targets).square().sum(1).mean() / 2
    return F.cross_entropy(outputs, targets)


def draw(samples: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Rows of the batches, epoch after epoch; what is left over at the end of one is dropped."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(samples, generator=generator).split(batch_size):
            if len(rows) == batch_size:
                yield rows


@torch.no_grad()
def evaluate(network: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> tuple[float, float | None]:
    """Loss (‖ŷ - y‖² where that is the loss), and accuracy in per cent."""
    network.eval()
    outputs = torch.cat([network(part) for part in inputs[:2000].split(500)])
    network.train()
    targets = targets[:2000]
    if task.is_squared:
        return 2 * loss_of(outputs, targets, task).item(), None
    return loss_of(outputs, targets, task).item(), 100 * (outputs.argmax(1) == targets).float().mean().item()


def report(runs: list[Run]) -> None:
    """The table: a row for each task and way, over its seeds."""
    harness.print_machines(runs)
    harness.print_header("task", "way", "in the end", "steps")
    for task, of in TASKS.items():
        for way in WAYS:
            ends = [run["curve"][-1] for run in runs if (run["task"], run["way"]) == (task, way)]
            if ends:
                column, form = (2, "{:.3g}") if of.is_squared else (3, "{:.1f}")
                reached = harness.spread([end[column] for end in ends], form)
                harness.print_row(task, way, reached, harness.spread([end[1] for end in ends], "{:.0f}"))


def main() -> None:
    parser = harness.make_parser(__doc__)
    harness.add_data_options(parser)
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of a run")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    harness.add_run_options(parser, "defaults")
    options = parser.parse_args()
    given = options.seconds, options.data_dir, options.synthetic
    runs = {
        harness.run_name(task, way, seed, f"{options.seconds:g}s"): partial(train, task, way, seed, *given)
        for task, seed, way in product(options.tasks, options.seeds, WAYS)
    }
    report(harness.run_all(options.output, runs, options.report))


if __name__ == "__main__":
    main()
