"""The part that the mixins share: manual optimization by one optimizer."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_struct.functional.checks import NotFinite
from lightning_struct.mixins.requirements import Requirements
from lightning_struct.utilities import namespaces as L


class ManualOptimization(L.LightningModule):
    """Base of the mixins, which say by ``_requirements`` what they need."""

    _requirements: ClassVar[Requirements]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        modules = L.lightning_classes("LightningModule")
        if next(base for base in cls.__mro__ if base in (ManualOptimization, *modules)) in modules:
            # put after the module, whose methods would hide those of the mixin
            cls.__bases__ = tuple(sorted(cls.__bases__, key=lambda base: not issubclass(base, ManualOptimization)))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def inputs_and_targets(self, batch: Any) -> tuple[Any, Any]:
        """The inputs that the network reads and the targets that the loss compares its outputs with, from a batch.

        Override it where a batch is not a pair of tensors: an autoencoder returns its images twice.

        Returns:
            The inputs, a tensor (n, ...) or for SHF also a tuple of them, and the targets, row i belonging to row i of
            the inputs.

        Raises:
            MisconfigurationException: the batch is not a sequence of two tensors.
        """
        inherited = getattr(super(), "inputs_and_targets", None)  # of the module that the mixin was put before
        return self._requirements.pair_of_tensors(self, batch) if inherited is None else inherited(batch)

    def configure_callbacks(self) -> Any:
        if self.trainer.state.fn == "fit":
            self._requirements.check_gradient_options(self)  # the first hook of a fit: Lightning's check is the next
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._requirements.check_trainer(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # Lightning loads weights before Trainer(precision="64-true") makes the module float64: they would be rounded
        if self._trainer is not None and self.trainer.precision == "64-true":
            self.double()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._requirements.check_trainer(self)
        self._requirements.only_optimizer(self)

    def on_fit_end(self) -> None:
        super().on_fit_end()
        self._requirements.check_trained(self)


def error_of_batch(error: ValueError | FloatingPointError, module: L.LightningModule, batch_idx: int) -> ValueError:
    """The error of a step, with the batch that it was in."""
    kind = NotFinite if isinstance(error, FloatingPointError) else ValueError
    return kind(f"Training batch {batch_idx} of epoch {module.current_epoch}: {error}")
