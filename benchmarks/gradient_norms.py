"""Cost of measuring the norm of every sample's gradient in every training step, here and by other packages.

    python benchmarks/gradient_norms.py [--tasks autoencoder cnn transformer] [--threads 1] [--pairs 15]

A training step is forward, backward and a step of Adam, float32, in a bare loop. Measured are ours
(GradientNormRecorder, by sketches with 8 random signs and exact), and the ways of others to get the same numbers, each
of which replaces the ordinary gradient by per-sample gradients or norms:

    vmap(grad)                 torch.func, in torch itself
    Opacus GradSampleModule    pip install opacus
    BackPACK BatchL2Grad       pip install backpack-for-pytorch
    BackPACK BatchGrad

Tasks: the MNIST autoencoder (784-1000-500-250-30 and back), the mini VGG of ``recipes/cifar_cnn``, both at batch 128,
and the Transformer of Lightning's demos with 2,000 words, 16 sentences of 35 tokens, no dropout. Data are random.

Each way runs in a process of its own, in which steps with and without it alternate, so that a machine whose speed
drifts does not change the ratio; time is CPU time of the process, where there is one thread. Memory is the highest
resident set of the process less what plain steps took. The last column shows that all ways measure the same: the sum of
the squared norms over the samples of the first batch, at the same weights. Ours take about ten minutes on one core with
15 pairs, mostly for the CNN; some rivals, which take up to seventy times a plain step, an hour (``--pairs 2``).
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import harness
from harness import Run
from lightning_struct.functional import GradientNormRecorder
from lightning_struct.models import mini_vgg

AUTOENCODER = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
WORDS, TOKENS = 2000, 35
TASKS = ("autoencoder", "cnn", "transformer")
LEARNING_RATE = 1e-3
Step = Callable[[], Tensor | None]


@dataclass
class Task:
    """A network, a batch of its inputs and targets, and a loss that is the mean over samples."""

    network: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Tensor
    loss: nn.Module

    @property
    def samples(self) -> int:
        return len(self.targets)

    def loss_of(self, network: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        outputs = network(*inputs)
        return self.loss(outputs, targets.reshape(-1) if isinstance(self.loss, nn.NLLLoss) else targets)


def make_task(name: str) -> Task:
    torch.manual_seed(0)
    if name == "autoencoder":
        layers = [layer for pair in pairwise(AUTOENCODER) for layer in (nn.Linear(*pair), nn.Sigmoid())]
        images = torch.rand(128, 784)
        return Task(nn.Sequential(*layers), (images,), images, nn.MSELoss())
    if name == "cnn":
        return Task(mini_vgg(), (torch.randn(128, 3, 32, 32),), torch.randint(10, (128,)), nn.CrossEntropyLoss())
    from lightning.pytorch.demos.transformer import Transformer

    text = torch.randint(WORDS, (16, TOKENS + 1))
    return Task(
        Transformer(vocab_size=WORDS, dropout=0.0), (text[:, :-1], text[:, 1:]), text[:, 1:].contiguous(), nn.NLLLoss()
    )


def plain_step(task: Task, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    task.loss_of(network, task.inputs, task.targets).backward()
    optimizer.step()


def recorder(task: Task, network: nn.Module, optimizer: torch.optim.Optimizer, probes: int | None) -> Step:
    measuring = GradientNormRecorder(network, samples=task.samples, probes=probes)
    measuring.attach()

    def step() -> Tensor:
        plain_step(task, network, optimizer)
        norms = torch.stack([norms for result in measuring.results() for norms in result.squared_norms])
        measuring.reset()
        return task.samples**2 * norms.sum()

    return step


def vmap_of_grad(task: Task, network: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    parameters = dict(network.named_parameters())

    def sample_loss(weights: dict[str, Tensor], inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        def call(*arguments: Tensor) -> Tensor:
            return functional_call(network, weights, arguments)

        return task.loss_of(call, tuple(x.unsqueeze(0) for x in inputs), target.unsqueeze(0))  # type: ignore[arg-type]

    gradients_of = vmap(grad(sample_loss), (None, 0, 0), randomness="different")

    def step() -> Tensor:
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        gradients = gradients_of(weights, task.inputs, task.targets)
        squared = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()]).sum()
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].mean(0)
        optimizer.step()
        return squared

    return step


def sum_of_squares(network: nn.Module, attribute: str) -> Tensor:
    """Sum of the squared norms of the per-sample gradients, which each parameter has in an attribute."""
    gradients: list[Tensor] = [getattr(parameter, attribute) for parameter in network.parameters()]
    return torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum()


def opacus(task: Task, network: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    from opacus import GradSampleModule  # type: ignore[import-not-found]

    wrapped = GradSampleModule(network, batch_first=True, loss_reduction="mean")

    def step() -> Tensor:
        wrapped.zero_grad()
        task.loss_of(wrapped, task.inputs, task.targets).backward()
        squared = sum_of_squares(network, "grad_sample")
        optimizer.step()
        return squared

    return step


def backpack(task: Task, network: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> Step:
    from backpack import backpack as extending  # type: ignore[import-not-found]
    from backpack import extend, extensions

    extended = extend(network)
    extend(task.loss)
    extension = getattr(extensions, name)

    def step() -> Tensor:
        optimizer.zero_grad()
        with extending(extension()):
            task.loss_of(extended, task.inputs, task.targets).backward()
        if name == "BatchL2Grad":
            squared = torch.stack([p.batch_l2 for p in network.parameters()]).sum()  # type: ignore[attr-defined]
        else:
            squared = sum_of_squares(network, "grad_batch")
        optimizer.step()
        return task.samples**2 * squared

    return step


WAYS: dict[str, Callable[[Task, nn.Module, torch.optim.Optimizer], Step]] = {
    "recorder, 8 probes": partial(recorder, probes=8),
    "recorder, exact": partial(recorder, probes=None),
    "torch.func vmap(grad)": vmap_of_grad,
    "Opacus GradSampleModule": opacus,
    "BackPACK BatchL2Grad": partial(backpack, name="BatchL2Grad"),
    "BackPACK BatchGrad": partial(backpack, name="BatchGrad"),
}


def measure(task: Task, way: str, pairs: int) -> Run:
    """Steps of two copies of the network, one plain and one measured, in turns."""
    networks = [task.network, copy.deepcopy(task.network)]
    optimizers = [torch.optim.Adam(network.parameters(), lr=LEARNING_RATE) for network in networks]
    start = copy.deepcopy(networks[1].state_dict())
    for network, optimizer in zip(networks, optimizers, strict=True):
        plain_step(task, network, optimizer)  # so that Adam's state is not counted to the way
    networks[1].load_state_dict(start)
    for network in networks:
        network.zero_grad()
    base = peak_mib()
    steps: tuple[Step, Step] = (
        lambda: plain_step(task, networks[0], optimizers[0]),
        WAYS[way](task, networks[1], optimizers[1]),
    )
    squared = steps[1]()
    assert squared is not None
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            begin = now()
            steps[which]()
            seconds[which].append(now() - begin)
    return compare(*seconds) | {"mib": peak_mib() - base, "squared": squared.item()}


def compare(plain: list[float], measured: list[float]) -> Run:
    ratios = sorted(b / a for a, b in zip(plain, measured, strict=True))
    quarter = len(ratios) // 4
    return {
        "ratio": statistics.median(measured) / statistics.median(plain),
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
        "plain_ms": 1e3 * statistics.median(plain),
    }


def now() -> float:
    """Seconds: of one thread its CPU time, which other jobs on the machine change little."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.way:
        task = make_task(options.tasks[0])
        print(json.dumps(measure(task, options.way, options.pairs)))
        return
    print(harness.machine_line())
    print(f"float32, seed 0, {options.pairs} pairs of steps; ratio of the medians (quartiles of the ratios of pairs)")
    given = [f"--pairs={options.pairs}", f"--threads={options.threads}"]
    columns = ("step / plain step", "more memory, MiB", "plain step, ms", "sum of squared norms")
    for name in options.tasks:
        harness.print_header(f"{name}: measured by", *columns)
        for way in options.ways:
            try:
                found = harness.measure_apart("--way", way, "--tasks", name, *given, threads=options.threads)
            except ChildProcessError as error:
                harness.print_row(way, f"not measured: {error}", "", "", "")
                continue
            harness.print_row(
                way,
                f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})",
                f"{found['mib']:.0f}",
                f"{found['plain_ms']:.0f}",
                f"{found['squared']:.5g}",
            )


if __name__ == "__main__":
    main()
