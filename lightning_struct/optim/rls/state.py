"""State of RLS between steps and processes: what was read, summed over processes; and P, as a checkpoint has it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_struct.collective import all_reduce_together, world_size
from lightning_struct.optim.rls.weights import TrainedWeight


def reduce_statistics(weights: Sequence[TrainedWeight]) -> None:
    """Sums and counts of all weights over processes, by one collective.

    Raises:
        ValueError: a weight needs the rows themselves.
    """
    refuse_rows_of_processes(weights)
    dtype = max((weight.dtype for weight in weights), key=lambda dtype: dtype.itemsize)
    totals = [
        weight.parameter.new_zeros(weight.groups, weight.features, dtype=weight.dtype)
        if weight.statistics.total is None
        else weight.statistics.total
        for weight in weights
    ]
    counts = torch.tensor(
        [count for weight in weights for count in weight.statistics.counts], dtype=dtype, device="cpu"
    )
    *totals, counts = all_reduce_together([*totals, counts])
    numbers = iter(counts.tolist())
    for weight, total in zip(weights, totals, strict=True):
        statistics = weight.statistics
        statistics.counts = [next(numbers) for _ in statistics.counts]
        statistics.total = total if statistics.counts[0] else None
        statistics.pairs = None  # of this process alone


def refuse_rows_of_processes(weights: Sequence[TrainedWeight]) -> None:
    """Raise where there are several processes and a weight needs the rows of all.

    Raises:
        ValueError: see above.
    """
    if world_size() > 1 and any(weight.settings.by_rows for weight in weights):
        raise ValueError(
            "RLS.exact reads every row in one process, and there are several: train in one, or use RLS(...)"
        )


def check_states(states: Mapping[str, Mapping[str, Any]], weights: Sequence[TrainedWeight]) -> None:
    """Raise unless states by name are of these weights, or empty.

    Raises:
        ValueError: one is of another weight, form or shape.
    """
    for weight in weights:
        _check_state(weight, states.get(weight.name, {}))
    if unknown := states.keys() - {weight.name for weight in weights}:
        raise ValueError(
            f"the state is of an RLS that trains {', '.join(sorted(unknown))}, which this one does not: make it with "
            "the same layers excluded, and unfreeze before what was unfrozen"
        )


def _check_state(weight: TrainedWeight, state: Mapping[str, Any]) -> None:
    if not state:
        return
    name = weight.main_tensor
    if name not in state:
        raise ValueError(
            f"the state of {weight.name} is of another form of P than {weight.form!r} with "
            f"forgetting={weight.settings.forgetting}"
        )
    if tuple(state[name].shape) != weight.shape:
        raise ValueError(
            f"the state of {weight.name} has P of shape {tuple(state[name].shape)}, expected {weight.shape}"
        )


def converted(value: Any, weight: TrainedWeight) -> Any:
    """A copy of a state, with its tensors where their weight is, in the dtype of its step."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():  # the count of the low-rank form was one at first
            return int(value)
        return value.to(weight.parameter.device, weight.dtype, copy=True)
    if isinstance(value, Mapping):
        return {name: converted(item, weight) for name, item in value.items()}
    if isinstance(value, list):
        return [converted(item, weight) for item in value]
    return copy.copy(value)
