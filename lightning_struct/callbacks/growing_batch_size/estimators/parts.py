"""Noise of the gradients from the differences between the backward passes of a step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_struct.callbacks.growing_batch_size.estimators.cadence import PlannedEstimator
from lightning_struct.callbacks.growing_batch_size.estimators.common import (
    Unmeasurable,
    check_finite,
    is_compiled,
    local_gradient,
    share,
    squared_norm,
    sum_of_squares,
)
from lightning_struct.callbacks.growing_batch_size.noise import GradientStatistics, statistics_of_parts
from lightning_struct.collective import world_size
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.distributed import (
    data_parallel_size,
    gathering_modules,
    gathers_parameters,
    shards_weights,
)
from lightning_struct.utilities.lightning_internals import gradient_scale, loss_scale
from lightning_struct.utilities.namespaces import MisconfigurationException


class BackwardPasses(PlannedEstimator):
    """Compares the gradients of single backward passes with the one that an optimizer steps by, which is their mean.

    A backward pass is that of one process on one of the accumulated batches; hooks on the parameters see its gradient
    before it is averaged over processes. Parameters that FSDP2 shards are hooked when they have been gathered. With K
    passes of b samples each, E‖g_b‖² = ‖G‖² + tr Σ/b and E‖g_B‖² = ‖G‖² + tr Σ/(K b) (McCandlish et al. 2018, appendix
    A.1). A step of one pass is not measured. Automatic optimization only.

    Args:
        trainer: in fit.
        module: the one that is trained, without a wrapper around it.
        every_n_steps: steps from one measurement to the next; None: chosen.
        max_overhead: see :class:`~lightning_struct.callbacks.growing_batch_size.estimators.cadence.Cadence`.

    Raises:
        MisconfigurationException: manual optimization, weights that are sharded in another way than by FSDP2 alone, or
            one process that accumulates no batches.
    """

    name = "parts"

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, every_n_steps: int | None, max_overhead: float
    ) -> None:
        if (problem := why_not(trainer)) is not None:
            raise MisconfigurationException(
                f"GrowingBatchSize(estimator='parts') compares the gradients of several backward passes of a step, but "
                f"{problem}"
            )
        super().__init__(trainer, module, every_n_steps, max_overhead)
        self._handles: list[RemovableHandle] = []
        self._norms: list[Tensor] = []
        self._hooked: set[str] = set()
        self._has_missed = False
        self._passes = 0
        self._measured: tuple[float, float, int] | None = None

    def begin_batch(self, batch: Any, expected_sizes: list[int], step: int) -> None:
        if step != self._step:  # batches may be accumulated
            self._step, self._passes, self._measured = step, 0, None
            self._norms.clear()
        if self._due == 0:
            self._due = step + self.every_n_steps - 1
        if step < self._due:
            self.pause()
        elif not self._handles:
            self._attach()

    def after_backward(self) -> None:
        self._passes += 1

    def before_step(self, optimizer: Optimizer) -> None:
        self._cadence.count_step(optimizer)
        if not self._handles or self._measured is not None:
            return
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        unhooked = {name: parameter for name, parameter in parameters.items() if name not in self._hooked}
        sums = sum_of_squares([], self._module.device).repeat(3)
        with torch.no_grad(), self.faults.kept():
            of_passes = sum_of_squares(self._norms, self._module.device) / (loss_scale(self._trainer) or 1.0) ** 2
            sums = torch.stack(
                [of_passes, *(self._squared_norm(optimizer, of.values()) for of in (parameters, unhooked))]
            )
        of_pass, of_mean, missed = self.faults.summed(sums).tolist()
        check_finite(of_pass + of_mean)
        if missed > 0:  # as of a layer that has been unfrozen since
            self._look_again([name for name, p in unhooked.items() if p.grad is not None])
            return
        self._has_missed = False
        # the gradient of the step is the mean over processes of the sums over their passes
        of_pass *= self._passes / world_size()
        self._measured = of_pass, of_mean, self._passes * world_size()

    def statistics(self, samples: int) -> dict[int, GradientStatistics]:
        if self._cadence.counts:
            self._cadence.end_count(samples)
        elif self._measured is None:
            return {}
        self.every_n_steps = self._cadence.every_n_steps(samples, self._passes + 1)  # norms: of each, and of the step
        self._due = self._step + self.every_n_steps
        if self._measured is None:
            return {}
        of_pass, of_step, number = self._measured
        return {0: statistics_of_parts(of_pass, of_step, number, samples)} if number > 1 else {}

    def pause(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"has_missed": self._has_missed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._has_missed = state["has_missed"]

    def _squared_norm(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Tensor:
        """This process's part of ‖∇‖² by which the optimizer is about to step, (), of some parameters."""
        gradients = [(g, share(p)) for p in parameters if (g := local_gradient(p)) is not None]
        norm = squared_norm([g for g, _ in gradients], [part for _, part in gradients], self._module.device)
        return norm / gradient_scale(self._trainer, optimizer) ** 2

    def _look_again(self, names: list[str]) -> None:
        """Hook the parameters anew for the next step; give up where that has not helped."""
        if self._has_missed:
            raise Unmeasurable(f"does not see the gradients of single backward passes of {', '.join(names[:3])}")
        self._has_missed = True
        self.pause()

    def _attach(self) -> None:
        """Hook the parameters; those that are gathered for each forward pass, when they are there."""
        # What is hooked may be copied, and must not copy the Trainer.
        norms, hooked, handles, faults = self._norms, self._hooked, self._handles, self.faults
        hooked.clear()

        def note(gradient: Tensor) -> None:
            with faults.kept():
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
        for prefix, module in gathering_modules(self._module):
            handles.append(module.register_forward_pre_hook(partial(hook_gathered, prefix)))


def why_not(trainer: L.Trainer) -> str | None:
    """The reason for which the backward passes of a step cannot be compared, and the remedy; None if they can."""
    if not trainer.lightning_module.automatic_optimization:
        return (
            "under manual optimization it is not known which of them make a step: use estimator='steps', which "
            "compares consecutive steps"
        )
    if shards_weights(trainer) and not gathers_parameters(trainer):
        return f"{type(trainer.strategy).__name__} shards the weights: use estimator='steps'"
    if data_parallel_size(trainer) != trainer.world_size:
        return "some processes share their batches (tensor parallelism): use estimator='steps'"
    if shards_weights(trainer) and any(is_compiled(layer) for layer in trainer.lightning_module.modules()):
        return "the layers that gather sharded weights are compiled: use estimator='steps'"
    if trainer.world_size * trainer.accumulate_grad_batches < 2:
        return (
            "each step has one: use several devices or Trainer(accumulate_grad_batches=2), or estimator='steps', which "
            "compares consecutive steps"
        )
    return None
