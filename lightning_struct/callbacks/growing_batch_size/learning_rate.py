"""A learning rate that follows the batch size, in the steps of the optimizers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, no_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_struct.callbacks.growing_batch_size.growth import State
from lightning_struct.utilities.namespaces import MisconfigurationException

# Share of a decided size, which is a real number, from which on the samples of a step are that size in whole samples.
REACHED = 0.9

LearningRateRule: TypeAlias = Literal["sqrt", "linear", "adascale"]


def learning_rate_factor(rule: LearningRateRule, growth: float, noise: float | None = None) -> float:
    """Factor of the learning rate for batches of S times the first size.

    - ``"sqrt"``: √S, for Adam and its kin (Krizhevsky 2014; Malladi et al. 2022).
    - ``"linear"``: S, for SGD (Goyal et al. 2017), up to the gradient noise scale: from where the noise is smaller than
      the gradient, larger batches bear no larger rate (McCandlish et al. 2018). Without a noise scale there is no
      bound.
    - ``"adascale"``: (σ² + μ²)/(σ²/S + μ²), which goes smoothly from S in noise to 1 without it (AdaScale's gain,
      Johnson et al. 2020, algorithm 1); 1 as long as there is no noise scale. AdaScale also advances schedules by its
      gain; here they go by samples, as the training does that they belong to.

    Args:
        rule: one of these.
        growth: S > 0; below 1 for a batch that has shrunk.
        noise: σ²/μ², the variance of the gradient of a batch of the first size over the squared norm of its mean, which
            is the gradient noise scale tr Σ/‖G‖² in batches of the first size. It may be infinite. None: unknown.

    Example:
        >>> [learning_rate_factor(rule, growth=4.0, noise=2.0) for rule in ("sqrt", "linear", "adascale")]
        [2.0, 2.0, 2.0]
        >>> [learning_rate_factor(rule, growth=4.0, noise=math.inf) for rule in ("sqrt", "linear", "adascale")]
        [2.0, 4.0, 4.0]
    """
    if rule == "sqrt":
        return math.sqrt(growth)
    if rule == "linear":
        return growth if noise is None else min(growth, max(noise, 1.0))
    if noise is None:
        return 1.0
    return growth if noise == math.inf else (noise + 1) / (noise / growth + 1)


def _unchanged(value: Any) -> Any:
    return value


class LearningRateScale:
    """Multiplies the learning rates of optimizers by a factor that follows the batch size, while they step.

    Between the steps, and in the closure of a step, ``param_groups`` hold the rate that the user configured:
    schedulers, loggers, checkpoints and ``training_step`` see that one. A rate that is a tensor is changed in place.

    Args:
        rule: see :func:`learning_rate_factor`.
    """

    def __init__(self, rule: LearningRateRule) -> None:
        self._rule = rule
        self._first_batch_size: float | None = None
        self._batch_size = 0.0
        self._noise_scale: float | None = None
        self._broadcast: Callable[[Any], Any] = _unchanged
        self._optimizers: Callable[[], Sequence[Any]] = list
        self._handles: list[RemovableHandle] = []
        self._rates: dict[Optimizer, list[tuple[dict[str, Any], float | Tensor]]] = {}
        self._depth: dict[Optimizer, int] = {}

    @property
    def factor(self) -> float:
        """Factor of the rate; 1 in the first step, to whose batch size the configured rate belongs."""
        first = self._first_batch_size
        if first is None:
            return 1.0
        noise = None if self._noise_scale is None else self._noise_scale / first
        return learning_rate_factor(self._rule, self._batch_size / first, noise)

    def attach(self, optimizers: Callable[[], Sequence[Any]], broadcast: Callable[[Any], Any] = _unchanged) -> None:
        """Begin to multiply the rates of optimizers.

        Args:
            optimizers: returns those that there are, when one steps: a project may replace them.
            broadcast: collective call that returns the first process's argument in all of them.

        Raises:
            MisconfigurationException: one of them has no learning rate, or is not one of torch's.
        """
        for optimizer in optimizers():
            self._check(optimizer)
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
                smaller, has the rate of those before it.
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
            noise_scale: tr Σ/‖G‖², averaged over steps, in samples, of several optimizers the smallest; None where the
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
        self._handles, self._broadcast, self._optimizers = [], _unchanged, list
        self._put_all_back()

    def state_dict(self) -> State:
        return {
            "first_batch_size": self._first_batch_size,
            "batch_size": self._batch_size,
            "noise_scale": self._noise_scale,
        }

    def load_state_dict(self, state: State) -> None:
        self._first_batch_size, self._batch_size = state["first_batch_size"], state["batch_size"]
        self._noise_scale = state["noise_scale"]

    def _check(self, optimizer: Any) -> None:
        name, option = type(optimizer).__name__, f"GrowingBatchSize(scale_lr={self._rule!r})"
        if not isinstance(optimizer, Optimizer):
            raise MisconfigurationException(
                f"{option} changes the rate by the step hooks of a torch.optim.Optimizer, which {name} is not: leave "
                "scale_lr out, or give the optimizer itself to the Trainer"
            )
        if all(group.get("lr") is None for group in optimizer.param_groups):
            raise MisconfigurationException(
                f"{option} has no rate to scale: {name} has none in its param_groups. Leave scale_lr out, or take an "
                "optimizer with a learning rate, lr"
            )

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
        factor = self.factor
        if optimizer in self._rates or factor == 1.0:
            return
        rates = self._rates[optimizer] = []
        multiplied: set[int] = set()  # groups may share a tensor
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None or id(rate) in multiplied:
                continue
            if isinstance(rate, Tensor):
                multiplied.add(id(rate))
                with no_grad():
                    rates.append((group, rate.clone()))
                    rate.mul_(factor)
            else:
                rates.append((group, rate))
                group["lr"] = rate * factor

    def _put_back(self, optimizer: Optimizer) -> None:
        for group, rate in self._rates.pop(optimizer, []):
            if isinstance(rate, Tensor):
                with no_grad():
                    group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def _put_all_back(self) -> None:
        for optimizer in list(self._rates):
            self._put_back(optimizer)
        self._depth.clear()
