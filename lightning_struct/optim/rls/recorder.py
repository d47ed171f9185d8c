"""Hooks that tell RLS what the layers read, of the calls through which a gradient comes back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_struct.functional.layers.calls import LayerCall, tensors_in
from lightning_struct.functional.torch_tools import current_backward, is_functorch_wrapped_tensor
from lightning_struct.optim.rls.layers import LayerReader
from lightning_struct.optim.rls.selection import WeightTable
from lightning_struct.optim.rls.statistics import Arrival
from lightning_struct.optim.rls.weights import TrainedWeight


class InputRecorder:
    """Recorder of the sums behind x̄ (equations (31), (51), (72), (80), (92)), of calls whose output gets a gradient.

    A call without gradients, as in validation, or whose loss is dropped, adds nothing. A copy of a layer, or a layer
    that is unpickled, keeps a hook that does nothing.

    Args:
        layers: of each layer to be hooked, its reader.
        table: the trained weights of the layers; it may be extended.

    Attributes:
        found_unfrozen: a weak method, called before a call of a layer is recorded that has parameters that are not
            trained yet but require gradients.
    """

    def __init__(self, layers: Mapping[nn.Module, LayerReader], table: WeightTable) -> None:
        self._layers, self._table = layers, table
        self.found_unfrozen: Callable[[], Callable[[], None] | None] = _nothing
        self._handles: list[RemovableHandle] = []
        self._watched: dict[nn.Module, AbstractContextManager[Any]] = {}
        self._noted: set[tuple[TrainedWeight, nn.Parameter]] = set()

    def attach(self) -> None:
        """Begin to record: hook the layers, before other hooks, which may replace an output."""
        # A compiled graph is broken at each layer: what is recorded must not become part of it.
        self._record_outside_of_graphs: Callable[..., None] = torch.compiler.disable(self._record)
        for layer, reader in self._layers.items():
            if reader.watch is not None:
                watching = _Hook(self, InputRecorder.watch)
                self._handles.append(layer.register_forward_pre_hook(watching, with_kwargs=True))
            recording = _Hook(self, InputRecorder.record)
            self._handles.append(
                layer.register_forward_hook(recording, prepend=True, with_kwargs=True, always_call=True)
            )
        for weight in self._table.weights:
            self.watch_gradients(weight)
        weakref.finalize(self, _remove, self._handles)

    def watch_gradients(self, weight: TrainedWeight) -> None:
        """Note the gradients of a weight and its biases: they say which uses count, and whether they were cleared."""
        for parameter in weight.parameters:
            if parameter.requires_grad and (weight, parameter) not in self._noted:
                self._noted.add((weight, parameter))
                hook = _GradientHook(weight)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Take the hooks away."""
        _remove(self._handles)

    def __contains__(self, layer: nn.Module) -> bool:
        return layer in self._layers

    def __getstate__(self) -> dict[str, Any]:
        return {"_layers": self._layers, "_table": self._table, "attached": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._layers, self._table = state["_layers"], state["_table"]
        self._handles, self._watched, self._noted, self.found_unfrozen = [], {}, set(), _nothing
        if state["attached"]:
            self.attach()

    def watch(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put a call of a layer under what its reader needs."""
        reader = self._layers[layer]
        assert reader.watch is not None
        if torch.is_grad_enabled() and (watched := reader.watch(layer)) is not None:
            watched.__enter__()
            self._watched[layer] = watched

    def record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Note a call of a layer."""
        watched = self._watched.pop(layer, None)
        if watched is not None:
            watched.__exit__(None, None, None)
        if torch.is_grad_enabled() and not torch.jit.is_tracing():
            self._record_outside_of_graphs(layer, args, kwargs, outputs, watched)

    def _record(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, watched: Any
    ) -> None:
        if layer in self._table.incomplete and (unfrozen := self.found_unfrozen()) is not None:
            unfrozen()
        reader, weights = self._layers[layer], self._table.of_layers[layer]
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        if not tensors or not any(p.requires_grad for weight in weights.values() for p in weight.parameters):
            return
        if any(map(is_functorch_wrapped_tensor, tensors)):
            return  # within torch.func, whose derivatives do not add to gradients
        device = tensors[0].device.type
        with torch.no_grad(), without_autocast(device):
            uses = reader.read(LayerCall(layer, args, kwargs, outputs), weights, watched)
        for weight, _ in uses:
            self.watch_gradients(weight)  # which may have been frozen before

        alone, training = len(tensors) == 1, layer.training  # the hook must not hold the tensors that hold it

        def arrive(cotangent: Tensor) -> None:
            kept, makes_graph = cotangent.detach() if alone else None, torch.is_grad_enabled()
            for weight, use in uses:
                weight.arrive(Arrival(use, kept, current_backward(), makes_graph and training))

        if alone:
            tensors[0].register_hook(arrive)
        else:
            register_multi_grad_hook(tensors, arrive, mode="any")


class _GradientHook:
    """Tells a weight that its gradient has changed, without keeping it alive; not copied with a parameter."""

    def __init__(self, weight: TrainedWeight) -> None:
        self._weight = weakref.ref(weight)

    def __call__(self, parameter: Tensor) -> None:
        weight = self._weight()
        if weight is not None:
            weight.note_gradient(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, ()


class _Hook:
    """A forward hook that does not keep its recorder alive and is left behind when a module is copied or pickled."""

    def __init__(self, recorder: InputRecorder, method: Callable[..., None]) -> None:
        self._recorder, self._method = weakref.ref(recorder), method

    def __call__(self, layer: nn.Module, *call: Any) -> None:
        recorder = self._recorder()
        if recorder is not None and layer in recorder:
            self._method(recorder, layer, *call)

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return _nothing


def _nothing(*call: Any) -> None:
    """The hook of a copied layer."""


def without_autocast(device: str) -> Any:
    """A context in which products keep the precision of their factors."""
    # Devices without autocast, as "meta", cannot even be asked whether it is enabled.
    is_enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else nullcontext()


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
