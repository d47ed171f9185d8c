"""Estimators of the gradient's noise in the optimizer steps of any LightningModule.

``layers`` measures by hooks on the layers, ``parts`` by the gradients of the backward passes of a step, ``steps`` by
those of consecutive steps; ``choice`` chooses one of them, and ``cadence`` how often it measures.
"""

from lightning_struct.callbacks.growing_batch_size.estimators.choice import choose_estimator
from lightning_struct.callbacks.growing_batch_size.estimators.estimator import GradientEstimator
from lightning_struct.callbacks.growing_batch_size.estimators.faults import GradientNotFinite, Unmeasurable
from lightning_struct.callbacks.growing_batch_size.estimators.samples import samples_in

__all__ = ["GradientEstimator", "GradientNotFinite", "Unmeasurable", "choose_estimator", "samples_in"]
