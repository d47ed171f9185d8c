"""The common part of the tasks of ``structured_tasks.py``: classes of matrices, and the weights best in validation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from torch import nn

from harness import Run
from lightning_struct.nn import STRUCTURED_CLASSES, Circulant, Fastfood
from paper_tables import Way

# By the names in the files of results.
RANKED: dict[str, Callable[..., nn.Module]] = {
    "ldr_td": STRUCTURED_CLASSES["LDRTridiagonal"],
    "ldr_sd": STRUCTURED_CLASSES["LDRSubdiagonal"],
    **{
        name.removesuffix("Like").lower() + "_like": layer
        for name, layer in STRUCTURED_CLASSES.items()
        if name.endswith("Like")
    },
    "low_rank": STRUCTURED_CLASSES["LowRank"],
}
UNRANKED: dict[str, Callable[..., nn.Module]] = {
    "unstructured": nn.Linear,
    "fastfood": Fastfood,
    "circulant": Circulant,
}
BUDGETED = ("pruned", "reduced")  # their rank is that of the LDR-SD layer whose parameters they have
CLASSES = ("unstructured", *RANKED, "fastfood", "circulant", *BUDGETED)
LABELS = {
    "ldr_td": "LDR-TD",
    "ldr_sd": "LDR-SD",
    "toeplitz_like": "Toeplitz-like",
    "hankel_like": "Hankel-like",
    "vandermonde_like": "Vandermonde-like",
    "cauchy_like": "Cauchy-like",
    "low_rank": "low rank",
}


def title(way: Way) -> str:
    name, rank = way
    return name if rank is None else f"{name} (r={rank})"


def ways_in(runs: Sequence[Run]) -> list[Way]:
    found = {(run["way"][0], run["way"][1]) for run in runs}
    return sorted(found, key=lambda way: (CLASSES.index(way[0]), way[1] or 0))


def finished(runs: Sequence[Run], way: Way) -> list[Run]:
    """The runs of a way that did not diverge."""
    return [run for run in runs if tuple(run["way"]) == way and "error" not in run]


class BestWeights(L.Callback):
    """Keeps the weights of the validation that was best so far."""

    def __init__(self, monitor: str, sign: int) -> None:
        self.monitor, self.sign = monitor, sign
        self.values: list[float] = []
        self.weights: dict[str, Any] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        value = trainer.callback_metrics[self.monitor].item()
        if all(self.sign * value > self.sign * other for other in self.values):
            self.weights = copy.deepcopy(pl_module.state_dict())
        self.values.append(value)
