"""The place of the samples in inputs and outputs of a layer, and the check that a layer ran again as it did before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import first_line
from lightning_struct.functional.layers.calls import (
    LayerCall,
    SampleCount,
    admissible_sizes,
    rows_of_arguments,
    tensors_in,
)
from lightning_struct.functional.layers.per_sample.contributions import Uncovered
from lightning_struct.functional.randomness import isolated_host_generators, random_state, restored_random_state


@dataclass(frozen=True)
class SampleLayout:
    """Place of the n samples: their ``dimension``. If that is 0 and larger than n, consecutive rows belong to one
    sample, or those that ``sample_of_row`` assigns to it.
    """

    samples: int
    dimension: int
    leading: int
    sample_of_row: Tensor | None = None

    def arranged(self, tensor: Tensor) -> Tensor:
        """(n, positions, *features) of (*leading, *features); zeros if a sample has fewer rows than another."""
        features = tensor.shape[self.leading :]
        if self.sample_of_row is not None:
            rows = tensor.reshape(tensor.shape[0], -1, *features)
            counts = torch.bincount(self.sample_of_row, minlength=self.samples)
            order = self.sample_of_row.argsort(stable=True)
            first = (counts.cumsum(0) - counts).repeat_interleave(counts)  # of the rows of its sample, in that order
            place = torch.arange(len(order), device=order.device) - first
            padded = rows.new_zeros(self.samples, int(counts.max()), *rows.shape[1:])
            padded[self.sample_of_row[order], place] = rows[order]
            return padded.flatten(1, 2)
        tensor = tensor if self.dimension == 0 else tensor.movedim(self.dimension, 0)
        return tensor.reshape(self.samples, -1, *features)


def sample_layout(size: Sequence[int], leading: int, call: LayerCall, *, ids: Tensor | None = None) -> SampleLayout:
    """Layout of the samples among the first ``leading`` dimensions of an input of this size; see
    :func:`~lightning_struct.functional.layers.per_sample.layer_contributions.contributions`.

    ``ids`` (k,) are the input of a table; they may belong to positions as well as to samples.

    Raises:
        Uncovered: none of them is that of the samples, or several may be.
    """
    if leading < 1:
        raise Uncovered(f"it read a tensor of shape {tuple(size)}, which has no dimension of samples")
    dimension = decided_dimension(size, leading, call, ids)
    if dimension is not None:
        return SampleLayout(size[dimension], dimension, leading)
    admissible = admissible_sizes(call.samples)
    if admissible is None:
        if call.module_call is not None and call.module_call.sizes and size[0] not in call.module_call.sizes:
            read = " or ".join(map(str, sorted(set(call.module_call.sizes))))
            shape = f"it read a tensor of shape {tuple(size)}, and the module reads {read} rows"
            raise Uncovered(f"{shape}: the first dimension of every layer's input must be the batch")
        return SampleLayout(size[0], 0, leading)
    for dimension in range(min(leading, 2)):
        if size[dimension] in admissible:
            return SampleLayout(size[dimension], dimension, leading)
    if len(admissible) == 1 and (sample_of_row := call.rows.get(size[0])) is not None:
        return SampleLayout(admissible[0], 0, leading, sample_of_row)
    if ids is None and len(admissible) == 1 and size[0] % admissible[0] == 0:
        if call.ambiguous:
            rows = f"the rows of its tensor of shape {tuple(size)} may have positions or samples first"
            raise Uncovered(f"{rows}, as the module has layers with batch_first=False")
        return SampleLayout(admissible[0], 0, leading)
    numbers = " or ".join(map(str, admissible))
    raise Uncovered(f"it read a tensor of shape {tuple(size)}, in which no dimension is that of {numbers} samples")


def decided_dimension(size: Sequence[int], leading: int, call: LayerCall, ids: Tensor | None = None) -> int | None:
    """The dimension of the samples if the sizes do not tell it, by another run of the module; None if they do.

    Args:
        size, leading, ids: as for :func:`sample_layout`; also of an output.
        call: of the layer.

    Raises:
        Uncovered: it cannot be found.
    """
    admissible, module_call = admissible_sizes(call.samples), call.module_call
    if module_call is None or size[0] < 2 or not (admissible is None or size[0] in admissible):
        return None
    if leading > 1:
        is_decided = size[0] != size[1] if admissible is None else size[1] not in admissible
        is_decided = is_decided or not (call.ambiguous or module_call.sizes)
    else:
        is_decided = ids is None or module_call.holds(ids)
    if is_decided:
        return None
    dimension: int = module_call.sample_dimension(call.layer, size)
    return dimension


# Relative to the norm of the output. Another mask changes it by about the square root of the dropout probability;
# rounding, also that of bfloat16 or TF32 over many steps, by less.
_TOLERANCE = 0.05


def has_active_dropout(layer: nn.Module) -> bool:
    """Whether an ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU`` has dropout inside that is active."""
    return layer.training and float(layer.dropout) > 0  # type: ignore[arg-type]


def check_rerun(recorded: Tensor, computed: Tensor) -> None:
    """Compare the output of a layer with dropout inside, of any shape, with that of the second run.

    Raises:
        Uncovered: they differ by more than rounding.
    """
    norm = torch.linalg.vector_norm
    recorded = recorded.to(computed.dtype)
    if not norm(computed - recorded) <= _TOLERANCE * norm(recorded):
        raise Uncovered(
            "its dropout cannot be repeated: the random generators are not in their state before the call, the kernel "
            "draws its own random numbers (as cuDNN's recurrent layers do), or the output was changed in place"
        )


def by_sample(sequences: Tensor, samples: SampleCount) -> Tensor:
    """(n, k·T, features) from (k·n, T, features), if each k sequences in a row are one sample.

    Args:
        sequences: of one call of the layer.
        samples: n, or the sizes that it may have; k is 1 with several, and if None.

    Raises:
        Uncovered: the number of sequences is no multiple of n, or none of the sizes.
    """
    number = sequences.shape[0]
    admissible = admissible_sizes(samples)
    if admissible is None or number in admissible:
        return sequences
    if len(admissible) != 1:
        raise Uncovered(f"it read {number} sequences, not {' or '.join(map(str, admissible))}")
    (n,) = admissible
    if number % n:
        raise Uncovered(f"it read {number} sequences, which is no multiple of {n} samples")
    return sequences.reshape(n, -1, sequences.shape[2])


class ModuleCall:
    """One call of the module that is measured, or of a part of it that read the batch.

    Args:
        module: the called module.
        args, kwargs: of the call; the samples are the rows of their tensors.
        admissible: sizes that n may have; None: the rows of the first tensor.
        running_again: context of another run, in which ``shapes`` are filled again.

    Attributes:
        module: see above.
        sizes: the numbers of rows of the module's inputs.
        shapes: of the inputs and outputs of each layer, with the layer, in the order of its calls.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        admissible: Collection[int] | None,
        running_again: Callable[[ModuleCall], AbstractContextManager[None]],
    ) -> None:
        tensors = tensors_in((args, kwargs))
        self.sizes = [tensor.size(0) for tensor in tensors if tensor.ndim]
        self.shapes: list[tuple[nn.Module, list[torch.Size]]] = []
        self.module, self._args, self._kwargs, self._running_again = module, args, kwargs, running_again
        self._places = places(tensors)
        self._samples = next((size for size in self.sizes if admissible is None or size in admissible), 0)
        device = tensors[0].device.type if tensors else "cpu"
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._moving: dict[tuple[nn.Module, torch.Size], set[tuple[int, ...]]] = {}
        self._failure: str | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether the rows of a tensor are, or are parts of, rows that the module reads."""
        return not places([tensor]).isdisjoint(self._places)

    def sample_dimension(self, layer: nn.Module, size: Sequence[int]) -> int:
        """The dimension of a tensor of this size, read or returned by the layer, that follows the number of samples.

        It is found by another run of the module, with one row less and no trace in its state.

        Raises:
            Uncovered: no dimension follows it, several do, or the module does not run.
        """
        if not self.sizes:
            self._failure = "the layer is called outside of a module that reads the batch"
        if not self._moving and self._failure is None:
            first, self.shapes = self.shapes, []
            try:
                self._run_with_one_sample_less()
                for (of, before), (again, after) in zip(first, self.shapes, strict=True):
                    for old, new in zip(before, after if of is again else [], strict=True):
                        moving = tuple(k for k, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
                        self._moving.setdefault((of, old), set()).add(moving)
            except Exception as error:  # noqa: BLE001  # whatever the user's module raises
                self._failure = f"with one sample less the module does not run as before ({first_line(error)})"
        moving_dimensions = self._moving.get((layer, torch.Size(size)), set())
        shape = f"its tensor of shape {tuple(size)}"
        if moving_dimensions == {()}:
            raise Uncovered(f"{shape} is the same whatever the number of samples, as position ids are")
        if len(moving_dimensions) != 1 or len(moving := next(iter(moving_dimensions))) != 1:
            why = self._failure or "it changes in several or different ones with the number of samples"
            raise Uncovered(f"which dimension of {shape} is that of the samples cannot be found: {why}")
        return moving[0]

    def _run_with_one_sample_less(self) -> None:
        n, parts = self._samples, list(self.module.modules())
        if n < 2 or any(isinstance(part, nn.SyncBatchNorm) for part in parts):
            raise ValueError("it needs two samples, and no SyncBatchNorm, which waits for other processes")
        *args, kwargs = rows_of_arguments((*self._args, self._kwargs), slice(n - 1), n)
        state = [(vars(part), dict(vars(part)), part._buffers, dict(part._buffers)) for part in parts]
        values = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            # With gradients, since torch's layers take other ways without.
            with (
                self._running_again(self),
                torch.enable_grad(),
                torch.autocast(*self._autocast),
                restored_random_state(random_state(args, kwargs)),
                isolated_host_generators(),
            ):
                self.module(*args, **kwargs)
        finally:
            for attributes, before, buffers, registered in state:
                attributes.clear()
                attributes.update(before)
                buffers.clear()
                buffers.update(registered)
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)


def places(tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
    """The storages of dense tensors, and how far apart their rows are there."""
    dense = [t for t in tensors if t.layout == torch.strided and not t.is_nested and t.ndim]
    return {(t.untyped_storage()._cdata, t.stride(0)) for t in dense}
