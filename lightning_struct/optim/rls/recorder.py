"""The layers that RLS trains: their weights, and hooks that record the inputs of calls whose output gets a gradient."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_struct.functional.layers.calls import LayerCall, tensors_in
from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.torch_tools import current_backward, is_functorch_wrapped_tensor
from lightning_struct.optim.requirements import LOWER_PRECISION
from lightning_struct.optim.rls.all_weights import check_inverses_fit
from lightning_struct.optim.rls.layers import TrainedLayer
from lightning_struct.optim.rls.settings import Settings
from lightning_struct.optim.rls.statistics import Arrival
from lightning_struct.optim.rls.weights import TrainedWeight


class InputRecorder:
    """Weights of layers, one for each parameter that is trained, and hooks on the layers that record their inputs.

    The hooks take the sums behind x̄ (equations (31), (51), (72), (80), (92)). A call without gradients, as in
    validation, or whose loss is dropped, adds nothing. A copy of a layer, or a layer that is unpickled, keeps a hook
    that does nothing.

    Args:
        layers: of :func:`layers_to_train`.
        settings: of the optimizer.

    Attributes:
        weights: all that are trained.
        found_unfrozen: called before a call of a layer is recorded that has weights that are not trained yet.
    """

    def __init__(self, layers: dict[nn.Module, TrainedLayer], settings: Settings) -> None:
        self.layers, self._settings = layers, settings
        self.weights: list[TrainedWeight] = []
        self._of_parameter: dict[nn.Parameter, TrainedWeight] = {}
        self._taken: set[nn.Parameter] = set()  # biases
        self.found_unfrozen: Callable[..., None] = _nothing
        self._handles: list[RemovableHandle] = []
        self._watched: dict[nn.Module, AbstractContextManager[Any]] = {}
        self._noted: set[tuple[TrainedWeight, nn.Parameter]] = set()

    # --- weights -----------------------------------------------------------------------------------------------------

    def extend(self, is_trained: Callable[[nn.Parameter], bool]) -> list[TrainedWeight]:
        """Take in all weights that are trained now, and their trained biases; returned are the new weights.

        Raises:
            ValueError: a weight is neither float32 nor float64; layers with one weight see it as other matrices.
            MemoryError: their P take more than is free.
        """
        before = len(self._of_parameter)
        for layer, matrix, parameter, bias in self._untrained():
            if is_trained(parameter):
                weight = layer.weights[matrix.weight] = self._weight(layer.name_of(matrix), parameter, matrix)
                if bias is None or not is_trained(bias) or bias in self._taken:
                    weight.add_layer(None)
                else:
                    self._taken.add(bias)
                    weight.add_layer(bias)
        new = list(self._of_parameter.values())[before:]
        check_inverses_fit(new)
        self.weights += new
        if self._handles:
            self._watch_gradients(new)
        return new

    def _weight(self, name: str, parameter: nn.Parameter, matrix: Matrix) -> TrainedWeight:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"RLS needs weights in float32 or float64, but {name} is {parameter.dtype}; {LOWER_PRECISION}"
            )
        groups, transposed = matrix.groups, matrix.transposed
        if parameter not in self._of_parameter:
            self._of_parameter[parameter] = TrainedWeight(
                name, parameter, self._settings, groups=groups, transposed=transposed
            )
        weight = self._of_parameter[parameter]
        if (weight.groups, weight.transposed) != (groups, transposed):
            raise ValueError(
                f"{weight.name} is the weight of layers with {weight.groups} and with {groups} groups, or of one that "
                "is stored as (in, out) and of one that is not: exclude one"
            )
        return weight

    def frozen(self) -> list[str]:
        """Names of the weights that do not require gradients."""
        return [layer.name_of(matrix) for layer, matrix, weight, _ in self._untrained() if not weight.requires_grad]

    def _untrained(self) -> Iterator[tuple[TrainedLayer, Matrix, nn.Parameter, nn.Parameter | None]]:
        """Layer, matrix, parameter and bias of the weights that are not trained yet."""
        for module, layer in self.layers.items():
            if not layer.is_complete():
                parameters = dict(module.named_parameters(remove_duplicate=False))
                for matrix in layer.matrices:
                    if matrix.weight in parameters and matrix.weight not in layer.weights:
                        yield layer, matrix, parameters[matrix.weight], parameters.get(matrix.bias or "")

    def without_parameter(self) -> list[str]:
        """Names of the layers whose weights are computed from parameters, as by ``weight_norm`` or pruning."""
        return [
            trained.name or type(layer).__name__
            for layer, trained in self.layers.items()
            if not {matrix.weight for matrix in trained.matrices} <= set(layer._parameters)
        ]

    # --- hooks -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to record: hook the layers, before other hooks, which may replace an output."""
        # A compiled graph is broken at each layer: the sums that are recorded must not become part of it.
        self._record_outside_of_graphs: Callable[..., None] = torch.compiler.disable(self._record)
        for layer, trained in self.layers.items():
            if trained.reader.watch is not None:
                self._handles.append(layer.register_forward_pre_hook(WeakHook(self.watch), with_kwargs=True))
            recording = layer.register_forward_hook(
                WeakHook(self.record), prepend=True, with_kwargs=True, always_call=True
            )
            self._handles.append(recording)
        self._watch_gradients(self.weights)
        weakref.finalize(self, _remove, self._handles)

    def _watch_gradients(self, weights: Sequence[TrainedWeight]) -> None:
        """Note the gradients of weights and biases: they say which uses count, and whether they were cleared."""
        for weight in weights:
            for parameter in weight.parameters:
                if parameter.requires_grad and (weight, parameter) not in self._noted:
                    self._noted.add((weight, parameter))
                    hook = WeakHook(weight.note_gradient)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Take the hooks away."""
        _remove(self._handles)

    def __getstate__(self) -> dict[str, Any]:
        own = ("layers", "_settings", "weights", "_of_parameter", "_taken")
        return {name: getattr(self, name) for name in own} | {"attached": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached = state.pop("attached")
        self.__init__(state["layers"], state["_settings"])  # type: ignore[misc]
        vars(self).update(state)
        if attached:
            self.attach()

    def watch(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the context that the reader of a layer needs around its call."""
        if layer in self.layers and torch.is_grad_enabled():
            watch = self.layers[layer].reader.watch
            if watch is not None and (watched := watch(layer)) is not None:
                watched.__enter__()
                self._watched[layer] = watched

    def record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Note a call of a layer."""
        watched = self._watched.pop(layer, None)
        if watched is not None:
            watched.__exit__(None, None, None)
        if layer in self.layers and torch.is_grad_enabled() and not torch.jit.is_tracing():
            self._record_outside_of_graphs(layer, args, kwargs, outputs, watched)

    def _record(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, watched: Any
    ) -> None:
        trained = self.layers[layer]
        if not trained.is_complete():
            self.found_unfrozen()
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        if not tensors or not any(p.requires_grad for weight in trained.weights.values() for p in weight.parameters):
            return
        if any(map(is_functorch_wrapped_tensor, tensors)):
            return  # within torch.func, whose derivatives do not add to gradients
        with torch.no_grad(), without_autocast(tensors[0].device.type):
            uses = trained.reader.read(LayerCall(layer, args, kwargs, outputs), trained, watched)
        self._watch_gradients([weight for weight, _ in uses])  # which may have been frozen before

        alone, training = len(tensors) == 1, layer.training  # the hook must not hold the tensors that hold it

        def arrive(cotangent: Tensor) -> None:
            kept, makes_graph = cotangent.detach() if alone else None, torch.is_grad_enabled()
            for weight, use in uses:
                weight.arrive(Arrival(use, kept, current_backward(), makes_graph and training))

        if alone:
            tensors[0].register_hook(arrive)
        else:
            register_multi_grad_hook(tensors, arrive, mode="any")


class WeakHook:
    """A hook that does not keep the object of its method alive; copies of modules and parameters leave it behind."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *call: Any) -> None:
        method = self._method()
        if method is not None:
            method(*call)

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
