"""Estimators of the gradient's noise in the optimizer steps of any LightningModule.

``layers`` measures by hooks on the layers, ``parts`` by the gradients of the backward passes of a step; ``common`` has
their common parts. One of them is chosen by the project, never by a clock, so that two runs with one seed are equal.
"""

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
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import shards_weights

__all__ = ["GradientEstimator", "GradientNotFinite", "NoiseEstimator", "Unmeasurable", "choose_estimator", "samples_in"]


def choose_estimator(
    asked: NoiseEstimator, trainer: L.Trainer, module: L.LightningModule, max_overhead: float
) -> GradientEstimator:
    """The estimator that was asked for.

    ``"auto"`` compares the backward passes of each step if there are several, from processes or accumulated batches.
    Else it measures the gradients of single samples, by layers.

    Raises:
        MisconfigurationException: the one that was asked for cannot measure this run.
        Unmeasurable: ``"auto"`` finds none that can.
    """
    problem = why_not(trainer)
    if asked.kind == "parts" or (asked.kind == "auto" and problem is None):
        return BackwardPasses(trainer, module, asked, max_overhead)
    if asked.kind == "auto":
        if shards_weights(trainer):
            raise Unmeasurable(f"has no gradients of samples, and compares no backward passes: {problem}")
        if any(is_compiled(layer) for layer in module.modules()):
            raise Unmeasurable(f"sees no layers in a compiled module, and compares no backward passes: {problem}")
    return SampleGradients(trainer, module, asked, max_overhead)
