"""Whole training steps of RLS with its default settings over those of Adam, on networks of today.

    OMP_NUM_THREADS=1 python benchmarks/rls_speed.py [--networks mnist resnet18_16 ...] [--rounds 9]

Rounds of all ways in turn, in one process and on one thread; the ratio of each round is to the Adam of that round, and
the table has the median with the lowest and the highest. Both clip to the norm 5, under the cross-entropy. Time is CPU
time. Denormal numbers are flushed to zero.

- ``mnist``: 784-512-10, batch 128; ``cnn64``: the paper's mini VGG with 64 channels, batch 128; ``lstm512``: the
  paper's two LSTM layers of 512 units, 200 words, batch 128;
- ``resnet18_16``, ``resnet18_64``: torchvision's ResNet-18 with the stem for images of 32 x 32, batches of 16 and 64;
- ``transformer``: six layers of 256 units, 16 sequences of 64 characters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import harness
from lightning_struct.models import RecurrentNetwork, fully_connected, mini_vgg
from lightning_struct.optim import RLS

ADAM = partial(torch.optim.Adam, lr=1e-3)
MAX_GRAD_NORM = 5.0
WAYS: dict[str, dict[str, Any]] = {"RLS": {}, "RLS, l1": {"l1": 1e-5}, "RLS, max_gain=None": {"max_gain": None}}


def resnet18() -> nn.Module:
    network = torchvision.models.resnet18(num_classes=10)
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return network


class Transformer(nn.Module):
    """Characters to scores of the next one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(65, 256), nn.Linear(256, 65)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(characters))).flatten(0, 1)


# Network, a batch, number of targets, of classes, and of steps in a round.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int, int, int]] = {
    "mnist": (fully_connected, lambda: torch.rand(128, 784), 128, 10, 20),
    "cnn64": (mini_vgg, lambda: torch.rand(128, 3, 32, 32), 128, 10, 1),
    "lstm512": (RecurrentNetwork, lambda: torch.randint(2, 20_000, (128, 200)), 128, 2, 1),
    "resnet18_16": (resnet18, lambda: torch.randn(16, 3, 32, 32), 16, 10, 1),
    "resnet18_64": (resnet18, lambda: torch.randn(64, 3, 32, 32), 64, 10, 1),
    "transformer": (Transformer, lambda: torch.randint(65, (16, 64)), 1024, 65, 1),
}


def make_step(name: str, arguments: dict[str, Any] | None) -> Callable[[], None]:
    """One training step by RLS, or by Adam where there are no arguments."""
    torch.manual_seed(0)
    build, batch, rows, classes, _ = NETWORKS[name]
    network, inputs, labels = build(), batch(), torch.randint(classes, (rows,))
    parameters = list(network.parameters())
    if arguments is None:
        optimizer: torch.optim.Optimizer = ADAM(parameters)
    else:
        optimizer = RLS(network, auxiliary=ADAM, max_grad_norm=MAX_GRAD_NORM, **arguments)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        if arguments is None:
            nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None], number: int) -> float:
    begin = time.process_time()
    for _ in range(number):
        step()
    return 1000 * (time.process_time() - begin) / number


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    print(harness.machine_line())
    harness.print_header("network", "way", "step / step with Adam (lowest to highest)", "with Adam, ms")
    for name in options.networks:
        steps = [make_step(name, arguments) for arguments in (None, *(WAYS[way] for way in options.ways))]
        number = NETWORKS[name][-1]
        rounds = [[milliseconds(step, number) for step in steps] for _ in range(options.rounds + 1)][1:]
        of_adam, *of_ways = zip(*rounds, strict=True)
        for way, times in zip(options.ways, of_ways, strict=True):
            ratios = [mine / adam for mine, adam in zip(times, of_adam, strict=True)]
            harness.print_row(name, way, harness.spread(ratios, bold=True), f"{statistics.median(of_adam):.1f}")


if __name__ == "__main__":
    main()
