"""Whether the noise of the steps undoes what they descend: only then is a larger batch worth its samples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size.estimators.faults import LocalFaults
from lightning_struct.callbacks.growing_batch_size.estimators.gradients import local, local_gradient, share
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import shards_plain_tensors, shards_weights
from lightning_struct.utilities.lightning_internals import gradient_scale

# Length of a window: this share of the steps so far, and at least so many steps.
SHARE_OF_STEPS, SHORTEST = 0.5, 300

# The end of a window is judged by one gradient for so many steps of the window.
STEPS_PER_GRADIENT = 16


def window_length(steps: int) -> int:
    """Length, in steps, of a window that begins after so many."""
    return max(SHORTEST, math.floor(SHARE_OF_STEPS * steps))


class StationarityTest:
    """Tests, window after window of steps, whether the loss still falls along what the window has moved.

    With the displacement Δ = w_start - w_end of a window of steps, and gradients g of batches that come after it,

        q = mean g·Δ, where E q = ∇L(w_end)·Δ.

    In a quadratic model of the loss, q = D - 2F: D is what the mean of the steps has descended, F what the noise of the
    steps has added to the loss (E ξᵀHξ = 2F for the displacement ξ by noise). A batch that is larger by a small factor
    1 + ε makes fewer steps of the same samples, which costs εD, and less noise, twice: in each step, and by fewer
    steps, which saves 2εF. So **a larger batch is worth its samples where q < 0**, and a smaller one where q > 0. For a
    window of one step of SGD, q is the product of successive gradients of Pflug (1983) and of Chee & Toulis (2018,
    arXiv 1710.06382). Those are dominated by momentum and by oscillations, which a long window averages out. The rate,
    the optimizer, momentum and preconditioning are all in Δ.

    A window is as long as half of the steps before it, so that its D is what a user would wait for. The test holds
    where q is negative by more than its standard error.

    It costs a copy of the weights in memory and in checkpoints, and a product with the gradient in one of sixteen
    steps.

    Args:
        trainer: in fit.
        optimizer: whose steps are tested.
    """

    def __init__(self, trainer: L.Trainer, optimizer: Optimizer) -> None:
        self._trainer, self._optimizer = trainer, optimizer
        self._sharded, self._in_parts = shards_weights(trainer), shards_plain_tensors(trainer)
        self.faults = LocalFaults()
        self._steps = 0
        self._passed = False
        self._length = self._end = 0  # of the window, in steps; no window is open before the next step
        self._weights: dict[int, Tensor] = {}  # at the start of the window; after its end, less those at the end
        self._products: list[float] = []

    @property
    def holds(self) -> bool:
        """Whether the noise undid the descent in the last window that was judged since the last :meth:`restart`."""
        return self._passed

    def restart(self) -> None:
        """Forget the window under way and the last result, as the batches have another size."""
        self._passed = False
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
            with self.faults.kept():
                self._weights = {i: local(parameter).clone() for i, parameter in self._parameters().items()}
        else:
            product = 0.0
            with self.faults.kept():
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
        """With sharded weights without the window under way, as a checkpoint has the first process's parts only."""
        kept = not self._sharded
        return {
            "steps": self._steps,
            "passed": self._passed,
            "length": self._length if kept else 0,
            "end": self._end if kept else 0,
            "weights": {i: tensor.clone() for i, tensor in self._weights.items()} if kept else {},
            "products": list(self._products) if kept else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = self._parameters()
        self._steps, self._passed = state["steps"], state["passed"]
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
            products.append(share(parameters[i], self._in_parts) * product)
        return sum(torch.stack([product.to(products[0].device) for product in products]).tolist()) if products else 0.0

    def _judge(self) -> None:
        sums = self.faults.summed(torch.tensor(self._products, device=self._trainer.strategy.root_device))
        values = [value for value in sums.tolist() if math.isfinite(value)]  # a GradScaler skips the others
        count = len(values)
        self._passed = False
        if count > 1:
            mean = sum(values) / count
            variance = sum((value - mean) ** 2 for value in values) / (count - 1)
            self._passed = mean < -math.sqrt(variance / count)
        self._begin_window()
