"""The parts of a step of RLS that look at all weights together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_struct.collective import world_size
from lightning_struct.functional.checks import NotFinite
from lightning_struct.functional.layers.registry import plain_name
from lightning_struct.optim.rls.gain_limit import GainLimit, largest_gains
from lightning_struct.optim.rls.norms import StepNorms
from lightning_struct.optim.rls.weights import TrainedWeight

# The states of weights by their names, of those that have one.
States: TypeAlias = Mapping[str, Mapping[str, Any]]
# Attribute of a gradient: its version when a step was made with it.
_STEPPED = "version_stepped_by_rls"


def forget_statistics(weights: Iterable[TrainedWeight]) -> None:
    """Drop what was read since the last step, as far as gradients have come of it."""
    for weight in weights:
        weight.statistics.reset()


def mean_inputs(weights: Iterable[TrainedWeight], states: States) -> dict[TrainedWeight, Tensor]:
    """x̄ of the weights that the step changes: their layers were called, and a gradient came back.

    Raises:
        ValueError: there is a gradient, but nothing was read.
    """
    return {weight: weight.statistics.mean() for weight in weights if _takes_part(weight, states)}


def is_of_last_step(gradient: Tensor) -> bool:
    """Whether a step was made with this gradient, and nobody has written to it since."""
    return getattr(gradient, _STEPPED, None) == gradient._version


def mark_as_stepped(gradients: Iterable[Tensor]) -> None:
    """Let :func:`is_of_last_step` hold of these gradients."""
    for gradient in gradients:
        setattr(gradient, _STEPPED, gradient._version)


def _takes_part(weight: TrainedWeight, states: States) -> bool:
    gradients = [parameter.grad for parameter in weight.parameters if parameter.grad is not None]
    if not gradients or weight.statistics.total is not None:
        return bool(gradients)
    if not any(gradient.any() for gradient in gradients):  # filled with zeros, and nobody called it
        return False
    if all(is_of_last_step(gradient) for gradient in gradients):  # Lightning's SWA steps once without a backward pass
        return False
    raise ValueError(
        f"RLS step {_coming_step([weight], states)}: {weight.name} has a gradient, but its layer was not seen to read "
        "anything since the last step. Either its weight is used without calling the layer, or the gradient does not "
        "come from backward(), but from torch.autograd.grad or torch.func, or a compiled module was called before RLS "
        "was made, or the hooks were removed: call the layer, call backward(), make RLS first, or exclude the layer"
    )


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
    wrong = ", ".join(_not_finite(module, means)) or "the norm of the gradients"
    raise NotFinite(
        f"RLS step {_coming_step(means, states)}: NaN or infinity in {wrong}; no weight and no P was changed. Look "
        "at the loss and the data of this batch; lower lr, and where max_gain is None set max_grad_norm"
    )


def _not_finite(module: nn.Module, means: Mapping[TrainedWeight, Tensor]) -> list[str]:
    """Where NaN or infinity is: in the gradients of which parameters, and in the mean inputs x̄ of which weights."""
    names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    wrong = [f"the gradient of {n}" for p, n in names.items() if p.grad is not None and not p.grad.isfinite().all()]
    return wrong + [f"the inputs of {weight.name}" for weight, mean in means.items() if not mean.isfinite().all()]


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
