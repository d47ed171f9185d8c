"""Callbacks for any Trainer."""

from lightning_struct.callbacks.adapters import AdapterCheckpoint
from lightning_struct.callbacks.damping import LevenbergMarquardtDamping
from lightning_struct.callbacks.growing_batch_size import (
    GradientStatistics,
    GrowingBatchSize,
    NoiseEstimator,
    ValidationRule,
)
from lightning_struct.callbacks.operator_monitor import OperatorMonitor
from lightning_struct.callbacks.predictions import PredictionWriter
from lightning_struct.callbacks.reconstructions import ReconstructionPlot
from lightning_struct.callbacks.solution_plot import SolutionPlot
from lightning_struct.callbacks.training_curves import TrainingCurves
from lightning_struct.callbacks.validation_merit import ValidationMeritStopping

__all__ = [
    "AdapterCheckpoint",
    "GradientStatistics",
    "GrowingBatchSize",
    "LevenbergMarquardtDamping",
    "NoiseEstimator",
    "OperatorMonitor",
    "PredictionWriter",
    "ReconstructionPlot",
    "SolutionPlot",
    "TrainingCurves",
    "ValidationMeritStopping",
    "ValidationRule",
]
