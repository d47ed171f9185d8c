"""What it costs to measure the norm of every sample's gradient in every training step.

    python benchmarks/gradient_norms.py [--tasks autoencoder cnn transformer] [--threads 1] [--pairs 15]

A training step is forward, backward and a step of Adam, float32. Measured are ours, in a bare loop (GradientNormRecorder,
by sketches with 8 random signs and exact) and as the callback GrowingBatchSize in a Lightning fit (its own plain step is
that of the same fit without it, at a batch size that is kept), and the ways of others to get the same numbers, each of
which replaces the ordinary gradient by per-sample gradients or norms:

    vmap(grad)                 torch.func, in torch itself
    Opacus GradSampleModule    pip install opacus
    BackPACK BatchL2Grad       pip install backpack-for-pytorch
    BackPACK BatchGrad

Tasks: the MNIST autoencoder (784-1000-500-250-30 and back), the mini VGG of ``recipes/cifar_cnn``, both at batch 128, and
the Transformer of Lightning's demos with 2,000 words, 16 sentences of 35 tokens, no dropout. Data are random.

Each way runs in a process of its own, in which steps with and without it alternate, so that a machine whose speed drifts
does not change the ratio; time is CPU time of the process, where there is one thread. Memory is the highest resident set
of the process less what plain steps took. What a way measures is in the last column: the sum of the squared norms over the
samples of the first batch, at the same weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

AUTOENCODER = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
WORDS, TOKENS = 2000, 35
TASKS = ("autoencoder", "cnn", "transformer")
LEARNING_RATE = 1e-3
FIT_STEPS, FIRST_STEPS = 12, 4  # the callback checks itself in the first three steps of a fit, which are not counted
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
        from lightning_struct.models import mini_vgg

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
    from lightning_struct.functional.gradient_norms import GradientNormRecorder

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


def opacus(task: Task, network: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(network, batch_first=True, loss_reduction="mean")

    def step() -> Tensor:
        wrapped.zero_grad()
        task.loss_of(wrapped, task.inputs, task.targets).backward()
        squared = torch.stack([p.grad_sample.flatten(1).square().sum(1) for p in network.parameters()]).sum()
        optimizer.step()
        return squared

    return step


def backpack(task: Task, network: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> Step:
    from backpack import backpack, extend, extensions

    extended = extend(network)
    extend(task.loss)
    extension = getattr(extensions, name)

    def step() -> Tensor:
        optimizer.zero_grad()
        with backpack(extension()):
            task.loss_of(extended, task.inputs, task.targets).backward()
        parameters = list(network.parameters())
        if name == "BatchL2Grad":
            squared = torch.stack([parameter.batch_l2 for parameter in parameters]).sum()
        else:
            squared = torch.stack([p.grad_batch.flatten(1).square().sum(1) for p in parameters]).sum()
        optimizer.step()
        return task.samples**2 * squared

    return step


WAYS: dict[str, Callable[[Task, nn.Module, torch.optim.Optimizer], Step]] = {
    "recorder, 8 probes": lambda *arguments: recorder(*arguments, probes=8),
    "recorder, exact": lambda *arguments: recorder(*arguments, probes=None),
    "torch.func vmap(grad)": vmap_of_grad,
    "Opacus GradSampleModule": opacus,
    "BackPACK BatchL2Grad": lambda *arguments: backpack(*arguments, name="BatchL2Grad"),
    "BackPACK BatchGrad": lambda *arguments: backpack(*arguments, name="BatchGrad"),
}
CALLBACK = "callback GrowingBatchSize"


def measure_bare(task: Task, way: str, pairs: int) -> dict[str, object]:
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
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            begin = now()
            steps[which]()
            seconds[which].append(now() - begin)
    return summary(*seconds) | {"mib": peak_mib() - base, "squared": float(squared)}  # type: ignore[arg-type]


def measure_callback(task: Task, pairs: int) -> dict[str, object]:
    """Short fits with and without the callback in turns; a pair are the medians of one fit each."""
    import lightning as L

    from lightning_struct import GrowingBatchSize

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = task.network

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return task.loss_of(self.network, tuple(batch[:-1]), batch[-1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    class Clock(L.Callback):
        """Times at which steps begin."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_start(self, *_: object) -> None:
            self.times.append(now())

    class KeepsBatchSize(GrowingBatchSize):
        """Measures and predicts, and stays where it is, so that both fits have the same batches."""

        def decide(self, batch_size: int) -> int:
            return batch_size

    data = TensorDataset(*(torch.cat([part] * FIT_STEPS) for part in (*task.inputs, task.targets)))

    def fit(callbacks: list[L.Callback]) -> float:
        clock = Clock()
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock, *callbacks],
        )
        trainer.fit(Module(), DataLoader(data, batch_size=task.samples))
        return statistics.median(b - a for a, b in pairwise(clock.times[FIRST_STEPS:]))

    fit([])
    base = peak_mib()
    fit([KeepsBatchSize()])
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            seconds[which].append(fit([KeepsBatchSize()] if which else []))
    return summary(*seconds) | {"mib": peak_mib() - base, "squared": None}


def summary(plain: list[float], measured: list[float]) -> dict[str, float]:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=(CALLBACK, *WAYS), default=[CALLBACK, *WAYS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        torch.set_num_threads(options.threads)
        task = make_task(options.tasks[0])
        pairs = options.pairs
        result = measure_callback(task, pairs) if options.way == CALLBACK else measure_bare(task, options.way, pairs)
        print(json.dumps(result))
        return
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.threads} thread(s)")
    print(f"float32, seed 0, {options.pairs} pairs of steps; ratio of the medians (quartiles of the ratios of pairs)")
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    for name in options.tasks:
        print(
            f"\n| {name}: measured by | step / plain step | more memory, MiB | plain step, ms | sum of squared norms |"
        )
        print("|---|---|---|---|---|", flush=True)
        for way in options.ways:
            command = [sys.executable, "-W", "ignore", __file__, "--way", way, "--tasks", name]
            command += ["--pairs", str(options.pairs), "--threads", str(options.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                print(f"| {way} | not measured: {lines[-1].replace('|', '/')[:160]} | | | |", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            squared = "" if row["squared"] is None else f"{row['squared']:.5g}"
            print(
                f"| {way} | {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f}) | {row['mib']:.0f} "
                f"| {row['plain_ms']:.0f} | {squared} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
