"""Calls of layers whose cotangents are awaited: what is kept of a forward pass for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers.calls import LayerCall, map_items, tensors_in
from lightning_struct.functional.layers.per_sample.projections import ParameterUse
from lightning_struct.functional.layers.per_sample.rules import compares_outputs, keeps_outputs, may_run_again
from lightning_struct.functional.randomness import RandomState
from lightning_struct.functional.torch_internals import current_backward


@dataclass
class Rerun:
    """State that running a layer again needs: (device, dtype, enabled) of autocast, and of the random generators."""

    autocast: tuple[str, torch.dtype, bool]
    random_state: RandomState | None


@dataclass(eq=False)
class AwaitedCall:
    """One call of a layer whose cotangents are awaited.

    Attributes:
        call: without cotangents.
        parameters: those that it uses, by name.
        backward: the pass within which it was made, by a checkpoint, or -1.
        rerun: where the layer is run again.
        use: where only this use inside of the call is meant.
        accumulated: the parameters whose gradients it has taken part in.
    """

    call: LayerCall
    parameters: dict[str, nn.Parameter]
    backward: int
    rerun: Rerun | None = None
    use: ParameterUse | None = None
    accumulated: set[nn.Parameter] = field(default_factory=set)


def awaited_call(call: LayerCall, parameters: dict[str, nn.Parameter], state: RandomState | None) -> AwaitedCall:
    """A call as it is kept for the backward pass, cut off from the graph.

    Args:
        call: with its outputs.
        parameters: those that it uses and that are trained, by name.
        state: of the random generators before the call, where its layer draws random numbers.
    """
    layer, args, kwargs = call.layer, call.args, call.kwargs
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        args, kwargs = _detached((args, kwargs))
    else:
        args = (args[0].detach(),)
    outputs = _detached(call.outputs, copy=compares_outputs(layer)) if keeps_outputs(layer) else None
    awaited = AwaitedCall(replace(call, args=args, kwargs=kwargs, outputs=outputs), parameters, current_backward())
    if may_run_again(layer):
        device = tensors_in(outputs)[0].device.type
        autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        awaited.rerun = Rerun(autocast, state)
    return awaited


def _detached(value: Any, seen: dict[int, Tensor] | None = None, *, copy: bool = False) -> Any:
    """``value`` with its tensors cut off from the graph, which would otherwise live as long as they.

    What was one tensor in two places still is.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.detach().clone() if copy else value.detach()
        return seen[id(value)]
    return map_items(lambda item: _detached(item, seen, copy=copy), value)
