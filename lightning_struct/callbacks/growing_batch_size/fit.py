"""The parts of one fit: hooks in the Trainer, values to log, and the batch under way."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightning_struct.callbacks.growing_batch_size import growth, learning_rate
from lightning_struct.callbacks.growing_batch_size.loader_growth import LoaderGrowth
from lightning_struct.callbacks.growing_batch_size.measurement import Measurement
from lightning_struct.callbacks.growing_batch_size.memory import MemoryLimit
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.lightning_internals import logs_now, optimizer_steps
from lightning_struct.utilities.namespaces import MisconfigurationException

LOGGED = ("batch_size", "batch_size_predicted", "gradient_variance", "gradient_noise_scale", "learning_rate_scale")


class Fit:
    """The parts of a fit, made in ``Callback.setup`` and given back when it ends.

    Args:
        trainer: in ``Callback.setup``.
        size: of a step, as decided.
        before: state of the parts of a fit that this one continues, with its averages and its learning rate.
        growing: ``mode`` and ``max_device_batch_size`` of :class:`~lightning_struct.callbacks.GrowingBatchSize`.
        scale_lr: see there.
        may_stay: whether the size may stay as it is if it cannot be changed.

    Attributes:
        growth: the way to change the samples of a step.
        clock: of the schedulers.
        memory: that bounds the samples of a forward pass; None if nothing does.
        values: by names of ``LOGGED``: those that are new since loggers wrote, as logging takes longer than checking.
        rate: that follows the batch; None if it does not.
        is_described: whether the line that describes the choices has been printed.
        note: of that line, on batches that are left as they are.
        logged_size: the size after the last change that was logged; None before one.
        batch: the one under way, with its number; None between two, and in an epoch that trains nothing.
        batch_ended: whether that was counted already, for a checkpoint that a callback before this one saves.
        stepped: whether an optimizer stepped in it.

    Raises:
        MisconfigurationException: the accumulation cannot be changed.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        size: growth.StepSize,
        before: growth.State,
        growing: tuple[str, int | Literal["auto"] | None],
        scale_lr: learning_rate.LearningRateRule | None,
        may_stay: bool,
    ) -> None:
        self.trainer, self._size, self._may_stay = trainer, size, may_stay
        mode, limit = growing
        self.growth: growth.BatchGrowth
        if mode in ("accumulate", "measure"):
            self.growth = growth.AccumulationGrowth(trainer, size, is_fixed=mode == "measure")
        else:
            on_refusal = self._accumulate_instead if mode == "auto" else None
            self.growth = LoaderGrowth(trainer, size, on_refusal)
        self.memory = None if limit is None else MemoryLimit(trainer, limit)
        self.clock, self.values = learning_rate.SchedulerClock(trainer), dict[str, float]()
        self.rate = None if scale_lr is None else learning_rate.LearningRateScale(scale_lr)
        self.is_described, self.note = False, ""
        self.logged_size: float | None = None
        self._to_log: tuple[str, ...] | None = None  # names that the module does not log itself, from the first step on
        self._measurement: Measurement | None = None
        # Trainer.global_step does not count the steps of self.optimizers(use_pl_optimizer=False), which a module may
        # take under manual optimization: this hook sees them
        self._handle: RemovableHandle | None = None
        # the loaded states, until they are used: the other way of growth may continue with them
        self._loaded_growth: growth.State | None = None
        self._loaded_measurement: growth.State | None = before["measurement"]
        self._resumes = False
        self._load(before)
        self._steps_before = 0
        self.batch: tuple[Any, int] | None = None
        self.batch_ended = self.stepped = self._stepped_by_hand = False

    @property
    def measurement(self) -> Measurement:
        """The measuring of the steps, from ``Callback.on_fit_start`` on."""
        assert self._measurement is not None
        return self._measurement

    def begin(self, measurement: Measurement) -> None:
        """Begin to measure, in ``Callback.on_fit_start``."""
        self._measurement = measurement
        if not self.trainer.lightning_module.automatic_optimization:
            self._handle = register_optimizer_step_post_hook(self._note_step)
        if self._loaded_measurement is not None:
            measurement.load_state_dict(self._loaded_measurement, averages_alone=not self._resumes)
        if self.rate is not None:
            self.rate.attach(lambda: self.trainer.optimizers, self.trainer.strategy.broadcast)

    def begin_training(self) -> None:
        """Begin with the first batch, in ``Callback.on_train_start``."""
        self.growth.on_train_start()
        self._loaded_growth = None
        if not self.growth.is_fixed:
            self.clock.attach(self.growth)
        self._steps_before = optimizer_steps(self.trainer, self.trainer.lightning_module)

    def begin_batch(self, batch: Any, batch_idx: int, step: int) -> None:
        """Begin with a batch that is trained on, in the optimizer step of that number."""
        self.batch = batch, batch_idx
        self.growth.on_train_batch_start()
        if batch_idx == 0:
            self.clock.begin_epoch()
        expected_sizes = self.growth.expected_sizes()
        if self.rate is not None:
            read = sum(expected_sizes) * self.measurement.processes * self.trainer.accumulate_grad_batches
            self.rate.begin_batch(self.growth.batch_size, read or None)
        self.measurement.begin_batch(batch, expected_sizes, step)
        if self.memory is not None:
            begin_part = partial(self.measurement.begin_part, step)
            self.memory.begin_batch(expected_sizes, begin_part, self.measurement.pause)

    def end_batch(self, batch: Any, batch_idx: int) -> int:
        """Count a batch that was trained on; returns its samples, over all processes."""
        self.batch_ended, steps = True, optimizer_steps(self.trainer, self.trainer.lightning_module)
        samples = self.measurement.end_batch(batch)
        self.stepped = self._stepped_by_hand or steps != self._steps_before
        self._steps_before, self._stepped_by_hand = steps, False
        self.clock.end_batch(batch_idx, self.growth, self.stepped)
        return samples

    def log(self, names: Sequence[str]) -> None:
        """Log the values of these names that are new, after the first step and when loggers write."""
        trainer = self.trainer
        if trainer.barebones or not (self._to_log is None or logs_now(trainer)):
            return
        if self._to_log is None:
            self._to_log = tuple(name for name in names if name not in trainer.callback_metrics)
        for name in self._to_log:
            if name in self.values:
                batch_size = int(self.values["batch_size"])
                trainer.lightning_module.log(name, self.values[name], batch_size=batch_size)
        self.values = {}

    def end(self, keep_growth: bool) -> growth.State:
        """Give Trainer and loaders back as they were.

        Args:
            keep_growth: whether all processes are here, to say where their loaders are.

        Returns:
            The last state of the parts, for a checkpoint that may still be written.
        """
        state = self.state_dict(keep_growth)
        if self._measurement is not None:
            self._measurement.pause()
        if self._handle is not None:
            self._handle.remove()
        if self.rate is not None:
            self.rate.detach()
        if self.memory is not None:
            self.memory.detach()
        self.clock.detach()
        self.growth.restore()
        return state

    def state_dict(self, with_growth: bool = True) -> growth.State:
        """State of the parts; with that of the growth it is a collective call of all processes."""
        return {
            "growth": self.growth.state_dict() if with_growth else None,
            "measurement": self._loaded_measurement if self._measurement is None else self._measurement.state_dict(),
            "learning_rate": None if self.rate is None else self.rate.state_dict(),
            "schedulers": self.clock.state_dict(),
            "memory": None if self.memory is None else self.memory.samples,
        }

    def load_state_dict(self, state: growth.State) -> None:
        """Continue where the state was saved."""
        self._load(state)
        if state["schedulers"] is not None:
            self.clock.load_state_dict(state["schedulers"])
        self._loaded_measurement, self._resumes = state["measurement"], True
        if self._measurement is not None and self._loaded_measurement is not None:
            self._measurement.load_state_dict(self._loaded_measurement)
        if state["growth"] is not None:
            self.growth.load_state_dict(state["growth"])
            self._loaded_growth = state["growth"]

    def _load(self, state: growth.State) -> None:
        if self.memory is not None and self.memory.is_found and state["memory"] is not None:
            self.memory.samples = state["memory"]
        if self.rate is not None and state["learning_rate"] is not None:
            self.rate.load_state_dict(state["learning_rate"])

    def _note_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepped_by_hand = self._stepped_by_hand or optimizer in self.trainer.optimizers

    def _accumulate_instead(self, problem: str, remedy: str, can_change: bool) -> None:
        """Continue by accumulation, as the batches of a loader cannot change size, or had better not."""
        refused, stays = f"The size of batches cannot be changed in {problem}.", False
        try:
            growth.check_accumulation(self.trainer, "mode='auto'", remedy)
        except MisconfigurationException as error:
            if not self._may_stay:
                raise MisconfigurationException(f"{refused} {error}") from None
            stays, refused = True, f"{refused} {error}."
        self.growth = growth.AccumulationGrowth(self.trainer, self._size, is_fixed=stays)
        if self._loaded_growth is not None:
            self.growth.load_state_dict(self._loaded_growth)
        instead = "accumulates gradients over more of them"
        if can_change:
            self.note = f". It leaves {problem}{'' if stays else f', and {instead}'}. For larger batches, {remedy}"
        elif stays:
            rank_zero_warn(f"{refused} GrowingBatchSize leaves the batch as it is")
        else:
            rank_zero_warn(
                f"{refused} GrowingBatchSize {instead} instead; mode='accumulate' says that this is meant. For larger "
                f"batches, {remedy}"
            )
