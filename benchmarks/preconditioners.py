"""What the preconditioner saves: solver iterations over a training run of SHF with Kronecker factors, and its seconds.

    OMP_NUM_THREADS=1 python benchmarks/preconditioners.py usps --data-dir DIRECTORY [--steps 5 20 40 60 80]
    OMP_NUM_THREADS=1 python benchmarks/preconditioners.py curves

Trains by ``recipes/TASK_autoencoder/kronecker.yaml``. Before each of the steps named, the subproblem of that step is solved
from zero by conjugate gradients without a preconditioner, with the randomised Jacobi preconditioner of the paper
(Algorithm 3) and with Kronecker factors, until ‖b - B d‖ <= ``--tolerance`` ‖b‖ in the space of the weights. Printed are the
iterations, and in the end the share of each phase in the wall time of the steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_struct.functional import conjugate_gradient
from lightning_struct.optim.shf.batch_model import BatchModel

CONFIGS = Path(__file__).resolve().parents[1] / "recipes"


class SolverIterations(L.Callback):
    """Solves the subproblems of the steps named three times, and adds up the seconds of all steps by phase.

    Args:
        steps: numbers of steps, from 0.
        tolerance: of the relative residual.
        maxiter: bound on the iterations.
    """

    def __init__(self, steps: list[int], tolerance: float, maxiter: int) -> None:
        self.steps, self.tolerance, self.maxiter = steps, tolerance, maxiter
        self.seconds: Counter[str] = Counter()

    @torch.no_grad()
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step not in self.steps:
            return
        shf = pl_module.shf
        inputs, targets = pl_module.inputs_and_targets(batch)
        weights = {name: p.detach() for name, p in pl_module.named_parameters()}
        l2, damping = shf.settings.l2, shf.damping
        model = BatchModel(pl_module, shf.loss, weights, inputs, targets, l2=l2)
        preconditioners = {
            "none": None,
            "diagonal": model.scaling("diagonal", damping, seed=trainer.global_step),
            "kronecker": shf._preconditioner_of(model).at(damping),
        }
        counts = []
        for preconditioner in preconditioners.values():
            result = conjugate_gradient(
                lambda d: model.curvature(d).add_(d, alpha=damping**2 + l2),
                -model.gradient,
                preconditioner=preconditioner,
                maxiter=self.maxiter,
                progress_tolerance=0.0,
                rtol=self.tolerance,
            )
            counts.append(f"{result.iterations}" if result.stop_reason == "residual" else f"> {self.maxiter}")
        print(f"| {trainer.global_step} | {model.n} | {damping:.3g} | {' | '.join(counts)} |", flush=True)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.seconds.update(pl_module.shf.report.seconds)
        if trainer.global_step > max(self.steps):
            trainer.should_stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("usps", "mnist", "curves"))
    parser.add_argument("--data-dir", default="data", help="where the files of the data set are; curves needs none")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 20, 40, 60, 80])
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--maxiter", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recipe = import_module(f"lightning_struct.recipes.{options.task}_autoencoder").main
    data = [f"--data.data_dir={Path(options.data_dir).resolve()}"] if options.task != "curves" else []
    print("| step | n | λ | no preconditioner | diagonal | Kronecker |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        cli = recipe(
            [
                "fit",
                f"--config={CONFIGS / f'{options.task}_autoencoder' / 'kronecker.yaml'}",
                *data,
                f"--seed_everything={options.seed}",
                f"--data.seed={options.seed}",
                "--trainer.enable_progress_bar=false",
                "--trainer.callbacks+=preconditioners.SolverIterations",
                f"--trainer.callbacks.steps={options.steps}",
                f"--trainer.callbacks.tolerance={options.tolerance}",
                f"--trainer.callbacks.maxiter={options.maxiter}",
            ]
        )
    (callback,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "SolverIterations")
    total = sum(callback.seconds.values())
    print("\n| phase | share of the seconds of all steps |\n|---|---|")
    for phase, seconds in callback.seconds.most_common():
        print(f"| {phase} | {seconds / total:.0%} |")


if __name__ == "__main__":
    main()
