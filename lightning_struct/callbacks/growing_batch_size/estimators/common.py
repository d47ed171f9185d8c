"""The common parts of the estimators: the user's choice, the interface, gradients in memory, and errors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics
from lightning_struct.collective import all_gather_objects, all_reduce, world_size
from lightning_struct.functional.checks import first_line
from lightning_struct.functional.torch_tools import tree_leaves
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check, check_positive


@dataclass(frozen=True)
class NoiseEstimator:
    """The way in which GrowingBatchSize measures the noise of the gradients.

    Args:
        kind: ``"layers"`` by hooks on the layers, ``"parts"`` by differences between the parts of a step (its backward
            passes, of several processes or accumulated batches); ``"auto"`` chooses.
        every_n_steps: optimizer steps between two checks; None: as the ``max_overhead`` of GrowingBatchSize allows, and
            each step if nothing has to be measured.
        probes: of ``"layers"``: number of random projections that estimate, without bias, the gradient norms of layers
            whose exact ones would be expensive: convolutions, and layers of sequences with many positions. None: all
            exact.

    Raises:
        MisconfigurationException: a field is out of range; the message names it.

    Example:
        >>> NoiseEstimator("layers", probes=None)
        NoiseEstimator(kind='layers', every_n_steps=None, probes=None)
    """

    kind: Literal["auto", "layers", "parts"] = "auto"
    every_n_steps: int | None = None
    probes: int | None = 8

    def __post_init__(self) -> None:
        kinds = ("auto", "layers", "parts")
        check("estimator", self.kind, self.kind in kinds, f"one of {', '.join(map(repr, kinds))}")
        check_positive(every_n_steps=self.every_n_steps, probes=self.probes)


class Unmeasurable(Exception):
    """An estimator cannot measure the gradients of this run. It is raised in all processes alike."""


class GradientNotFinite(Exception):
    """A gradient is NaN or infinite, and the step is not measured. It is raised in all processes alike."""


class LocalFaults:
    """Errors of one process, which takes part in the collectives of all until all know of them.

    Example:
        >>> faults, norm = LocalFaults(), torch.zeros(1)
        >>> with faults.deferred():
        ...     norm = torch.ones(2) @ torch.ones(3)
        >>> try:
        ...     faults.summed(norm)
        ... except Unmeasurable as error:
        ...     print(str(error)[:20])
        fails (RuntimeError:
    """

    def __init__(self) -> None:
        self._first: str | None = None

    def defer(self, error: Exception) -> None:
        """Keep an error for the next :meth:`summed`."""
        self._first = self._first or first_line(error)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context manager that defers an error, and ends there."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - measuring must not end a training
            self.defer(error)

    def summed(self, values: Tensor) -> Tensor:
        """(k,), on the CPU: the values (k,), each summed over the processes; one collective.

        Raises:
            Unmeasurable: a process has deferred an error since the last call.
        """
        own, self._first = self._first, None
        sums = all_reduce(torch.cat([values, values.new_full((1,), float(own is not None))])).cpu()
        if sums[-1] > 0:
            raise Unmeasurable(f"fails ({next(fault for fault in all_gather_objects(own) if fault is not None)})")
        return sums[:-1]


class GradientEstimator:
    """A way to measure, while a Trainer runs, the noise of the gradients by which each optimizer steps.

    The methods are called in the order of a training batch: :meth:`begin_batch`, :meth:`before_backward` and
    :meth:`after_backward` for each backward pass that Lightning makes, :meth:`before_step` for each optimizer that
    steps, and :meth:`statistics` at the end of a batch in which one did.

    Args:
        trainer: in fit.
        module: the one that is trained, without a wrapper around it.

    Attributes:
        name: that by which a user asks for it.
        every_n_steps: optimizer steps from one measurement to the next.
        faults: errors of this process.
    """

    name: str
    every_n_steps: int

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._trainer, self._module, self.faults = trainer, module, LocalFaults()

    def begin_batch(self, batch: Any, expected_sizes: list[int], step: int) -> None:
        """Prepare for the batch that is about to be trained on.

        Args:
            batch: argument of ``training_step``.
            expected_sizes: samples that were to be read of each loader.
            step: number of the optimizer step to be, the first one is 1.
        """

    def before_backward(self, loss: Tensor) -> None:
        """Take note of a loss whose backward pass begins."""

    def after_backward(self) -> None:
        """Take note of the end of a backward pass."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the needed numbers of the gradients by which ``optimizer`` is about to step, before they are clipped.

        Raises:
            GradientNotFinite: a gradient is NaN or infinite; the next step that is checked may be measured again.
            Unmeasurable: neither these gradients nor those of any other optimizer can be measured.
        """

    def statistics(self, samples: int) -> dict[int, GradientStatistics]:
        """Statistics of the steps in the batch that ends, by the place of their optimizers in ``Trainer.optimizers``.

        Args:
            samples: number of samples of the steps, over all processes.
        """
        raise NotImplementedError

    def pause(self) -> None:
        """Remove all hooks, and forget all that is not saved, until the next :meth:`begin_batch`."""

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was saved."""


def samples_in(batch: Any, expected_sizes: list[int]) -> int:
    """Number of samples in a batch of this process.

    It is the sum over the loaders that take part in the batch: in ``"max_size"`` mode some are at their end.
    """
    if len(expected_sizes) == 1:
        return expected_sizes[0]
    first, second = leading_sizes(batch)
    for sizes in (first, second):
        read = sum(size for size in expected_sizes if size in sizes)
        if read:
            return read
    return sum(expected_sizes) or max(first, default=1)


def leading_sizes(batch: Any) -> tuple[set[int], set[int]]:
    """Sizes of the first and of the second dimensions of the tensors in a batch."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    # the second of a nested tensor is ragged
    return {t.size(0) for t in tensors if t.ndim}, {t.size(1) for t in tensors if t.ndim > 1 and not t.is_nested}


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    return (tensor.to_local() if hasattr(tensor, "placements") else tensor).detach()  # a DTensor has placements


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The part of a parameter's gradient that this process holds, dense or coalesced; None without a gradient."""
    if parameter.grad is None:
        return None
    gradient = local(parameter.grad)
    return gradient.coalesce() if gradient.is_sparse else gradient


def share(parameter: nn.Parameter) -> float:
    """Weight of the part that a process holds, in a sum over all processes: 1/P if each of P holds the whole."""
    gradient: Any = parameter.grad
    placements = getattr(gradient, "placements", ())
    shards = math.prod(gradient.device_mesh.size(i) for i, place in enumerate(placements) if place.is_shard())
    return shards / world_size()


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` made one function of layers: hooks see none.

    Of a compiled LightningModule, Lightning takes the module itself, with methods that are compiled.
    """
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    methods = (getattr(module, name, None) for name in ("forward", "training_step"))
    return any(hasattr(method, "_torchdynamo_orig_callable") for method in methods)
