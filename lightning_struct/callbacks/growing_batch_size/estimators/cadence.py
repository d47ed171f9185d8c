"""How often an estimator may measure, so that it takes no more than a share of the training time.

It is bounded by counting, and not by a clock: two runs with one seed must measure at the same steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_struct.callbacks.growing_batch_size.estimators.common import GradientEstimator
from lightning_struct.functional.torch_tools import numbers_of_outputs
from lightning_struct.utilities import namespaces as L

if TYPE_CHECKING:
    from torch.autograd.graph import Node

# Nodes of autograd whose outputs are views: nothing is moved in memory.
VIEWS = {
    *("AccumulateGrad", "Alias", "AsStrided", "Chunk", "Detach", "Diagonal", "Expand", "Movedim", "Narrow", "Permute"),
    *("ReshapeAlias", "Select", "Slice", "Split", "Squeeze", "SwapDims", "T", "Transpose", "Unbind", "Unflatten"),
    *("Unfold", "UnsafeView", "Unsqueeze", "View"),
}

# Time of the calls from Python, where tensors are so small that nothing else counts: it was at most .25 of a step.
CALLS = 0.25

# Measuring by hooks on the layers takes up to so many times a step: by rules alone, with convolutions among the layers,
# and where layers are run again.
LAYERS_BY_RULES, LAYERS_CONVOLVE, LAYERS_RUN_AGAIN = 1.0, 1.6, 3.4


def moved_in_backward(loss: Tensor) -> int:
    """Numbers in all intermediate results between the parameters and ``loss``, but views."""
    seen: set[Node] = set()
    stack: list[Node | None] = [loss.grad_fn]
    total = 0
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
        if name not in VIEWS:
            total += numbers_of_outputs(node)
    return total


class Cadence:
    """Optimizer steps from one measurement to the next.

    Work is counted in passes over the memory of the parameters: a pass reads or writes as many numbers as there are
    parameters. A step writes the gradients; the optimizer reads them, reads and writes the parameters, and reads and
    writes what it keeps of each. Each intermediate result is written and read, and so is its gradient. That is the
    least: products of matrices take longer, how much depends on the machine. Counted is the first step; what depends on
    the samples grows with their number.

    Args:
        every_n_steps: if it is not to be chosen.
        max_overhead: share of the time of the steps that measuring may take.
    """

    def __init__(self, every_n_steps: int | None, max_overhead: float) -> None:
        self._given, self._max_overhead = every_n_steps, max_overhead
        self._counts = dict.fromkeys(("samples", "parameters", "kept", "intermediate"), 0)
        self._stepped: list[tuple[Optimizer, list[Tensor]]] = []

    @property
    def counts(self) -> bool:
        """Whether the step under way is the one to be counted."""
        return self._given is None and self._counts["samples"] == 0

    def count_backward(self, loss: Tensor) -> None:
        if self.counts:
            self._counts["intermediate"] += moved_in_backward(loss)

    def count_step(self, optimizer: Optimizer) -> None:
        if self.counts:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._stepped.append((optimizer, parameters))

    def end_count(self, samples: int) -> None:
        """End the step that is counted, of so many samples, after its optimizers have stepped."""
        self._counts["samples"] = samples
        for optimizer, parameters in self._stepped:
            kept = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
            self._counts["kept"] += sum(value.numel() for value in kept if isinstance(value, Tensor))
            self._counts["parameters"] += sum(parameter.numel() for parameter in parameters)
        self._stepped.clear()

    def every_n_steps(self, samples: int, passes: float) -> int:
        """Steps from one measurement to the next that a measurement of so many passes allows, on so many samples."""
        if self._given is not None:
            return self._given
        counts = self._counts
        intermediate = counts["intermediate"] * samples / max(counts["samples"], 1)
        of_step = 4 + (2 * counts["kept"] + 4 * intermediate) / max(counts["parameters"], 1)
        return max(1, math.ceil(max(CALLS, passes / of_step) / self._max_overhead))

    def state_dict(self) -> dict[str, int]:
        return dict(self._counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._counts = dict(state)


class PlannedEstimator(GradientEstimator):
    """An estimator that plans its measurements by a :class:`Cadence`.

    Args:
        trainer: in fit.
        module: the one that is trained, without a wrapper around it.
        every_n_steps: steps from one measurement to the next; None: chosen.
        max_overhead: see :class:`Cadence`.
    """

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, every_n_steps: int | None, max_overhead: float
    ) -> None:
        super().__init__(trainer, module)
        self._cadence = Cadence(every_n_steps, max_overhead)
        self.every_n_steps = every_n_steps or 1
        self._step = 0  # number of the present one
        self._due = 0  # number of the step that is measured next; 0 before the first step

    def before_backward(self, loss: Tensor) -> None:
        self._cadence.count_backward(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due, "every_n_steps": self.every_n_steps, "cadence": self._cadence.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._due, self.every_n_steps = state["due"], state["every_n_steps"]
        self._cadence.load_state_dict(state["cadence"])
