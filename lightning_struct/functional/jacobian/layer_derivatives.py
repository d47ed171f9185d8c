"""Layers whose derivative is cheap in both directions, for a Jacobian that is multiplied often.

J v is the derivative of u -> Jᵀu: a backward pass through a backward pass. Torch's second derivatives of some layers
take far more than a product needs: those of recurrent layers run through each operation of each step in time, those of
normalisations through tens of small operations, and those of convolutions compute more than is needed. Within
:func:`layer_derivatives` these layers return the same outputs, and the classes below give their derivatives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_struct.functional.layers.kinds import recurrent_places
from lightning_struct.functional.layers.recurrent_cells import CELLS, CellTangents, CellWeights
from lightning_struct.functional.layers.registry import padding


class LayerDerivative(ABC):
    """A layer at one call: its outputs for some tensors (inputs, weights, biases), and its derivative there."""

    @abstractmethod
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs: new tensors, which may be changed in place."""

    @abstractmethod
    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The cotangents of the tensors by those of the outputs; None for those that are not needed."""

    @abstractmethod
    def push_forward(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The tangents of the outputs by those of the tensors, with None for zero; new tensors."""


def call_with_derivative(make: Callable[..., LayerDerivative], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return the outputs of ``make(*tensors)``, a node of the graph with the derivative that it gives.

    The graph may be differentiated once, and the result once more in the cotangents, in which it is linear
    function; not in the tensors, which are constants of it.
    """
    return _Call.apply(make, *tensors)


def is_covered(input: Any, *weights: Tensor | None) -> bool:
    """Whether a layer is called on a tensor with entries, in the dtype of its weights and without autocast."""
    if not isinstance(input, Tensor) or input.numel() == 0 or torch.is_autocast_enabled(input.device.type):
        return False
    return all(w is None or (w.dtype == input.dtype and w.device == input.device) for w in weights)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., LayerDerivative], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)  # so that torch sees changes of them in place
        ctx.derivative = derivative = make(*tensors)
        return derivative.outputs()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors
        return None, *_Transposed.apply(ctx.derivative, ctx.needs_input_grad[1:], *cotangents)


class _Transposed(torch.autograd.Function):
    """The cotangents of the tensors by those of the outputs."""

    @staticmethod
    def forward(
        ctx: Any, derivative: LayerDerivative, needed: tuple[bool, ...], *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.derivative = derivative
        return tuple(derivative.pull_back(needed, cotangents))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.derivative.push_forward(tangents)


def call_recurrent(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """Call the layer with this derivative; leave packed sequences, initial states and dropout to torch."""
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    drops = layer.training and layer.dropout > 0 and layer.num_layers > 1
    covered = hx is None and not drops and is_covered(input, *weights)
    if not covered or input.dim() != 3 or input.shape[2] != layer.input_size:
        return type(layer).forward(layer, input, hx)
    sequence = input.transpose(0, 1) if layer.batch_first else input
    last: list[Tensor] = []
    last_cells: list[Tensor] = []
    for level in range(layer.num_layers):
        of_directions = []
        for direction, place in enumerate(recurrent_places(layer, level)):
            weights = [getattr(layer, f"{name}_{place}", None) for name in CellWeights._fields]
            along = sequence.flip(0) if direction else sequence
            states, *last_cell = call_with_derivative(partial(_Recurrence, layer.mode), along, *weights)
            last.append(states[-1])
            last_cells += last_cell
            of_directions.append(states.flip(0) if direction else states)
        sequence = torch.cat(of_directions, 2) if layer.bidirectional else of_directions[0]
    output = sequence.transpose(0, 1) if layer.batch_first else sequence
    return output, (torch.stack(last), torch.stack(last_cells)) if last_cells else torch.stack(last)


class _Recurrence(LayerDerivative):
    """h_1..h_T, (T, N, state), and of an LSTM c_T, for inputs (T, N, in), weights, and zero initial states."""

    def __init__(self, mode: str, inputs: Tensor, *weights: Tensor) -> None:
        own = CellWeights(*weights)
        hidden = own.weight_hh.shape[0] // {"LSTM": 4, "GRU": 3}.get(mode, 1)
        initial = [inputs.new_zeros(inputs.shape[1], width) for width in (own.weight_hh.shape[1], hidden)]
        self._cell = CELLS[mode](inputs, own, initial)

    def outputs(self) -> tuple[Tensor, ...]:
        states, last_cell = self._cell.states[1:].clone(), self._cell.last_cell
        return (states,) if last_cell is None else (states, last_cell.clone())

    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        cell = self._cell
        of_states = cotangents[0].clone(memory_format=torch.contiguous_format)  # the pass adds to it
        of_cells = of_states.new_zeros(*of_states.shape[:2], cotangents[-1].shape[-1])
        if cell.last_cell is not None:
            of_cells[-1] = cotangents[1]
        by_inputs, by_states = cell.pull_back(of_states, of_cells)
        products: list[Callable[[], Tensor | None]] = [
            lambda: by_inputs @ cell.weights.weight_ih,
            lambda: _outer(by_inputs, cell.inputs),
            lambda: _outer(by_states, cell.states[:-1]),
            lambda: by_inputs.sum((0, 1)),
            lambda: by_states.sum((0, 1)),
            lambda: None if cell.projected is None else _outer(of_states, cell.projected),
        ]
        return [product() if is_needed else None for product, is_needed in zip(products, needed, strict=True)]

    def push_forward(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        of_inputs, *of_weights = tangents
        of_states, of_last = self._cell.push_forward(of_inputs, CellTangents(*of_weights))
        return (of_states,) if of_last is None else (of_states, of_last)


def _outer(cotangents: Tensor, multiplied: Tensor) -> Tensor:
    """Σ_t δ_t a_tᵀ, summed over the samples, too."""
    return cotangents.flatten(0, 1).t() @ multiplied.flatten(0, 1)


def call_convolution(layer: Any, input: Any) -> Any:
    """Call ``nn.Conv1d`` to ``nn.Conv3d`` with this derivative; leave other padding than by zeros to torch."""
    zeros = _padding(layer)
    plain = type(layer)._conv_forward in (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)
    covered = plain and zeros is not None and is_covered(input, layer.weight, layer.bias)
    if not covered or input.dim() != layer.weight.dim():
        return type(layer).forward(layer, input)
    options: dict[str, Any] = {"stride": layer.stride, "padding": zeros, "dilation": layer.dilation}
    options |= {"transposed": False, "output_padding": (0,) * len(layer.stride), "groups": layer.groups}
    (output,) = call_with_derivative(partial(_Filtered, options), input, layer.weight, layer.bias)
    return output


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Zeros on both sides of each dimension; None if there is something else, or more on one side."""
    pairs = padding(layer)
    if layer.padding_mode != "zeros" or any(before != after for before, after in pairs):
        return None
    return tuple(before for before, _ in pairs)


class _Filtered(LayerDerivative):
    """The outputs of a convolution for inputs (N, channels, ...), filters and a bias."""

    def __init__(self, options: dict[str, Any], inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._options, self._inputs, self._weight, self._bias = options, inputs, weight, bias

    def outputs(self) -> tuple[Tensor, ...]:
        return (self._convolved(self._inputs, self._weight, self._bias),)

    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        (of_outputs,) = cotangents
        found: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(
            of_outputs, self._inputs, self._weight, [len(self._weight)], **self._options, output_mask=list(needed)
        )
        return found

    def push_forward(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        of_inputs, of_weight, of_bias = tangents
        if of_weight is not None:
            found = self._convolved(self._inputs, of_weight, of_bias)
            return (found if of_inputs is None else found.add_(self._convolved(of_inputs, self._weight, None)),)
        moved = torch.zeros_like(self._inputs) if of_inputs is None else of_inputs
        return (self._convolved(moved, self._weight, of_bias),)

    def _convolved(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(inputs, weight, bias, **self._options)


_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
# Cotangents of the outputs, a weight or None, and the needed ones -> cotangents of inputs, weight and bias.
_Backward = Callable[[Tensor, Tensor | None, Sequence[bool]], Sequence[Tensor | None]]


def call_layer_norm(layer: nn.LayerNorm, input: Any) -> Tensor:
    """Call the layer with this derivative, or leave the call to torch."""
    shape = list(layer.normalized_shape)
    covered = is_covered(input, layer.weight, layer.bias)
    if not covered or input.dim() <= len(shape) or list(input.shape[-len(shape) :]) != shape:
        return type(layer).forward(layer, input)

    def make(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> LayerDerivative:
        inputs = inputs.contiguous()
        normalised, mean, scale = torch.native_layer_norm(inputs, shape, None, None, layer.eps)

        def backward(u: Tensor, w: Tensor | None, needed: Sequence[bool]) -> Any:
            # it takes the gradient of a bias only if there is one
            b = None if w is None else bias
            return torch.ops.aten.native_layer_norm_backward(u, inputs, shape, mean, scale, w, b, list(needed))

        return _Normalised(normalised, weight, bias, backward)

    return _called(make, input, layer)


def call_group_norm(layer: nn.GroupNorm, input: Any) -> Tensor:
    """Call the layer with this derivative, or leave the call to torch."""
    if not is_covered(input, layer.weight, layer.bias) or input.dim() < 2 or input.shape[1] != layer.num_channels:
        return type(layer).forward(layer, input)
    n, channels = input.shape[:2]
    sizes = (n, channels, input.numel() // (n * channels), layer.num_groups)

    def make(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> LayerDerivative:
        inputs = inputs.contiguous()
        normalised, mean, scale = torch.native_group_norm(inputs, None, None, *sizes, layer.eps)

        def backward(u: Tensor, w: Tensor | None, needed: Sequence[bool]) -> Any:
            return torch.ops.aten.native_group_norm_backward(u, inputs, mean, scale, w, *sizes, list(needed))

        return _Normalised(normalised, weight, bias, backward, (-1, *(1,) * (inputs.dim() - 2)))

    return _called(make, input, layer)


def call_batch_norm(layer: _BatchNorm, input: Any) -> Tensor:
    """Call the layer with this derivative and update its statistics, or leave the call to torch."""
    covered = is_covered(input, layer.weight, layer.bias, layer.running_mean)
    if not covered or input.dim() < 2 or input.shape[1] != layer.num_features:
        return type(layer).forward(layer, input)
    with torch.no_grad():
        type(layer).forward(layer, input)  # for the statistics, and for the errors of torch
    of_batch = layer.training or layer.running_mean is None
    statistics = (None, None) if of_batch else (layer.running_mean, layer.running_var)

    def make(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> LayerDerivative:
        normalised, *saved = torch.native_batch_norm(inputs, None, None, *statistics, of_batch, 0.0, layer.eps)

        def backward(u: Tensor, w: Tensor | None, needed: Sequence[bool]) -> Any:
            return torch.ops.aten.native_batch_norm_backward(
                u, inputs, w, *statistics, *saved, of_batch, layer.eps, list(needed)
            )

        return _Normalised(normalised, weight, bias, backward, (-1, *(1,) * (inputs.dim() - 2)))

    return _called(make, input, layer)


def _called(make: Callable[..., LayerDerivative], input: Tensor, layer: Any) -> Tensor:
    (output,) = call_with_derivative(make, input, layer.weight, layer.bias)
    return output


class _Normalised(LayerDerivative):
    """w∘x̂ + b.

    Args:
        normalised: x̂.
        weight, bias: w and b; None for one and zero.
        backward: of the normalisation.
        shape: in which w and b stand beside x̂; None for their own.
    """

    def __init__(self, normalised: Tensor, weight: Any, bias: Any, backward: _Backward, shape: Any = None) -> None:
        self._normalised, self._backward, self._shape = normalised, backward, shape
        self._weight, self._bias = weight, bias

    def outputs(self) -> tuple[Tensor, ...]:
        return (self._scaled(self._normalised.clone(), self._weight, self._bias),)

    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return self._backward(cotangents[0].contiguous(), self._weight, needed)

    def push_forward(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        of_inputs, of_weight, of_bias = tangents
        found = torch.zeros_like(self._normalised)
        if of_inputs is not None:
            moved: Any = self._backward(of_inputs.contiguous(), None, (True, False, False))[0]
            found = self._scaled(moved, self._weight, None)
        if of_weight is not None:
            found.addcmul_(self._normalised, self._beside(of_weight))
        return (found if of_bias is None else found.add_(self._beside(of_bias)),)

    def _scaled(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """weight∘x + bias, in place of x."""
        if weight is not None:
            x.mul_(self._beside(weight))
        return x if bias is None else x.add_(self._beside(bias))

    def _beside(self, tensor: Tensor) -> Tensor:
        return tensor if self._shape is None else tensor.view(self._shape)


_CALLS: dict[type[nn.Module], Callable[..., Any]] = {
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), call_recurrent),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), call_convolution),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), call_batch_norm),
    nn.LayerNorm: call_layer_norm,
    nn.GroupNorm: call_group_norm,
}


@contextmanager
def layer_derivatives(module: nn.Module | None) -> Iterator[None]:
    """Context manager: layers of a module are differentiated by the classes above.

    A graph that is made within it has one backward pass, and a second one by the cotangents of the first, which gives
    products with the Jacobian. It has no second derivative in the weights or inputs: those are constants of it. It
    covers layers of torch's classes, and of classes derived from them with the same ``forward``; other calls, such as
    those under autocast, are left to torch.
    """
    calls: dict[nn.Module, Callable[..., Any]] = {}
    for layer in () if module is None else module.modules():
        kind = next((kind for kind in _CALLS if isinstance(layer, kind)), None)
        if kind is not None and "forward" not in vars(layer) and type(layer).forward is kind.forward:
            calls[layer] = _CALLS[kind]
    for layer, call in calls.items():
        layer.forward = partial(call, layer)
    try:
        yield
    finally:
        for layer in calls:
            del layer.forward
