"""One call of the measured module, and the search for the samples' dimension if sizes alone do not decide it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import first_line
from lightning_struct.functional.layers.calls import rows_of_arguments, tensors_in
from lightning_struct.functional.layers.per_sample.contributions import Uncovered
from lightning_struct.functional.randomness import isolated_host_generators, random_state, restored_random_state


class ModuleCall:
    """One call of the module that is measured, or of a part of it that read the batch.

    Args:
        module: what is called.
        args, kwargs: of the call; the samples are the rows of their tensors.
        admissible: sizes that n may have; None: the rows of the first tensor.
        running_again: context of another run, in which ``shapes`` are filled again.

    Attributes:
        module: see above.
        sizes: the numbers of rows of what the module reads.
        shapes: of what each layer reads and returns, with the layer, in the order of its calls.
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
