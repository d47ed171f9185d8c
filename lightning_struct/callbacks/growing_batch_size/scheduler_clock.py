"""Schedulers that are stepped with the optimizer, on the time of batches of the first size."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_struct.callbacks.growing_batch_size.growth import BatchGrowth, State, is_scheduled
from lightning_struct.utilities import namespaces as L

TOLERANCE = 1e-9  # of sums of fractions of a batch


def scheduler_steps(batches: float, of: float, accumulated: int, frequency: int) -> int:
    """Steps that Lightning makes of a scheduler with ``interval="step"`` in the first batches of a training.

    Args:
        batches: how many are done; of a fraction the whole ones count.
        of: batches of each epoch.
        accumulated: batches of an optimizer step.
        frequency: of the scheduler, in batches of an epoch.

    Example:
        >>> [scheduler_steps(batches, of=5, accumulated=2, frequency=1) for batches in range(8)]
        [0, 0, 1, 1, 2, 3, 3, 4]
    """
    epochs, rest = divmod(batches + TOLERANCE, of)
    together = math.lcm(accumulated, frequency)
    steps = math.floor(rest) // together
    if epochs:
        remainder_is_stepped = of % accumulated and of % frequency == 0
        steps += int(epochs) * (int(of) // together + bool(remainder_is_stepped))
    return steps


class SchedulerClock:
    """Steps the schedulers with ``interval="step"`` as often as it would be done with batches of the first size.

    As batches grow there are fewer optimizer steps, but a schedule goes on meaning what the user wrote: it reaches each
    of its points after the same samples, and its end with that of the training. A batch counts by its size, fractions
    included, and the last one of an epoch for what is left of the steps that an epoch has with batches of the first
    size. Where an epoch is a number of batches, by ``limit_train_batches``, those that are left share what is left of
    the steps.

    Where ``max_steps`` alone can end the training, the number of steps is what the user wrote: then Lightning steps the
    schedulers as ever. So it does those that are reduced on a plateau, and a module its own in manual optimization.
    Where ``max_epochs`` and ``max_steps`` are both given, nobody can tell beforehand which of them ends the training:
    the schedulers go by the one that is nearer to its end. With ``max_steps`` and a ``GradientAccumulationScheduler``,
    by which steps are not the same share of the training in each epoch, Lightning steps them as ever.

    Args:
        trainer: in ``Callback.setup``.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer, self._accumulated = trainer, trainer.accumulate_grad_batches
        self._taken: dict[int, tuple[Any, int]] = {}  # configurations of schedulers by their ids, and their frequencies
        self._batches = self._batches_stepped = 0.0

    def attach(self, growth: BatchGrowth) -> None:
        """Take over the stepping from Lightning, at the start of training."""
        trainer, module = self._trainer, self._trainer.lightning_module
        if trainer.max_steps != -1 and (is_scheduled(trainer) or not self._has_both_limits(growth.first_length)):
            return
        configs = self._of_steps()
        if configs and not module.automatic_optimization:
            names = " and ".join(dict.fromkeys(type(config.scheduler).__name__ for config in configs))
            rank_zero_warn(
                f"{type(module).__name__} optimizes by hand and steps {names} itself, with interval='step': as "
                "GrowingBatchSize makes batches larger there are fewer optimizer steps, and a length taken from "
                "trainer.estimated_stepping_batches, which is that of the first batch size, may not be reached. Step "
                "it once an epoch, or set its length together with Trainer(max_steps=...)"
            )
            return
        if configs and trainer.fit_loop.restarting and not self._batches:  # by the checkpoint of a run without a clock
            self._batches = self._batches_stepped = float(trainer.fit_loop.batch_idx + 1)
        self._take_over(configs)

    def begin_epoch(self) -> None:
        """Take over those, too, that have been made since, as with other optimizers for a compressed module."""
        if self._taken:
            self._take_over(config for config in self._of_steps() if id(config) not in self._taken)

    def _of_steps(self) -> list[Any]:
        configs = self._trainer.lr_scheduler_configs
        return [config for config in configs if config.interval == "step" and not config.reduce_on_plateau]

    def _take_over(self, configs: Iterable[Any]) -> None:
        for config in configs:
            self._taken[id(config)] = config, config.frequency
            config.frequency = sys.maxsize  # batches between the steps that Lightning makes

    def detach(self) -> None:
        """Give the stepping back."""
        for config, frequency in self._taken.values():
            config.frequency = frequency
        self._taken = {}

    def end_batch(self, batch_idx: int, growth: BatchGrowth, stepped: bool) -> None:
        """Count a batch, before the next size is decided, and step the schedulers if the optimizer has stepped.

        Args:
            batch_idx: of the batch in its epoch.
            growth: of the batch.
            stepped: whether the optimizer has.
        """
        if not self._taken:
            return
        length = growth.first_length
        if batch_idx == 0:
            self._batches = self._batches_stepped = 0.0
            if is_scheduled(self._trainer):
                self._accumulated = self._trainer.accumulate_grad_batches
        size = growth.relative_size
        if size is None and length < math.inf:
            size = (length - self._batches) / max(self._trainer.num_training_batches - batch_idx, 1)
        self._batches = min(self._batches + (1.0 if size is None else size), length)
        if self._trainer.is_last_batch:
            self._batches = math.ceil(self._batches - TOLERANCE) if length == math.inf else length
        if not stepped:
            return
        if length == math.inf:  # a stream may give the processes batches of different sizes
            self._batches = self._trainer.strategy.broadcast(self._batches)
            length = self._batches if self._trainer.is_last_batch else length
        places = self._batches_stepped, self._batches
        if self._has_both_limits(length):
            steps = self._trainer.global_step
            places = self._place(places[0], steps - 1, length), self._place(places[1], steps, length)
        for config in self._trainer.lr_scheduler_configs:  # callbacks may have put others there
            if id(config) not in self._taken:
                continue
            _, frequency = self._taken[id(config)]
            before, now = (scheduler_steps(batches, length, self._accumulated, frequency) for batches in places)
            for _ in range(now - before):
                self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
        self._batches_stepped = self._batches

    def state_dict(self) -> State:
        return {"batches": self._batches, "batches_stepped": self._batches_stepped}

    def load_state_dict(self, state: State) -> None:
        self._batches, self._batches_stepped = state["batches"], state["batches_stepped"]

    def _has_both_limits(self, length: float) -> bool:
        trainer = self._trainer
        return trainer.max_steps != -1 and trainer.max_epochs not in (None, -1) and length < math.inf

    def _place(self, batches: float, steps: int, length: float) -> float:
        """Place of the schedulers between both limits, in batches of the first size since the start of training.

        Args:
            batches: of this epoch that are done, in batches of the first size.
            steps: of the optimizer that are done.
            length: of an epoch.
        """
        trainer = self._trainer
        assert trainer.max_epochs is not None
        planned = math.ceil(length / self._accumulated) * trainer.max_epochs
        end = min(self._batches_of(trainer.max_steps, length), length * trainer.max_epochs)
        by_epochs = (trainer.current_epoch * length + batches) / (length * trainer.max_epochs) * end
        return max(by_epochs, self._batches_of(steps * min(1.0, planned / trainer.max_steps), length))

    def _batches_of(self, steps: float, length: float) -> float:
        """Batches of the first size that make so many optimizer steps."""
        epochs, rest = divmod(steps, math.ceil(length / self._accumulated))
        return epochs * length + min(rest * self._accumulated, length)
