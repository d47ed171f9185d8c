"""The measuring of the steps of a fit: by the module itself, by an estimator, or not at all."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size import estimators
from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics, NoiseScale, relative_variance
from lightning_struct.callbacks.growing_batch_size.stationarity import LossGrowth, StationarityTest
from lightning_struct.collective import world_size
from lightning_struct.functional.checks import first_line
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import data_parallel_size
from lightning_struct.utilities.lightning_internals import loss_scale

_T = TypeVar("_T")


class StepStatistics(NamedTuple):
    """Statistics of the optimizer steps in a batch.

    Attributes:
        samples: over all processes, loaders and accumulated batches together; of those that a module accumulates by
            hand, of one.
        checked: statistics of the optimizer with the largest relative variance; None if no check is due, or
            possible.
    """

    samples: int
    checked: GradientStatistics | None


class Measurement:
    """Statistics of the gradients, and their averages.

    A fault of measuring ends no training: gradients that are NaN or infinite are not measured, and nothing is measured
    after an estimator has failed, each with one warning.

    Args:
        trainer: in fit.
        module: the one that is trained. If it has a method ``gradient_statistics()``, that is asked.
        needed: whether the gradients decide anything. If not, nothing is measured.
        estimator: the one that was asked for.
        max_overhead: see :class:`~lightning_struct.callbacks.GrowingBatchSize`.
        tests_stationarity: whether to test if the noise of the steps cancels their descent.
        watches_loss: whether to look if the loss grows with the batch.

    Attributes:
        processes: number of those that read different batches.
        is_reported: whether the module reports its own statistics.
        noise: averages of the measurements, by the place of the optimizer.
        size_before_loss_grew: the size to go back to if the last look at the loss found that it has grown with the
            batch, as one that is summed over it; else None.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        *,
        needed: bool,
        estimator: estimators.NoiseEstimator,
        max_overhead: float,
        tests_stationarity: bool,
        watches_loss: bool,
    ) -> None:
        self._trainer, self._module = trainer, module
        self._asked, self._max_overhead = estimator, max_overhead
        reported = getattr(module, "gradient_statistics", None)
        self._reported: Callable[[], GradientStatistics | None] | None = reported if callable(reported) else None
        self.is_reported, self.processes = self._reported is not None, data_parallel_size(trainer)
        self.noise: dict[int, NoiseScale] = {}
        self.size_before_loss_grew: float | None = None
        self._loss_growth = LossGrowth()
        self._loss_grew_with_batch = False
        self._samples = self._batches = self._expected = 0
        self._expected_sizes: list[int] = []
        self._has_warned_of_nan = self._gave_up = self._sees_steps = False
        self._estimator: estimators.GradientEstimator | None = None
        needed = needed and not self.is_reported
        self._tests_stationarity = needed and tests_stationarity
        # a GradScaler changes the factor of the loss, and to ask for its factor is to wait for the device
        self._sees_loss = needed and watches_loss and getattr(trainer.precision_plugin, "scaler", None) is None
        self._tests: dict[Optimizer, StationarityTest] = {}
        if needed:
            try:
                self._estimator = estimators.choose_estimator(estimator, trainer, module, max_overhead)
            except estimators.Unmeasurable as problem:
                self._give_up(f"GrowingBatchSize {problem}")

    @property
    def _stationarity(self) -> list[StationarityTest]:
        """The tests of the present optimizers, which a project may replace; empty without this test."""
        if not self._tests_stationarity:
            return []
        optimizers = self._trainer.optimizers
        if list(self._tests) != optimizers:
            self._tests = {of: self._tests.get(of) or StationarityTest(self._trainer, of) for of in optimizers}
        return list(self._tests.values())

    @property
    def noise_limits(self) -> bool:
        """Whether the noise of the steps cancels their descent, for every optimizer, and larger batches help;
        true if that is not tested."""
        return not self._loss_grew_with_batch and all(test.holds for test in self._stationarity)

    @property
    def has_tested(self) -> bool:
        """Whether that was tested at least once, for every optimizer."""
        return all(test.has_judged for test in self._stationarity)

    @property
    def noise_scale(self) -> float | None:
        """tr Σ/‖G‖², in samples, the largest of the optimizers; None before the first measurement."""
        return max((noise.value for noise in self.noise.values()), default=None)

    def look_at_loss(self) -> None:
        """Look whether the loss has grown with the batch: if it has, no noise limits any more."""
        self.size_before_loss_grew = self._loss_growth.size_before_loss_grew()
        self._loss_grew_with_batch = self._loss_grew_with_batch or self.size_before_loss_grew is not None

    def restart(self) -> None:
        """Forget the tests with batches of another size."""
        for test in self._stationarity:
            test.restart()

    def resized(self, before: float, after: float) -> None:
        """Test anew, with batches of another size from now on."""
        self.restart()
        self._loss_growth.restart(before, after)

    def description(self) -> str:
        """The way of measuring, in one clause; of an estimator after the first step, when it has counted its work."""
        if self.is_reported:
            return f"goes by {type(self._module).__name__}.gradient_statistics()"
        if self._estimator is None:
            return "measures nothing, as " + ("it cannot" if self._gave_up else "nothing asks for it")
        every = self._estimator.every_n_steps
        steps = "in each step" if every == 1 else f"every {every} steps"
        bound = f", within max_overhead={self._max_overhead:g} of the time" if self._asked.every_n_steps is None else ""
        return f"measures by estimator={self._estimator.name!r} {steps}{bound}"

    def begin_batch(self, batch: Any, expected_sizes: list[int], step: int) -> None:
        self._expected_sizes = expected_sizes
        self._ask(lambda estimator: estimator.begin_batch(batch, expected_sizes, step))

    def begin_part(self, step: int, part: Any, sizes: list[int]) -> None:
        """Begin with a part of a batch: of each loader it has so many samples."""
        self._ask(lambda estimator: estimator.begin_batch(part, sizes, step))

    def before_backward(self, loss: Tensor) -> None:
        if self._sees_loss:
            self._loss_growth.update(loss)
        self._ask(lambda estimator: estimator.before_backward(loss))

    def after_backward(self) -> None:
        self._ask(lambda estimator: estimator.after_backward())

    def before_step(self, optimizer: Optimizer) -> None:
        self._sees_steps = True
        if optimizer not in self._trainer.optimizers:
            return
        self._ask(lambda estimator: estimator.before_step(optimizer))
        if self._tests_stationarity and not self._gave_up:
            try:
                self._stationarity[self._trainer.optimizers.index(optimizer)].before_step()
            except Exception as error:  # noqa: BLE001 - measuring must not end a training
                problem = error if isinstance(error, estimators.Unmeasurable) else f"fails ({first_line(error)})"
                self._give_up(f"GrowingBatchSize cannot test whether noise cancels what the steps gain: it {problem}")

    def end_batch(self, batch: Any) -> int:
        """Count the samples of a batch, over all processes; those of a module that reports them are counted by it."""
        if self._reported is not None:
            return 0
        read = estimators.samples_in(batch, self._expected_sizes)
        if not self._expected_sizes:  # the batch shows it, or may: it is none larger than those before
            read = min(read, self._expected or read)
        elif len(self._expected_sizes) == 1:
            self._expected = read
        read *= self.processes
        self._samples += read
        self._batches += 1
        return read

    def end_step(self, step: int) -> StepStatistics | None:
        """Statistics of a step, after its batch; None if its samples are not known."""
        # a module may accumulate any number of batches by hand: the decided size is that of one
        batches = 1 if self._batches < 2 or self._module.automatic_optimization else self._batches
        samples, self._samples, self._batches = self._samples // batches, 0, 0
        if self._estimator is not None or self._gave_up:
            if not (self._sees_steps or self._gave_up):
                self._give_up(
                    f"GrowingBatchSize cannot measure the steps of {type(self._module).__name__}: step what "
                    "self.optimizers() returns (not use_pl_optimizer=False), or in optimizer_step what it gets"
                )
            measured = self._ask(lambda estimator: estimator.statistics(samples))
            return StepStatistics(samples, self._largest(measured) if measured else None)
        due = step % (self._asked.every_n_steps or 1) == 0
        if self._reported is None:
            return StepStatistics(samples, GradientStatistics(samples, None, 0.0, None) if due else None)
        reported = self._reported()
        if reported is None:
            return None
        if due and not math.isfinite((reported.variance or 0.0) + reported.gradient_squared_norm):
            self._warn_of_nan()
            due = False
        return StepStatistics(reported.batch_size, self._largest({0: reported}) if due else None)

    def pause(self) -> None:
        """Remove all hooks."""
        if self._estimator is not None:
            self._estimator.pause()

    def state_dict(self) -> dict[str, Any]:
        estimator = self._estimator
        return {
            "estimator": None if estimator is None else estimator.name,
            "asked": self._asked.kind,
            "state": None if estimator is None else estimator.state_dict(),
            "gave_up": self._gave_up,
            "sees_steps": self._sees_steps,
            "expected": self._expected,
            "noise": {number: dict(vars(noise)) for number, noise in self.noise.items()},
            "stationarity": [test.state_dict() for test in self._stationarity] if self._tests_stationarity else None,
            "loss_growth": self._loss_growth.state_dict() if self._sees_loss else None,
            "loss_grew_with_batch": self._loss_grew_with_batch,
        }

    def load_state_dict(self, state: dict[str, Any], averages_alone: bool = False) -> None:
        """Continue where the state was saved, or, in another fit, with its averages and its knowledge of the loss."""
        self._loss_grew_with_batch = state["loss_grew_with_batch"]
        self.noise = {number: NoiseScale(**of_optimizer) for number, of_optimizer in state["noise"].items()}
        if averages_alone:
            return
        for test, of_test in zip(self._stationarity, state["stationarity"] or (), strict=False):
            test.load_state_dict(of_test)
        if state["loss_growth"] is not None:
            self._loss_growth.load_state_dict(state["loss_growth"])
        self._sees_steps, self._expected = state["sees_steps"], state["expected"]
        if self._estimator is None:
            return
        if state["gave_up"] and self._asked.kind == state["asked"]:
            self._estimator, self._gave_up = None, True
        elif self._estimator.name == state["estimator"]:
            self._estimator.load_state_dict(state["state"])

    def _ask(self, ask: Callable[[estimators.GradientEstimator], _T]) -> _T | None:
        """Call the estimator, if there is one. If it cannot measure, nothing is measured from then on."""
        estimator = self._estimator
        if estimator is None:
            return None
        try:
            return ask(estimator)
        except estimators.GradientNotFinite:
            if loss_scale(self._trainer) is None:  # a GradScaler skips such steps
                self._warn_of_nan()
        except Exception as error:  # noqa: BLE001 - measuring must not end a training
            if isinstance(error, estimators.Unmeasurable) or world_size() == 1:
                problem = error if isinstance(error, estimators.Unmeasurable) else f"fails ({first_line(error)})"
                self._give_up(f"GrowingBatchSize(estimator={estimator.name!r}) {problem}")
            else:  # the other processes learn of it when they measure together
                estimator.faults.defer(error)
        return None

    def _warn_of_nan(self) -> None:
        if not self._has_warned_of_nan:
            self._has_warned_of_nan = True
            rank_zero_warn(
                f"The gradient of batch {self._trainer.fit_loop.batch_idx} in epoch {self._trainer.current_epoch} is "
                "NaN or infinite, and is not measured. Trainer(detect_anomaly=True) shows where it comes from"
            )

    def _give_up(self, problem: str) -> None:
        """Measure nothing any more, and warn: the problem is a sentence without its full stop."""
        rank_zero_warn(
            f"{problem}. Nothing is measured any more. Declare layers by register_layer, let several backward passes "
            f"make a step (Trainer(accumulate_grad_batches=2)), give {type(self._module).__name__} a method "
            "gradient_statistics(), or set the sizes by schedule=..."
        )
        self.pause()
        self._estimator, self._gave_up, self._tests = None, True, {}

    def _largest(self, measured: dict[int, GradientStatistics]) -> GradientStatistics | None:
        for number, statistics in measured.items():
            if statistics.variance is not None:
                self.noise.setdefault(number, NoiseScale()).update(statistics)
        for gone in [number for number in self.noise if number >= max(len(self._trainer.optimizers), 1)]:
            del self.noise[gone]
        return max(measured.values(), key=relative_variance, default=None)
