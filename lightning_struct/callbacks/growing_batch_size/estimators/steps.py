"""Noise of the gradients from pairs of consecutive steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size.estimators.cadence import PlannedEstimator
from lightning_struct.callbacks.growing_batch_size.estimators.common import (
    check_finite,
    local_gradient,
    share,
    squared_norm,
    sum_of_squares,
)
from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics, statistics_of_pair
from lightning_struct.functional.torch_tools import copy_each_, subtract_each_
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import shards_plain_tensors, shards_weights
from lightning_struct.utilities.lightning_internals import gradient_scale

# Copying, subtracting, and three norms: so many reads and writes of as many numbers as there are parameters.
PASSES = 8

# Sizes of two batches may differ by such a factor: of a sum of losses the gradients are as large as the batch.
LIKE_SIZES = 1.25


@dataclass
class _Gradients:
    """The gradients of a step, by the places of the parameters in the optimizer, and their weights in sums."""

    tensors: dict[int, Tensor]
    shares: dict[int, float]


@dataclass
class _Kept:
    """The gradient of a step, by the places of the parameters in the optimizer; the batch may not be over."""

    gradients: dict[int, Tensor]
    squared_norm: float
    scale: float
    samples: int = 0


@dataclass
class _Pair:
    """‖g‖² and ‖g'‖² of two consecutive steps and ‖g - g'‖², and the samples of the first."""

    first: float
    second: float
    difference: float
    samples: int


class StepPairs(PlannedEstimator):
    """Compares the gradients of two consecutive steps of an optimizer.

    Both estimate the gradient G of the loss, and their errors are independent: E g·g' = ‖G‖² and E‖g‖² = ‖G‖² + tr Σ/n
    on a batch of n. That takes no rule for any layer, nor the samples' own gradients; it works for compiled and for
    sharded networks. What G changes from one step to the next counts as noise.

    Of parameters that get a gradient in one of the steps alone nothing is measured. Where batches differ much in their
    sizes, there is no pair. The gradients of the first step of a pair are kept, in memory of its own, and in
    checkpoints that are written before the second; of sharded gradients there a pair is given up.

    Args:
        trainer: in fit.
        module: the one that is trained, without a wrapper around it.
        every_n_steps: steps from one pair to the next; None: chosen.
        max_overhead: see :class:`~lightning_struct.callbacks.growing_batch_size.estimators.cadence.Cadence`.
    """

    name = "steps"

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        every_n_steps: int | None,
        max_overhead: float,
    ) -> None:
        super().__init__(trainer, module, every_n_steps, max_overhead)
        self._sharded, self._in_parts = shards_weights(trainer), shards_plain_tensors(trainer)
        self._optimizers: dict[int, Optimizer] = {}
        self._kept: dict[int, _Kept] = {}
        self._memory: dict[int, dict[int, Tensor]] = {}
        self._pairs: dict[int, _Pair] = {}
        self._stepped: set[int] = set()
        self._without: set[int] = set()

    def begin_batch(self, batch: Any, expected_sizes: list[int], step: int) -> None:
        if step != self._step:  # batches may be accumulated
            self._step, self._stepped, self._pairs = step, set(), {}
        if self._due == 0:
            self._due = step + max(self.every_n_steps, 2) - 1

    def before_step(self, optimizer: Optimizer) -> None:
        number = self._trainer.optimizers.index(optimizer)
        if number in self._stepped:  # as one that evaluates the loss several times
            return
        self._stepped.add(number)
        if self._optimizers.setdefault(number, optimizer) is not optimizer:  # it has been replaced
            self._optimizers[number] = optimizer
            self._kept.pop(number, None)
        self._cadence.count_step(optimizer)
        closes = number in self._kept
        opens = self._step >= self._due - 1 and (not closes or self.every_n_steps == 1)
        if not (opens or closes):
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale = gradient_scale(self._trainer, optimizer)
        gradients = _Gradients({}, {})
        with torch.no_grad():
            with self.faults.kept():
                tensors = {i: g for i, p in enumerate(parameters) if (g := local_gradient(p)) is not None}
                gradients = _Gradients(tensors, {i: share(parameters[i], self._in_parts) for i in tensors})
            if closes:
                self._close(number, gradients, scale)
            if opens:
                self._open(number, gradients, scale)

    def statistics(self, samples: int) -> dict[int, GradientStatistics]:
        if not self._step:  # it has begun in the middle of this batch
            return {}
        for kept in self._kept.values():
            kept.samples = kept.samples or samples
        if self._cadence.counts:
            self._cadence.end_count(samples)
            self.every_n_steps = self._cadence.every_n_steps(samples, PASSES)
            self._due = self._step + max(self.every_n_steps, 2) - 1
        elif self._pairs:
            self.every_n_steps = self._cadence.every_n_steps(samples, PASSES)
            self._due = self._step + self.every_n_steps
        pairs, self._pairs = self._pairs, {}
        return {
            number: statistics_of_pair(pair.first, pair.second, pair.difference, (pair.samples, samples))
            for number, pair in pairs.items()
            if max(pair.samples, samples) <= LIKE_SIZES * min(pair.samples, samples)
        }

    def pause(self) -> None:
        self._kept, self._memory, self._pairs = {}, {}, {}

    def state_dict(self) -> dict[str, Any]:
        """With sharded weights without the pair under way, as a checkpoint has the first process's parts only."""
        kept = {
            number: vars(kept) | {"gradients": {i: gradient.clone() for i, gradient in kept.gradients.items()}}
            for number, kept in self._kept.items()
            if kept.samples and not self._sharded
        }
        return super().state_dict() | {"kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._kept = {number: _Kept(**kept) for number, kept in state["kept"].items()}
        self._memory = {number: dict(kept.gradients) for number, kept in self._kept.items()}

    def _open(self, number: int, gradients: _Gradients, scale: float) -> None:
        """Keep the gradients of the first step of a pair."""
        memory = self._memory.setdefault(number, {})
        sums = sum_of_squares([], self._module.device).repeat(1)
        with self.faults.kept():
            _keep(memory, gradients.tensors)
            sums = self._squared_norm(gradients.tensors, gradients)[None]
        (norm,) = self.faults.summed(sums).tolist()
        check_finite(norm)
        if norm == 0 and not gradients.tensors:
            self._warn_of_nothing(number)
            return
        self._kept[number] = _Kept({i: memory[i] for i in gradients.tensors}, norm / scale**2, scale)

    def _close(self, number: int, gradients: _Gradients, scale: float) -> None:
        """Compare the kept gradients with those of the second step; their memory gets the differences."""
        kept = self._kept.pop(number)
        both: list[int] = []
        norms = sum_of_squares([], self._module.device).repeat(3)
        with self.faults.kept():
            now = gradients.tensors
            both = [i for i, g in kept.gradients.items() if i in now and now[i].shape == g.shape]
            norms = self._norms(kept, self._memory[number], gradients, both, scale)
        before, second, difference = (value / scale**2 for value in self.faults.summed(norms).tolist())
        check_finite(second)
        if both:
            before = before if len(both) < len(kept.gradients) else kept.squared_norm
            self._pairs[number] = _Pair(before, second, difference, kept.samples)

    def _norms(
        self, kept: _Kept, memory: dict[int, Tensor], gradients: _Gradients, both: list[int], scale: float
    ) -> Tensor:
        """(3,), ‖g‖² or 0 where that is known, ‖g'‖² and ‖g - g'‖², of what is in both steps, times ``scale``²."""
        second = {i: gradients.tensors[i] for i in both}
        first = {i: kept.gradients[i].to(second[i].device) for i in both}
        if kept.scale != scale:
            first = {i: gradient * (scale / kept.scale) for i, gradient in first.items()}
        memory.update(first)
        norms = [self._squared_norm(first if len(both) < len(kept.gradients) else {}, gradients)]
        norms.append(self._squared_norm(second, gradients))
        dense = [i for i in both if not (first[i].is_sparse or second[i].is_sparse)]
        if dense:
            subtract_each_([first[i] for i in dense], [second[i] for i in dense])
        differences = {i: first[i] if i in dense else (first[i] - second[i]).coalesce() for i in both}
        norms.append(self._squared_norm(differences, gradients))
        return torch.stack(norms)

    def _squared_norm(self, tensors: dict[int, Tensor], gradients: _Gradients) -> Tensor:
        shares = [gradients.shares[i] for i in tensors]
        return squared_norm(list(tensors.values()), shares, self._module.device)

    def _warn_of_nothing(self, number: int) -> None:
        if number not in self._without:
            self._without.add(number)
            rank_zero_warn(
                "GrowingBatchSize finds no gradients in the parameters of "
                f"{type(self._trainer.optimizers[number]).__name__} before it steps, and cannot measure them. Give "
                f"{type(self._module).__name__} a method gradient_statistics() that returns GradientStatistics, or set "
                "the sizes by schedule=..."
            )


def _keep(memory: dict[int, Tensor], gradients: dict[int, Tensor]) -> None:
    """Copy gradients into memory, new where there is none for them."""
    copied: list[int] = []
    for i, gradient in gradients.items():
        kept = memory.get(i)
        if gradient.is_sparse or kept is None or kept.is_sparse or kept.shape != gradient.shape:
            memory[i] = gradient.clone()
        else:
            copied.append(i)
    if copied:
        copy_each_([memory[i] for i in copied], [gradients[i] for i in copied])
