"""A batch that grows by a gradient-variance test and a validation test (section 4.3)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct.functional.gradient_norms import required_batch_size
from lightning_struct.utilities.due_validation import DueValidation
from lightning_struct.utilities.gradient_statistics import GradientStatistics
from lightning_struct.utilities.monitor import monitored_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, float]
PANELS = {
    "batch_size": "samples in a batch",
    "variance_ratio": "‖Var‖₁ / (n ‖ḡ‖²)",
    "validation_value": "validation value",
}


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

    The mean of the last ``window`` predictions, rounded up, where that is larger than n; else ``growth`` times n, rounded
    up, where the validation value has fallen by less than ``validation_threshold`` of itself; else n.

    Args:
        batch_size: n >= 1.
        predictions: n̂ of the checks so far, the last one last. No decision falls before there are more than ``window``.
        validation_values: f_val likewise; the last one is compared with the one ``window`` before it, if there is one.
        max_batch_size: n_max. A batch that is larger already stays as it is: none is ever made smaller.
        window, validation_threshold, growth: of the rules.

    Returns:
        At least n, and at most n_max or n, whichever is larger.
    """
    grown = batch_size
    if len(predictions) > window:
        average = math.ceil(sum(predictions[-window:]) / window)
        if average > batch_size:
            grown = average
        elif _stalls(validation_values, window, validation_threshold):
            grown = math.ceil(growth * batch_size)
    return max(batch_size, min(grown, max_batch_size))


def _stalls(values: Sequence[float], window: int, threshold: float) -> bool:
    if len(values) <= window:
        return False
    # The text of section 4.3 looks four values back, Algorithm 1 five: this is Algorithm 1. It divides by the last value,
    # which may be zero or negative; hence the product, and the absolute value.
    before, now = values[-1 - window], values[-1]
    return before - now < threshold * abs(now)


class GrowingBatchSize(L.Callback):
    """Lets the batch grow as the gradient gets small against its noise, or as validation stalls. ::

        Trainer(callbacks=[GrowingBatchSize(max_batch_size=2000)])

    After each training step it asks the module for ``gradient_statistics()`` (a module trained by ``SHFOptimization`` has
    them), predicts the batch size at which the norm test would hold, decides by :func:`next_batch_size`, and sets
    ``batch_size`` of the training loader's :class:`~lightning_struct.data.sampling.IndependentDraws` for the next batch.
    Sizes are of all processes together. The first process decides for all. Logged are ``batch_size_predicted``, and
    ``batch_size`` and ``gradient_variance`` where the module does not log them itself.

    Override :meth:`decide` for another rule. All that a resumed run needs is in ``state_dict``, the size included.

    Args:
        max_batch_size: n_max; the size of the data set if None.
        theta: θ > 0 of the norm test: the relative error that the mean gradient may have.
        validation_monitor: a logged metric, to be minimised, for the validation rule, which is then applied once after
            each validation; if None, the validation value in the statistics, applied in each step.
        validation_threshold: relative decrease over ``window`` checks below which the batch grows by ``growth``.
        growth: factor of the validation rule, at least 1.
        window: predictions that are averaged, and checks that are looked back; there is no decision before so many.
        every_n_steps: steps between two checks.

    Attributes:
        predictions: n̂ of the last checks.
        validation_values: of the last checks.
        records: one dict for each check: ``samples`` seen in training, ``batch_size`` of the step,
            ``batch_size_predicted``, ``variance_ratio`` = ‖Var‖₁/(n‖ḡ‖²), which times (N - n)/(N - 1) the norm test
            bounds by θ², and ``validation_value``.

    Raises:
        MisconfigurationException: an argument out of range; at the start of fit a module without statistics, a loader
            whose batches cannot change size, or one whose batches are larger than ``max_batch_size`` already; a step
            without gradient variance; a monitor that is not logged, or not finite.
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
        self.predictions: list[int] = []
        self.validation_values: list[float] = []
        self.records: list[Record] = []
        self._samples = 0
        self._last_step = 0
        self._batch_size: int | None = None
        self._sampler: Any = None
        self._dataset_size = 0
        self._logged_here: tuple[str, ...] | None = None
        self._validation = DueValidation()

    def decide(self, batch_size: int) -> int:
        """The size of the next batch, from the predictions and validation values so far."""
        return next_batch_size(
            batch_size,
            self.predictions,
            self.validation_values,
            max_batch_size=self._limit,
            window=self.window,
            validation_threshold=self.validation_threshold,
            growth=self.growth,
        )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not callable(getattr(pl_module, "gradient_statistics", None)):
            raise MisconfigurationException(
                f"GrowingBatchSize asks the module for gradient_statistics(), which {type(pl_module).__name__} does not "
                "have: train it by SHFOptimization, or define the method so that it returns GradientStatistics"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        self._sampler, self._dataset_size = resizable_sampler(loader), len(loader.dataset)
        if self._batch_size is not None:
            self._sampler.batch_size = self._batch_size
        if self._sampler.batch_size > self._limit:
            raise MisconfigurationException(
                f"Batches of {self._sampler.batch_size} are larger than GrowingBatchSize(max_batch_size={self._limit}): "
                "start with smaller ones, or raise the limit"
            )
        self._last_step = trainer.global_step
        self._logged_here = None
        if self.validation_monitor is not None:
            self._validation.on_train_start(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._validation.on_train_batch_end(trainer)
        statistics: GradientStatistics | None = pl_module.gradient_statistics()  # type: ignore[operator]
        if trainer.global_step == self._last_step or statistics is None:
            return
        self._last_step = trainer.global_step
        self._samples += statistics.batch_size
        if trainer.global_step % self.every_n_steps:
            return
        self._check(statistics, type(pl_module).__name__)
        self._batch_size = self._sampler.batch_size = trainer.strategy.broadcast(self.decide(self._sampler.batch_size))
        if self.validation_monitor is not None:
            # the value has been looked at: too few are left for another decision before the next validation
            self.validation_values = self.validation_values[-self.window :]
        self._log(trainer, pl_module, statistics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._validation.on_validation_end(trainer) or self.validation_monitor is None:
            return
        value = monitored_value(trainer, self.validation_monitor, "GrowingBatchSize(validation_monitor=...)")
        self.validation_values = [*self.validation_values, value][-self.window - 1 :]

    def plot(self) -> "tuple[Figure, list[Axes]]":
        """Draw batch size, variance ratio and validation value, whichever there is, over samples seen in training.

        Needs matplotlib.

        Raises:
            MisconfigurationException: nothing has been recorded.
        """
        from matplotlib.figure import Figure

        if not self.records:
            raise MisconfigurationException("GrowingBatchSize has nothing to plot: train first")
        names = [name for name in PANELS if any(name in record for record in self.records)]
        figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
        axes = list(figure.subplots(1, len(names), squeeze=False)[0])
        for panel, name in zip(axes, names, strict=True):
            points = [(record["samples"], record[name]) for record in self.records if name in record]
            panel.plot(*zip(*points, strict=True), drawstyle="steps-post" if name == "batch_size" else "default")
            panel.set(xlabel="samples seen", ylabel=PANELS[name])
            panel.grid(alpha=0.25)
        return figure, axes

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch_size": self._batch_size,
            "predictions": list(self.predictions),
            "validation_values": list(self.validation_values),
            "samples": self._samples,
            "records": [dict(record) for record in self.records],
            "validation": self._validation.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batch_size = state_dict["batch_size"]
        self.predictions = list(state_dict["predictions"])
        self.validation_values = list(state_dict["validation_values"])
        self._samples = state_dict["samples"]
        self.records = [dict(record) for record in state_dict["records"]]
        self._validation.load_state_dict(state_dict["validation"])

    @property
    def _limit(self) -> int:
        return min(self.max_batch_size or self._dataset_size, self._dataset_size)

    def _check(self, statistics: GradientStatistics, module_name: str) -> None:
        """Take in the statistics of a step."""
        size, variance, squared_norm = statistics.batch_size, statistics.variance, statistics.gradient_squared_norm
        if variance is None:
            raise MisconfigurationException(
                f"{module_name} reports no gradient variance for a batch of {size}: there is none for a single sample, nor "
                "where batch normalisation couples the samples. Start with two at least, take another normalisation, or "
                "leave GrowingBatchSize out"
            )
        predicted = required_batch_size(variance, squared_norm, self._dataset_size, self.theta)
        self.predictions = [*self.predictions, predicted][-self.window - 1 :]
        record: Record = {"samples": self._samples, "batch_size": size, "batch_size_predicted": predicted}
        if squared_norm > 0:
            record["variance_ratio"] = variance / (size * squared_norm)
        if self.validation_monitor is None and statistics.validation_value is not None:
            self.validation_values = [*self.validation_values, statistics.validation_value][-self.window - 1 :]
        if self.validation_values:
            record["validation_value"] = self.validation_values[-1]
        self.records.append(record)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule, statistics: GradientStatistics) -> None:
        values = {
            "batch_size_predicted": self.predictions[-1],
            "batch_size": statistics.batch_size,
            "gradient_variance": statistics.variance,
        }
        if self._logged_here is None:
            self._logged_here = tuple(name for name in values if name not in trainer.callback_metrics)
        for name in self._logged_here:
            pl_module.log(name, float(values[name]), batch_size=statistics.batch_size)  # type: ignore[arg-type]


def resizable_sampler(loader: Any) -> Any:
    """The sampler of a training loader whose ``batch_size`` can be set while it is in use.

    Raises:
        MisconfigurationException: there is none, or workers fetch batches of it ahead.
    """
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    found = [sampler for sampler in samplers if getattr(sampler, "resizable", False)]
    if not isinstance(loader, DataLoader) or not found:
        named = ", ".join(type(sampler).__name__ for sampler in samplers if sampler is not None)
        raise MisconfigurationException(
            f"GrowingBatchSize cannot change the batches of a {type(loader).__name__}{named and f' with {named}'}: use "
            "DrawLoader(dataset, IndependentDraws(dataset, batch_size, draws_per_epoch)) of lightning_struct.data for "
            "training"
        )
    if loader.num_workers:
        raise MisconfigurationException(
            f"GrowingBatchSize needs a training loader with num_workers=0, but got {loader.num_workers}: batches fetched "
            "ahead would keep the old size"
        )
    return found[0]
