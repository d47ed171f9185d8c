"""Solver iterations that the preconditioner saves over a training run of SHF with Kronecker factors, and its seconds.

    OMP_NUM_THREADS=1 python benchmarks/preconditioners.py usps --data-dir DIRECTORY [--steps 5 20 40 60 80]
    OMP_NUM_THREADS=1 python benchmarks/preconditioners.py curves

Trains by ``recipes/TASK_autoencoder/kronecker.yaml``. Before each of the steps named, the subproblem of that step is
solved from zero by conjugate gradients without a preconditioner, with the randomised Jacobi preconditioner of the paper
(Algorithm 3) and with Kronecker factors, until ‖b - B d‖ <= 0.1 ‖b‖ in the space of the weights. Printed
are the iterations, and in the end the share of each phase in the wall time of the steps. With the steps named it takes
about three minutes of one core on USPS, and longer on the larger networks.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import lightning as L
import torch

import harness
from autoencoders import data_arguments
from lightning_struct.functional import conjugate_gradient
from lightning_struct.optim import Kronecker
from lightning_struct.optim.shf.outputs.batch_model import BatchModel
from lightning_struct.optim.shf.outputs.preconditioner import (
    BlockPreconditioner,
    KroneckerFactors,
    averaged,
    diagonal_scaling,
)

MAXITER = 500


class SolverIterations(L.Callback):
    """Solves the subproblems of the steps named three times, and adds up the seconds of all steps by phase.

    Args:
        steps: numbers of steps, from 0.
    """

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps
        self.seconds: Counter[str] = Counter()

    @torch.no_grad()
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step not in self.steps:
            return
        shf = pl_module.shf
        inputs, targets = pl_module.inputs_and_targets(batch)
        weights = {name: p.detach() for name, p in pl_module.named_parameters()}
        l2, damping = shf.settings.l2, shf.damping
        model = BatchModel(pl_module, shf.loss, weights, inputs, targets, shf.settings)
        preconditioners = {
            "none": None,
            "diagonal": diagonal_scaling("diagonal", model, trainer.global_step, damping),
            "kronecker": self._kronecker(pl_module, model, math.hypot(damping, math.sqrt(l2))),
        }
        counts = []
        for preconditioner in preconditioners.values():
            result = conjugate_gradient(
                lambda d: model.curvature(d).add_(d, alpha=damping**2 + l2),
                -model.gradient,
                preconditioner=preconditioner,
                maxiter=MAXITER,
                progress_tolerance=0.0,
                rtol=0.1,
            )
            counts.append(f"{result.iterations}" if result.stop_reason == "residual" else f"> {MAXITER}")
        harness.print_row(trainer.global_step, model.n, f"{damping:.3g}", *counts)

    def _kronecker(self, module: Any, model: BatchModel, damping: float) -> BlockPreconditioner:
        """The preconditioner of this step: the averages of the steps before, with this batch in them."""
        shf = module.shf
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        kronecker = KroneckerFactors(module, trained, Kronecker(max_size=None))
        factors = kronecker.measure(model, seed=module.global_step)
        if module.global_step:
            factors = averaged(shf.state["shf"]["factors"], factors, shf.settings.preconditioner.decay)
        return kronecker.preconditioner(factors, damping)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.seconds.update(pl_module.shf.report.seconds)
        if trainer.global_step > max(self.steps):
            trainer.should_stop = True


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("task", choices=("usps", "mnist", "curves"), help="curves needs no data files")
    harness.add_data_options(parser)
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 20, 40, 60, 80])
    options = parser.parse_args()
    recipe = f"{options.task}_autoencoder"
    arguments = [
        f"--config={harness.CONFIGS / recipe / 'kronecker.yaml'}",
        *data_arguments(options.task, options),
        "--seed_everything=0",
        "--data.seed=0",
    ]
    print(harness.machine_line())
    harness.print_header("step", "n", "λ", "no preconditioner", "diagonal", "Kronecker")
    with harness.fitted_recipe(recipe, arguments, "preconditioners.SolverIterations", steps=options.steps) as (
        _,
        callback,
    ):
        total = sum(callback.seconds.values())
        harness.print_header("phase", "share of the seconds of all steps")
        for phase, seconds in callback.seconds.most_common():
            harness.print_row(phase, f"{seconds / total:.0%}")


if __name__ == "__main__":
    main()
