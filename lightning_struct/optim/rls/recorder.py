"""The layers that RLS trains: their weights, and hooks that record the inputs of calls whose output gets a gradient."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_struct.functional.layers.calls import LayerCall, tensors_in
from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.recorder import CallRecorder, no_hook
from lightning_struct.functional.torch_tools import current_backward, is_functorch_wrapped_tensor
from lightning_struct.optim.requirements import LOWER_PRECISION
from lightning_struct.optim.rls.all_weights import check_inverses_fit
from lightning_struct.optim.rls.layers import TrainedLayer
from lightning_struct.optim.rls.settings import Settings
from lightning_struct.optim.rls.statistics import Use, UseInPass
from lightning_struct.optim.rls.weights import TrainedWeight

# Number of uses in earlier passes that are kept though no gradient of the weight has come from them.
MOST_WAITING = 64


class InputRecorder(CallRecorder):
    """Weights of layers, one for each parameter that is trained, and hooks on the layers that record their inputs.

    The hooks take the sums behind x̄ (equations (31), (51), (72), (80), (92)). A call without gradients, as in
    validation, or whose loss is dropped, adds nothing. A use counts if its pass adds to the gradient of the weight.

    Args:
        layers: of :func:`layers_to_train`.
        settings: of the optimizer.

    Attributes:
        weights: all that are trained.
        found_unfrozen: called before a call of a layer is recorded that has weights that are not trained yet.
    """

    def __init__(self, layers: dict[nn.Module, TrainedLayer], settings: Settings) -> None:
        super().__init__()
        self.layers, self._settings = layers, settings
        self.weights: list[TrainedWeight] = []
        self._of_parameter: dict[nn.Parameter, TrainedWeight] = {}
        self._taken: set[nn.Parameter] = set()  # biases
        self.found_unfrozen: Callable[..., None] = no_hook
        self._weight_of: dict[nn.Parameter, TrainedWeight] = {}
        # Uses whose outputs have got a gradient, and the weight has not; those of the last pass are at the end.
        self._waiting: dict[TrainedWeight, dict[Use, UseInPass]] = defaultdict(dict)

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
            self._hook_gradients(new)
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
        """Begin to record."""
        # A compiled graph is broken at each layer: the sums that are recorded must not become part of it.
        self._record_outside_of_graphs: Callable[..., None] = torch.compiler.disable(self._record)
        for layer, trained in self.layers.items():
            self._hook_layer(layer, watched=trained.reader.watch is not None)
        self._hook_gradients(self.weights)

    def _hook_gradients(self, weights: Iterable[TrainedWeight]) -> None:
        """Note the gradients of weights and biases: they say which uses count, and whether they were cleared."""
        for weight in weights:
            for parameter in weight.parameters:
                self._weight_of[parameter] = weight
                self._hook_parameter(parameter)

    def __getstate__(self) -> dict[str, Any]:
        own = ("layers", "_settings", "weights", "_of_parameter", "_taken")
        return {name: getattr(self, name) for name in own} | {"attached": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached = state.pop("attached")
        self.__init__(state["layers"], state["_settings"])  # type: ignore[misc]
        vars(self).update(state)
        if attached:
            self.attach()

    def _is_recorded(self, layer: nn.Module) -> bool:
        return layer in self.layers and torch.is_grad_enabled() and not torch.jit.is_tracing()

    def _watch(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self.layers[layer].reader.watch
        return None if watch is None else watch(layer)

    def _called(self, call: LayerCall, watched: Any) -> None:
        self._record_outside_of_graphs(call, watched)

    def _record(self, call: LayerCall, watched: Any) -> None:
        trained = self.layers[call.layer]
        if not trained.is_complete():
            self.found_unfrozen()
        tensors = [tensor for tensor in tensors_in(call.outputs) if tensor.requires_grad]
        if not tensors or not any(p.requires_grad for weight in trained.weights.values() for p in weight.parameters):
            return
        if any(map(is_functorch_wrapped_tensor, tensors)):
            return  # within torch.func, whose derivatives do not add to gradients
        with torch.no_grad(), without_autocast(tensors[0].device.type):
            uses = trained.reader.read(call, trained, watched)
        self._hook_gradients(weight for weight, _ in uses)  # they may have been frozen before

        alone, training = len(tensors) == 1, call.layer.training  # the hook must not hold the tensors that hold it

        def note(cotangent: Tensor) -> None:
            kept, makes_graph = cotangent.detach() if alone else None, torch.is_grad_enabled()
            for weight, use in uses:
                self._note_cotangent(weight, UseInPass(use, kept, current_backward(), makes_graph and training))

        if alone:
            tensors[0].register_hook(note)
        else:
            register_multi_grad_hook(tensors, note, mode="any")

    # --- backward passes ---------------------------------------------------------------------------------------------

    def _note_cotangent(self, weight: TrainedWeight, use: UseInPass) -> None:
        """Let a use wait for the gradient of its weight; uses of other passes wait if these may be differentiated.

        If others have cleared the gradients, the statistics begin anew.
        """
        if weight.statistics.is_cleared():
            self.forget([weight])
        waiting = self._waiting[weight]
        waiting.pop(use.use, None)
        if waiting and next(reversed(waiting.values())).backward != use.backward:
            of_pass = [other for other in waiting.values() if other.backward == use.backward]
            others = [o for o in waiting.values() if o.backward != use.backward and o.may_be_differentiated]
            waiting = self._waiting[weight] = {o.use: o for o in [*others[-MOST_WAITING:], *of_pass]}
        waiting[use.use] = use

    def _accumulated(self, parameter: Any) -> None:
        """Count the uses of a backward pass that has added to the gradient of a weight or of a bias.

        The gradient of the weight comes when all its uses have got theirs. Passes by ``torch.autograd.grad`` add none;
        but if the loss is made of their derivatives, the gradient may come through these alone. So if no output has got
        a gradient in this pass, those count that made a graph.
        """
        weight = self._weight_of[parameter]
        if parameter is weight.parameter or not weight.parameter.requires_grad:
            waiting = list(self._waiting.pop(weight, {}).values())
            of_pass = [use for use in waiting if use.backward == current_backward()]
            for use in of_pass or [use for use in waiting if use.may_be_differentiated]:
                weight.statistics.add(use.use, use.cotangent if of_pass else None)
            weight.statistics.in_pass = 0
        if parameter.grad is not None:
            weight.statistics.versions[parameter] = parameter.grad._version

    def forget(self, weights: Iterable[TrainedWeight] | None = None) -> None:
        """Drop the inputs since the last step, of all weights or of some.

        Uses in passes that may be differentiated wait on: Lightning clears gradients after the forward pass, in which a
        loss may have taken derivatives.
        """
        for weight in self.weights if weights is None else weights:
            weight.forget()
            waiting = self._waiting.pop(weight, {})
            if kept := {use: of_pass for use, of_pass in waiting.items() if of_pass.may_be_differentiated}:
                self._waiting[weight] = kept

    def end_step(self) -> None:
        """Forget everything, also passes that might be differentiated yet."""
        self._waiting.clear()
        self.forget()


def without_autocast(device: str) -> Any:
    """A context in which products keep the precision of their factors."""
    # Devices without autocast, as "meta", cannot even be asked whether it is enabled.
    is_enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else nullcontext()
