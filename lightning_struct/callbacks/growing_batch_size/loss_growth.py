"""Whether the loss has grown with the batch, as a sum over the samples does, or a contrastive loss."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

# Losses that an average goes over.
AVERAGED = 100

# Smaller factors of the size are lost in what the loss does anyway.
SMALLEST_FACTOR = 1.5

# Losses rise if the average of their second half is more than so many times that of the first, or so many standard
# errors above it: those of a training that diverges differ too much from each other for the second test.
LARGE_RISE, STANDARD_ERRORS = 2.0, 5.0


class LossGrowth:
    """Compares the losses before and after the batch has become k times as large, by two measures.

    - **Their average.** If the loss is averaged over the samples, it stays as it is; if it is summed, it becomes k
      times as large; either is less by what training has lowered it meanwhile. The limit is between the two, the cube
      root of k. Where the losses were rising already, as those of a training that diverges, they would have gone on
      rising: from the first to the second half of those before by a factor q, so in as many more by q². By that the
      limit is multiplied, if q is more than noise.
    - **Their spread**, the average change from one loss to the next. If the loss is averaged, it becomes smaller by √k,
      as the noise of the samples does; if it is summed, larger by √k. The limit is between the two, 1.

    Both have to be passed. The average alone would not do for a loss that may be negative, as a log-likelihood: its
    zero is arbitrary, and training makes it larger in magnitude. They are looked at once, when there are as many losses
    after the growth as go into an average.

    Example:
        >>> growth = LossGrowth()
        >>> for size in (8, 16):
        ...     for _ in range(AVERAGED):
        ...         growth.update(torch.tensor(3.0 * size))
        ...     if size == 8:
        ...         growth.restart(8, 16)
        >>> growth.size_before_loss_grew()
        8
    """

    def __init__(self) -> None:
        self._losses: deque[Tensor] = deque(maxlen=AVERAGED)
        self._before: tuple[float, float, float] | None = None
        """The size before the last growth, and the limits for the average and the spread after it."""

    def update(self, loss: Tensor) -> None:
        """Take in the loss of a backward pass; on its device, without waiting for it. Sharded ones are left out."""
        if type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point():
            self._losses.append(loss.detach().to(torch.float32, copy=True))

    def restart(self, before: float, after: float) -> None:
        """The batch has another size from now on."""
        self._before = None
        if len(self._losses) == AVERAGED and after >= SMALLEST_FACTOR * before:
            average, spread = self._average_and_spread()
            self._before = before, average * (after / before) ** (1 / 3) * self._rise() ** 2, spread
        self._losses.clear()

    def size_before_loss_grew(self) -> float | None:
        """The size before the last growth, if the loss has grown with it; None else, or where that is not known yet."""
        if self._before is None or len(self._losses) < AVERAGED:
            return None
        (size, limit, limit_of_spread), self._before = self._before, None
        average, spread = self._average_and_spread()
        return size if limit != 0 and average / limit > 1 and spread >= limit_of_spread else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._values(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(map(torch.tensor, state["losses"]), maxlen=AVERAGED)
        self._before = state["before"]

    def _rise(self) -> float:
        """By what the average rises from the first half to the second; 1 where that is no more than noise."""
        values, half = self._values(), AVERAGED // 2
        first, second = fmean(values[:half]), fmean(values[half:])
        if first == 0 or second / first <= 1:
            return 1.0
        noise = math.hypot(pstdev(values[:half]), pstdev(values[half:])) / math.sqrt(half)
        rises = second / first > LARGE_RISE or abs(second - first) > STANDARD_ERRORS * noise
        return second / first if rises else 1.0

    def _average_and_spread(self) -> tuple[float, float]:
        values = self._values()
        return fmean(values), fmean(abs(after - before) for before, after in pairwise(values))

    def _values(self) -> list[float]:
        if not self._losses:
            return []
        device = self._losses[-1].device  # those of a checkpoint are on the CPU
        return torch.stack([loss.to(device).reshape(()) for loss in self._losses]).tolist()
