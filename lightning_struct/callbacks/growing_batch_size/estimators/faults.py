"""What keeps an estimator from measuring. None of it ends a training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_struct.collective import all_gather_objects, all_reduce
from lightning_struct.functional.checks import first_line


class Unmeasurable(Exception):
    """An estimator cannot measure the gradients of this run. It is raised in all processes alike."""


class GradientNotFinite(Exception):
    """A gradient is NaN or infinite, and the step is not measured. It is raised in all processes alike."""


def check_finite(value: float) -> None:
    """Check a norm of a gradient, before it is used.

    Raises:
        GradientNotFinite: it is NaN or infinite.
    """
    if not math.isfinite(value):
        raise GradientNotFinite


class LocalFaults:
    """Errors of one process, which goes on to take part in what all do together, until all are told.

    Example:
        >>> faults, norm = LocalFaults(), torch.zeros(1)
        >>> with faults.kept():
        ...     norm = torch.ones(2) @ torch.ones(3)
        >>> try:
        ...     faults.summed(norm)
        ... except Unmeasurable as error:
        ...     print(str(error)[:20])
        fails (RuntimeError:
    """

    def __init__(self) -> None:
        self._first: str | None = None

    def keep(self, error: Exception) -> None:
        self._first = self._first or first_line(error)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that an error leaves, and does not end more than that."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - measuring must not end a training
            self.keep(error)

    def take(self) -> str | None:
        """The error that is kept, from now on no more."""
        first, self._first = self._first, None
        return first

    def summed(self, values: Tensor) -> Tensor:
        """(k,), on the CPU: the values (k,), each summed over the processes; one collective.

        Raises:
            Unmeasurable: a process has kept an error.
        """
        own = self.take()
        sums = all_reduce(torch.cat([values, values.new_full((1,), float(own is not None))])).cpu()
        if sums[-1] > 0:
            raise Unmeasurable(f"fails ({next(fault for fault in all_gather_objects(own) if fault is not None)})")
        return sums[:-1]
