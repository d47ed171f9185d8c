"""The parts of a step of RLS that look at all weights together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce_together, world_size
from lightning_struct.functional.checks import NotFinite
from lightning_struct.functional.layers.registry import plain_name
from lightning_struct.functional.torch_tools import norms_of_each
from lightning_struct.optim.memory import check_memory
from lightning_struct.optim.rls.gain_limit import largest_gains
from lightning_struct.optim.rls.weights import TrainedWeight

# Attribute of a gradient: its version when a step was made with it.
_STEPPED = "version_stepped_by_rls"


def mean_inputs(weights: Iterable[TrainedWeight], step: int) -> dict[TrainedWeight, Tensor]:
    """x̄ of the weights that this step changes: their layers were called, and a gradient came back.

    Raises:
        ValueError: there is a gradient, but nothing was read.
    """
    means = {}
    for weight in weights:
        gradients = [parameter.grad for parameter in weight.parameters if parameter.grad is not None]
        of_last_step = all(getattr(gradient, _STEPPED, None) == gradient._version for gradient in gradients)
        if gradients and weight.statistics.total is not None:
            means[weight] = weight.statistics.mean()
        # Gradients may be filled with zeros without a call, and Lightning's SWA steps once without a backward pass.
        elif not of_last_step and any(gradient.any() for gradient in gradients):
            raise ValueError(
                f"RLS step {step}: {weight.name} has a gradient, but its layer was not seen "
                "to read anything since the last step. Either its weight is used without calling the layer, or the "
                "gradient does not come from backward(), but from torch.autograd.grad or torch.func, or a compiled "
                "module was called before RLS was made, or the hooks were removed: call the layer, call backward(), "
                "make RLS first, or exclude the layer"
            )
    return means


def mark_as_stepped(gradient: Tensor) -> None:
    """Mark a gradient as used by a step, until the next write to it."""
    setattr(gradient, _STEPPED, gradient._version)


def check_finite(module: nn.Module, norms: StepNorms, means: Mapping[TrainedWeight, Tensor], step: int) -> None:
    """Raise if gradients or inputs of the step are not finite.

    Args:
        module: all of it.
        norms: of the step.
        means: of :func:`mean_inputs`.
        step: the number of the step, from 1 on.

    Raises:
        NotFinite: NaN or infinity in gradients or x̄; the message names the step and the weights.
    """
    if norms.is_finite():
        return
    names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    wrong = [f"the gradient of {n}" for p, n in names.items() if p.grad is not None and not p.grad.isfinite().all()]
    wrong += [f"the inputs of {weight.name}" for weight, mean in means.items() if not mean.isfinite().all()]
    raise NotFinite(
        f"RLS step {step}: NaN or infinity in {', '.join(wrong) or 'the norm of the gradients'};"
        " no weight and no P was changed. Look at the loss and the data of this batch; lower lr, and if max_gain is "
        "None set max_grad_norm"
    )


def gains_to_limit(states: Mapping[TrainedWeight, dict[str, Any]], max_gain: float) -> dict[TrainedWeight, Tensor]:
    """The largest gain of each weight's coming step, without weights whose gain is certainly small.

    Args:
        states: of the weights that step together.
        max_gain: c.
    """
    gains = {weight: weight.gain(state) for weight, state in states.items()}
    # Waiting for a device would cost more than it saves; processes must go on together.
    if world_size() == 1 and all(weight.parameter.device.type == "cpu" for weight in states):
        gains = {w: g for w, g in gains.items() if w.settings.forgetting < 1 or g.trace() > max_gain}
    return largest_gains(gains)


def reduce_statistics(weights: Sequence[TrainedWeight]) -> None:
    """Sums and counts of all weights over processes, by one collective."""
    dtype = max((weight.dtype for weight in weights), key=lambda dtype: dtype.itemsize)
    own = [
        w.parameter.new_zeros(w.groups, w.features, dtype=w.dtype) if w.statistics.total is None else w.statistics.total
        for w in weights
    ]
    counts = torch.tensor([n for weight in weights for n in weight.statistics.counts], dtype=dtype, device="cpu")
    *totals, counts = all_reduce_together([*own, counts])
    numbers = iter(counts.tolist())
    for weight, total in zip(weights, totals, strict=True):
        statistics = weight.statistics
        statistics.counts = [next(numbers) for _ in statistics.counts]
        statistics.total = total if statistics.counts[0] else None
        statistics.pairs = None  # of this process alone


@dataclass(frozen=True)
class StepNorms:
    """Norms of the gradients, inputs and weights of a step.

    Attributes:
        gradients: of all parameters that have one.
        means: of x̄, by its weight.
        thetas: of θ, weight and biases together.
    """

    gradients: Mapping[nn.Parameter, float]
    means: Mapping[TrainedWeight, float]
    thetas: Mapping[TrainedWeight, float]

    def clip_coefficient(self, max_norm: float | None) -> float:
        """Factor that brings the norm of all gradients together to ``max_norm`` if it is above; None is no bound."""
        total = math.hypot(*self.gradients.values())
        return 1.0 if max_norm is None else min(max_norm / (total + 1e-6), 1.0)

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in gradients and mean inputs."""
        return all(map(math.isfinite, [*self.gradients.values(), *self.means.values()]))

    def gradient_of(self, weight: TrainedWeight) -> float:
        """The norm of the gradients of a weight and its biases together."""
        return math.hypot(*(self.gradients[p] for p in weight.parameters if p in self.gradients))


def step_norms(parameters: Iterable[nn.Parameter], means: Mapping[TrainedWeight, Tensor]) -> StepNorms:
    """The norms of a step, for which it waits for the device once.

    Args:
        parameters: all trained ones, those of the auxiliary optimizer too.
        means: x̄ of the weights that the step changes.
    """
    of_weights = (parameter for weight in means for parameter in weight.parameters)
    # The auxiliary optimizer may train an embedding with sparse gradients.
    gradients = {
        p: p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        for p in (*parameters, *of_weights)
        if p.grad is not None
    }
    parts = {weight: weight.parameters for weight in means}
    tensors = [*gradients.values(), *means.values(), *(part for those in parts.values() for part in those)]
    alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = defaultdict(dict)
    for place, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype][place] = tensor
    norms_of = [
        torch.stack(norms_of_each(list(some.values()), torch.float32 if dtype.itemsize < 4 else None))
        for (_, dtype), some in alike.items()
    ]
    numbers = torch.cat([norms.to(norms_of[0].device) for norms in norms_of]).tolist() if norms_of else []
    of_place = dict(zip((place for some in alike.values() for place in some), numbers, strict=True))
    norms = iter(of_place[place] for place in range(len(tensors)))
    return StepNorms(
        {parameter: next(norms) for parameter in gradients},
        {weight: next(norms) for weight in means},
        {weight: math.hypot(*(next(norms) for _ in those)) for weight, those in parts.items()},
    )


def check_inverses_fit(weights: Sequence[TrainedWeight]) -> None:
    """Compare the memory that all P take with the free memory of their devices.

    Raises:
        MemoryError: they take more; the message names the largest of them and the remedies.
    """
    for device in {weight.parameter.device for weight in weights}:
        there = {w.name: (w.memory, f"{w.features} inputs") for w in weights if w.parameter.device == device}
        remedy = "Use form='low_rank' or 'rank1', or exclude layers"
        check_memory("The matrices P of RLS", there, device, remedy)
