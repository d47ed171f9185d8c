"""The part that the mixins share: manual optimization by one optimizer, and its requirements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_struct.collective import refuse_unlike_batches
from lightning_struct.functional.checks import NotFinite
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import compare_batches, refuse_sharded_weights
from lightning_struct.utilities.lightning_internals import names_of_optimizers
from lightning_struct.utilities.namespaces import MisconfigurationException

PRECISIONS = ("32-true", "64-true", "bf16-mixed")


@dataclass(frozen=True)
class Requirements:
    """The optimizer of a mixin, and the ends of its error messages.

    Attributes:
        optimizer: the class of the one optimizer; the mixin is named after it.
        precision: why the other precisions do not work.
        automatic: remedy for a module that sets ``automatic_optimization``.
        batch: remedy for a batch that is not a pair of tensors.
        optimizers: remedy for other optimizers.
        clipping: remedy for the Trainer's clipping of gradients; follows "leave it out".
        several_inputs: the inputs of a batch may be a list or tuple of tensors, as torch's collate makes it.
    """

    optimizer: type[Optimizer]
    precision: str
    automatic: str
    batch: str
    optimizers: str
    clipping: str
    several_inputs: bool = False

    @property
    def mixin(self) -> str:
        """Name of the mixin."""
        return f"{self.optimizer.__name__}Optimization"

    def check_trainer(self, module: L.LightningModule) -> None:
        """Refuse a Trainer that the mixin does not work with.

        Raises:
            MisconfigurationException: another precision, a strategy that shards the weights, or a module that sets
                ``automatic_optimization``.
        """
        if module.trainer.precision not in PRECISIONS:
            raise MisconfigurationException(
                f"{self.mixin} does not work with Trainer(precision={module.trainer.precision!r}): {self.precision}. "
                f"Use 'bf16-mixed', '32-true' or '64-true'"
            )
        refuse_sharded_weights(module.trainer, self.mixin)
        if module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(module).__name__} sets automatic_optimization=True, but {self.mixin} is manual: "
                f"{self.automatic}"
            )

    def check_gradient_options(self, module: L.LightningModule) -> None:
        """Refuse options of the Trainer for gradients, before Lightning does and names automatic optimization.

        Raises:
            MisconfigurationException: ``gradient_clip_val`` or ``accumulate_grad_batches`` is set.
        """
        trainer: Any = module.trainer
        if module.automatic_optimization:
            return
        clip, batches = trainer.gradient_clip_val, trainer.accumulate_grad_batches
        if clip or batches != 1:
            option = f"gradient_clip_val={clip!r}" if clip else f"accumulate_grad_batches={batches}"
            remedy = self.clipping if clip else f" and make the batches {batches} times as large, each is one step"
            raise MisconfigurationException(f"{self.mixin} does not work with Trainer({option}): leave it out{remedy}")

    def check_trained(self, module: L.LightningModule) -> None:
        """Refuse a fit that had no batch, which Lightning ends without an error.

        Raises:
            MisconfigurationException: the training loader has no batches.
        """
        if module.trainer.num_training_batches == 0:  # with limit_train_batches=0 it is infinite
            raise MisconfigurationException(
                f"{type(module).__name__} was not trained, because the training loader has no batches: look at the "
                "size of the data set, at the sampler, and with drop_last=True at the batch size"
            )

    def only_optimizer(self, module: L.LightningModule) -> Any:
        """The optimizer that ``configure_optimizers`` returned to the Trainer.

        Raises:
            MisconfigurationException: it returned anything but one of this class.
        """
        optimizers = module.trainer.optimizers
        if len(optimizers) == 1 and isinstance(optimizers[0], self.optimizer):
            return optimizers[0]
        name = self.optimizer.__name__
        raise MisconfigurationException(
            f"{type(module).__name__} is trained by {self.mixin}, which needs exactly one {name} from "
            f"configure_optimizers, but got {names_of_optimizers(module.trainer)}: {self.optimizers}"
        )

    def as_pair(self, module: L.LightningModule, returned: Any) -> tuple[Any, Any]:
        """Check the return value of the module's ``inputs_and_targets``, which must be a pair.

        Raises:
            MisconfigurationException: it is none.
        """
        if isinstance(returned, tuple | list) and len(returned) == 2:
            return returned[0], returned[1]
        raise MisconfigurationException(
            f"{type(module).__name__}.inputs_and_targets returned a {type(returned).__name__}, not a pair"
        )

    def pair_of_tensors(self, module: L.LightningModule, batch: Any) -> tuple[Any, Tensor]:
        """The inputs and targets of a batch of the module: two tensors, the inputs several if that is allowed.

        Raises:
            MisconfigurationException: the batch is not a sequence of two tensors.
        """
        if isinstance(batch, Sequence) and len(batch) == 2 and isinstance(batch[1], Tensor):
            inputs = batch[0] if self.several_inputs and isinstance(batch[0], list | tuple) else batch[:1]
            if inputs and all(isinstance(part, Tensor) for part in inputs):
                return batch[0], batch[1]
        held = f" of {', '.join(type(part).__name__ for part in batch)}" if isinstance(batch, Sequence) else ""
        raise MisconfigurationException(
            f"A batch for {type(module).__name__} is a {type(batch).__name__}{held}, no pair of tensors: {self.batch}"
        )


class ManualOptimization(L.LightningModule):
    """Base of the mixins, whose needs are their ``_requirements``."""

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

        Override it if a batch is not a pair of tensors: an autoencoder returns its images twice.

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
            compare_batches(self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        # Lightning loads weights before Trainer(precision="64-true") makes the module float64: they would be rounded
        if self._trainer is not None and self.trainer.precision == "64-true":
            self.double()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._requirements.check_trainer(self)
        self._requirements.only_optimizer(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch is None:  # for which Lightning takes no training step, before which others compare their batches
            refuse_unlike_batches(None, None, self.device)
        super().on_train_batch_end(outputs, batch, batch_idx)

    def on_fit_end(self) -> None:
        super().on_fit_end()
        self._requirements.check_trained(self)


def error_of_batch(error: ValueError | FloatingPointError, module: L.LightningModule, batch_idx: int) -> ValueError:
    """The error of a step, with the batch that it was in."""
    kind = NotFinite if isinstance(error, FloatingPointError) else ValueError
    return kind(f"Training batch {batch_idx} of epoch {module.current_epoch}: {error}")
