"""SHF as the training step of a LightningModule."""

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_struct.callbacks.growing_batch_size import GradientStatistics, GrowingBatchSize
from lightning_struct.functional.residuals.residuals import LeastSquares
from lightning_struct.mixins.manual import ManualOptimization, Requirements, error_of_batch
from lightning_struct.optim import SHF, NextBatch, StepReport
from lightning_struct.utilities.namespaces import MisconfigurationException, lightning_classes

# Callbacks that read or set ``lr`` in the groups of the optimizer, some of them only after epochs.
_NEED_RATES = ("LearningRateMonitor", "LearningRateFinder", "StochasticWeightAveraging", "BackboneFinetuning")
SHOWN_IN_PROGRESS_BAR = ("train_loss", "damping", "batch_size", "solver_iterations")


class SHFOptimization(ManualOptimization):
    """Trains a LightningModule by :class:`~lightning_struct.optim.SHF`.

    Put it before the module's own base class, and return an SHF from ``configure_optimizers``. Each batch is one
    iteration of Algorithm 1 (Emirahmetoglu & Stewart) and counts once in ``global_step``. A ``training_step`` for
    another optimizer can stay in the module; it does not run. Override :meth:`on_shf_step` to do something in each
    step, and :meth:`inputs_and_targets` if a batch is not a pair of tensors.

    Each step logs ``train_loss`` (before the step), ``damping``, ``reduction_ratio``, ``solver_iterations``,
    ``step_length`` and ``batch_size``; if defined, ``gradient_variance`` and ``batch_size_predicted`` (unless a
    ``GrowingBatchSize`` logs its own prediction); with damping by the next batch, the default without ``damping``, also
    ``step_scale`` and ``next_batch_ratio``; with ``loss="least_squares"`` and several blocks of residuals also
    ``train_loss_NAME`` of each, ½ mean r² without its weight, and ``block_weight_NAME`` of a condition whose weight has
    risen. All values are of the whole batch, over all processes.

    It works on one device and under DDP, with precision 32-true, 64-true and bf16-mixed. There is no learning rate, so
    do not use schedulers and callbacks that need one. Lightning refuses clipping and accumulation of gradients.

    Raises:
        MisconfigurationException: at the start of fit, for another precision, a strategy that shards the weights, a
            callback that needs a learning rate, or anything but one SHF from ``configure_optimizers``.
        ValueError: in a step, for NaN or infinity in the batch, the outputs or the loss, with the index of the batch;
            the weights are unchanged.

    Example:
        >>> import lightning as L
        >>> class LitNet(SHFOptimization, L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = torch.nn.Linear(3, 2)
        ...
        ...     def forward(self, inputs):
        ...         return self.layers(inputs)
        ...
        ...     def configure_optimizers(self):
        ...         return SHF(self, "mse")
        >>> LitNet().automatic_optimization
        False
    """

    _requirements = Requirements(
        optimizer=SHF,
        precision="half precision loses its steps, and a float16 GradScaler gives an optimizer no batch",
        automatic="leave the attribute alone",
        batch="define inputs_and_targets(self, batch), which returns (inputs, targets)",
        optimizers="return SHF(self, 'mse'), or leave SHFOptimization out",
        clipping=", a step of SHF is no gradient that could be clipped",
        several_inputs=True,
    )
    _replaced_training_step: str | None = None
    _returns_residuals = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.training_step is not SHFOptimization.training_step:
            owner = next(base for base in cls.__mro__ if "training_step" in vars(base))
            cls._replaced_training_step = f"{owner.__name__}.training_step"
            cls.training_step = SHFOptimization.training_step  # type: ignore[method-assign]

    def on_shf_step(self, report: StepReport) -> None:
        """Called after each step with its report; override it to look at more than is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One SHF iteration on the batch.

        Returns:
            The loss before the step: (), detached.
        """
        if torch.compiler.is_compiling():  # to trace all that a step does takes a minute, and gains nothing
            return torch.compiler.disable(self._shf_step)(batch, batch_idx)
        return self._shf_step(batch, batch_idx)

    def _shf_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = self._requirements.as_pair(self, self.inputs_and_targets(batch))
        optimizer: Any = self.optimizers()
        try:
            report: StepReport = optimizer.step(inputs=inputs, targets=targets)
        except (ValueError, FloatingPointError) as error:
            raise error_of_batch(error, self, batch_idx) from error
        self._shf_log_step(report)
        self.on_shf_step(report)
        return torch.tensor(report.loss_before, device=self.device)

    def inputs_and_targets(self, batch: Any) -> tuple[Any, Any]:
        """The module's inputs and the targets of the loss, from a batch.

        Override it if a batch is not a pair of tensors. With ``loss="least_squares"``, which needs no targets, the
        batch is the input by default: a list holds several arguments of the module, and anything else, a tensor or a
        dict of tensors, is its only argument. Override it for any other batch.

        Returns:
            The inputs, a tensor (n, ...) or a tuple of the module's arguments, and the targets, row i belonging to row
            i of the inputs, or None with ``loss="least_squares"``.

        Raises:
            MisconfigurationException: the batch is not a sequence of two tensors.
        """
        # of the module before which this is put
        own = getattr(super(ManualOptimization, self), "inputs_and_targets", None)
        if own is None and self._returns_residuals:
            return tuple(batch) if isinstance(batch, list) else batch, None
        return super().inputs_and_targets(batch)

    def gradient_statistics(self) -> GradientStatistics | None:
        """Statistics of the last step's batch; None before the first step of this fit."""
        if (report := self.shf.report) is None:
            return None
        return GradientStatistics(report.batch_size, report.gradient_variance, report.gradient_norm**2, report.merit)

    @property
    def shf(self) -> SHF:
        """The optimizer that ``configure_optimizers`` returned to the Trainer.

        Raises:
            MisconfigurationException: it returned anything but one SHF.
        """
        return self._requirements.only_optimizer(self)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        for name in _NEED_RATES:
            if any(isinstance(c, lightning_classes(f"callbacks.{name}")) for c in self.trainer.callbacks):  # type: ignore[attr-defined]
                raise MisconfigurationException(
                    f"{name} needs the learning rate of an optimizer, and SHF has none: leave the callback out. The "
                    "length of its steps follows from the damping, which is logged; for averaged weights there are "
                    "WeightAveraging and EMAWeightAveraging"
                )

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._returns_residuals = isinstance(self.shf.loss, LeastSquares)
        if self._shf_grows:
            self.shf.exact_variance = True
        if self._replaced_training_step is not None:
            rank_zero_info(
                f"{self._replaced_training_step} is not run: SHFOptimization takes the step, and calls on_shf_step "
                "after it"
            )

    @property
    def _shf_grows(self) -> bool:
        return any(isinstance(callback, GrowingBatchSize) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]

    def _shf_log_step(self, report: StepReport) -> None:
        values: dict[str, float | None] = {
            "train_loss": report.loss_before,
            "damping": report.damping,
            "reduction_ratio": report.reduction_ratio,
            "solver_iterations": report.solver_iterations,
            "step_length": report.step_length,
            "batch_size": report.batch_size,
            "gradient_variance": report.gradient_variance,
        }
        if isinstance(self.shf.settings.damping, NextBatch):
            values |= {"step_scale": report.step_scale, "next_batch_ratio": report.next_batch_ratio}
        if not self._shf_grows:
            values["batch_size_predicted"] = report.predicted_batch_size
        if len(report.block_losses) > 1:
            values |= {f"train_loss_{block}": loss for block, loss in report.block_losses.items()}
        values |= {f"block_weight_{block}": weight for block, weight in report.block_weights.items()}
        for name, value in values.items():
            if value is not None:
                self.log(name, float(value), prog_bar=name in SHOWN_IN_PROGRESS_BAR, batch_size=report.batch_size)
