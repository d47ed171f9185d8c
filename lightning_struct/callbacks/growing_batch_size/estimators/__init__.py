"""Estimators of the gradient's noise in the optimizer steps of any LightningModule.

``layers`` measures by hooks on the layers, ``parts`` by the gradients of the backward passes of a step, ``steps`` by
those of consecutive steps; ``cadence`` says how often, and ``common`` has what they share. One of them is chosen by the
project, never by a clock, so that two runs with one seed are equal.
"""

from __future__ import annotations

from lightning_struct.callbacks.growing_batch_size.estimators.common import (
    GradientEstimator,
    GradientNotFinite,
    NoiseEstimator,
    Unmeasurable,
    is_compiled,
    samples_in,
)
from lightning_struct.callbacks.growing_batch_size.estimators.layers import SampleGradients
from lightning_struct.callbacks.growing_batch_size.estimators.parts import BackwardPasses, why_not
from lightning_struct.callbacks.growing_batch_size.estimators.steps import StepPairs
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import shards_weights

__all__ = [
    "GradientEstimator",
    "GradientNotFinite",
    "NoiseEstimator",
    "Unmeasurable",
    "choose_estimator",
    "samples_in",
]


def choose_estimator(
    asked: NoiseEstimator, trainer: L.Trainer, module: L.LightningModule, max_overhead: float
) -> GradientEstimator:
    """The estimator that was asked for.

    ``"auto"`` compares the backward passes of each step where there are several, from processes or accumulated batches.
    Else it measures the gradients of single samples, by layers; and where weights are sharded or layers compiled, it
    compares consecutive steps. These come last: what the gradient of the loss itself changes from one step to the next
    looks like noise to them, and under momentum that is often more than the noise.

    Raises:
        MisconfigurationException: the one that was asked for cannot measure this run.
    """
    kind, every_n_steps = asked.kind, asked.every_n_steps
    if kind == "auto":
        without_layers = shards_weights(trainer) or any(is_compiled(layer) for layer in module.modules())
        kind = "parts" if why_not(trainer) is None else "steps" if without_layers else "layers"
    if kind == "layers":
        return SampleGradients(trainer, module, every_n_steps, max_overhead, asked.probes)
    if kind == "parts":
        return BackwardPasses(trainer, module, every_n_steps, max_overhead)
    return StepPairs(trainer, module, every_n_steps, max_overhead)
