"""The learning rate and its schedulers while batches grow.

The rate follows the batch size in the steps of the optimizers alone. Schedulers that are stepped with the optimizer go
by the time of batches of the first size.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, no_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_struct.callbacks.growing_batch_size.growth import BatchGrowth, State, is_scheduled
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.namespaces import MisconfigurationException

# Share of a decided size, which is a real number, from which on the samples of a step are that size in whole samples.
REACHED = 0.9

TOLERANCE = 1e-9  # of sums of fractions of a batch
# Attributes of the scale in checkpoints, without their _
SAVED = ("first_batch_size", "batch_size", "noise_scale", "highest_rates")

# Halvings of a rate that double the batch: a cosine ends at zero, and its last steps would be on all samples.
MOST_HALVINGS = 4

LearningRateRule: TypeAlias = Literal["sqrt", "linear"]


def learning_rate_factor(rule: LearningRateRule, growth: float, noise: float | None = None) -> float:
    """Factor of the learning rate for batches of S times the first size.

    - ``"sqrt"``: √S, for Adam and its kin (Krizhevsky 2014; Malladi et al. 2022).
    - ``"linear"``: S, for SGD (Goyal et al. 2017), up to the gradient noise scale: once the noise is smaller than
      the gradient, larger batches bear no larger rate (McCandlish et al. 2018). Without a noise scale there is no
      bound.

    Args:
        rule: one of these.
        growth: S > 0; below 1 for a batch that has shrunk.
        noise: σ²/μ², the variance of the gradient of a batch of the first size over the squared norm of its mean, which
            is the gradient noise scale tr Σ/‖G‖² in batches of the first size. It may be infinite. None: unknown.

    Example:
        >>> [learning_rate_factor(rule, growth=4.0, noise=3.0) for rule in ("sqrt", "linear")]
        [2.0, 3.0]
    """
    if rule == "sqrt":
        return math.sqrt(growth)
    return growth if noise is None else min(growth, max(noise, 1.0))


class LearningRateScale:
    """Multiplies the learning rates of optimizers by a factor that follows the batch size, while they step.

    Between the steps, and in the closure of a step, ``param_groups`` hold the rate that the user configured:
    schedulers, loggers, checkpoints and ``training_step`` see that one. A rate that is a tensor is changed in place.

    With the rate, the β₂ of Adam and its variants becomes β₂^(n/n₀), so that the half-life of its average of squares is
    the same number of samples (Marek et al. 2025, arXiv 2507.07101).

    Args:
        rule: see :func:`learning_rate_factor`.
    """

    def __init__(self, rule: LearningRateRule) -> None:
        self._rule = rule
        self._first_batch_size: float | None = None
        self._batch_size = 0.0
        self._noise_scale: float | None = None
        self._highest_rates: list[float] = []
        self._broadcast: Callable[[Any], Any] = lambda value: value
        self._optimizers: Callable[[], Sequence[Any]] = list
        self._handles: list[RemovableHandle] = []
        self._configured: dict[Optimizer, list[tuple[dict[str, Any], str, Any]]] = {}
        self._depth: dict[Optimizer, int] = {}

    @property
    def factor(self) -> float:
        """Factor of the rate; 1 in the first step, to whose batch size the configured rate belongs."""
        first = self._first_batch_size
        noise = None if self._noise_scale is None or first is None else self._noise_scale / first
        return learning_rate_factor(self._rule, self._growth, noise)

    @property
    def _growth(self) -> float:
        """n/n₀."""
        return 1.0 if self._first_batch_size is None else self._batch_size / self._first_batch_size

    def size_by_rate(self) -> float | None:
        """Batch size by which the schedule of the rate is followed (Seesaw: Meterez et al. 2025, arXiv 2510.14717).

        It is n₀ times two for each time that the configured rate has halved since it was highest, up to
        ``MOST_HALVINGS``; of several rates the one counts that has fallen least. If the rate grows by √(n/n₀), it falls
        by √2 when it would have halved. Between two halvings it goes on falling. None before the first step.
        """
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
        highest = self._highest_rates if len(self._highest_rates) == len(rates) else rates
        self._highest_rates = [max(rate, before) for rate, before in zip(rates, highest, strict=True)]
        shares = (rate / top for rate, top in zip(rates, self._highest_rates, strict=True) if top > 0)
        least = max(max(shares, default=1.0), 0.5**MOST_HALVINGS)
        if self._first_batch_size is None:
            return None
        return self._first_batch_size * 2 ** math.floor(-math.log2(least) + TOLERANCE)

    def attach(
        self, optimizers: Callable[[], Sequence[Any]], broadcast: Callable[[Any], Any] = lambda value: value
    ) -> None:
        """Begin to multiply the rates of optimizers.

        Args:
            optimizers: returns those that there are, when one steps: a project may replace them.
            broadcast: collective call that returns the first process's argument in all of them.

        Raises:
            MisconfigurationException: one of them has no learning rate, or is not one of torch's.
        """
        option = f"GrowingBatchSize(scale_lr={self._rule!r})"
        for optimizer in optimizers():
            name = type(optimizer).__name__
            if not isinstance(optimizer, Optimizer):
                raise MisconfigurationException(
                    f"{option} changes the rate by the step hooks of a torch.optim.Optimizer, which {name} is not: "
                    "leave scale_lr out, or give the optimizer itself to the Trainer"
                )
            if all(group.get("lr") is None for group in optimizer.param_groups):
                raise MisconfigurationException(
                    f"{option} has no rate to scale, as no group of {name} has an lr: leave scale_lr out"
                )
        self.detach()
        self._optimizers, self._broadcast = optimizers, broadcast
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def begin_batch(self, batch_size: float, samples: int | None = None) -> None:
        """Take note of the size of the step under way.

        Args:
            batch_size: samples of a step, as decided.
            samples: of the step under way; None if that is not known. As long as they are fewer, because workers had
                been asked for batches of an earlier size, that size counts. The last batch of an epoch, when it is
                smaller, has the rate of those before it, also right after a growth.
        """
        self._put_all_back()  # after a step that failed
        if batch_size == self._batch_size:
            return
        samples = self._broadcast(samples)
        if samples is None or samples >= REACHED * batch_size:
            self._batch_size = batch_size
        else:
            self._batch_size = min(batch_size, max(self._batch_size, samples))

    def end_step(self, batch_size: float, noise_scale: float | None = None) -> None:
        """Take note of an optimizer step.

        Args:
            batch_size: samples of a step, as they were decided before it. Those of the first one are n₀.
            noise_scale: tr Σ/‖G‖², averaged over steps, in samples, of several optimizers the smallest; None if the
                step was not measured.
        """
        if self._first_batch_size is None:
            self._first_batch_size = self._batch_size = self._broadcast(batch_size)
        if self._rule != "sqrt" and noise_scale is not None:
            self._noise_scale = self._broadcast(noise_scale)

    def detach(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._put_all_back()

    def state_dict(self) -> State:
        return {name: getattr(self, f"_{name}") for name in SAVED}

    def load_state_dict(self, state: State) -> None:
        for name in SAVED:
            setattr(self, f"_{name}", state[name])

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer not in self._optimizers():
            return None
        # The step of a subclass may call that of its base, which has hooks, too.
        self._depth[optimizer] = self._depth.get(optimizer, 0) + 1
        self._multiply(optimizer)
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._at_the_configured_rate(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._at_the_configured_rate(optimizer, args[1]), *args[2:]), kwargs
        return None

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer not in self._depth:
            return
        self._depth[optimizer] -= 1
        if not self._depth[optimizer]:
            del self._depth[optimizer]
            self._put_back(optimizer)

    def _at_the_configured_rate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of a step, for which the rate is put back."""

        def evaluate() -> Any:
            self._put_back(optimizer)
            result = closure()
            self._multiply(optimizer)
            return result

        return evaluate

    def _multiply(self, optimizer: Optimizer) -> None:
        factor, growth = self.factor, self._growth
        if optimizer in self._configured or growth == 1.0:
            return
        configured = self._configured[optimizer] = []
        multiplied: set[int] = set()  # groups may share a tensor
        for group in optimizer.param_groups:
            rate, betas = group.get("lr"), group.get("betas")
            if isinstance(betas, (tuple, list)) and len(betas) == 2:
                configured.append((group, "betas", betas))
                group["betas"] = (betas[0], betas[1] ** growth)
            if rate is None or id(rate) in multiplied:
                continue
            if isinstance(rate, Tensor):
                multiplied.add(id(rate))
                with no_grad():
                    configured.append((group, "lr", rate.clone()))
                    rate.mul_(factor)
            else:
                configured.append((group, "lr", rate))
                group["lr"] = rate * factor

    def _put_back(self, optimizer: Optimizer) -> None:
        for group, name, value in self._configured.pop(optimizer, []):
            if isinstance(value, Tensor):
                with no_grad():
                    group[name].copy_(value)
            else:
                group[name] = value

    def _put_all_back(self) -> None:
        for optimizer in list(self._configured):
            self._put_back(optimizer)
        self._depth.clear()


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
    """Steps the schedulers with ``interval="step"`` as often as batches of the first size would.

    As batches grow there are fewer optimizer steps, but a schedule keeps the meaning that the user gave it: it reaches
    each of its points after the same samples, and its end with that of the training. A batch counts by its size,
    fractions included, and the last one of an epoch for the rest of the steps that an epoch has with batches of the
    first size. A draw is a batch of the first size, as an epoch is a number of them.

    If ``max_steps`` alone can end the training, the number of steps is as the user wrote it: then Lightning steps the
    schedulers as usual. It also steps those that are reduced on a plateau. In manual optimization the module does so.
    If ``max_epochs`` and ``max_steps`` are both given, it is not known beforehand which of them ends the training:
    the schedulers go by the one that is nearer to its end. With ``max_steps`` and a ``GradientAccumulationScheduler``,
    by which steps are not the same share of the training in each epoch, Lightning steps them as usual.

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
        if trainer.max_steps != -1 and (is_scheduled(trainer) or not self._has_both_limits(growth.first_length())):
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
            self._take_over(self._of_steps())

    def _of_steps(self) -> list[Any]:
        configs = self._trainer.lr_scheduler_configs
        return [config for config in configs if config.interval == "step" and not config.reduce_on_plateau]

    def _take_over(self, configs: Sequence[Any]) -> None:
        for config in configs:
            if id(config) not in self._taken:
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
        length = growth.first_length()
        if batch_idx == 0:
            self._batches = self._batches_stepped = 0.0
            if is_scheduled(self._trainer):
                self._accumulated = self._trainer.accumulate_grad_batches
        self._batches = min(self._batches + growth.relative_size(), length)
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
