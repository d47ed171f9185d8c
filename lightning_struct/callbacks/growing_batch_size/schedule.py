"""Batch sizes set by hand: so large after so many samples."""

import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from lightning_struct.utilities.namespaces import MisconfigurationException

# Steps after which a size is looked up again in any case.
LONGEST_WAIT = 100

FORM = "SAMPLES:SIZE entries with spaces between them, such as '0:32 50_000:128'"
ENTRY = re.compile(r"([0-9]+(?:_[0-9]+)*):([0-9]+(?:_[0-9]+)*)")


@dataclass(frozen=True)
class SampleSchedule:
    """Batch sizes by the samples seen in training.

    Attributes:
        entries: pairs of samples seen and the batch size from there on, the samples increasing.

    Example:
        >>> schedule = SampleSchedule.parse("0:32 50_000:128")
        >>> schedule.batch_size(49_999), schedule.batch_size(50_000)
        (32, 128)
    """

    entries: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str, max_batch_size: int | None = None) -> "SampleSchedule":
        """Read a schedule from its text, entries ``SAMPLES:SIZE`` with spaces between them.

        Args:
            text: such as ``"0:32 50_000:128"``.
            max_batch_size: largest size that is allowed.

        Raises:
            MisconfigurationException: an entry that cannot be read, a size below 1 or above ``max_batch_size``, samples
                that do not increase; the message quotes the entry and its place.
        """
        if not isinstance(text, str):
            raise MisconfigurationException(f"schedule must be a string of {FORM}, but is {text!r}")
        entries = []
        for number, word in enumerate(re.finditer(r"\S+", text), start=1):
            place = f"schedule={text!r}: entry {number}, {word[0]!r} (at character {word.start() + 1}),"
            match = ENTRY.fullmatch(word[0])
            if match is None:
                raise MisconfigurationException(f"{place} cannot be read: a schedule is {FORM}")
            samples, size = int(match[1]), int(match[2])
            if size < 1:
                raise MisconfigurationException(f"{place} has a batch size below 1")
            if max_batch_size is not None and size > max_batch_size:
                raise MisconfigurationException(
                    f"{place} has a batch size above max_batch_size={max_batch_size}: lower the size, or raise the "
                    "limit"
                )
            entries.append((samples, size))
            if any(later[0] <= before[0] for before, later in pairwise(entries)):
                raise MisconfigurationException(f"{place} does not come after the {entries[-2][0]} samples before it")
        if not entries:
            raise MisconfigurationException(f"schedule={text!r} is empty: a schedule is {FORM}")
        return cls(tuple(entries))

    def batch_size(self, samples: int) -> int | None:
        """Size of a batch that begins after so many samples; None before the first entry."""
        number = bisect_right(self.entries, samples, key=lambda entry: entry[0])
        return self.entries[number - 1][1] if number else None

    def wait(self, samples: int, batch_size: float) -> float:
        """Steps after which the size is to be looked up again; infinite after the last entry.

        Args:
            samples: seen in training.
            batch_size: of a step. As long as those to come are not more than twice as large on average, the next entry
                is not missed; else it is seen at most ``LONGEST_WAIT`` steps late.

        Example:
            >>> schedule = SampleSchedule.parse("0:32 50_000:128")
            >>> [schedule.wait(samples, 32) for samples in (0, 48_000, 49_990, 50_000)]
            [100, 31, 1, inf]
        """
        number = bisect_right(self.entries, samples, key=lambda entry: entry[0])
        if number == len(self.entries):
            return math.inf
        return min(max(int((self.entries[number][0] - samples) / (2 * batch_size)), 1), LONGEST_WAIT)
