"""Sums over the processes of torch.distributed, and comparisons of them; with one process, nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def world_size() -> int:
    """Number of processes of the default group; 1 if none is set up."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum over processes, in place; one collective."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums of each of several tensors over processes; one collective, in the widest of their dtypes."""
    if world_size() == 1 or not tensors:
        return list(tensors)
    device, dtype = tensors[0].device, max((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize)
    flat = all_reduce(torch.cat([t.reshape(-1).to(device, dtype) for t in tensors]))
    parts = flat.split([t.numel() for t in tensors])
    return [part.to(t).view_as(t) for part, t in zip(parts, tensors, strict=True)]


def all_gather_rows(row: Tensor) -> Tensor:
    """(processes, k): the (k,) rows of all processes, in the order of ranks."""
    if world_size() == 1:
        return row[None]
    rows = [torch.empty_like(row) for _ in range(world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def gather_numbers(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Integers of all processes, in the order of ranks; with one process, no device is asked."""
    if world_size() == 1:
        return [list(numbers)]
    return all_gather_rows(torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()


def all_gather_unequal(rows: Tensor) -> Tensor:
    """(sum of all k, ...): the (k, ...) rows of all processes, in the order of ranks; k may differ."""
    if world_size() == 1:
        return rows
    counts = [count for (count,) in gather_numbers([len(rows)], rows.device)]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def all_gather_objects(value: Any) -> list[Any]:
    """Objects of all processes, in the order of ranks; they are pickled."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast_numbers(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The numbers of the first process, in all of them; one collective, which pickles nothing."""
    if world_size() == 1:
        return list(numbers)
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.broadcast(values, src=0)
    return values.tolist()


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if world_size() > 1 else 0


def refuse_unlike_batches(inputs: Any, targets: Any, device: torch.device) -> None:
    """Raise on all processes if one has no inputs or no targets, or a table of another width than the others.

    Without it that process alone raises, and the others wait for it until the connection is closed.

    Raises:
        ValueError: one has; it names the rank.
    """
    if world_size() == 1:
        return
    batch = {"inputs": inputs, "targets": targets}
    first, *others = gather_numbers([_width(value) for value in batch.values()], device)
    for r, other in enumerate(others, start=1):
        for name, *widths in zip(batch, first, other, strict=True):
            if widths[0] != widths[1]:
                has = [f"{width} columns" if width > 0 else "none" if width < 0 else "others" for width in widths]
                raise ValueError(
                    f"the {name} of the processes are unlike: {has[0]} on rank 0, {has[1]} on rank {r}. All processes "
                    "need samples of one kind; the weights are unchanged"
                )


def _width(value: Any) -> int:
    """The columns of a table of real numbers, 0 for other values, -1 for none."""
    is_table = isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point()
    return value.shape[1] if is_table else -1 if value is None else 0
