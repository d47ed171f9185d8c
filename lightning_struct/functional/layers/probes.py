"""Inputs and cotangents of a network's layers, in one pass for given cotangents of its outputs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_struct.functional.layers.calls import LayerCall
from lightning_struct.functional.layers.per_sample.contributions import Contribution, Uncovered
from lightning_struct.functional.layers.per_sample.recorded_calls import (
    RecordedCall,
    edge_of,
    is_watched,
    recorded_calls,
    watch,
)
from lightning_struct.functional.layers.recorder import CallRecorder
from lightning_struct.functional.torch_tools import call_with


class Probe(NamedTuple):
    """Result of back-propagating one vector.

    Attributes:
        uses: (layer, name of the parameter below it, its use) for each call of each layer.
        gradients: of the parameters that were asked for, by name; zero where nothing arrives.
    """

    uses: list[tuple[nn.Module, str, Contribution]]
    gradients: dict[str, Tensor]


class _Recorder(CallRecorder):
    """Keeps all calls of some layers, with the edges of the graph at which their cotangents arrive."""

    def __init__(self, layers: Collection[nn.Module]) -> None:
        super().__init__()
        self.calls: list[tuple[RecordedCall, list[GradientEdge | None]]] = []
        for layer in layers:
            self._hook_layer(layer, watched=is_watched(layer))

    def _is_recorded(self, layer: nn.Module) -> bool:
        return True

    def _watch(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return watch(layer, args, kwargs)

    def _called(self, call: LayerCall, watched: Any) -> None:
        # Edges of the graph, and not the tensors, which may be written over by the next layer.
        self.calls += [(made, list(map(edge_of, results))) for made, results in recorded_calls(call, watched)]


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
    recorder = _Recorder(layers)
    try:
        with torch.enable_grad():
            outputs = call_with(module, {}, tuple(args))
    finally:
        recorder.remove()
    wanted: list[Any] = [edge for _, edges in recorder.calls for edge in edges if edge is not None]
    wanted += parameters.values()
    cotangents_of_outputs = cotangent(outputs.detach()).to(outputs.dtype)
    found = iter(torch.autograd.grad(outputs, wanted, cotangents_of_outputs, allow_unused=True) if wanted else ())
    uses = []
    for made, edges in recorder.calls:
        cotangents = [None if edge is None else next(found) for edge in edges]
        if any(t is not None for t in cotangents):
            with suppress(Uncovered):
                uses += [(made.call.layer, name, use) for name, use in made.contributions(cotangents).items()]
    pairs = zip(parameters.items(), found, strict=True)
    return Probe(uses, {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
