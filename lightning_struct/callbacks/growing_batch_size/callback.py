"""The callback: a batch that grows by the noise of the gradient, by validation, or by a schedule."""

import math
from numbers import Real
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size import rules
from lightning_struct.callbacks.growing_batch_size.estimators import NoiseEstimator
from lightning_struct.callbacks.growing_batch_size.fit import LOGGED, Fit
from lightning_struct.callbacks.growing_batch_size.growth import StepSize
from lightning_struct.callbacks.growing_batch_size.measurement import Measurement
from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics
from lightning_struct.callbacks.growing_batch_size.stationarity import window_length
from lightning_struct.callbacks.runs import Run
from lightning_struct.callbacks.validation import DueValidation, MonitoredValue
from lightning_struct.collective import broadcast_numbers, world_size
from lightning_struct.functional.checks import is_extended, is_real
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import check, check_positive
from lightning_struct.utilities.distributed import compare_batches
from lightning_struct.utilities.lightning_internals import skips_backward, trained_on
from lightning_struct.utilities.namespaces import Callback, MisconfigurationException

MOST_RECORDS = 4096
PARTS = ("growth", "measurement", "learning_rate", "schedulers", "memory")  # parts of a fit that checkpoints hold
# Attributes in checkpoints, without their _
COUNTED = ("first_size", "samples", "steps", "resized_at", "looks_at")

# Growth is not logged if the smaller of both sizes is more than this share of the larger.
SIMILAR = 0.9


class GrowingBatchSize(Callback):
    """Enlarges the batch during training when gradient noise cancels what the steps gain.

    ``Trainer(callbacks=[GrowingBatchSize()])`` is enough in any project: automatic and manual optimization, any
    optimizer, one device or several, loaders with and without workers, map-style and iterable data sets, several
    loaders, custom batch samplers. The size changes within the running epoch, and every sample of the epoch is still
    seen once.

    **The rule.** By default the batch grows, at most to twice its size, when two conditions hold: a test finds that
    gradient noise cancels what the steps gain, and the gradient noise scale is larger than the batch. It stays as it is
    for about the first 300 steps, and as long as the steps make progress. With ``scale_lr`` the batch grows towards the
    noise scale without that test. When the loss has grown with the batch, because it is a sum over the samples or
    compares them with each other, the batch returns to its last size for good, with a warning. With ``theta`` it
    follows the norm test alone. If the module computes the statistics itself, as one trained by ``SHFOptimization``
    does, the rule is that of Emirahmetoglu & Stewart (section 4.3, Algorithms 1 and 2). For another rule, override
    :meth:`decide`.

    **The measurement.** An estimator measures the noise from the gradients of single samples, by hooks on the layers;
    or from those of the backward passes of a step, if it has several. Which one, and how often, depends on the project
    and never on a clock; one line after the first step reports it. If layers can measure less than half of the
    gradient, or an estimator fails, nothing is measured any more, and one warning gives the reason and the remedy.
    A gradient that is NaN or infinite is not measured; one warning names the first such batch, and the gradient is left
    alone. With ``theta=inf`` or a ``schedule`` nothing is measured. A module with a method ``gradient_statistics()``
    supplies the measurement itself. With several optimizers, the largest prediction counts.

    **Sizes** are those of an optimizer step: over all processes, loaders and accumulated batches together. Batches that
    a module accumulates by hand count one by one. The first process decides for all.

    **Memory.** The test keeps a copy of the trainable weights, in memory and in checkpoints.

    **Logged**, unless the module logs them itself, after the first step and every ``Trainer(log_every_n_steps=...)``
    steps: ``batch_size``, ``batch_size_predicted``, ``gradient_variance`` = tr Σ as last measured,
    ``gradient_noise_scale`` = tr Σ/‖G‖² from averages, and with ``scale_lr`` ``learning_rate_scale``.

    **Schedulers** with ``interval="step"`` still end with the training. If epochs or time end it, they are stepped as
    often as after the same samples in batches of the first size, so that a schedule of length
    ``estimated_stepping_batches`` remains right (automatic optimization only). If ``max_steps`` may end it too, the
    limit that is closer decides; if only ``max_steps`` can, they are left alone.

    **Limits.** It resizes torch's ``DataLoader`` if that puts single samples into batches. With other loaders it
    accumulates gradients over batches, or refuses them by name if that is impossible, too. With workers, a change takes
    effect ``num_workers * prefetch_factor`` batches later. With ``drop_last=True`` on an iterable data set, samples
    that do not fill the last batch are left out. Before training, ``estimated_stepping_batches`` counts batches of the
    first size; during training, it counts those of the epoch under way. The rest of a resumed epoch comes in the
    original order; later epochs are shuffled as Lightning shuffles them after any resume. Another fit of the same
    module by the same Trainer continues with the present size; with another Trainer or module, as for the next fold of
    a cross-validation, the callback starts anew.

    Args:
        max_batch_size: n_max, the most that memory allows; None: the size of the data set. A checkpoint with a larger
            batch goes on with this size.
        theta: θ > 0 of the norm test: the relative error that the mean gradient may have. 1 is the gradient noise
            scale. None: 0.5, the paper's value, if the module has its own statistics; else 1, and the batch grows only
            when noise cancels what the steps gain, or with ``scale_lr``. Infinite: no norm test.
        schedule: sizes set by hand, without measuring: ``SAMPLES:SIZE`` entries such as ``"0:32 50K:128 1.5M:512"``,
            with K, M, B and T for 10³, 10⁶, 10⁹ and 10¹². Each holds from the first step that begins after so many
            samples; until the first one, the loaders keep their own size. Sizes may fall. ``"auto"``: by the schedule
            of the learning rate. Each time that it has halved the rate, the batch doubles, and by ``scale_lr``
            (``"sqrt"`` if that is left out) the rate falls by √2 only; see :meth:`LearningRateScale.size_by_rate`.
        scale_lr: how the learning rate follows the batch size n from the first one, n₀, within the steps of all
            optimizers; outside of them the configured rate is seen. ``"sqrt"``: by √(n/n₀), for Adam and its variants.
            ``"linear"``: by n/n₀, up to the noise scale if that is measured, for SGD. β₂ of Adam becomes β₂^(n/n₀), so
            that its half-life is the same number of samples.
        max_device_batch_size: most samples of one forward pass on one device (automatic optimization only). Larger
            batches are trained on in parts, whose gradients are accumulated. ``"auto"``: as many as memory allows; a
            batch for which it does not suffice is trained on once more in halves (one process).
        estimator: how gradients are measured: ``"layers"`` by hooks on the layers, ``"parts"`` by differences between
            the backward passes of a step; ``"auto"`` chooses. A :class:`NoiseEstimator` also says how often, and with
            how many random projections.
        max_overhead: share of the training time that measuring may take, in (0, 1]. The work in every step, about a
            tenth of a millisecond, is not included.
        validation: a :class:`ValidationRule`, by which the batch also grows while validation stalls. None: that of the
            paper, ``ValidationRule()``, which does nothing unless the module's own statistics have a validation value.
        mode: ``"batch"`` enlarges the batches of the loaders; ``"accumulate"`` leaves them alone and accumulates
            gradients over more of them, to save memory (automatic optimization only; any loader). ``"auto"``: larger
            batches; but accumulation if a loader cannot be resized, with a warning, or if it has batches of one sample
            or its own batch sampler. ``"measure"``: the size stays as it is, and the noise scale is reported.

    Attributes:
        logged: names of the values that are logged; all, unless you set fewer, or ``()``.
        predictions: n̂ of the last checks.
        validation_values: f_val of the last checks.
        records: a dict for each check: ``samples`` seen in training, ``batch_size`` of the step,
            ``batch_size_predicted``, ``variance_ratio`` = tr Σ/(n‖ḡ‖²), and ``validation_value``. The norm test bounds
            (N - n)/(N - 1) times that ratio by θ² if the module has its own statistics. Elsewhere the noise is removed
            from ‖ḡ‖², and the bound is θ²/(1 + θ²) for large N. When there are too many checks, every other one of the
            older ones is dropped.

    Raises:
        MisconfigurationException: an argument is out of range or contradicts another; at the start of fit, a loader
            whose batches cannot change size, with ``mode="batch"`` or if they cannot be accumulated either; a given
            estimator that cannot measure this run (``"layers"`` with sharded weights, ``"parts"`` with one backward
            pass per step); batches that are already larger than ``max_batch_size``; with ``scale_lr`` an optimizer
            without a learning rate; a checkpoint from the middle of an epoch with other processes or loaders, or of
            version 0.2.0; a monitor that is not logged, or not finite at first.

    Example:
        >>> from lightning import Trainer
        >>> callback = GrowingBatchSize(max_batch_size=4096)
        >>> trainer = Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        *,
        theta: float | None = None,
        schedule: str | None = None,
        scale_lr: Literal["sqrt", "linear"] | None = None,
        max_device_batch_size: int | Literal["auto"] | None = None,
        estimator: Literal["auto", "layers", "parts"] | NoiseEstimator = "auto",
        max_overhead: float = 0.03,
        validation: rules.ValidationRule | None = None,
        mode: Literal["auto", "batch", "accumulate", "measure"] = "auto",
    ) -> None:
        check_positive(max_batch_size=max_batch_size)
        if max_device_batch_size != "auto":
            check_positive(max_device_batch_size=max_device_batch_size)
        check("theta", theta, theta is None or (is_extended(theta) and theta > 0), "a number > 0, or None")
        check("scale_lr", scale_lr, scale_lr in (None, "sqrt", "linear"), "'sqrt', 'linear', or None")
        share = is_real(max_overhead) and 0 < max_overhead <= 1
        check("max_overhead", max_overhead, share, "a share of the time, in (0, 1]")
        is_rule = validation is None or isinstance(validation, rules.ValidationRule)
        check("validation", validation, is_rule, "a ValidationRule, or None")
        modes = ("auto", "batch", "accumulate", "measure")
        check("mode", mode, mode in modes, f"one of {', '.join(map(repr, modes))}")
        self.max_batch_size, self.theta, self.schedule = max_batch_size, theta, schedule
        self.scale_lr: Literal["sqrt", "linear"] | None = scale_lr or ("sqrt" if schedule == "auto" else None)
        self.max_device_batch_size, self.max_overhead, self.mode = max_device_batch_size, max_overhead, mode
        self.estimator = estimator if isinstance(estimator, NoiseEstimator) else NoiseEstimator(estimator)
        self.validation = validation or rules.ValidationRule()
        self._schedule = None if schedule in (None, "auto") else rules.SampleSchedule.parse(schedule, max_batch_size)
        chosen: dict[str, tuple[Any, ...]] = {"theta": (theta, None, math.inf), "validation": (validation, None)}
        chosen |= {"estimator": (estimator, "auto"), "mode": (mode, "auto", "batch", "accumulate")}
        for name, (value, *unmeasured) in chosen.items():
            if schedule is not None and value not in unmeasured:
                raise MisconfigurationException(
                    f"schedule={schedule!r} sets the sizes, and nothing is measured, but {name}={value!r} asks for "
                    "measurements: leave one of them out"
                )
        self.logged: tuple[str, ...] = LOGGED
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing seen."""
        self.predictions: list[int] = []
        self.validation_values: list[float] = []
        self.records: list[dict[str, float]] = []
        self._run, self._validation = Run(), DueValidation()
        self._monitored = MonitoredValue(self.validation.monitor or "", "ValidationRule(monitor=...)")
        self._samples = self._steps = 0
        self._size = StepSize()
        self._first_size: float | None = None  # of the first step
        self._resized_at = 0  # in steps
        self._looks_at = 0.0  # the step after which the schedule is next looked at
        self._fit: Fit | None = None  # the present one
        self._parts: dict[str, Any] = dict.fromkeys(PARTS)  # state of those of the last one, or of a checkpoint

    def decide(self, batch_size: float) -> float:
        """Size of the next batch, from the predictions and validation values so far, or by the schedule.

        Its fraction is kept; the loaders get the nearest whole number (halves up) of samples, or of accumulated
        batches.
        """
        if self._schedule is not None:
            return self._schedule.batch_size(self._samples) or batch_size
        predictions, limit, measurement = self.predictions, self._limit, self._present_fit.measurement
        if measurement.size_before_loss_grew is not None:
            return measurement.size_before_loss_grew
        if not measurement.is_reported:
            # the noise of a batch of twice the size must be measured before the next decision
            limit = min(limit, 2 * batch_size)
            if not self._may_grow:
                predictions = [min(size, math.floor(batch_size)) for size in predictions]
        values, rule = self.validation_values, self.validation
        return rules.next_batch_size(batch_size, predictions, values, max_batch_size=limit, validation=rule)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        compare_batches(trainer)
        if self._run.begins_anew(trainer, pl_module):
            self._begin()
        self._look_at_schedule()
        growing = self.mode, self.max_device_batch_size
        self._fit = Fit(trainer, self._size, self._parts, growing, self.scale_lr, self.schedule is None)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        measurement = Measurement(
            trainer,
            pl_module,
            needed=self._tests_norm,
            estimator=self.estimator,
            max_overhead=self.max_overhead,
            tests_stationarity=self._waits_for_noise,
            watches_loss=self.theta is None,
        )
        self._present_fit.begin(measurement)
        if self._steps and self._resized_at == self._steps:
            measurement.restart()  # the limit may have bounded the size

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fit = self._present_fit
        fit.begin_training()
        if self.max_batch_size is not None and fit.growth.batch_size > self.max_batch_size:
            raise MisconfigurationException(
                f"Batches of {fit.growth.batch_size:g} are larger than "
                f"GrowingBatchSize(max_batch_size={self.max_batch_size}): start with smaller ones, or raise the limit"
            )
        if self.schedule == "auto":
            self._follow_rate()
            if not trainer.lr_scheduler_configs:
                rank_zero_warn(
                    "GrowingBatchSize(schedule='auto') follows the schedule of the learning rate, but "
                    "configure_optimizers returns no lr_scheduler: the batch grows only if the module lowers the rate"
                )
        if self._limit == math.inf and self.schedule is None:
            rank_zero_warn(
                "GrowingBatchSize(max_batch_size=None) lets the batch grow to the size of the data set, and this one "
                "has no length: set max_batch_size to the most that memory allows"
            )
        self._run.on_train_start(pl_module)
        if self.validation.monitor is not None:
            if not trainer.enable_validation:
                raise MisconfigurationException(
                    f"GrowingBatchSize(validation={self.validation}) goes by a validation, and there is none: give a "
                    "validation loader and a validation_step, or leave validation out"
                )
            self._validation.on_train_start(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.schedule == "auto":
            self._follow_rate()
        self._present_fit.growth.on_train_epoch_start()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not skips_backward(trainer):
            self._present_fit.begin_batch(batch, batch_idx, step=self._steps + 1)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._fit is not None:  # without a fit, a loop of Lightning is run by hand
            self._fit.measurement.before_backward(loss)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._fit is not None:
            self._fit.measurement.after_backward()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._fit is not None and self._fit.batch is not None:
            self._fit.measurement.before_step(optimizer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        fit = self._present_fit
        if fit.batch is None:
            return
        if not fit.batch_ended:
            self._end_batch(trainer, batch, batch_idx)
        fit.batch, fit.batch_ended = None, False
        if fit.stepped:
            if not fit.is_described:
                fit.is_described = True
                rank_zero_info(self._description())
            fit.log(self.logged)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.validation.monitor is None or not self._validation.on_validation_end(trainer):
            return
        value = self._monitored.logged(trainer, required=not self.validation_values)
        if value is None:  # only some validations log it
            return
        if math.isfinite(value):
            self.validation_values = [*self.validation_values, value][-self.validation.window - 1 :]
        else:
            rank_zero_warn(f"{self._monitored.not_finite(trainer, value)}. This validation is left out")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._present_fit.growth.on_train_epoch_end()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._first_size is not None:
            rank_zero_info(self._summary())

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # the other processes may not be here: then there is no state of all of them for a checkpoint that comes now
        self._end_fit(keep_growth=trainer.world_size == 1)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._end_fit(keep_growth=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fit": None}  # its hooks are in the Trainer of this process

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; a collective call of all processes, as ``Trainer.save_checkpoint`` is.

        Each of them tells where it is in the epoch. If a callback before this one saves a checkpoint at the end of a
        batch, for Lightning that batch is done: so it is counted here, and the next size decided, which a resumed run
        could not do without its gradients.
        """
        fit = self._fit
        if fit is not None and fit.batch is not None and not fit.batch_ended and trained_on(fit.trainer):
            self._end_batch(fit.trainer, *fit.batch)
        return {
            "batch_size": self._size.decided,
            **{name: getattr(self, f"_{name}") for name in COUNTED},
            "predictions": list(self.predictions),
            "validation_values": list(self.validation_values),
            "schedule": self.schedule,
            "records": [dict(record) for record in self.records],
            "validation": self._validation.state_dict(),
            **(self._parts if fit is None else fit.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not {"schedule", "batch_size", *COUNTED, *PARTS} <= state_dict.keys():
            raise MisconfigurationException(
                "The checkpoint's state of GrowingBatchSize is that of lightning_struct 0.2.0 or older, or of a "
                "version under development, and this version does not read it: finish the run with "
                "the version that began it, or delete checkpoint['callbacks']['GrowingBatchSize'] to resume "
                "with the DataLoader's own batch size"
            )
        for name in COUNTED:
            setattr(self, f"_{name}", state_dict[name])
        of_growth = state_dict["growth"] or {"decided": state_dict["batch_size"]}
        self._size.decided = of_growth["decided"]
        self.predictions = list(state_dict["predictions"])
        self.validation_values = list(state_dict["validation_values"])
        self.records = [dict(record) for record in state_dict["records"]]
        if self.schedule is None or self.schedule != state_dict["schedule"]:
            self._looks_at = 0.0
            self._look_at_schedule()
        self._validation.load_state_dict(state_dict["validation"])
        self._parts = {name: state_dict[name] for name in PARTS}
        decided, most = self._size.decided, self.max_batch_size
        if most is not None and decided is not None and decided > most:  # it may be a lower one now
            rank_zero_info(f"The checkpoint's batch of {decided:g} becomes one of max_batch_size={most}")
            self._size.decided, self._resized_at = float(most), self._steps
        if self._fit is not None:
            self._fit.load_state_dict(self._parts)

    @property
    def _present_fit(self) -> Fit:
        assert self._fit is not None
        return self._fit

    @property
    def _limit(self) -> float:
        bounds = self.max_batch_size, self._present_fit.growth.dataset_size()
        return min((bound for bound in bounds if bound is not None), default=math.inf)

    @property
    def _waits_for_noise(self) -> bool:
        """Whether the callback decides when to grow. With ``scale_lr`` it does not wait."""
        return self.theta is None and self.scale_lr is None

    @property
    def _may_grow(self) -> bool:
        """Whether a prediction may enlarge the batch now: without ``theta`` only after a window of steps."""
        waited = self._steps >= self._resized_at + window_length(self._resized_at)
        return self.theta is not None or (waited and self._present_fit.measurement.noise_limits)

    @property
    def _tests_norm(self) -> bool:
        return self.theta != math.inf and self.schedule is None

    @property
    def _present_theta(self) -> float:
        """θ given by the user, or the default for the kind of training."""
        if self.theta is not None:
            return self.theta
        return 0.5 if self._present_fit.measurement.is_reported else 1.0

    @property
    def _has_own_rule(self) -> bool:
        """Whether a subclass decides by a rule of its own."""
        return type(self).decide is not GrowingBatchSize.decide

    def _end_batch(self, trainer: L.Trainer, batch: Any, batch_idx: int) -> None:
        """Take note of a batch that was trained on, and decide on the size of the next ones."""
        if self.validation.monitor is not None:
            self._validation.on_train_batch_end(trainer)
        fit = self._present_fit
        self._samples += fit.end_batch(batch, batch_idx)
        if fit.stepped:
            self._after_step(trainer)
        fit.growth.on_train_batch_end()

    def _after_step(self, trainer: L.Trainer) -> None:
        self._steps += 1
        fit = self._present_fit
        growth, measurement = fit.growth, fit.measurement
        if self._first_size is None:
            self._first_size = growth.batch_size
        step = measurement.end_step(self._steps)
        if step is None:
            return
        if measurement.is_reported:
            self._samples += step.samples
        fit.values["batch_size"] = float(step.samples)
        growth.on_step(step.samples)
        if fit.rate is not None:
            fit.values["learning_rate_scale"] = fit.rate.factor
            noise = [noise.value for noise in measurement.noise.values()] if step.checked else []
            fit.rate.end_step(growth.batch_size, min(noise, default=None))
        if self.schedule is not None:
            self._record(batch_size=step.samples)
            if self.schedule == "auto":
                self._follow_rate()
            elif self._steps >= self._looks_at:
                self._set_batch_size(trainer, step.samples)
            return
        if step.checked is None:
            return
        if step.checked.variance is None and step.checked.batch_size < 2 and self._tests_norm:
            # otherwise the batch is the rest of an epoch
            if growth.batch_size < 1.5 and self._limit > 1 and self._may_grow and not growth.is_fixed:
                self._resize(2.0, "a batch of one has no variance to measure")
            return
        self._check(step.checked, type(trainer.lightning_module).__name__)
        measurement.look_at_loss()
        # whether the size may change is the same in all processes; the first one decides
        rule = self.validation
        stalls = len(self.validation_values) > rule.window
        if stalls or self._tests_norm or self._has_own_rule:
            self._set_batch_size(trainer, step.samples)
        if rule.monitor is not None:
            # the value has been looked at: too few are left for another decision before the next validation
            self.validation_values = self.validation_values[-rule.window :]

    def _set_batch_size(self, trainer: L.Trainer, samples: int) -> None:
        """Decide on the size after a step on so many samples."""
        fit = self._present_fit
        if fit.growth.is_fixed:
            return
        present = fit.growth.batch_size
        decided = self.decide(present)
        if not isinstance(decided, Real | Tensor) or not 1 <= decided < math.inf:
            raise MisconfigurationException(
                f"{type(self).__name__}.decide() returned {decided} as the next batch size: it must be a number >= 1"
            )
        size, wait = min(float(decided), self.max_batch_size or math.inf), 0.0
        if self._schedule is not None and world_size() > 1 and not self._has_own_rule:
            wait = self._schedule.wait(self._samples, max(samples, size))
        size, wait = broadcast_numbers((size, wait), trainer.strategy.root_device)
        self._looks_at = self._steps + wait
        if size == present:
            return
        if decided == fit.measurement.size_before_loss_grew:
            self._resize(size, None)
            rank_zero_warn(
                "The loss has grown with the batch, as a sum over the samples does, and a contrastive loss, which "
                f"compares each with all others. GrowingBatchSize puts the batch back from {present:g} to "
                f"{decided:g} samples, for the rest of the training: SGD would take longer steps, not less noisy "
                "ones. Average a sum over the samples, and multiply the learning rate of SGD by the size of the "
                "batch; or set the sizes by schedule=..."
            )
        else:
            stalls = bool(self.validation_values) and size > max(self.predictions, default=0)
            self._resize(size, "the validation value stalls" if stalls else self._noise)

    def _follow_rate(self) -> None:
        """Take the size that the learning rate has now, which is the same in all processes."""
        fit = self._present_fit
        by_rate = None if fit.rate is None or fit.growth.is_fixed else fit.rate.size_by_rate()
        if by_rate is not None:
            size = min(by_rate, max(self._limit, fit.growth.batch_size))
            if size != fit.growth.batch_size:
                self._resize(size, self._noise)

    def _resize(self, size: float, reason: str | None) -> None:
        """Change the size of the next steps, and log it unless the last change that was logged is a similar size."""
        fit = self._present_fit
        present = fit.growth.batch_size
        self._resized_at = self._steps
        fit.growth.set_batch_size(size)
        fit.measurement.resized(present, size)
        if reason is not None and not SIMILAR < size / (fit.logged_size or present) < 1 / SIMILAR:
            before, fit.logged_size = self._in_epoch(fit.logged_size or present), size
            after = self._in_epoch(size)
            rank_zero_info(f"GrowingBatchSize: batch {before:.0f} -> {after:.0f} at step {self._steps}: {reason}")

    def _in_epoch(self, size: float) -> float:
        """Samples of the largest step of this size: the end of an epoch cuts larger ones."""
        return min(size, self._present_fit.growth.dataset_size() or size)

    @property
    def _noise(self) -> str:
        """The reason for a size, in words."""
        if self.schedule is not None:
            return f"schedule={self.schedule!r}"
        scale = self._present_fit.measurement.noise_scale
        asked = "" if self._present_theta in (1, math.inf) else f", theta={self._present_theta:g}"
        return f"noise scale {scale:.3g}{asked}" if scale is not None else "no noise scale was measured"

    def _look_at_schedule(self) -> None:
        """Take the size that the schedule of samples has after the samples so far, if it has one."""
        if self._schedule is not None:
            self._size.decided = self._schedule.batch_size(self._samples) or self._size.decided

    def _check(self, statistics: GradientStatistics, module_name: str) -> None:
        """Predict the batch size from the statistics of a step and the averages so far, and record both."""
        size, variance = statistics.batch_size, statistics.variance
        fit, theta = self._present_fit, (self._present_theta if self._tests_norm else math.inf)
        if variance is None and theta < math.inf:
            problem = (
                f"{module_name} reports no gradient variance for a batch of {size}: there is none where batch "
                "normalisation couples the samples. Take another normalisation; or set the sizes by schedule=..., "
                "or by validation with theta=inf, neither of which needs one"
            )
            if not self.records:
                raise MisconfigurationException(problem)
            rank_zero_warn(f"{problem}. The size is decided by the steps before")
            return
        needs_value = self.validation.growth != rules.ValidationRule.growth
        has_value = self.validation.monitor is not None or statistics.validation_value is not None
        if not self.records and needs_value and not has_value:
            rank_zero_warn(
                f"ValidationRule(growth={self.validation.growth:g}) is the factor by which the batch grows while a "
                "validation value stalls, and there is none: name a logged metric by monitor=..."
            )
        predicted, noises = 1, fit.measurement.noise.values()
        if variance is not None:
            taken = [statistics] if fit.measurement.is_reported else [noise.statistics(size) for noise in noises]
            dataset_size = fit.growth.dataset_size()
            predicted = max(rules.predicted_batch_size(of, dataset_size, theta, self.max_batch_size) for of in taken)
            fit.values["gradient_variance"] = variance
        fit.values["batch_size_predicted"] = float(predicted)
        if (noise_scale := fit.measurement.noise_scale) is not None and noise_scale < math.inf:
            fit.values["gradient_noise_scale"] = noise_scale
        most = self.validation.window + 1
        self.predictions = [*self.predictions, predicted][-most:]
        if self.validation.monitor is None and statistics.validation_value is not None:
            self.validation_values = [*self.validation_values, statistics.validation_value][-most:]
        record: dict[str, float] = {"batch_size": size, "batch_size_predicted": predicted}
        if variance is not None and statistics.gradient_squared_norm > 0:
            record["variance_ratio"] = variance / (size * statistics.gradient_squared_norm)
        if self.validation_values:
            record["validation_value"] = self.validation_values[-1]
        self._record(**record)

    def _record(self, **record: float) -> None:
        """Append a record; of too many, drop every other one of the older half."""
        self.records.append({"samples": self._samples, **record})
        if len(self.records) > MOST_RECORDS:
            del self.records[: MOST_RECORDS // 2 : 2]

    def _description(self) -> str:
        """The choices in one line, after the first step, in which estimators count their work."""
        fit = self._present_fit
        measures = fit.measurement.description()
        if self.schedule is not None:
            return f"GrowingBatchSize goes by schedule={self.schedule!r}{fit.note}"
        rule = f", theta={self._present_theta:g}" if self._tests_norm else ""
        if fit.growth.is_fixed:
            rule += ", and leaves the batch as it is"
        elif rule and self.theta is None and not fit.measurement.is_reported:
            earliest = self._resized_at + window_length(self._resized_at)
            when = " when gradient noise cancels what the steps gain," if self._waits_for_noise else ""
            rule += f", and grows{when} after {earliest} steps at the earliest"
        if self.validation.monitor is not None:
            rule += f"; it grows by growth={self.validation.growth:g} where {self.validation.monitor!r} stalls"
        return f"GrowingBatchSize {measures}{rule}{fit.note}"

    def _summary(self) -> str:
        """Summary of the growth in one line, at the end of the training."""
        fit, first = self._present_fit, self._first_size
        size, scale = self._in_epoch(fit.growth.batch_size), fit.measurement.noise_scale
        text = f"batch {first:.0f} all along" if first == size else f"batch {first:.0f} -> {size:.0f}"
        if self.schedule is not None:
            return f"GrowingBatchSize: {text}, by schedule={self.schedule!r}"
        text = f"GrowingBatchSize: {text}; {self._noise}"
        if scale is not None and scale <= size:
            return f"{text}: {'' if first == size else 'still '}larger batches would not have helped"
        if not self._tests_norm or fit.measurement.noise_limits:
            return text
        if not fit.measurement.has_tested:
            return f"{text}. The run was too short to test whether noise cancels what the steps gain"
        return f"{text}. The steps made progress nevertheless: larger batches would have cost samples"

    def _end_fit(self, keep_growth: bool) -> None:
        """Give Trainer and loaders back as they were; a checkpoint may still be written."""
        if self._fit is not None:
            fit, self._fit = self._fit, None
            self._parts = fit.end(keep_growth)
