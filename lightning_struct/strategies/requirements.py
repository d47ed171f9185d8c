"""Requirements of the mixins on a module, its batches and its Trainer."""

from collections.abc import Sequence
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

PRECISIONS = ("32-true", "64-true", "bf16-mixed")

OptimizerType = TypeVar("OptimizerType", bound=Optimizer)


def pair_of_tensors(batch: Any, name: str, remedy: str) -> tuple[Tensor, Tensor]:
    """The two tensors of a batch of the module that is called ``name``.

    Raises:
        MisconfigurationException: the batch is not a sequence of two tensors; the message ends with ``remedy``.
    """
    if isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    held = f" of {', '.join(type(part).__name__ for part in batch)}" if isinstance(batch, Sequence) else ""
    raise MisconfigurationException(
        f"A batch for {name} is a {type(batch).__name__}{held}, not a pair of tensors: {remedy}"
    )


def only_optimizer(module: L.LightningModule, kind: type[OptimizerType], remedy: str) -> OptimizerType:
    """The optimizer that ``configure_optimizers`` returned to the Trainer.

    Raises:
        MisconfigurationException: it returned anything but one of this kind; the message ends with ``remedy``.
    """
    optimizers = module.trainer.optimizers
    if len(optimizers) == 1 and isinstance(optimizers[0], kind):
        return optimizers[0]
    returned = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    raise MisconfigurationException(
        f"{type(module).__name__} is trained by {kind.__name__}Optimization, which needs exactly one {kind.__name__} from "
        f"configure_optimizers, but got {returned}: {remedy}"
    )
