"""RLS as the training step of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_struct.collective import refuse_unlike_batches
from lightning_struct.functional.jacobian.losses import SquaredError
from lightning_struct.functional.layers.calls import tensors_in
from lightning_struct.functional.layers.registry import coupling_layer
from lightning_struct.mixins.manual import ManualOptimization, Requirements, error_of_batch
from lightning_struct.optim.rls import RLS
from lightning_struct.utilities.namespaces import MisconfigurationException, lightning_classes


def _with_rls_step(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """A training step that takes an RLS step on its loss; only the one that the Trainer calls does."""

    @wraps(training_step)
    def step(self: RLSOptimization, *batch_and_index: Any, **kwargs: Any) -> Any:
        if self._asked_for_loss:  # by the training step of a subclass
            return training_step(self, *batch_and_index, **kwargs)
        inputs, targets = [*tensors_in(batch_and_index[:1]), None, None][:2]
        refuse_unlike_batches(inputs, targets, self.device)
        self._asked_for_loss = True
        try:
            output = training_step(self, *batch_and_index, **kwargs)
        finally:
            self._asked_for_loss = False
        loss = output.get("loss", output) if isinstance(output, Mapping) else output
        if not (loss is None or isinstance(loss, Tensor)):
            raise MisconfigurationException(
                f"{type(self).__name__}.training_step returned a {type(loss).__name__}, but RLSOptimization needs "
                "the loss: return it, or a dict that has it under 'loss', or None to skip the batch"
            )
        batch_idx = self.trainer.fit_loop.batch_idx
        if loss is not None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            try:
                optimizer.step()
            except (ValueError, FloatingPointError) as error:
                raise error_of_batch(error, self, batch_idx) from error
        self._rls_step_schedulers("step", batch_idx + 1)
        if self.trainer.is_last_batch:
            self._rls_step_schedulers("epoch", self.current_epoch + 1)
        return None if loss is None else loss.detach()

    step.takes_rls_step = True  # type: ignore[attr-defined]
    return step


class RLSOptimization(ManualOptimization):
    """Trains a LightningModule by :class:`~lightning_struct.optim.RLS` in manual optimization.

    RLS also works in automatic optimization, without this class; with it, errors name the batch, and no training step
    needs to be written. Put it before the module's own base class, and return an RLS from ``configure_optimizers``.
    Each batch is one step and counts once in ``global_step``. The module's own ``training_step`` returns the
    loss. A module without one is trained by the paper's loss, ½‖outputs - targets‖² averaged over samples, on
    :meth:`inputs_and_targets`; it is logged as ``train_loss``. Learning-rate schedulers are stepped as in automatic
    optimization, except ``ReduceLROnPlateau``, which is refused.

    It works on one device and under DDP, with precision 32-true, 64-true and bf16-mixed. In manual optimization
    Lightning refuses clipping and accumulation of gradients by the Trainer; clip by ``RLS(max_grad_norm=...)``.

    Raises:
        MisconfigurationException: at the start of fit, for another precision, a strategy that shards the weights,
            ``ReduceLROnPlateau``, ``StochasticWeightAveraging`` with batch normalisation, or anything but one RLS from
            ``configure_optimizers``; in a step, if ``training_step`` returns no loss.
        ValueError: in a step, for NaN or infinity in gradients or inputs, with the index of the batch and the layers,
            batches that are unlike on several processes, or under the paper's loss outputs that are not shaped as their
            targets; the weights and P are unchanged.

    Example:
        >>> import lightning as L
        >>> import torch
        >>> class LitNet(RLSOptimization, L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = torch.nn.Linear(3, 2)
        ...
        ...     def forward(self, inputs):
        ...         return self.layers(inputs)
        ...
        ...     def configure_optimizers(self):
        ...         return RLS(self, momentum=0.5)
        >>> LitNet().automatic_optimization
        False
    """

    _requirements = Requirements(
        optimizer=RLS,
        precision="P needs float32 weights, and its steps no GradScaler",
        automatic="leave the attribute alone, or the mixin out: RLS works in automatic optimization too",
        batch="define training_step, or inputs_and_targets(self, batch), which returns (inputs, targets)",
        optimizers="return RLS(self), with an auxiliary optimizer within it if needed, or leave RLSOptimization out",
        clipping=" and clip by RLS(max_grad_norm=...)",
    )
    _asked_for_loss = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not getattr(cls.training_step, "takes_rls_step", False):
            cls.training_step = _with_rls_step(cls.training_step)  # type: ignore[method-assign]

    @_with_rls_step
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """One RLS step on the batch.

        Returns:
            The loss before the step, detached; None if the module's own ``training_step`` returns none: then no step
            is taken. To a ``training_step`` that extends this one, the loss with its graph.
        """
        own: Any = super().training_step
        if own.__func__ not in [module.training_step for module in lightning_classes("LightningModule")]:
            return own(batch, batch_idx)
        inputs, targets = self._requirements.as_pair(self, self.inputs_and_targets(batch))
        loss = 0.5 * SquaredError().residual(self(inputs), targets).square().sum() / len(targets)  # equation (57)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(targets), sync_dist=True)
        return loss

    @property
    def rls(self) -> RLS:
        """The optimizer that ``configure_optimizers`` returned to the Trainer.

        Raises:
            MisconfigurationException: it returned anything but one RLS.
        """
        return self._requirements.only_optimizer(self)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if any(isinstance(config.scheduler, ReduceLROnPlateau) for config in self.trainer.lr_scheduler_configs):
            raise MisconfigurationException(
                "In manual optimization Lightning drops the monitor of ReduceLROnPlateau: leave RLSOptimization out, "
                "RLS works in automatic optimization too"
            )
        averages = lightning_classes("callbacks.StochasticWeightAveraging")
        averaged = any(isinstance(callback, averages) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        if averaged and (layer := coupling_layer(self)) is not None:
            raise MisconfigurationException(
                f"StochasticWeightAveraging ends with an epoch for the statistics of {layer}, in which manual "
                "optimization trains on: leave RLSOptimization out, RLS works in automatic optimization too"
            )

    def on_fit_end(self) -> None:
        self.rls.remove_hooks()
        super().on_fit_end()

    def _rls_step_schedulers(self, interval: str, number: int) -> None:
        """Step the schedulers of an interval, when the Trainer does it in automatic optimization."""
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == interval and number % config.frequency == 0:
                self.lr_scheduler_step(config.scheduler, None)
