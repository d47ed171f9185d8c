"""GrowingBatchSize: a mini-batch that grows while a Trainer runs.

``callback`` has the arguments and the order of events, and ``fit`` the parts of one fit; ``rules`` has the decisions.
``measurement`` asks an estimator (``estimators``) for the ``noise`` of the gradients, and runs the tests of
``stationarity``. ``loader_growth`` makes larger batches, and ``growth`` accumulates more of them. By ``learning_rate``
the rate follows, and the schedulers are stepped by samples.
"""

from lightning_struct.callbacks.growing_batch_size.callback import GrowingBatchSize
from lightning_struct.callbacks.growing_batch_size.estimators import NoiseEstimator
from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics
from lightning_struct.callbacks.growing_batch_size.rules import ValidationRule, next_batch_size

__all__ = ["GradientStatistics", "GrowingBatchSize", "NoiseEstimator", "ValidationRule", "next_batch_size"]
