"""The rule of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``: the recurrences of cotangents and tangents alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.jacobian.rule_call import Rule, call_by_rule, may_have_rule
from lightning_struct.functional.layers.recurrent_cells import CELLS, CellTangents, CellWeights
from lightning_struct.functional.layers.registry import recurrent_places


def call_recurrent(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """A call of the layer by the rule; by torch for packed sequences, an initial state or dropout between levels."""
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    drops = layer.training and layer.dropout > 0 and layer.num_layers > 1
    if hx is not None or drops or not may_have_rule(input, *weights) or not _is_batch_for(layer, input):
        return type(layer).forward(layer, input, hx)
    sequence = input.transpose(0, 1) if layer.batch_first else input
    last: list[Tensor] = []
    last_cells: list[Tensor] = []
    for level in range(layer.num_layers):
        of_directions = []
        for direction, place in enumerate(recurrent_places(layer, level)):
            weights = [getattr(layer, f"{name}_{place}", None) for name in CellWeights._fields]
            along = sequence.flip(0) if direction else sequence
            states, *last_cell = call_by_rule(partial(_Recurrence, layer.mode), along, *weights)
            last.append(states[-1])
            last_cells += last_cell
            of_directions.append(states.flip(0) if direction else states)
        sequence = torch.cat(of_directions, 2) if layer.bidirectional else of_directions[0]
    output = sequence.transpose(0, 1) if layer.batch_first else sequence
    return output, (torch.stack(last), torch.stack(last_cells)) if last_cells else torch.stack(last)


def _is_batch_for(layer: nn.RNNBase, input: Tensor) -> bool:
    return input.dim() == 3 and input.shape[2] == layer.input_size


class _Recurrence(Rule):
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
