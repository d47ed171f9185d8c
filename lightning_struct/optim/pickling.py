"""Copies and pickles of optimizers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def state_without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """All attributes but torch's hooks: a copy of the optimizer with its module goes on as the original would.

    Torch's own ``__getstate__`` leaves out what a subclass adds.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not name.startswith("_optimizer_")  # a scheduler puts its own step there
    }
