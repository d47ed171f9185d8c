"""The norms that a step of RLS asks for: of gradients, mean inputs x̄ and weights θ, all at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_struct.functional.torch_tools import norms_of_each
from lightning_struct.optim.rls.weights import TrainedWeight, WeightNorms


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

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in gradients and mean inputs."""
        return all(map(math.isfinite, [*self.gradients.values(), *self.means.values()]))

    def of(self, weight: TrainedWeight) -> WeightNorms:
        """Those of one weight."""
        gradients = [self.gradients[p] for p in weight.parameters if p in self.gradients]
        return WeightNorms(self.thetas[weight], math.hypot(*gradients))


def step_norms(parameters: Iterable[nn.Parameter], means: Mapping[TrainedWeight, Tensor]) -> StepNorms:
    """The norms of a step, for which it waits for the device once.

    Args:
        parameters: all that are trained, by whomever.
        means: x̄ of the weights that the step changes.
    """
    of_weights = (parameter for weight in means for parameter in weight.parameters)
    gradients = {p: _entries(p.grad) for p in (*parameters, *of_weights) if p.grad is not None}
    parts = {weight: weight.theta_parts() for weight in means}
    tensors = [*gradients.values(), *means.values(), *(part for those in parts.values() for part in those)]
    norms = iter(_norms(tensors))
    return StepNorms(
        {parameter: next(norms) for parameter in gradients},
        {weight: next(norms) for weight in means},
        {weight: math.hypot(*(next(norms) for _ in those)) for weight, those in parts.items()},
    )


def _entries(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, which is sparse where the auxiliary optimizer trains an embedding with such ones."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """The Euclidean norm of each tensor."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype].append(place)
    norms = []
    for (_, dtype), places in alike.items():
        of_kind = norms_of_each([tensors[place] for place in places], torch.float32 if dtype.itemsize < 4 else None)
        norms.append(torch.stack(of_kind))
    if not norms:
        return []
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    numbers = torch.cat([norm.to(norms[0].device, widest) for norm in norms]).tolist()
    places = [place for those in alike.values() for place in those]
    return [number for _, number in sorted(zip(places, numbers, strict=True))]
