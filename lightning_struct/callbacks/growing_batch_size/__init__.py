"""GrowingBatchSize: a mini-batch that grows while a Trainer runs.

``callback`` has the settings and the order of events, and ``fit`` what lives for one fit; ``rules`` has the decisions,
as functions; ``measurement`` the statistics of the gradients that an optimizer steps by; ``loader_growth`` and
``accumulation_growth`` the two ways to change the samples of a step; ``learning_rate`` the rate that follows them, and
``scheduler_clock`` the schedulers that go on by samples; ``step_log`` what is logged, and ``records`` what is kept of
the checks.
"""

from lightning_struct.callbacks.growing_batch_size.callback import GrowingBatchSize
from lightning_struct.callbacks.growing_batch_size.gradient_statistics import GradientStatistics
from lightning_struct.callbacks.growing_batch_size.rules import next_batch_size
from lightning_struct.callbacks.growing_batch_size.settings import NoiseEstimator, ValidationRule

__all__ = ["GradientStatistics", "GrowingBatchSize", "NoiseEstimator", "ValidationRule", "next_batch_size"]
