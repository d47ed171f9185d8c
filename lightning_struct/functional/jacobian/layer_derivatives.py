"""Recurrent layers whose derivative is cheap in both directions, for a Jacobian that is multiplied often.

J v is the derivative of u -> Jᵀu: a backward pass through a backward pass. Torch's second derivatives of recurrent
layers run through each operation of each step in time and take far more than a product needs. Within
:func:`layer_derivatives` these layers return the same outputs, and :class:`_Recurrence` gives their derivatives.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_struct.functional.layers.kinds import recurrent_places
from lightning_struct.functional.layers.recurrent_cells import CELLS, CellTangents, CellWeights


@contextmanager
def layer_derivatives(module: nn.Module | None) -> Iterator[None]:
    """Context manager: recurrent layers of a module are differentiated by the rules of their cells.

    A graph that is made within it has one backward pass, and a second one by the cotangents of the first, which gives
    products with the Jacobian. It has no second derivative in the weights or inputs: those are constants of it. It
    covers layers of torch's classes, and of classes derived from them with the same ``forward``.
    """
    layers = [
        layer
        for layer in (() if module is None else module.modules())
        if isinstance(layer, nn.RNN | nn.LSTM | nn.GRU)
        and "forward" not in vars(layer)
        and type(layer).forward in (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)
    ]
    for layer in layers:
        layer.forward = partial(_call_recurrent, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _call_recurrent(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """Call the layer with this derivative; leave packed sequences, initial states, dropout and autocast to torch."""
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    drops = layer.training and layer.dropout > 0 and layer.num_layers > 1
    covered = hx is None and not drops and isinstance(input, Tensor) and input.numel() > 0
    covered = covered and all(w.dtype == input.dtype and w.device == input.device for w in weights)
    covered = covered and not torch.is_autocast_enabled(input.device.type)
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
            states, *last_cell = _Call.apply(layer.mode, along, *weights)
            last.append(states[-1])
            last_cells += last_cell
            of_directions.append(states.flip(0) if direction else states)
        sequence = torch.cat(of_directions, 2) if layer.bidirectional else of_directions[0]
    output = sequence.transpose(0, 1) if layer.batch_first else sequence
    return output, (torch.stack(last), torch.stack(last_cells)) if last_cells else torch.stack(last)


class _Call(torch.autograd.Function):
    """The outputs of a recurrence for inputs and weights, which are constants of its derivative."""

    @staticmethod
    def forward(ctx: Any, mode: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)  # so that torch sees changes of them in place
        ctx.recurrence = recurrence = _Recurrence(mode, *tensors)
        return recurrence.outputs()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors
        return None, *_Transposed.apply(ctx.recurrence, ctx.needs_input_grad[1:], *cotangents)


class _Transposed(torch.autograd.Function):
    """The cotangents of inputs and weights by those of the outputs, in which they are linear."""

    @staticmethod
    def forward(ctx: Any, recurrence: Any, needed: tuple[bool, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.recurrence = recurrence
        return tuple(recurrence.pull_back(needed, cotangents))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recurrence.push_forward(tangents)


class _Recurrence:
    """h_1..h_T, (T, N, state), and of an LSTM c_T, for inputs (T, N, in), weights, and zero initial states."""

    def __init__(self, mode: str, inputs: Tensor, *weights: Tensor) -> None:
        own = CellWeights(*weights)
        hidden = own.weight_hh.shape[0] // {"LSTM": 4, "GRU": 3}.get(mode, 1)
        initial = [inputs.new_zeros(inputs.shape[1], width) for width in (own.weight_hh.shape[1], hidden)]
        self._cell = CELLS[mode](inputs, own, initial)

    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs: new tensors, which may be changed in place."""
        states, last_cell = self._cell.states[1:].clone(), self._cell.last_cell
        return (states,) if last_cell is None else (states, last_cell.clone())

    def pull_back(self, needed: Sequence[bool], cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The cotangents of inputs and weights by those of the outputs; None for those that are not needed."""
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
        """The tangents of the outputs by those of inputs and weights, with None for zero; new tensors."""
        of_inputs, *of_weights = tangents
        of_states, of_last = self._cell.push_forward(of_inputs, CellTangents(*of_weights))
        return (of_states,) if of_last is None else (of_states, of_last)


def _outer(cotangents: Tensor, multiplied: Tensor) -> Tensor:
    """Σ_t δ_t a_tᵀ, summed over the samples, too."""
    return cotangents.flatten(0, 1).t() @ multiplied.flatten(0, 1)
