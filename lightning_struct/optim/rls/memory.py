"""Memory of the matrices P of RLS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from lightning_struct.optim.memory import bytes_as_text, check_memory, table
from lightning_struct.optim.rls.forms import LARGEST_FULL
from lightning_struct.optim.rls.weights import TrainedWeight


def summary_table(weights: Sequence[TrainedWeight]) -> str:
    """A line for each trained weight: its name, the form and size of P, and the memory that this takes."""
    rows = [("weight", "form", "P", "memory")]
    for weight in weights:
        first, *others = weight.shape
        size = " x ".join(str(number) for number in ([first] if first > 1 else []) + others)
        rows.append((weight.name, weight.form, size, bytes_as_text(weight.memory)))
    rows.append(("total", "", "", bytes_as_text(sum(weight.memory for weight in weights))))
    return table(rows)


def memory_in_words(weights: Sequence[TrainedWeight]) -> str:
    """What P of these weights takes, and how many have a form that was chosen by their size."""
    memory = bytes_as_text(sum(weight.memory for weight in weights))
    text = f"RLS takes {memory} for P; weights that it trains: {len(weights)}"
    if not (number := sum(weight.settings.form is None and weight.form == "low_rank" for weight in weights)):
        return text
    chosen = f"{number} with more than {LARGEST_FULL:,} inputs have the low-rank form"
    return f"{text}; {chosen} (form='full' for the exact one)"


def check_inverses_fit(weights: Sequence[TrainedWeight]) -> None:
    """Compare what all P take with what is free where the weights are.

    Raises:
        MemoryError: they take more; named are the largest of them and the remedies.
    """
    on_device: dict[torch.device, list[TrainedWeight]] = defaultdict(list)
    for weight in weights:
        on_device[weight.parameter.device].append(weight)
    for device, there in on_device.items():
        largest = sorted(there, key=lambda weight: -weight.memory)[:3]
        check_memory(
            "The matrices P of RLS",
            {weight.name: (weight.memory, f"{weight.features} inputs") for weight in there},
            device,
            f"Use max_size={min(weight.features for weight in largest) - 1} to keep the rank-1 form of the larger "
            "ones, form='low_rank' or 'rank1' for all, block_size, or exclude layers",
        )
