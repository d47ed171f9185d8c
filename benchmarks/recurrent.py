"""Recurrent regressions: a GRU predicts three series by RLS and by Adam, for so many CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/recurrent.py

The series are Mackey-Glass (τ = 17, one step ahead), NARMA-10 (from its inputs), and the first variable of the Lorenz
system (five steps of .04 ahead). Errors are on the last 450 steps, over the standard deviation of the series.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from harness import machine_line, make_parser, print_header, print_row, spread
from lightning_struct import RLS

STEPS, TRAINED, WINDOW, BATCH = 2200, 1700, 50, 16


def mackey_glass() -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (time, 1)."""
    values = [1.2] * 18
    for _ in range(10 * STEPS + 1000):
        before = values[-171] if len(values) > 171 else values[0]
        values.append(values[-1] + 0.1 * (0.2 * before / (1 + before**10) - 0.1 * values[-1]))
    series = torch.tensor(values[1000::10][:STEPS])[:, None]
    return series[:-1], series[1:]


def narma() -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (time, 1)."""
    inputs = (0.5 * torch.rand(STEPS + 10, generator=torch.Generator().manual_seed(1))).tolist()
    values = [0.0] * 10
    for t in range(9, STEPS + 9):
        product = 1.5 * inputs[t - 9] * inputs[t]
        values.append(0.3 * values[t] + 0.05 * values[t] * sum(values[t - 9 : t + 1]) + product + 0.1)
    return torch.tensor(inputs[:STEPS])[:, None], torch.tensor(values[1 : STEPS + 1])[:, None]


def lorenz() -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (time, 1)."""
    x, y, z, values = 1.0, 1.0, 20.0, list[float]()
    for _ in range(4 * STEPS + 400):
        x, y, z = x + 0.1 * (y - x), y + 0.01 * (x * (28 - z) - y), z + 0.01 * (x * y - 8 / 3 * z)
        values.append(x)
    series = torch.tensor(values[400::4][:STEPS])[:, None]
    return series[:-5], series[5:]


class Network(nn.Module):
    """A GRU of 32 units and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


TASKS = {"Mackey-Glass": mackey_glass, "NARMA-10": narma, "Lorenz": lorenz}
WAYS: dict[str, Callable[[Network], torch.optim.Optimizer]] = {
    "RLS on all layers": RLS,
    "RLS, output layer by Adam at 1e-2": lambda net: RLS(
        net, exclude=[net.head], auxiliary=partial(torch.optim.Adam, lr=1e-2)
    ),
    "Adam at 1e-2": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2),
    "RLS, η of 1/50 for the output layer": lambda net: RLS(net, gradient_scale={"head": 1 / 50}),
    "RLS, ratio of 1": lambda net: RLS(net, ratio=1.0),
    "RLS, lr of 0.3": lambda net: RLS(net, lr=0.3),
    "RLS, lr of 3": lambda net: RLS(net, lr=3.0),
}


def error(task: str, way: str, seed: int, seconds: float) -> float:
    """Error of one run, over the standard deviation of the series."""
    x, y = ((series - series.mean()) / series.std() for series in TASKS[task]())
    torch.manual_seed(seed)
    net = Network()
    optimizer, began = WAYS[way](net), time.process_time()
    while time.process_time() - began < seconds:
        starts = torch.randint(0, TRAINED - WINDOW, (BATCH,)).tolist()
        inputs, targets = (torch.stack([series[t : t + WINDOW] for t in starts]) for series in (x, y))
        optimizer.zero_grad()
        (0.5 * (net(inputs) - targets).square().mean()).backward()
        optimizer.step()
    with torch.no_grad():
        difference = net(x[None, TRAINED:]) - y[None, TRAINED:]
    return difference[:, WINDOW:].square().mean().sqrt().item()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS)[:3])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_header("", *arguments.tasks)
    for way in arguments.ways:
        errors = [[error(task, way, seed, arguments.seconds) for seed in arguments.seeds] for task in arguments.tasks]
        print_row(way, *(spread(of_task, "{:.3f}") for of_task in errors))
    print(f"\n{machine_line()}")


if __name__ == "__main__":
    main()
