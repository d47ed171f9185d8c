"""Whether the loss has grown with the batch, as one does that is summed over the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Losses that an average goes over.
AVERAGED = 100

# Smaller factors of the size are lost in what the loss does anyway.
SMALLEST_FACTOR = 1.5


class LossGrowth:
    """Compares the average loss before and after the batch has become k times as large.

    If the loss is averaged over the samples, it stays as it is; if it is summed, it becomes k times as large; either is
    less by what training has lowered it meanwhile. The limit is between the two, the cube root of k. It is looked at
    once, when there are as many losses after the growth as go into an average.

    Example:
        >>> growth = LossGrowth()
        >>> for size in (8, 16):
        ...     for _ in range(AVERAGED):
        ...         growth.update(torch.tensor(3.0 * size))
        ...     if size == 8:
        ...         growth.restart(8, 16)
        >>> growth.size_before_vain_growth()
        8
    """

    def __init__(self) -> None:
        self._average: Tensor | None = None
        self._losses = 0
        self._before: tuple[float, float] | None = None
        """The size before the last growth, and the limit for the loss after it."""

    def update(self, loss: Tensor) -> None:
        """Take in the loss of a backward pass; on its device, without waiting for it. Sharded ones are left out."""
        if type(loss) is not Tensor or loss.numel() != 1 or not loss.is_floating_point():
            return
        loss = loss.detach().reshape(())
        self._losses += 1
        if self._average is None:
            self._average = loss.to(torch.float32, copy=True)
        else:
            self._average.lerp_(loss.to(self._average), 1 / min(self._losses, AVERAGED))

    def restart(self, before: float, after: float) -> None:
        """The batch has another size from now on."""
        is_known = self._average is not None and self._losses >= AVERAGED and after >= SMALLEST_FACTOR * before
        self._before = (before, self._value() * (after / before) ** (1 / 3)) if is_known else None
        self._average, self._losses = None, 0

    def size_before_vain_growth(self) -> float | None:
        """The size before the last growth, if the loss has grown with it; None else, or where that is not known yet."""
        if self._before is None or self._losses < AVERAGED:
            return None
        (size, limit), self._before = self._before, None
        value = self._value()
        return size if limit != 0 and value / limit > 1 else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "average": None if self._average is None else self._value(),
            "losses": self._losses,
            "before": self._before,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        average, self._losses, self._before = state["average"], state["losses"], state["before"]
        self._average = None if average is None else torch.tensor(average, device=device)

    def _value(self) -> float:
        assert self._average is not None
        return float(self._average)
