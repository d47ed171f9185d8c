"""The choice of an estimator: by what is there, never by a clock, so that two runs with one seed are equal."""

from __future__ import annotations

from lightning_struct.callbacks.growing_batch_size.estimators.estimator import GradientEstimator
from lightning_struct.callbacks.growing_batch_size.estimators.gradients import is_compiled
from lightning_struct.callbacks.growing_batch_size.estimators.layers import SampleGradients
from lightning_struct.callbacks.growing_batch_size.estimators.ranks import BackwardPasses, why_not
from lightning_struct.callbacks.growing_batch_size.estimators.steps import StepPairs
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.sharded_weights import shards_weights


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

    ``"auto"`` compares the backward passes of each step where there are several, from processes or accumulated batches.
    Else it measures the gradients of single samples, by layers; and where weights are sharded or layers compiled, it
    compares consecutive steps. These come last: what the gradient of the loss itself changes from one step to the next
    looks like noise to them, and under momentum that is often more than the noise.

    Raises:
        MisconfigurationException: the one that was asked for cannot measure this run.
    """
    if name == "auto":
        without_layers = shards_weights(trainer) or any(is_compiled(layer) for layer in module.modules())
        name = "ranks" if why_not(trainer) is None else "steps" if without_layers else "layers"
    if name == "layers":
        return SampleGradients(trainer, module, every_n_steps, max_overhead, probes)
    if name == "ranks":
        return BackwardPasses(trainer, module, every_n_steps, max_overhead)
    return StepPairs(trainer, module, every_n_steps, max_overhead)
