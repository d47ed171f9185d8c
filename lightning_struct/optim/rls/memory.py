"""How much memory there is for the matrices of RLS, and how much they take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_struct.optim.rls.blocks import Block


def summary_table(blocks: Sequence[Block]) -> str:
    """A line for each trained weight: its name, the form and size of P, and the memory that this takes."""
    rows = [("weight", "form", "P", "memory")]
    for block in blocks:
        groups = f"{block.groups} x " if block.groups > 1 else ""
        size = f"{groups}{block.size} x {block.size}" if block.form == "full" else f"{groups}{block.size}"
        rows.append((block.name, block.form, size, as_text(block.memory)))
    rows.append(("total", "", "", as_text(sum(block.memory for block in blocks))))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{name:<{widths[0]}}  {form:<{widths[1]}}  {size:>{widths[2]}}  {memory:>{widths[3]}}"
        for name, form, size, memory in rows
    )


def check_memory(blocks: Sequence[Block]) -> None:
    """Compare what all P take with what is free where the weights are.

    Raises:
        MemoryError: they take more; named are the largest of them and the remedies.
    """
    on_device: dict[torch.device, list[Block]] = defaultdict(list)
    for block in blocks:
        on_device[block.weight.device].append(block)
    for device, there in on_device.items():
        needed, free = sum(block.memory for block in there), available_memory(device)
        if free is not None and needed > free:
            largest = sorted(there, key=lambda block: -block.memory)[:3]
            named = ", ".join(f"{block.name} {as_text(block.memory)} ({block.size} inputs)" for block in largest)
            raise MemoryError(
                f"The matrices P of RLS take {as_text(needed)}, but {as_text(free)} are free on {device}; the largest: "
                f"{named}. Use max_size={min(block.size for block in largest) - 1} to keep the rank-1 form of the larger "
                "ones, form='rank1' for all, or exclude layers"
            )


def available_memory(device: torch.device) -> int | None:
    """Free bytes of a device; None where that cannot be asked."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if device.type != "cpu":
        return None
    free = [_free_of_the_machine(), _free_of_the_container()]
    return min((number for number in free if number is not None), default=None)


def _free_of_the_machine() -> int | None:
    lines = _text(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _free_of_the_container() -> int | None:
    directory = Path("/sys/fs/cgroup")
    limit, used = (_text(directory / name).strip() for name in ("memory.max", "memory.current"))
    return max(int(limit) - int(used), 0) if limit.isdigit() and used.isdigit() else None


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def as_text(memory: int) -> str:
    """A number of bytes in KiB, MiB or GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if memory >= size:
            return f"{memory / size:.1f} {unit}"
    return f"{memory / 2**10:.1f} KiB"
