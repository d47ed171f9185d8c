"""The mathematics: pure functions on tensors, on torch alone."""

from lightning_struct.functional.damping import levenberg_marquardt
from lightning_struct.functional.gauss_newton import Linearization, linearize
from lightning_struct.functional.gradient_norms import (
    gradient_variance,
    norm_test_batch_size,
    per_sample_gradient_norms,
    required_batch_size,
)
from lightning_struct.functional.least_squares import LeastSquaresResult, lsmr, lsqr
from lightning_struct.functional.losses import CrossEntropy, GaussNewtonLoss, SquaredError

__all__ = [
    "CrossEntropy",
    "GaussNewtonLoss",
    "LeastSquaresResult",
    "Linearization",
    "SquaredError",
    "gradient_variance",
    "levenberg_marquardt",
    "linearize",
    "lsmr",
    "lsqr",
    "norm_test_batch_size",
    "per_sample_gradient_norms",
    "required_batch_size",
]
