"""The time that GrowingBatchSize costs, at a batch that stays as it is: the tasks of growing_batch_size.py.

    OMP_NUM_THREADS=1 python benchmarks/growing_batch_size_overhead.py --data-dir DIRECTORY [--tasks mnist ...]

The callback measures in one of so many steps, by default, and looks whether something is due in all others. Both are
timed apart, each in a short fit of its own in which every step is of that kind, next to a fit without the callback; the
three take turns, so that a machine whose speed drifts does not change the ratios. A fit counts with the median of its
steps, after the first ones, in which the callback compares what it measures with the gradient. What the callback costs
on average follows from both, and from the interval that it has chosen, which it logs.

Time is CPU time of the process. The default takes about five minutes of one core.
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from unittest import TestCase

import lightning as L
import torch
from lightning_utilities.core import rank_zero
from torch.utils.data import DataLoader

import harness
from growing_batch_size import TASKS, Data, Project, Task
from lightning_struct import GrowingBatchSize, NoiseEstimator
from lightning_struct.data.in_memory import keep_batch

FIRST_STEPS = 10
NEVER = 1_000_000


class KeepsBatchSize(GrowingBatchSize):
    """Measures and decides, and stays where it is, so that all fits have the same batches."""

    def decide(self, batch_size: float) -> float:
        super().decide(batch_size)
        return batch_size


class StepTimes(L.Callback):
    """CPU seconds at which steps begin."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.times.append(time.process_time())

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(after - before for before, after in pairwise(self.times[FIRST_STEPS:]))


def fit(task: Task, data: Data, steps: int, growing: GrowingBatchSize | None) -> float:
    """Seconds of a step of a short fit."""
    L.seed_everything(0, verbose=False)
    times = StepTimes()
    callbacks = [times] if growing is None else [growing, times]
    trainer = harness.bare_trainer(*callbacks, max_steps=steps, max_epochs=-1, limit_val_batches=0)
    loader = DataLoader(data[0], batch_size=task.batch_size, shuffle=True, collate_fn=keep_batch)
    trainer.fit(Project(task), loader)
    return times.median


def chosen_interval(task: Task, data: Data) -> int:
    """Steps from one measurement to the next, as the callback chooses by default."""
    with TestCase().assertLogs(rank_zero.log, "INFO") as logs:
        fit(task, data, FIRST_STEPS + 2, KeepsBatchSize())
    (found,) = re.findall(r"GrowingBatchSize measures .* every (\d+) steps", "\n".join(logs.output))
    return int(found)


def report(name: str, options: argparse.Namespace) -> None:
    """Print the row of a task."""
    task = TASKS[name]
    data = task.data(options)
    every = chosen_interval(task, data)
    kinds: list[Callable[[], GrowingBatchSize | None]] = [
        lambda: None,
        lambda: KeepsBatchSize(estimator=NoiseEstimator(every_n_steps=NEVER)),
        lambda: KeepsBatchSize(estimator=NoiseEstimator(every_n_steps=1)),
    ]
    rounds = [[fit(task, data, options.steps, kind()) for kind in kinds] for _ in range(options.rounds)]
    plain, other, measured = (list(seconds) for seconds in zip(*rounds, strict=True))
    others = [b - a for a, b in zip(plain, other, strict=True)]
    average = [((every - 1) * b + c) / every / a for a, b, c in rounds]
    harness.print_row(
        name,
        harness.spread([1e3 * seconds for seconds in plain]),
        harness.spread([1e6 * seconds for seconds in others], "{:.0f}"),
        harness.spread([c / a for a, c in zip(plain, measured, strict=True)]),
        every,
        harness.spread(average, "{:.3f}"),
    )


def main() -> None:
    parser = harness.make_parser(__doc__)
    harness.add_data_options(parser)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--steps", type=int, default=70, help=f"of a fit; the first {FIRST_STEPS} are not counted")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    print(harness.machine_line())
    print(f"seed 0, {options.rounds} rounds: median (lowest to highest)")
    harness.print_header(
        "task",
        "plain step, ms",
        "more in a step between measurements, µs",
        "measured step / plain",
        "measured every ... steps",
        "on average / plain",
    )
    for name in options.tasks:
        report(name, options)


if __name__ == "__main__":
    main()
