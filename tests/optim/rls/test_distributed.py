"""Two processes with uneven shares of the batch take the steps of one process with all of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

from lightning_struct.optim import RLS, SHF
from tests.cases import flat, trainable
from tests.optim.helpers import gaussian
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow

WORLD, STEPS = 2, 5


class Packed(nn.Module):
    """Sequences of one to four steps, so that the mean length differs between the processes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(20, 12)
        self.lstm, self.head = nn.LSTM(3, 4, 2, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x):
        sequences = self.embedding(x).view(-1, 4, 3)
        cut = [
            sequence[: 1 + int(row[0] > 0) + 2 * int(row[1] > 0)] for sequence, row in zip(sequences, x, strict=True)
        ]
        return self.head(self.lstm(pack_sequence(cut, enforce_sorted=False))[1][0][-2:].transpose(0, 1).flatten(1))


def perceptron():
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(40, 2)
    )


@dataclass(frozen=True)
class Scenario:
    build: Callable[[], nn.Module] = perceptron
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64


ADAM = partial(torch.optim.Adam, lr=1e-3)
SCENARIOS = {
    "perceptron": Scenario(options={"momentum": 0.5, "l1": 1e-4}),
    "clipped": Scenario(options={"max_grad_norm": 0.05}),
    "rank1": Scenario(options={"form": "rank1"}),
    "convolution_and_adam": Scenario(convolution, {"auxiliary": ADAM}),
    "packed": Scenario(Packed),
    "float32": Scenario(dtype=torch.float32),
}


def share(step, rank):
    """The rows of a process, or all where ``rank`` is None, and the number of all."""
    first = 1 + (5 * step) % 9
    rows = 0.3 * gaussian(first + 6, 20, seed=step) + 0.2
    return (rows if rank is None else rows[:first] if rank == 0 else rows[first:]), len(rows)


def train(scenario, rank):
    """The weights after each step."""
    torch.manual_seed(0)
    module = scenario.build().to(scenario.dtype)
    optimizer = RLS(module, **scenario.options)
    model = module if rank is None else DistributedDataParallel(module)
    steps = []
    for step in range(STEPS):
        rows, number = share(step, rank)
        optimizer.zero_grad()
        outputs = model(rows.to(scenario.dtype))
        loss = 0.5 * (outputs - rows[:, :2].sin().to(scenario.dtype)).square().sum() / number
        (loss if rank is None else loss * WORLD).backward()
        optimizer.step()
        steps.append(flat(trainable(module)).clone())
    return steps


def error_with_sharded_weights(make):
    module = perceptron()
    fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)))
    try:
        RLS(module) if make is RLS else SHF(module, "mse")
    except ValueError as error:
        return str(error)
    return ""


def work(rank):
    return {
        "sharded": {
            "RLS": error_with_sharded_weights(RLS),
            "SHF": error_with_sharded_weights(partial(SHF, loss="mse")),
        },
        "steps": {name: train(scenario, rank) for name, scenario in SCENARIOS.items()},
    }


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What each of the two processes did."""
    return in_two_processes(work, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_weights_are_those_of_one_process_with_the_whole_batch_and_bitwise_alike(name, processes):
    runs = [of["steps"][name] for of in processes]
    for mine, other, expected in zip(*runs, train(SCENARIOS[name], None), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12 if mine.dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("name", ["RLS", "SHF"])
def test_sharded_weights_are_refused_when_the_optimizer_is_made(name, processes):
    assert "0.weight is a DTensor, spread over processes (FSDP2, tensor parallelism)" in processes[0]["sharded"][name]
