"""Free memory for the state of an optimizer, and the error if it does not suffice."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

_log = logging.getLogger(__name__)
CONTROL_GROUP = Path("/sys/fs/cgroup")


def check_memory(what: str, needed: Mapping[str, tuple[int, str]], device: torch.device, remedy: str) -> None:
    """Compare the memory that is needed with that which is free; log a warning if it is more than half of that.

    Args:
        what: the beginning of the message, a plural, as "The matrices P of RLS".
        needed: by the name of the state, its bytes and a description.
        device: the device that must have room.
        remedy: the end of the message.

    Raises:
        MemoryError: it is more; the message names the three largest and the remedy.
    """
    total, free = sum(size for size, _ in needed.values()), available_memory(device)
    if free is None or total <= free:
        if free is not None and total > free / 2:
            _log.warning(
                "%s take %s of %s that are free on %s", what, bytes_as_text(total), bytes_as_text(free), device
            )
        return
    largest = sorted(needed.items(), key=lambda item: -item[1][0])[:3]
    named = ", ".join(f"{name} {bytes_as_text(size)} ({description})" for name, (size, description) in largest)
    raise MemoryError(
        f"{what} take {bytes_as_text(total)}, but {bytes_as_text(free)} are free on {device}; the largest: {named}. "
        f"{remedy}"
    )


def fits_memory(needed: Mapping[str, tuple[int, str]], device: torch.device) -> bool:
    """Whether so much is free, or cannot be asked."""
    free = available_memory(device)
    return free is None or sum(size for size, _ in needed.values()) <= free


def available_memory(device: torch.device) -> int | None:
    """Free bytes of a device; None if that cannot be asked."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    free = [_free_of_the_machine(), _free_of_the_container()]
    return min((number for number in free if number is not None), default=None)


def _free_of_the_machine() -> int | None:
    lines = _text(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _free_of_the_container() -> int | None:
    """Bytes that the limit leaves. Files that lie unused in memory count as free, since they make room."""
    limit, used = (_text(CONTROL_GROUP / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None
    lines = _text(CONTROL_GROUP / "memory.stat").splitlines()
    unused_files = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(int(limit) - int(used) + unused_files, 0)


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def bytes_as_text(memory: int) -> str:
    """A number of bytes in KiB, MiB or GiB.

    Example:
        >>> bytes_as_text(3 * 2**20)
        '3.0 MiB'
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if memory >= size:
            return f"{memory / size:.1f} {unit}"
    return f"{memory / 2**10:.1f} KiB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of text: two columns at the left, and at the right of theirs the others, which are numbers.

    Example:
        >>> print(table([("weight", "form", "memory"), ("0.weight", "full", "4 KiB")]))
        weight    form  memory
        0.weight  full   4 KiB
    """
    columns = [
        [f"{text:{'<' if number < 2 else '>'}{max(map(len, column))}}" for text in column]
        for number, column in enumerate(zip(*rows, strict=True))
    ]
    return "\n".join(map("  ".join, zip(*columns, strict=True)))
