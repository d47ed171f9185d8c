"""The objective of one batch, evaluated away from the current weights."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce
from lightning_struct.functional.jacobian.losses import GaussNewtonLoss
from lightning_struct.functional.randomness import RandomState, restored_random_state
from lightning_struct.functional.torch_tools import call_with, in_eval_mode
from lightning_struct.functional.vectors import inner
from lightning_struct.optim.shf.samples import Batches, BatchShare, FlatWeights, arguments
from lightning_struct.optim.shf.settings import Settings


class Objective:
    """f(w) = mean loss of the batch + ½ l2 ‖w‖², truly evaluated, over all processes.

    Args:
        module: the network; neither its weights nor its buffers are changed.
        loss: its mean over samples is f.
        weights: w.
        batch: the samples that f is the mean of.
        random_state: the state that random numbers start from in each evaluation on ``batch``, for one dropout mask.
        settings: ``l2``, the weight of ½‖w‖², and ``chunk_size``, the samples that are evaluated at once.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: GaussNewtonLoss,
        weights: FlatWeights,
        batch: BatchShare,
        random_state: RandomState,
        settings: Settings,
    ) -> None:
        self._module, self._loss, self._weights = module, loss, weights
        self._batch, self._random_state = batch, random_state
        self._l2, self._chunk_size = settings.l2, settings.chunk_size
        self._like = weights.vector

    def value_at(self, d: Tensor, step: float = 1.0) -> float:
        """f(w + s d), with the dropout masks of the linearisation."""
        return self.value_of(*torch.stack(self.parts_at(d, step)).tolist())

    def parts_at(self, d: Tensor, step: float = 1.0) -> list[Tensor]:
        """The sum of the losses of all samples at w + s d, and with l2 ‖w + s d‖², for :meth:`value_of`.

        The host does not wait for the device, so that one look at it can be for several values.
        """
        weights = self._weights.vector.add(d, alpha=step)
        with restored_random_state(self._random_state):
            losses = [
                (self._loss.value(self._outputs(weights, args), targets) * len(targets)).double()
                for args, targets, _ in self._batch.chunks(self._chunk_size)
            ]
        total = all_reduce(sum(losses[1:], losses[0]))
        return [total, inner(weights, weights)] if self._l2 else [total]

    def value_of(self, total: float, squares: float = 0.0) -> float:
        """f from the sum of the losses of all samples and ‖w‖²."""
        return total / self._batch.total + 0.5 * self._l2 * squares

    def merit(self, d: Tensor, batches: Batches) -> float:
        """φ(d) = f(w + d) on validation data, equation (20): the module in eval mode, without the penalty."""
        weights = self._weights.vector + d
        total = self._like.new_zeros(2, dtype=torch.float64)
        with in_eval_mode(self._module):
            for inputs, targets in batches:
                if len(targets) == 0:  # its mean is NaN
                    continue
                outputs = self._outputs(weights, arguments(inputs))
                total[0] += self._loss.value(outputs, targets) * len(targets)
                total[1] += len(targets)
        loss, samples = all_reduce(total).tolist()
        return loss / samples

    def _outputs(self, weights: Tensor, args: tuple[Any, ...]) -> Tensor:
        return call_with(self._module, self._weights.unflat(weights), args).to(self._like.dtype)
