"""The end of a run at a constant rate: a batch that grows, a rate that falls, or both. Branches of one run.

    OMP_NUM_THREADS=1 python benchmarks/growing_batch_size_at_end.py --data-dir DIRECTORY [--tasks mnist ...]

A run of a task of growing_batch_size.py with its own batch is continued in several ways after 0.8 or 0.9 of its
samples, all on the same ones. Reported are the last validation losses; and q of the test of progress over the window
from 0.6 to 0.8 of the samples, by the 40 gradients after it, in standard errors.
"""

from __future__ import annotations

import argparse
from copy import deepcopy

import torch

import harness
from growing_batch_size import TASKS, Project, Task

# The multiples of the batch after shares of the samples; whether the rate falls to zero from the first of them on.
WAYS = {
    "2, 4, 8 times": ({0.8: 2, 0.9: 4, 0.95: 8}, False),
    "2, 4 times": ({0.9: 2, 0.95: 4}, False),
    "falling rate": ({0.8: 1}, True),
    "2, 4, 8 times, falling rate": ({0.8: 2, 0.9: 4, 0.95: 8}, True),
}


class Branches:
    """A run with the own batch, and others that continue it."""

    def __init__(self, task: Task, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.training, self.validation = (part.tensors for part in task.data(options))
        self.module, self.first = Project(task), task.batch_size
        self.optimizer = task.optimizer(self.module.parameters())
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.total = int(task.samples * options.share) // self.first * self.first
        generator, n = torch.Generator().manual_seed(options.seed), len(self.training[0])
        self.order = torch.cat([torch.randperm(n, generator=generator) for _ in range(self.total // n + 2)])
        self.states: dict[float, tuple[int, object, object]] = {}
        self.products: list[float] = []  # of displacement and gradients
        self.own = self.fit(0, {}, False)

    def fit(self, at: int, growth: dict[float, int], falls: bool) -> float:
        begins, is_first = min(growth, default=1.0), not at
        while at < self.total:
            share, module = at / self.total, self.module
            for place in (0.6, 0.8, 0.9):
                if is_first and place not in self.states and share >= place:
                    self.states[place] = at, deepcopy(module.state_dict()), deepcopy(self.optimizer.state_dict())
            times = max((multiple for after, multiple in growth.items() if share >= after - 1e-9), default=1)
            rows = self.order[at : (at := min(at + times * self.first, self.total))]
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * (max((1 - share) / (1 - begins), 1e-3) if falls else 1)
            self.optimizer.zero_grad()
            module.loss(tuple(tensor[rows] for tensor in self.training)).backward()
            if is_first and 0.8 in self.states and len(self.products) < 40:
                before, after = (self.states[place][1] for place in (0.6, 0.8))
                moved = [(before[name] - after[name], p.grad) for name, p in module.named_parameters()]
                self.products.append(sum((displacement * gradient).sum().item() for displacement, gradient in moved))
            self.optimizer.step()
        module.eval()
        with torch.no_grad():
            loss = module.loss(self.validation).item()
        module.train()
        return loss

    def branch(self, growth: dict[float, int], falls: bool) -> float:
        at, weights, moments = self.states[min(growth)]
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(deepcopy(moments))
        return self.fit(at, growth, falls)


def main() -> None:
    parser = harness.make_parser(__doc__)
    harness.add_data_options(parser)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=["mnist", "usps", "imdb", "bag"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the samples of each task")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    harness.print_header("task", "steps", "q in standard errors", "own batch", *WAYS)
    for name in options.tasks:
        run = Branches(TASKS[name], options)
        losses = [run.own, *(run.branch(*way) for way in WAYS.values())]
        q = torch.tensor(run.products)
        score = f"{(q.mean() / q.std() * len(q) ** 0.5).item():+.1f}"
        harness.print_row(name, run.total // run.first, score, *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
