"""Inputs and cotangents of a network's layers, in one pass for given cotangents of its outputs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_struct.functional.layers.calls import LayerCall, tensors_in
from lightning_struct.functional.layers.per_sample import inner_calls
from lightning_struct.functional.layers.per_sample.contributions import Contribution, Uncovered
from lightning_struct.functional.layers.per_sample.layer_contributions import contributions, draws_random_numbers
from lightning_struct.functional.layers.registry import base_call
from lightning_struct.functional.randomness import RandomState, random_state, restored_random_state
from lightning_struct.functional.torch_tools import call_with


class _Probed(NamedTuple):
    """A call of a layer, or a use inside of it.

    Attributes:
        layer: the layer.
        edges: of the graph, where the cotangents arrive.
        read: its contributions, given the cotangents; raises Uncovered if the samples cannot be told apart.
    """

    layer: nn.Module
    edges: Sequence[GradientEdge | None]
    read: Callable[[list[Any]], dict[str, Contribution]]


class Probe(NamedTuple):
    """Result of back-propagating one vector.

    Attributes:
        uses: (layer, name of the parameter below it, its use) for each call of each layer.
        gradients: of the parameters that were asked for, by name; zero where nothing arrives.
    """

    uses: list[tuple[nn.Module, str, Contribution]]
    gradients: dict[str, Tensor]


def probe_layers(
    module: nn.Module,
    args: Sequence[Any],
    layers: Collection[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    cotangent: Callable[[Tensor], Tensor],
) -> Probe:
    """Run a module once, back-propagate, and read off the gradients that each call of the layers gives their
    parameters.

    The module's buffers stay as they are. A call whose samples cannot be told apart is left out, as is one through
    which nothing comes back.

    Args:
        module: called as ``module(*args)``.
        args: its inputs.
        layers: modules below it.
        parameters: those whose whole gradient is wanted.
        cotangent: from the module's outputs to the vector that is back-propagated.
    """
    calls: list[_Probed] = []
    states: dict[nn.Module, RandomState] = {}
    recordings: dict[nn.Module, inner_calls.RecordedCalls] = {}

    def before(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if draws_random_numbers(layer):
            states[layer] = random_state(*tensors_in((inputs, kwargs)))
        elif inner_calls.is_recorded(layer):
            recordings[layer] = inner_calls.RecordedCalls().__enter__()

    def after(layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        call, recording = LayerCall(layer, inputs, kwargs, outputs), recordings.pop(layer, None)
        if recording is not None:
            recording.__exit__()
            if outputs is not None:  # else it has failed
                for edge, use in inner_calls.parameter_uses(base_call(call), recording.calls):
                    calls.append(_Probed(layer, [edge], partial(_contributions_of_use, use)))
            return
        # An edge of the graph, and not the tensor, which may be written over by the next layer.
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in tensors_in(outputs)]
        calls.append(_Probed(layer, edges, partial(_contributions, call, states.pop(layer, None))))

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    for layer in layers:
        options = {"prepend": True, "with_kwargs": True, "always_call": inner_calls.is_recorded(layer)}
        handles.append(layer.register_forward_hook(after, **options))
    try:
        with torch.enable_grad():
            outputs = call_with(module, {}, tuple(args))
    finally:
        for handle in handles:
            handle.remove()

    wanted: list[Any] = [edge for probed in calls for edge in probed.edges if edge is not None]
    wanted += parameters.values()
    cotangents_of_outputs = cotangent(outputs.detach()).to(outputs.dtype)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents_of_outputs, allow_unused=True) if wanted else ())
    uses = []
    for probed in calls:
        cotangents = [None if edge is None else next(found) for edge in probed.edges]
        if any(t is not None for t in cotangents):
            with suppress(Uncovered):
                uses += [(probed.layer, name, use) for name, use in probed.read(cotangents).items()]
    pairs = zip(parameters.items(), found, strict=True)
    return Probe(uses, {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})


def _contributions(call: LayerCall, state: RandomState | None, cotangents: list[Any]) -> dict[str, Contribution]:
    with nullcontext() if state is None else restored_random_state(state):
        return contributions(replace(call, cotangents=cotangents))


def _contributions_of_use(use: inner_calls.ParameterUse, cotangents: list[Any]) -> dict[str, Contribution]:
    return use.contributions(cotangents[0], None)
