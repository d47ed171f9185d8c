"""Calls of layers, and uses of parameters inside of them, as they are kept until their cotangents are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_struct.functional.layers.calls import LayerCall, map_leaves, tensors_in
from lightning_struct.functional.layers.per_sample import inner_calls
from lightning_struct.functional.layers.per_sample.contributions import Contribution
from lightning_struct.functional.layers.per_sample.layer_contributions import (
    contributions,
    draws_random_numbers,
    reader_of,
)
from lightning_struct.functional.layers.registry import base_call, owned_parameters
from lightning_struct.functional.randomness import (
    RandomState,
    isolated_host_generators,
    random_state,
    restored_random_state,
)
from lightning_struct.functional.torch_tools import current_backward

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(eq=False)
class RecordedCall:
    """One call of a layer whose cotangents are not known yet.

    Attributes:
        call: without cotangents, and cut off from the graph.
        parameters: those that are trained and that it uses, by name.
        backward: the pass within which it was made, by a checkpoint, or -1.
        use: the one use inside of the call that is recorded; None for the whole call.
        autocast: (device, dtype, enabled) of the call, for running the layer again; None if it is not.
        random_state: of the generators before the call, for the same.
        accumulated: the parameters whose gradients it has taken part in.
    """

    call: LayerCall
    parameters: dict[str, nn.Parameter]
    backward: int = field(default_factory=current_backward)
    use: inner_calls.ParameterUse | None = None
    autocast: tuple[str, torch.dtype, bool] | None = None
    random_state: RandomState | None = None
    accumulated: set[nn.Parameter] = field(default_factory=set)

    def contributions(self, cotangents: Sequence[Tensor | None]) -> dict[str, Contribution]:
        """Each sample's share of the gradients of the parameters, given the cotangents of the results.

        Raises:
            Uncovered: the samples cannot be told apart.
        """
        call = replace(self.call, cotangents=cotangents)
        if self.use is not None:
            return self.use.contributions(call.cotangent, call.samples)
        if self.autocast is None:
            return contributions(call)
        restored = nullcontext() if self.random_state is None else restored_random_state(self.random_state)
        with torch.autocast(*self.autocast, cache_enabled=False), restored, isolated_host_generators():
            return contributions(call)


class _StateBefore:
    """A context that keeps the state of the random generators before a call."""

    def __init__(self, *tensors: Tensor) -> None:
        self.state = random_state(*tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


Watched: TypeAlias = inner_calls.LinearCalls | inner_calls.BaseCalls | _StateBefore


def is_watched(layer: nn.Module) -> bool:
    """Whether :func:`watch` may return a context for calls of the layer."""
    is_inner = inner_calls.calls_linear(layer) or inner_calls.calls_base(layer)
    return is_inner or (reader_of(layer).is_known and reader_of(layer).runs_again)


def watch(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watched | None:
    """The context for a call of a layer whose arguments and outputs do not show all; else None."""
    if inner_calls.calls_linear(layer):
        return inner_calls.LinearCalls()
    if inner_calls.calls_base(layer):
        return inner_calls.BaseCalls(layer)
    return _StateBefore(*tensors_in((args, kwargs))) if draws_random_numbers(layer) else None


def recorded_calls(call: LayerCall, watched: Watched | None) -> Iterator[tuple[RecordedCall, Sequence[Tensor]]]:
    """The inner calls, or uses of parameters, that make up one call of a layer, with their results.

    The records are cut off from the graph, which would otherwise live as long as they.

    Args:
        call: with its outputs.
        watched: the context from :func:`watch` in which it was made.
    """
    if isinstance(watched, inner_calls.LinearCalls):
        bare = replace(call, args=(), kwargs={}, outputs=None)
        for result, use in inner_calls.parameter_uses(base_call(replace(call, outputs=None)), watched.calls):
            yield RecordedCall(bare, use.parameters, use=use), [result]
        return
    inner = watched.calls if isinstance(watched, inner_calls.BaseCalls) else []
    state = watched.state if isinstance(watched, _StateBefore) else None
    for made, state_before in inner or [(call, state)]:
        made = replace(call, args=made.args, kwargs=made.kwargs, outputs=made.outputs, of_base=made.of_base)
        yield _recorded(made, state_before), tensors_in(made.outputs)


def _recorded(call: LayerCall, state: RandomState | None) -> RecordedCall:
    args, kwargs = _detached((call.args, call.kwargs))
    reader, outputs = reader_of(call.layer), None
    if reader.runs_again or reader.declared:
        # if they are compared they must be those of the call, which the next layer may write over
        outputs = _detached(call.outputs, copy=not reader.is_known or draws_random_numbers(call.layer))
    parameters = {name: p for name, p in owned_parameters(call.layer).items() if p.requires_grad}
    recorded = RecordedCall(replace(call, args=args, kwargs=kwargs, outputs=outputs), parameters)
    if reader.runs_again and (tensors := tensors_in(outputs)):
        device = tensors[0].device.type
        recorded.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        recorded.random_state = state
    return recorded


def edge_of(result: Tensor) -> GradientEdge | None:
    """The edge of the graph at which the cotangent of a result arrives; None if there will be none."""
    return get_gradient_edge(result) if result.requires_grad and not result.is_leaf else None


def _detached(value: Any, *, copy: bool = False) -> Any:
    """``value`` with its tensors cut off from the graph. A tensor in two places remains one tensor."""
    seen: dict[int, Tensor] = {}

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            seen[id(leaf)] = leaf.detach().clone() if copy else leaf.detach()
        return seen.get(id(leaf), leaf)

    return map_leaves(cut, value)
