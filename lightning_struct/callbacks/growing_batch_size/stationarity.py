"""Tests of the steps: noise that cancels their descent, and a loss that grows with the batch.

Only if noise cancels the descent is a larger batch worth its samples; and only if the loss does not grow with it.
"""

import math
from collections import deque
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size.estimators.common import LocalFaults, local, local_gradient, share
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import shards_weights
from lightning_struct.utilities.lightning_internals import gradient_scale

# Length of a window: this share of the steps so far, and at least so many steps.
SHARE_OF_STEPS, SHORTEST = 0.5, 300

# The end of a window is judged by one gradient for so many steps of the window.
STEPS_PER_GRADIENT = 16

# Losses that an average goes over.
AVERAGED = 100

# Smaller factors of the size are lost in the usual changes of the loss.
SMALLEST_FACTOR = 1.5

# Losses rise if the average of their second half is more than so many times that of the first, or so many standard
# errors above it: those of a training that diverges differ too much from each other for the second test.
LARGE_RISE, STANDARD_ERRORS = 2.0, 5.0


def window_length(steps: int) -> int:
    """Length, in steps, of a window that begins after so many."""
    return max(SHORTEST, math.floor(SHARE_OF_STEPS * steps))


class StationarityTest:
    """Tests, window after window of steps, whether the loss still falls along the displacement of the window.

    With the displacement Δ = w_start - w_end of a window of steps, and gradients g of batches that come after it,

        q = mean g·Δ, where E q = ∇L(w_end)·Δ.

    In a quadratic model of the loss, q = D - 2F: D is the descent by the mean of the steps, F the loss that the noise
    of the steps has added to the loss (E ξᵀHξ = 2F for the displacement ξ by noise). A batch that is larger by a small
    factor 1 + ε makes fewer steps of the same samples, which costs εD, and less noise, twice: in each step, and by
    fewer steps, which saves 2εF. So **a larger batch is worth its samples where q < 0**, and a smaller one where q > 0.
    For a window of one step of SGD, q is the product of successive gradients of Pflug (1983) and of Chee & Toulis
    (2018, arXiv 1710.06382). Those are dominated by momentum and by oscillations, which a long window averages out. The
    rate, the optimizer, momentum and preconditioning are all in Δ.

    A window is as long as half of the steps before it, so that its D is the descent that a user would wait for. The
    test holds if q is negative by more than its standard error.

    It costs a copy of the weights in memory and in checkpoints, and a product with the gradient in one of sixteen
    steps.

    Args:
        trainer: in fit.
        optimizer: whose steps are tested.

    Attributes:
        holds: whether the noise cancelled the descent in the last window that was judged since the last
            :meth:`restart`.
        has_judged: whether a window was judged at all.
    """

    def __init__(self, trainer: L.Trainer, optimizer: Optimizer) -> None:
        self._trainer, self._optimizer = trainer, optimizer
        self._sharded, self.faults = shards_weights(trainer), LocalFaults()
        self.holds = self.has_judged = False
        self._steps = self._length = self._end = (
            0  # the last two of the window, in steps; no window is open before the next step
        )
        self._weights: dict[int, Tensor] = {}  # at the start of the window; after its end, less those at the end
        self._products: list[float] = []

    def restart(self) -> None:
        """Forget the window under way and the last result, as the batches have another size."""
        self.holds = False
        self._begin_window()

    def before_step(self) -> None:
        """Look at the weights, and at the gradients of the optimizer's coming step before they are clipped."""
        if self._end == 0 or self._steps >= self._end:
            self._look()
        self._steps += 1

    @torch.no_grad()
    def _look(self) -> None:
        if self._end == 0:
            self._length = window_length(self._steps)
            self._end = self._steps + self._length
            with self.faults.deferred():
                self._weights = {i: local(parameter).clone() for i, parameter in self._parameters().items()}
        else:
            product = 0.0
            with self.faults.deferred():
                parameters = self._parameters()
                if self._steps == self._end:
                    self._weights = {
                        i: before.sub_(now)
                        for i, before in self._weights.items()
                        if i in parameters and (now := local(parameters[i])).shape == before.shape
                    }
                product = self._product(parameters) / gradient_scale(self._trainer, self._optimizer)
            self._products.append(product)
            if len(self._products) >= self._length // STEPS_PER_GRADIENT:
                self._judge()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; without the window if weights are sharded, as one process has only its parts."""
        window: tuple[Any, ...] = self._length, self._end, self._weights, self._products
        length, end, weights, products = (0, 0, {}, []) if self._sharded else window
        weights = {i: tensor.clone() for i, tensor in weights.items()}
        state = {"steps": self._steps, "passed": self.holds, "judged": self.has_judged, "length": length, "end": end}
        return state | {"weights": weights, "products": list(products)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = self._parameters()
        self._steps, self.holds = state["steps"], state["passed"]
        self.has_judged = state.get("judged", self.holds)  # version 0.3.0 does not say
        self._length, self._end = state["length"], state["end"]
        self._weights = {
            i: tensor.to(parameters[i].device) for i, tensor in state["weights"].items() if i in parameters
        }
        self._products = list(state["products"])

    def _parameters(self) -> dict[int, nn.Parameter]:
        """The trainable parameters, by their places in the optimizer."""
        places = enumerate(p for group in self._optimizer.param_groups for p in group["params"])
        return {i: parameter for i, parameter in places if parameter.requires_grad}

    def _begin_window(self) -> None:
        self._length = self._end = 0
        self._weights, self._products = {}, []

    def _product(self, parameters: dict[int, nn.Parameter]) -> float:
        """g·Δ, this process's part of a sum over processes."""
        products = []
        for i, displacement in self._weights.items():
            gradient = local_gradient(parameters[i]) if i in parameters else None
            if gradient is None:
                continue
            if gradient.is_sparse:
                displacement, gradient = displacement[gradient.indices()[0]], gradient.values()
            product = torch.dot(at_least_float32(displacement).flatten(), at_least_float32(gradient).flatten())
            products.append(share(parameters[i]) * product)
        return sum(torch.stack([product.to(products[0].device) for product in products]).tolist()) if products else 0.0

    def _judge(self) -> None:
        sums = self.faults.summed(torch.tensor(self._products, device=self._trainer.strategy.root_device))
        values = [value for value in sums.tolist() if math.isfinite(value)]  # a GradScaler skips the others
        count = len(values)
        self.holds, self.has_judged = False, True
        if count > 1:
            mean = sum(values) / count
            variance = sum((value - mean) ** 2 for value in values) / (count - 1)
            self.holds = mean < -math.sqrt(variance / count)
        self._begin_window()


class LossGrowth:
    """Compares the losses before and after the batch has become k times as large, by two measures.

    - **Their average.** If the loss is averaged over the samples, it stays as it is; if it is summed, it becomes k
      times as large; training has lowered either meanwhile. The limit is between the two, the cube
      root of k. If the losses were rising already, as those of a training that diverges, they would have gone on
      rising: from the first to the second half of those before by a factor q, so in as many more by q². By that the
      limit is multiplied, if q is more than noise.
    - **Their spread**, the average change from one loss to the next. If the loss is averaged, it becomes smaller by √k,
      as the noise of the samples does; if it is summed, larger by √k. The limit is between the two, 1.

    Both have to be passed. The average alone would not do for a loss that may be negative, as a log-likelihood: its
    zero is arbitrary, and training makes it larger in magnitude. They are looked at once, when there are as many losses
    after the growth as go into an average.

    Example:
        >>> growth = LossGrowth()
        >>> for size in (8, 16):
        ...     for _ in range(AVERAGED):
        ...         growth.update(torch.tensor(3.0 * size))
        ...     if size == 8:
        ...         growth.restart(8, 16)
        >>> growth.size_before_loss_grew()
        8
    """

    def __init__(self) -> None:
        self._losses: deque[Tensor] = deque(maxlen=AVERAGED)
        self._before: tuple[float, float, float] | None = None
        """The size before the last growth, and the limits for the average and the spread after it."""

    def update(self, loss: Tensor) -> None:
        """Take in the loss of a backward pass; on its device, without waiting for it. Sharded ones are left out."""
        if type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point():
            self._losses.append(loss.detach().to(torch.float32, copy=True))

    def restart(self, before: float, after: float) -> None:
        """The batch has another size from now on."""
        self._before = None
        if len(self._losses) == AVERAGED and after >= SMALLEST_FACTOR * before:
            average, spread = self._average_and_spread()
            self._before = before, average * (after / before) ** (1 / 3) * self._rise() ** 2, spread
        self._losses.clear()

    def size_before_loss_grew(self) -> float | None:
        """The size before the last growth, if the loss has grown with it; None else, or if that is not known yet."""
        if self._before is None or len(self._losses) < AVERAGED:
            return None
        (size, limit, limit_of_spread), self._before = self._before, None
        average, spread = self._average_and_spread()
        return size if limit != 0 and average / limit > 1 and spread >= limit_of_spread else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._values(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(map(torch.tensor, state["losses"]), maxlen=AVERAGED)
        self._before = state["before"]

    def _rise(self) -> float:
        """Factor by which the average rises from the first half to the second; 1 if that is no more than noise."""
        values, half = self._values(), AVERAGED // 2
        first, second = fmean(values[:half]), fmean(values[half:])
        if first == 0 or second / first <= 1:
            return 1.0
        noise = math.hypot(pstdev(values[:half]), pstdev(values[half:])) / math.sqrt(half)
        rises = second / first > LARGE_RISE or abs(second - first) > STANDARD_ERRORS * noise
        return second / first if rises else 1.0

    def _average_and_spread(self) -> tuple[float, float]:
        values = self._values()
        return fmean(values), fmean(abs(after - before) for before, after in pairwise(values))

    def _values(self) -> list[float]:
        if not self._losses:
            return []
        device = self._losses[-1].device  # losses of a checkpoint are on the CPU
        return torch.stack([loss.to(device).reshape(()) for loss in self._losses]).tolist()
