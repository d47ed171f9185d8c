"""The share of a batch that each process has, and weights as one flat vector."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_struct.collective import all_gather_rows, rank, world_size
from lightning_struct.functional.checks import NotFinite, check_dense
from lightning_struct.functional.layers.calls import rows_of_arguments, tensors_in
from lightning_struct.functional.torch_tools import add_to_each, norms_of_each

Batches: TypeAlias = Sequence[tuple[Any, Tensor]]


def any_not_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether any of the tensors holds NaN or infinity, a bool tensor ()."""
    tensors = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.bool, device=device)
    return not_finite(torch.stack(norms_of_each(tensors, order=math.inf)).max()).to(device)


def not_finite(numbers: Tensor) -> Tensor:
    """Whether each number is NaN or infinite, by fewer operations than ``isfinite`` takes."""
    return numbers - numbers != 0  # NaN - NaN and ∞ - ∞ are NaN


def checks_before_forward(device: torch.device) -> bool:
    """Whether data is looked at before the first forward: on the CPU, or since processes exchange their counts.

    Elsewhere it is looked at together with the loss, since the host waits for each look at a device.
    """
    return device.type == "cpu" or world_size() > 1


def refusal_of_batch(where: str = "") -> NotFinite:
    """The error of a batch with NaN or infinity; ``where`` names the process."""
    return NotFinite(f"the batch holds NaN or infinity{where}; the weights are unchanged. Clean the data")


class FlatWeights:
    """Weights by parameter name, and as one flat vector.

    Attributes:
        by_name: name -> weight.
        vector: all weights, one after another.
    """

    def __init__(self, by_name: dict[str, Tensor]) -> None:
        self.by_name = by_name
        self._sizes = [p.numel() for p in by_name.values()]
        self.vector = self.flat(by_name)

    def flat(self, tensors: dict[str, Tensor]) -> Tensor:
        """A dict of tensors by parameter name as one flat vector."""
        return torch.cat([tensors[name].reshape(-1) for name in self.by_name])

    def unflat(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of :meth:`flat`, as views."""
        parts = vector.split(self._sizes)
        return {name: part.view(p.shape) for (name, p), part in zip(self.by_name.items(), parts, strict=True)}

    def add_(self, d: Tensor) -> None:
        """Add a flat vector to the weights themselves; ``vector`` stays as it is."""
        add_to_each(list(self.by_name.values()), list(self.unflat(d).values()))


@dataclass(frozen=True)
class BatchShare:
    """Inputs and targets on this process, and the number of samples on each process.

    Attributes:
        args: the module's arguments; row i of tensors among them, and of those in dicts that have as many rows as there
            are samples, belongs to sample i.
        targets: row i belongs to sample i.
        counts: samples of each process, by rank.
        not_finite: whether the batch holds NaN or infinity, a bool tensor (), if it was not checked yet.
    """

    args: tuple[Any, ...]
    targets: Tensor
    counts: tuple[int, ...]
    not_finite: Tensor

    @staticmethod
    def of_batch(inputs: Any, targets: Tensor, device: torch.device) -> BatchShare:
        """The checked samples of a batch.

        Args:
            inputs: this process's share, a tensor (n, ...), or a tuple or list of the module's arguments.
            targets: row i belongs to sample i.
            device: where processes exchange their counts.

        Raises:
            ValueError: a tensor without dimensions; on any process the batch is empty, its rows do not match, or it
                holds NaN or infinity. All processes raise alike.
        """
        args = arguments(inputs)
        check_data(args, targets)
        tensors = [t for t in (*args, targets) if isinstance(t, Tensor)]
        if not all(t.ndim for t in tensors):
            raise ValueError(
                "a tensor without dimensions is among inputs and targets, whose rows belong to samples: give a number, "
                "or one for each sample"
            )
        rows = len(targets)
        rows_of_inputs = next((len(t) for t in tensors if len(t) != rows), rows)
        not_finite = any_not_finite(tensors_in((args, targets)), device)
        shares = [[rows, rows_of_inputs, False]]
        if checks_before_forward(device):
            numbers = torch.tensor([rows, rows_of_inputs], device=device)
            shares = all_gather_rows(torch.cat([numbers, not_finite.long()[None]])).tolist()
        for r, (samples, samples_of_inputs, bad_value) in enumerate(shares):
            where = f" on rank {r}" if len(shares) > 1 else ""
            if samples == 0:
                raise ValueError(f"the batch is empty{where}: SHF needs at least one sample on every process")
            if samples_of_inputs != samples:
                raise ValueError(
                    f"inputs and targets differ in their number of samples{where}: {samples_of_inputs} rows of inputs, "
                    f"{samples} of targets. Row i of the targets belongs to row i of the inputs; give tensors whose "
                    "rows are not samples in a dict, as one argument of the module"
                )
            if bad_value:
                raise refusal_of_batch(where)
        return BatchShare(args, targets, tuple(count for count, *_ in shares), not_finite)

    @property
    def total(self) -> int:
        """Number of samples over all processes."""
        return sum(self.counts)

    @property
    def first_row(self) -> int:
        """Number of samples on the processes before this one."""
        return sum(self.counts[: rank()])

    def first(self, number: int) -> BatchShare:
        """The first samples of the batch of all processes.

        Raises:
            ValueError: a process would be left without samples.
        """
        counts, left = [], number
        for r, count in enumerate(self.counts):
            counts.append(min(count, left))
            left -= counts[-1]
            if not counts[-1]:
                raise ValueError(
                    f"curvature_share leaves the first {number} of {self.total} samples, and none on process {r}, "
                    f"which has the samples from {sum(self.counts[:r])} on: choose a larger share"
                )
        rows = slice(counts[rank()])
        return replace(self, args=self._rows_of_args(rows), targets=self.targets[rows], counts=tuple(counts))

    def chunks(self, size: int | None) -> Iterator[tuple[tuple[Any, ...], Tensor, slice]]:
        """Arguments, targets and rows of this process's samples, ``size`` at a time, or all at once for None."""
        count = len(self.targets)
        if size is None or size >= count:
            yield self.args, self.targets, slice(0, count)
            return
        for first in range(0, count, size):
            rows = slice(first, first + size)
            yield self._rows_of_args(rows), self.targets[rows], rows

    def _rows_of_args(self, rows: slice) -> tuple[Any, ...]:
        return rows_of_arguments(self.args, rows, len(self.targets))


def arguments(inputs: Any) -> tuple[Any, ...]:
    """The module's arguments: the inputs themselves, or the items of a tuple or list (torch's collate makes lists)."""
    several = isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence)
    return tuple(inputs) if several else (inputs,)


def check_data(inputs: tuple[Any, ...], targets: Tensor | None) -> None:
    """Raise TypeError for text, arrays of NumPy and tensors that are not dense, in inputs, targets or dicts of them."""
    if any(isinstance(value, str) or hasattr(value, "__array_interface__") for value in inputs):
        raise TypeError(f"inputs must be tensors, or dicts of tensors, got {inputs!r:.80}")
    for name, value in (("inputs", inputs), ("targets", targets)):
        for tensor in tensors_in(value):
            check_dense(f"every tensor in {name}", tensor, has_numbers=True)


def check_arguments(module: nn.Module, args: tuple[Any, ...], remedy: str = "") -> None:
    """Raise TypeError if forward does not take so many arguments; ``remedy`` names the right form."""
    try:
        taken = inspect.signature(module.forward)
        taken.bind(*args)
    except ValueError:  # no signature
        return
    except TypeError as error:
        raise TypeError(
            f"{type(module).__name__}.forward{taken} cannot take the {len(args)} inputs of this batch ({error}). "
            f"{remedy}A tuple or a list holds several arguments, anything else, as a dict, is one"
        ) from error
