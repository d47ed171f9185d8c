"""Batches that are trained on in parts, as far as the memory of the device needs it."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_struct.callbacks.growing_batch_size.estimators import samples_in
from lightning_struct.functional.checks import first_line
from lightning_struct.functional.torch_tools import tree_leaves
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.lightning_internals import train_in_parts
from lightning_struct.utilities.namespaces import MisconfigurationException


class MemoryLimit:
    """Bounds the samples of a forward pass: larger batches are trained on in parts, whose gradients are accumulated.

    The bound is given, or found: whenever a forward pass, or its backward pass, runs out of memory, it is halved, and
    the batch under way is trained on once more. The loss of a part counts by its samples, so that the gradient of an
    averaged loss is that of the whole batch, and a step has as many samples as without the bound. ``training_step`` is
    called for each part; values logged before a backward pass failed count twice in the means of an epoch.

    Args:
        trainer: in ``Callback.setup``.
        limit: the bound, in samples of this process; ``"auto"``: it is to be found.

    Attributes:
        is_found: whether the bound is to be found.
        samples: of a forward pass, at most; infinite before memory has run out.

    Raises:
        MisconfigurationException: manual optimization, a strategy that accumulates by itself, or several processes that
            would have to find one bound.
    """

    def __init__(self, trainer: L.Trainer, limit: int | Literal["auto"]) -> None:
        module, problem = type(trainer.lightning_module).__name__, None
        if not trainer.lightning_module.automatic_optimization:
            problem = f"under manual optimization {module}.training_step does itself"
        elif trainer.strategy.handles_gradient_accumulation:
            problem = f"{type(trainer.strategy).__name__} does itself"
        elif trainer.world_size > 1 and limit == "auto":
            problem = f"{trainer.world_size} processes would have to agree on when memory runs out"
        if problem is not None:
            raise MisconfigurationException(
                f"GrowingBatchSize(max_device_batch_size={limit!r}) trains on parts of a batch, which {problem}: give "
                "max_batch_size, or in automatic optimization the samples that memory allows"
            )
        self.is_found = limit == "auto"
        self.samples = math.inf if limit == "auto" else limit
        self._sizes: list[int] = []
        self._begin_part: Callable[[Any, list[int]], None] = lambda part, sizes: None
        self._abandon: Callable[[], None] = lambda: None
        self.detach = train_in_parts(trainer, self._train)

    def begin_batch(
        self, sizes: list[int], begin_part: Callable[[Any, list[int]], None], abandon: Callable[[], None]
    ) -> None:
        """Prepare for a batch.

        Args:
            sizes: samples that were read of each loader.
            begin_part: is called with each part and its samples, before the forward pass.
            abandon: is called when memory has run out.
        """
        self._sizes, self._begin_part, self._abandon = sizes, begin_part, abandon

    def _train(self, batch: Any, train: Callable[[int, Iterator[tuple[Any, float]]], Any]) -> Any:
        sizes, is_measured = self._sizes or [samples_in(batch, [])], True
        while True:
            count = max(math.ceil(sum(sizes) / self.samples), 1)
            try:
                count = min(count, *sizes) if any(_leads(leaf, sizes) for leaf in tree_leaves(batch)) else 1
                return train(count, self._parts(batch, sizes, count, is_measured))
            except torch.OutOfMemoryError as error:
                of_part = math.ceil(sum(sizes) / count)
                can_split = count < min(sizes) and any(_leads(leaf, sizes) for leaf in tree_leaves(batch))
                if not (can_split and self.is_found):
                    raise
                problem = first_line(error)
            self._abandon()
            self.samples, is_measured = math.ceil(of_part / 2), False
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            rank_zero_warn(
                f"{of_part} samples are too many for the memory of the device ({problem}). GrowingBatchSize goes on in "
                f"parts of {self.samples}, and accumulates their gradients: the steps are on as many samples as before"
            )

    def _parts(self, batch: Any, sizes: list[int], count: int, is_measured: bool) -> Iterator[tuple[Any, float]]:
        """The parts of a batch, and their shares of its samples."""
        if count == 1:
            yield batch, 1.0
            return
        for number in range(count):
            bounds = {size: (size * number // count, size * (number + 1) // count) for size in sizes}
            part, samples = _part(batch, bounds), [bounds[size][1] - bounds[size][0] for size in sizes]
            if is_measured:
                self._begin_part(part, samples)
            yield part, sum(samples) / sum(sizes)


def _leads(leaf: Any, sizes: list[int]) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.size(0) in sizes


def _part(batch: Any, bounds: dict[int, tuple[int, int]]) -> Any:
    """The part of a batch whose samples are within the bounds, by how many there are of a loader."""
    if isinstance(batch, Tensor):
        return batch[slice(*bounds[batch.size(0)])] if _leads(batch, list(bounds)) else batch
    if isinstance(batch, Mapping):
        return type(batch)({key: _part(value, bounds) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        if len(batch) in bounds and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
            return batch[slice(*bounds[len(batch)])]  # such as a text for each sample
        parts = [_part(value, bounds) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
