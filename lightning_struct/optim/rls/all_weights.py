"""The parts of a step of RLS that look at all weights together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_struct.collective import world_size
from lightning_struct.functional.layers import plain_name
from lightning_struct.optim.rls.gain_limit import GainLimit, largest_gains
from lightning_struct.optim.rls.weights import TrainedWeight


def gain_limits(states: Mapping[TrainedWeight, dict[str, Any]], max_gain: float) -> dict[TrainedWeight, GainLimit]:
    """The limits of the gain of each weight's coming step, but of those whose gain is small for sure.

    Args:
        states: of the weights that step together.
        max_gain: c.
    """
    gains = {weight: weight.gain(state) for weight, state in states.items()}
    # Waiting for a device would cost more than it saves; processes must go on together.
    if world_size() == 1 and all(weight.parameter.device.type == "cpu" for weight in states):
        gains = {w: g for w, g in gains.items() if w.forgetting < 1 or g.trace() > max_gain}
    return {weight: GainLimit(gain, max_gain, len(states)) for weight, gain in largest_gains(gains).items()}


def not_finite(module: nn.Module, means: Mapping[TrainedWeight, Tensor]) -> list[str]:
    """Where NaN or infinity is: in the gradients of which parameters, and in the mean inputs x̄ of which weights."""
    names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    wrong = [f"the gradient of {n}" for p, n in names.items() if p.grad is not None and not p.grad.isfinite().all()]
    return wrong + [f"the inputs of {weight.name}" for weight, mean in means.items() if not mean.isfinite().all()]
