"""Recurrent layers whose derivative is cheap in both directions, for a Jacobian that is multiplied often.

Within :func:`cheap_recurrences` the layers compute what they compute else, by
:mod:`~lightning_struct.functional.recurrent_cells`. The backward pass through torch's kernels, and the backward pass
through that one, run through each operation of each step in time; here they are the recurrences of the cotangents and
of the tangents alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_struct.functional.layers import recurrent_places
from lightning_struct.functional.recurrent_cells import CELLS, Cell, CellTangents, CellWeights


@contextmanager
def cheap_recurrences(module: nn.Module | None) -> Iterator[None]:
    """Within it ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` of the module have cheap products with their Jacobian.

    A graph that is made within it has one backward pass, and a second one by the cotangents of the first, which gives
    products with the Jacobian. It has no second derivative in the weights or inputs: those are constants of it. Calls
    with packed sequences, initial states, dropout between levels or autocast are those of torch.
    """
    layers = [] if module is None else _layers(module)
    for layer in layers:
        layer.forward = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def has_recurrences(function: object) -> bool:
    """Whether it is a module with layers that :func:`cheap_recurrences` is for."""
    return isinstance(function, nn.Module) and bool(_layers(function))


def _layers(module: nn.Module) -> list[nn.RNNBase]:
    """The layers of torch's classes, and of classes derived from them with the same ``forward``."""
    forwards = {kind.forward for kind in (nn.RNN, nn.LSTM, nn.GRU)}
    recurrent = (layer for layer in module.modules() if isinstance(layer, nn.RNNBase))
    return [layer for layer in recurrent if type(layer).forward in forwards and "forward" not in vars(layer)]


def _forward(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """The call of the layer."""
    if hx is not None or not _is_plain(layer, input):
        return type(layer).forward(layer, input, hx)
    sequence = input.transpose(0, 1) if layer.batch_first else input
    last: list[Tensor] = []
    last_cells: list[Tensor] = []
    for level in range(layer.num_layers):
        of_directions = []
        for direction, place in enumerate(recurrent_places(layer, level)):
            weights = [getattr(layer, f"{name}_{place}", None) for name in CellWeights._fields]
            states, *last_cell = _Recurrence.apply(layer.mode, sequence.flip(0) if direction else sequence, *weights)
            last.append(states[-1])
            last_cells += last_cell
            of_directions.append(states.flip(0) if direction else states)
        sequence = torch.cat(of_directions, 2) if layer.bidirectional else of_directions[0]
    output = sequence.transpose(0, 1) if layer.batch_first else sequence
    return output, (torch.stack(last), torch.stack(last_cells)) if last_cells else torch.stack(last)


def _is_plain(layer: nn.RNNBase, input: Any) -> bool:
    """Whether a call without initial states is one that the cells compute."""
    if not isinstance(input, Tensor) or input.dim() != 3 or input.numel() == 0:
        return False
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    return (
        input.shape[2] == layer.input_size
        and all(weight.dtype == input.dtype and weight.device == input.device for weight in weights)
        and not (layer.training and layer.dropout > 0 and layer.num_layers > 1)
        and not torch.is_autocast_enabled(input.device.type)
    )


class _Recurrence(torch.autograd.Function):
    """h_1..h_T, (T, N, state), and of an LSTM c_T, for inputs (T, N, in) and zero initial states."""

    @staticmethod
    def forward(ctx: Any, mode: str, inputs: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        own = CellWeights(*weights)  # type: ignore[arg-type]
        hidden = own.weight_hh.shape[0] // {"LSTM": 4, "GRU": 3}.get(mode, 1)
        initial = [inputs.new_zeros(inputs.shape[1], width) for width in (own.weight_hh.shape[1], hidden)]
        ctx.cell = cell = CELLS[mode](inputs, own, initial)
        ctx.save_for_backward(inputs, *weights)  # so that torch sees what changes them in place
        states = cell.states[1:].clone()  # which may be changed in place
        return (states,) if cell.last_cell is None else (states, cell.last_cell.clone())

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors
        return None, *_Transposed.apply(ctx.cell, ctx.needs_input_grad[1:], *cotangents)


class _Transposed(torch.autograd.Function):
    """The cotangents of inputs and weights by those of the outputs, of which they are a linear function."""

    @staticmethod
    def forward(
        ctx: Any, cell: Cell, needed: tuple[bool, ...], of_states: Tensor, of_last: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.cell = cell
        of_states = of_states.clone(memory_format=torch.contiguous_format)  # the pass adds to it
        of_cells = of_states if of_last is None else of_states.new_zeros(len(of_states), *of_last.shape)
        if of_last is not None:
            of_cells[-1] = of_last
        by_inputs, by_states = cell.pull_back(of_states, of_cells)
        products = [
            lambda: by_inputs @ cell.weights.weight_ih,
            lambda: _outer(by_inputs, cell.inputs),
            lambda: _outer(by_states, cell.states[:-1]),
            lambda: by_inputs.sum((0, 1)),
            lambda: by_states.sum((0, 1)),
            lambda: None if cell.projected is None else _outer(of_states, cell.projected),
        ]
        return tuple(product() if is_needed else None for product, is_needed in zip(products, needed, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_inputs: Tensor | None, *of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.cell.push_forward(of_inputs, CellTangents(*of_weights))


def _outer(cotangents: Tensor, multiplied: Tensor) -> Tensor:
    """Σ_t δ_t a_tᵀ, summed over the samples, too."""
    return cotangents.flatten(0, 1).t() @ multiplied.flatten(0, 1)
