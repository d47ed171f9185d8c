"""The parts of a step of RLS that look at all weights together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_struct.collective import all_reduce_together, world_size
from lightning_struct.functional.checks import NotFinite
from lightning_struct.functional.layers.registry import plain_name
from lightning_struct.functional.torch_tools import norms_of_each
from lightning_struct.optim.rls.gain_limit import GainLimit, largest_gains
from lightning_struct.optim.rls.weights import TrainedWeight, WeightNorms

# The states of weights by their names, of those that have one.
States: TypeAlias = Mapping[str, Mapping[str, Any]]
# Attribute of a gradient: its version when a step was made with it.
_STEPPED = "version_stepped_by_rls"
# The error of RLS.exact under torch.distributed.
ROWS_OF_PROCESSES = "RLS.exact reads every row in one process, and there are several: train in one, or use RLS(...)"


def forget_statistics(weights: Iterable[TrainedWeight]) -> None:
    """Drop what was read since the last step, as far as gradients have come of it."""
    for weight in weights:
        weight.statistics.reset()


def mean_inputs(weights: Iterable[TrainedWeight], states: States) -> dict[TrainedWeight, Tensor]:
    """x̄ of the weights that the step changes: their layers were called, and a gradient came back.

    Raises:
        ValueError: there is a gradient, but nothing was read.
    """
    means = {}
    for weight in weights:
        gradients = [parameter.grad for parameter in weight.parameters if parameter.grad is not None]
        if gradients and weight.statistics.total is not None:
            means[weight] = weight.statistics.mean()
            continue
        # Gradients may be filled with zeros without a call, and Lightning's SWA steps once without a backward pass.
        if any(gradient.any() for gradient in gradients) and not all(map(is_of_last_step, gradients)):
            raise ValueError(
                f"RLS step {_coming_step([weight], states)}: {weight.name} has a gradient, but its layer was not seen "
                "to read anything since the last step. Either its weight is used without calling the layer, or the "
                "gradient does not come from backward(), but from torch.autograd.grad or torch.func, or a compiled "
                "module was called before RLS was made, or the hooks were removed: call the layer, call backward(), "
                "make RLS first, or exclude the layer"
            )
    return means


def is_of_last_step(gradient: Tensor) -> bool:
    """Whether a step was made with this gradient, and nobody has written to it since."""
    return getattr(gradient, _STEPPED, None) == gradient._version


def mark_as_stepped(gradients: Iterable[Tensor]) -> None:
    """Let :func:`is_of_last_step` hold of these gradients."""
    for gradient in gradients:
        setattr(gradient, _STEPPED, gradient._version)


def check_finite(module: nn.Module, norms: StepNorms, means: Mapping[TrainedWeight, Tensor], states: States) -> None:
    """Raise where anything that the step reads is not finite.

    Args:
        module: all of it.
        norms: of the step.
        means: of :func:`mean_inputs`.
        states: of the weights.

    Raises:
        NotFinite: NaN or infinity in gradients or x̄; named are the step and where it is.
    """
    if norms.is_finite():
        return
    names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    wrong = [f"the gradient of {n}" for p, n in names.items() if p.grad is not None and not p.grad.isfinite().all()]
    wrong += [f"the inputs of {weight.name}" for weight, mean in means.items() if not mean.isfinite().all()]
    raise NotFinite(
        f"RLS step {_coming_step(means, states)}: NaN or infinity in {', '.join(wrong) or 'the norm of the gradients'};"
        " no weight and no P was changed. Look at the loss and the data of this batch; lower lr, and where max_gain is "
        "None set max_grad_norm"
    )


def _coming_step(weights: Iterable[TrainedWeight], states: States) -> int:
    return 1 + max((states.get(weight.name, {}).get("steps", 0) for weight in weights), default=0)


def gain_limits(states: Mapping[TrainedWeight, dict[str, Any]], max_gain: float) -> dict[TrainedWeight, GainLimit]:
    """The limits of the gain of each weight's coming step, but of those whose gain is small for sure.

    Args:
        states: of the weights that step together.
        max_gain: c.
    """
    gains = {weight: weight.gain(state) for weight, state in states.items()}
    # Waiting for a device would cost more than it saves; processes must go on together.
    if world_size() == 1 and all(weight.parameter.device.type == "cpu" for weight in states):
        gains = {w: g for w, g in gains.items() if w.settings.forgetting < 1 or g.trace() > max_gain}
    return {weight: GainLimit(gain, max_gain, len(states)) for weight, gain in largest_gains(gains).items()}


def reduce_statistics(weights: Sequence[TrainedWeight]) -> None:
    """Sums and counts of all weights over processes, by one collective.

    Raises:
        ValueError: a weight needs the rows themselves.
    """
    if any(weight.form.by_rows for weight in weights):
        raise ValueError(ROWS_OF_PROCESSES)
    dtype = max((weight.dtype for weight in weights), key=lambda dtype: dtype.itemsize)
    totals = [
        weight.parameter.new_zeros(weight.groups, weight.features, dtype=weight.dtype)
        if weight.statistics.total is None
        else weight.statistics.total
        for weight in weights
    ]
    counts = torch.tensor(
        [count for weight in weights for count in weight.statistics.counts], dtype=dtype, device="cpu"
    )
    *totals, counts = all_reduce_together([*totals, counts])
    numbers = iter(counts.tolist())
    for weight, total in zip(weights, totals, strict=True):
        statistics = weight.statistics
        statistics.counts = [next(numbers) for _ in statistics.counts]
        statistics.total = total if statistics.counts[0] else None
        statistics.pairs = None  # of this process alone


@dataclass(frozen=True)
class StepNorms:
    """Norms of what a step reads.

    Attributes:
        gradients: of all parameters that have one.
        means: of x̄, by its weight.
        thetas: of θ, weight and biases together.
    """

    gradients: Mapping[nn.Parameter, float]
    means: Mapping[TrainedWeight, float]
    thetas: Mapping[TrainedWeight, float]

    @property
    def total(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*self.gradients.values())

    def clip_coefficient(self, max_norm: float | None) -> float:
        """Factor that brings the norm of all gradients together to ``max_norm`` if it is above; None is no bound."""
        return 1.0 if max_norm is None else min(max_norm / (self.total + 1e-6), 1.0)

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in gradients and mean inputs."""
        return all(map(math.isfinite, [*self.gradients.values(), *self.means.values()]))

    def of(self, weight: TrainedWeight) -> WeightNorms:
        """The norms of one weight."""
        gradients = [self.gradients[p] for p in weight.parameters if p in self.gradients]
        return WeightNorms(self.thetas[weight], math.hypot(*gradients))


def step_norms(parameters: Iterable[nn.Parameter], means: Mapping[TrainedWeight, Tensor]) -> StepNorms:
    """The norms of a step, for which it waits for the device once.

    Args:
        parameters: all that are trained, by whomever.
        means: x̄ of the weights that the step changes.
    """
    of_weights = (parameter for weight in means for parameter in weight.parameters)
    # The auxiliary optimizer may train an embedding with sparse gradients.
    gradients = {
        p: p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        for p in (*parameters, *of_weights)
        if p.grad is not None
    }
    parts = {weight: weight.theta_parts() for weight in means}
    tensors = [*gradients.values(), *means.values(), *(part for those in parts.values() for part in those)]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype].append(place)
    of_alike = []
    for (_, dtype), places in alike.items():
        precision = torch.float32 if dtype.itemsize < 4 else None
        of_alike.append(torch.stack(norms_of_each([tensors[place] for place in places], precision)))
    if not of_alike:
        return StepNorms({}, {}, {})
    widest = max((those.dtype for those in of_alike), key=lambda dtype: dtype.itemsize)
    numbers = torch.cat([those.to(of_alike[0].device, widest) for those in of_alike]).tolist()
    of_place = dict(zip((place for places in alike.values() for place in places), numbers, strict=True))
    norms = iter(of_place[place] for place in range(len(tensors)))
    return StepNorms(
        {parameter: next(norms) for parameter in gradients},
        {weight: next(norms) for weight in means},
        {weight: math.hypot(*(next(norms) for _ in those)) for weight, those in parts.items()},
    )


def check_states(states: Mapping[str, Mapping[str, Any]], weights: Sequence[TrainedWeight]) -> None:
    """Raise unless states by name are of these weights, or empty.

    Raises:
        ValueError: one is of another weight, form or shape.
    """
    for weight in weights:
        if state := states.get(weight.name):
            weight.check_state(state)
    if unknown := states.keys() - {weight.name for weight in weights}:
        raise ValueError(
            f"the state is of an RLS that trains {', '.join(sorted(unknown))}, which this one does not: make it with "
            "the same layers excluded, and unfreeze before what was unfrozen"
        )
