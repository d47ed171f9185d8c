"""A batch that grows by a gradient-variance test and a validation test (section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from lightning_struct.functional.gradient_norms import required_batch_size

Record = dict[str, float]


def next_batch_size(
    batch_size: int,
    predictions: Sequence[int],
    validation_values: Sequence[float],
    *,
    max_batch_size: int,
    window: int = 5,
    validation_threshold: float = 0.005,
    growth: float = 1.005,
) -> int:
    """The size of the next batch (Algorithm 1).

    The mean of the last ``window`` predictions, rounded up, where that is larger; else ``growth`` times the size where the
    validation value has fallen by less than ``validation_threshold`` of itself over ``window`` values; else unchanged.

    Args:
        batch_size: n.
        predictions: n̂ of the steps so far, the last one last; fewer than ``window`` are no reason to grow.
        validation_values: likewise, fewer than ``window`` + 1 are no reason to grow.
        max_batch_size: never more, unless n is already.
        window, validation_threshold, growth: of the rules.
    """
    grown = batch_size
    average = math.ceil(sum(predictions[-window:]) / window) if len(predictions) >= window else 0
    if average > batch_size:
        grown = average
    elif len(validation_values) > window:
        # The text of section 4.3 looks four values back, Algorithm 1 five; this is Algorithm 1.
        before, now = validation_values[-1 - window], validation_values[-1]
        if before - now < validation_threshold * now:
            grown = math.ceil(growth * batch_size)
    return max(batch_size, min(grown, max_batch_size))


class GrowingBatchSize(L.Callback):
    """Lets the batch grow as the gradient gets small against its noise, or as validation stalls. ::

        Trainer(callbacks=[GrowingBatchSize(max_batch_size=2000)])

    After each training step it asks the module for its ``gradient_statistics()`` (as a module trained by
    ``SHFOptimization`` has them), predicts the batch size at which the norm test would hold, and sets ``batch_size`` of
    the training loader's :class:`~lightning_struct.data.sampling.IndependentDraws`; sizes are those of all processes
    together. It never shrinks a batch. Override :meth:`decide` for another rule.

    Args:
        max_batch_size: n_max; the size of the data set if None.
        theta: θ of the norm test: the relative error that the mean gradient may have.
        validation_monitor: a logged metric for the validation rule, checked after each validation; if None, the
            validation value that the statistics hold, checked after each step.
        validation_threshold: relative decrease over ``window`` checks below which the batch grows by ``growth``.
        growth: factor of the validation rule.
        window: predictions that are averaged, and checks that are looked back.
        every_n_steps: steps between two decisions.

    Raises:
        MisconfigurationException: an argument out of range; at the start of fit, a module without statistics or a loader
            whose batches cannot change size, with the remedy.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        *,
        theta: float = 0.5,
        validation_monitor: str | None = None,
        validation_threshold: float = 0.005,
        growth: float = 1.005,
        window: int = 5,
        every_n_steps: int = 1,
    ) -> None:
        if not (theta > 0 and growth >= 1 and window >= 1 and every_n_steps >= 1):
            raise MisconfigurationException(
                "GrowingBatchSize needs theta > 0, growth >= 1, window >= 1 and every_n_steps >= 1, but got "
                f"{theta}, {growth}, {window} and {every_n_steps}"
            )
        if max_batch_size is not None and max_batch_size < 1:
            raise MisconfigurationException(f"max_batch_size must be at least 1, but is {max_batch_size}")
        self.max_batch_size, self.theta = max_batch_size, theta
        self.validation_monitor, self.validation_threshold = validation_monitor, validation_threshold
        self.growth, self.window, self.every_n_steps = growth, window, every_n_steps
        self.records: list[Record] = []
        self._predictions: list[int] = []
        self._values: list[float] = []
        self._samples = 0
        self._sampler: Any = None
        self._sampler_state: dict[str, Any] | None = None
        self._last_step = 0

    def decide(self, batch_size: int) -> int:
        """The size of the next batch, from the predictions and validation values so far."""
        return next_batch_size(
            batch_size,
            self._predictions,
            self._values,
            max_batch_size=self.max_batch_size or len(self._sampler.dataset),
            window=self.window,
            validation_threshold=self.validation_threshold,
            growth=self.growth,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not hasattr(pl_module, "gradient_statistics"):
            raise MisconfigurationException(
                f"GrowingBatchSize asks the module for gradient_statistics(), which {type(pl_module).__name__} does not "
                "have: train it by SHFOptimization, or define the method"
            )
        self._sampler = _resizable_sampler(trainer.train_dataloader)
        if self._sampler_state is not None:
            self._sampler.load_state_dict(self._sampler_state)
            self._sampler_state = None
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        statistics = pl_module.gradient_statistics()  # type: ignore[operator]
        if trainer.global_step == self._last_step or statistics is None:
            return
        self._last_step = trainer.global_step
        self._samples += statistics.batch_size
        if trainer.global_step % self.every_n_steps:
            return
        if statistics.variance is None:
            raise MisconfigurationException(
                f"{type(pl_module).__name__} reports no gradient variance: with batch normalisation in training mode, or "
                "a batch of one, there is none. Use another normalisation, or leave GrowingBatchSize out"
            )
        predicted = required_batch_size(
            statistics.variance, statistics.gradient_squared_norm, len(self._sampler.dataset), self.theta
        )
        self._predictions = [*self._predictions, predicted][-self.window :]
        if self.validation_monitor is None and statistics.validation_value is not None:
            self._check(statistics.validation_value)
        self._sampler.batch_size = trainer.strategy.broadcast(self.decide(self._sampler.batch_size))
        if self.validation_monitor is not None:
            self._values = self._values[-self.window :]  # the rule holds once for each validation
        record = {"samples": self._samples, "batch_size": statistics.batch_size, "predicted": predicted}
        if statistics.gradient_squared_norm > 0:
            record["variance_ratio"] = statistics.variance / (statistics.batch_size * statistics.gradient_squared_norm)
        if statistics.validation_value is not None:
            record["validation"] = statistics.validation_value
        self.records.append(record)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        name = self.validation_monitor
        if name is None or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        if name not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise MisconfigurationException(
                f"GrowingBatchSize monitors {name!r}, which was not logged; logged are: {logged}. Log it in "
                "validation_step, or set validation_monitor"
            )
        self._check(float(trainer.callback_metrics[name]))

    def plot(self) -> tuple[Figure, list[Axes]]:
        """Draw batch size (with its prediction), variance ratio and validation value over samples seen.

        The variance ratio is ‖Var‖₁/(n‖ḡ‖²), which the norm test bounds by θ².

        Raises:
            MisconfigurationException: nothing has been recorded.
        """
        if not self.records:
            raise MisconfigurationException("GrowingBatchSize has no records: train first")
        panels = [
            ("batch_size", "samples in a batch"),
            ("variance_ratio", "variance ratio"),
            ("validation", "validation"),
        ]
        panels = [panel for panel in panels if any(panel[0] in record for record in self.records)]
        figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
        axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
        for panel, (name, label) in zip(axes, panels, strict=True):
            points = [(record["samples"], record[name]) for record in self.records if name in record]
            panel.plot(*zip(*points, strict=True))
            panel.set(xlabel="samples seen", ylabel=label)
            panel.grid(alpha=0.25)
        return figure, axes

    def state_dict(self) -> dict[str, Any]:
        return {
            "predictions": list(self._predictions),
            "values": list(self._values),
            "samples": self._samples,
            "records": [dict(record) for record in self.records],
            "sampler": None if self._sampler is None else self._sampler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._predictions = list(state_dict["predictions"])
        self._values = list(state_dict["values"])
        self._samples = state_dict["samples"]
        self.records = [dict(record) for record in state_dict["records"]]
        self._sampler_state = state_dict["sampler"]

    def _check(self, value: float) -> None:
        self._values = [*self._values, value][-self.window - 1 :]


def _resizable_sampler(loader: Any) -> Any:
    """The sampler of the loader that yields batches of a settable size."""
    if isinstance(loader, DataLoader):
        for sampler in (loader.batch_sampler, loader.sampler):
            if getattr(sampler, "resizable", False):
                return sampler
    sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
    found = type(loader).__name__ + (f" over {type(sampler).__name__}" if sampler is not None else "")
    raise MisconfigurationException(
        f"GrowingBatchSize cannot change the batches of a {found}: give the training loader "
        "batch_sampler=IndependentDraws(dataset, batch_size, draws_per_epoch) (lightning_struct.data), or use DrawLoader"
    )
