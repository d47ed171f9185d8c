"""The choice of an estimator: by what is there, never by a clock, so that two runs with one seed are equal."""

from __future__ import annotations

from lightning_struct.callbacks.growing_batch_size.estimators.estimator import GradientEstimator
from lightning_struct.callbacks.growing_batch_size.estimators.layers import SampleGradients
from lightning_struct.callbacks.growing_batch_size.estimators.ranks import BackwardPasses, why_not
from lightning_struct.callbacks.growing_batch_size.estimators.steps import StepPairs
from lightning_struct.utilities import namespaces as L


def choose_estimator(
    name: str,
    trainer: L.Trainer,
    module: L.LightningModule,
    *,
    every_n_steps: int | None,
    max_overhead: float,
    probes: int | None,
) -> GradientEstimator:
    """The estimator of that name.

    ``"auto"`` compares the backward passes of each step where there are several, from processes or accumulated batches, and
    else consecutive steps.

    Raises:
        MisconfigurationException: the one that was asked for cannot measure this run.
    """
    if name == "auto":
        name = "ranks" if why_not(trainer) is None else "steps"
    if name == "layers":
        return SampleGradients(trainer, module, every_n_steps, max_overhead, probes)
    if name == "ranks":
        return BackwardPasses(trainer, module, every_n_steps, max_overhead)
    return StepPairs(trainer, module, every_n_steps, max_overhead)
