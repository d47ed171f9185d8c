"""Numbers below the normal range of floating point, on which the arithmetic of a CPU takes up to ten times as long."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Such numbers become zero, in this thread and in those that it starts.

    torch does not tell the mode that it is in, but Python's own floats are computed in it: it is put back in the end.
    """
    flushed = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
