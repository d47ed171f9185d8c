"""Noise of the gradients from the differences between the backward passes of a step."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_struct.callbacks.growing_batch_size.estimators.common import (
    GradientEstimator,
    GradientNotFinite,
    NoiseEstimator,
    Unmeasurable,
    is_compiled,
    local_gradient,
    share,
)
from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics, statistics_of_parts
from lightning_struct.collective import world_size
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32
from lightning_struct.functional.torch_tools import norms_of_each
from lightning_struct.utilities import distributed
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.lightning_internals import gradient_scale, loss_scale
from lightning_struct.utilities.namespaces import MisconfigurationException

# Passes over the memory of the parameters that a step makes at least: it writes the gradients, and the optimizer reads
# them, and reads and writes the parameters. A measurement reads the gradients of each backward pass, and of the step.
PASSES_OF_STEP = 4

# Time of the calls from Python, if tensors are so small that nothing else counts: it was at most .25 of a step.
CALLS = 0.25


class BackwardPasses(GradientEstimator):
    """Compares the gradients of single backward passes with the one that an optimizer steps by, which is their mean.

    A backward pass is that of one process on one of the accumulated batches; hooks on the parameters see its gradient
    before it is averaged over processes. Parameters that FSDP2 shards are hooked when they have been gathered. With K
    passes of b samples each, E‖g_b‖² = ‖G‖² + tr Σ/b and E‖g_B‖² = ‖G‖² + tr Σ/(K b) (McCandlish et al. 2018, appendix
    A.1). A step of one pass is not measured. Automatic optimization only.

    Args:
        trainer: in fit.
        module: the one that is trained, without a wrapper around it.
        asked: the user's choice, with the steps from one measurement to the next.
        max_overhead: share of the time of the steps that measuring may take.

    Raises:
        MisconfigurationException: manual optimization, weights that are sharded in another way than by FSDP2 alone, or
            one process that accumulates no batches.
    """

    name = "parts"

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, asked: NoiseEstimator, max_overhead: float
    ) -> None:
        if (problem := why_not(trainer)) is not None:
            raise MisconfigurationException(
                f"GrowingBatchSize(estimator='parts') compares several backward passes of a step, but {problem}"
            )
        super().__init__(trainer, module)
        self._asked, self._max_overhead = asked.every_n_steps, max_overhead
        self.every_n_steps = self._allowed(trainer.accumulate_grad_batches)
        self._step = 0  # number of the present one
        self._due = 0  # number of the step that is measured next; 0 before the first step
        self._handles: list[RemovableHandle] = []
        self._norms: list[Tensor] = []
        self._hooked: set[str] = set()
        self._has_missed, self._passes = False, 0
        self._measured: tuple[float, float, int] | None = None

    def begin_batch(self, batch: Any, expected_sizes: list[int], step: int) -> None:
        if step != self._step:  # batches may be accumulated
            self._step, self._passes, self._measured = step, 0, None
            self._norms.clear()
        if self._due == 0:
            self._due = step + (self._asked or 1) - 1
        if step < self._due:
            self.pause()
        elif not self._handles:
            self._attach()

    def after_backward(self) -> None:
        self._passes += 1

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._handles or self._measured is not None:
            return
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        unhooked = {name: parameter for name, parameter in parameters.items() if name not in self._hooked}
        sums = sum_of_squares([], self._module.device).repeat(3)
        with torch.no_grad(), self.faults.deferred():
            of_passes = sum_of_squares(self._norms, self._module.device) / (loss_scale(self._trainer) or 1.0) ** 2
            sums = torch.stack(
                [of_passes, *(self._squared_norm(optimizer, of.values()) for of in (parameters, unhooked))]
            )
        of_pass, of_mean, missed = self.faults.summed(sums).tolist()
        if not math.isfinite(of_pass + of_mean):
            raise GradientNotFinite
        if missed > 0:  # a layer may have been unfrozen: hook anew for the next step
            if self._has_missed:
                names = [name for name, p in unhooked.items() if p.grad is not None]
                raise Unmeasurable(f"does not see the gradients of single backward passes of {', '.join(names[:3])}")
            self._has_missed = True
            self.pause()
            return
        self._has_missed = False
        # the gradient of the step is the mean over processes of the sums over their passes
        of_pass *= self._passes / world_size()
        self._measured = of_pass, of_mean, self._passes * world_size()

    def statistics(self, samples: int) -> dict[int, GradientStatistics]:
        if self._measured is None:
            return {}
        self.every_n_steps = self._allowed(self._passes)
        self._due = self._step + self.every_n_steps
        of_pass, of_step, number = self._measured
        return {0: statistics_of_parts(of_pass, of_step, number, samples)} if number > 1 else {}

    def pause(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due, "every_n_steps": self.every_n_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._due, self.every_n_steps = state["due"], state["every_n_steps"]

    def _allowed(self, passes: int) -> int:
        """Steps from one measurement to the next, for steps of so many backward passes."""
        share = max(CALLS, (passes + 1) / PASSES_OF_STEP)
        return self._asked or math.ceil(share / self._max_overhead)

    def _squared_norm(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Tensor:
        """This process's part of ‖∇‖² by which the optimizer is about to step, (), of some parameters.

        The norms of numbers of 16 bits are taken in float32; sparse gradients are coalesced.
        """
        total = sum_of_squares([], self._module.device)
        groups: dict[tuple[float, torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            if (gradient := local_gradient(parameter)) is not None:
                values = gradient.values() if gradient.is_sparse else gradient
                groups.setdefault((share(parameter), values.device, values.dtype), []).append(values)
        for (part, _, dtype), group in groups.items():
            norms = norms_of_each(group, torch.float32 if dtype.itemsize < 4 else None)
            total += part * sum_of_squares([torch.stack(norms)], self._module.device)
        return total / gradient_scale(self._trainer, optimizer) ** 2

    def _attach(self) -> None:
        """Hook the parameters; sharded ones once they are gathered for a forward pass."""
        # Hooked modules may be copied, and must not copy the Trainer.
        norms, hooked, handles, faults = self._norms, self._hooked, self._handles, self.faults
        hooked.clear()

        def note(gradient: Tensor) -> None:
            with faults.deferred():
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                norms.append(torch.linalg.vector_norm(at_least_float32(values.detach())))

        def hook(prefix: str, module: nn.Module) -> None:
            for name, parameter in module.named_parameters(prefix):
                if name not in hooked and parameter.requires_grad and not hasattr(parameter, "placements"):
                    hooked.add(name)
                    handles.append(parameter.register_hook(note))

        def hook_gathered(prefix: str, module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                hook(prefix, module)

        hook("", self._module)
        for prefix, module in distributed.gathering_modules(self._module):
            handles.append(module.register_forward_pre_hook(partial(hook_gathered, prefix)))


def why_not(trainer: L.Trainer) -> str | None:
    """The reason for which the backward passes of a step cannot be compared, and the remedy; None if they can."""
    by_hand = "set the sizes by schedule=..."
    has_layers = not any(is_compiled(layer) for layer in trainer.lightning_module.modules())
    if not trainer.lightning_module.automatic_optimization:
        remedy = f"use estimator='layers', or {by_hand}" if has_layers else by_hand
        return f"under manual optimization it is not known which of them make a step: {remedy}"
    if distributed.shards_weights(trainer) and not distributed.gathers_parameters(trainer):
        return f"{type(trainer.strategy).__name__} shards the weights: {by_hand}"
    if distributed.data_parallel_size(trainer) != trainer.world_size:
        return f"some processes share their batches (tensor parallelism): {by_hand}"
    if distributed.shards_weights(trainer) and not has_layers:
        return f"the layers that gather sharded weights are compiled: {by_hand}"
    if trainer.world_size * trainer.accumulate_grad_batches < 2:
        remedy = "use several devices or Trainer(accumulate_grad_batches=2)"
        return f"each step has one: {remedy}{', or estimator=' + repr('layers') if has_layers else ''}"
    return None


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A scalar on ``device``, in float64 if the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.cat([tensor.to(device).reshape(-1) for tensor in tensors]).to(dtype).square().sum()
