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
    """Compares the losses before and after the batch has become k times as large, by two measures.

    - **Their average.** If the loss is averaged over the samples, it stays as it is; if it is summed, it becomes k
      times as large; either is less by what training has lowered it meanwhile. The limit is between the two, the cube
      root of k.
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
        >>> growth.size_before_vain_growth()
        8
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._averages: Tensor | None = None
        """Of the losses, and of their changes from one to the next."""
        self._losses = 0
        self._before: tuple[float, float, float] | None = None
        """The size before the last growth, and the limits for the average and the spread after it."""

    def update(self, loss: Tensor) -> None:
        """Take in the loss of a backward pass; on its device, without waiting for it. Sharded ones are left out."""
        if type(loss) is not Tensor or loss.numel() != 1 or not loss.is_floating_point():
            return
        loss = loss.detach().reshape(()).to(torch.float32, copy=True)
        change = torch.zeros_like(loss) if self._last is None else (loss - self._last.to(loss.device)).abs_()
        self._last = loss
        self._losses += 1
        new = torch.stack((loss, change))
        if self._averages is None:
            self._averages = new
        else:
            self._averages.lerp_(new.to(self._averages.device), 1 / min(self._losses, AVERAGED))

    def restart(self, before: float, after: float) -> None:
        """The batch has another size from now on."""
        self._before = None
        if self._losses >= AVERAGED and after >= SMALLEST_FACTOR * before:
            average, spread = self._values()
            self._before = before, average * (after / before) ** (1 / 3), spread
        self._last, self._averages, self._losses = None, None, 0

    def size_before_vain_growth(self) -> float | None:
        """The size before the last growth, if the loss has grown with it; None else, or where that is not known yet."""
        if self._before is None or self._losses < AVERAGED:
            return None
        (size, limit, limit_of_spread), self._before = self._before, None
        average, spread = self._values()
        return size if limit != 0 and average / limit > 1 and spread >= limit_of_spread else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": None if self._last is None else float(self._last),
            "averages": None if self._averages is None else self._values(),
            "losses": self._losses,
            "before": self._before,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        last, averages = state["last"], state["averages"]
        self._last = None if last is None else torch.tensor(last, device=device)
        self._averages = None if averages is None else torch.tensor(averages, device=device)
        self._losses, self._before = state["losses"], state["before"]

    def _values(self) -> list[float]:
        assert self._averages is not None
        return self._averages.tolist()
