"""Per-sample gradient contributions of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, and of their cells.

A layer is run again from its recorded input and initial state, and then backwards from the cotangents of its outputs
(:mod:`~lightning_struct.functional.layers.recurrent_cells`). The result is one cotangent δ_t for each pre-activation:
a weight's share of one sample is Σ_t δ_t a_tᵀ with its input a_t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_struct.functional.layers.calls import LayerCall, SampleCount
from lightning_struct.functional.layers.kinds import recurrent_places
from lightning_struct.functional.layers.per_sample.contributions import Contribution, Dense, Outer, Uncovered
from lightning_struct.functional.layers.per_sample.sample_layout import by_sample, check_rerun
from lightning_struct.functional.layers.recurrent_cells import CELLS, Cell, cell_weights


def recurrent_contributions(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share of the gradients that one call of a recurrent layer gives its weights and biases.

    Stacked, bidirectional, batch first or not, with projections, with or without an initial state; of packed sequences
    the samples are in the order that they had before sorting. Dropout between the layers needs the random generators as
    they were before the call (see :func:`~lightning_struct.functional.randomness.restored_random_state`).

    Args:
        call: of ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``. Its cotangents are first that of the output sequence, last those
            of h_n or of h_n and c_n. Its ``samples`` are as :func:`~.sample_layout.by_sample` takes them.

    Returns:
        By the name of the parameter, in float32 at least.

    Raises:
        Uncovered: the input is one sequence without a batch dimension; the number of sequences is none that n may have;
            dropout took another mask than in the call.
    """
    layer, outputs, cotangents = call.layer, call.outputs, call.cotangents
    parameter = next(layer.parameters())
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    with torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
        inputs, initial, layout = _arguments(layer, dtype, call.argument(0, "input"), call.argument(1, "hx", None))
        levels, masks = _forward(layer, dtype, inputs, initial, layout)
        if masks:
            recorded = outputs[0].data if isinstance(outputs[0], PackedSequence) else outputs[0]
            check_rerun(layout.time_first(recorded.detach()), layout.padded(_joined(levels[-1], layout)))
        of_outputs = None if cotangents[0] is None else layout.time_first(cotangents[0]).to(dtype)
        of_final = [None if final is None else layout.sorted(final).to(dtype) for final in cotangents[-len(initial) :]]
        return _backward(layer, levels, masks, of_outputs, of_final, layout, call.samples)


def cell_contributions(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share of the gradients that one call of a cell, one step in time, gives its weights and biases.

    Args:
        call: of ``nn.RNNCell``, ``nn.LSTMCell`` or ``nn.GRUCell``. Its cotangents are those of h, or of h and c.

    Returns:
        By the name of the parameter, in float32 at least.

    Raises:
        Uncovered: the input is one sample without a batch dimension; their number is none that n may have.
    """
    layer = call.layer
    inputs, hx = call.argument(0, "input"), call.argument(1, "hx", None)
    if inputs.dim() != 2:
        raise Uncovered("it read one sample without a batch dimension")
    dtype = torch.promote_types(layer.weight_ih.dtype, torch.float32)
    with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
        modes = {nn.RNNCell: "RNN", nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}
        mode = next(mode for kind, mode in modes.items() if isinstance(layer, kind))
        if hx is None:
            initial = [inputs.new_zeros(len(inputs), layer.hidden_size, dtype=dtype)] * (2 if mode == "LSTM" else 1)
        else:
            initial = [state.detach().to(dtype) for state in ((hx,) if isinstance(hx, Tensor) else hx)]
        if mode == "RNN":
            mode = f"RNN_{layer.nonlinearity.upper()}"
        cell = CELLS[mode](inputs.to(dtype)[None], cell_weights(layer, "", dtype), initial)
        of_states, of_cells = (
            torch.zeros_like(cell.states[1:]) if cotangent is None else cotangent.to(dtype)[None].clone()
            for cotangent in (*call.cotangents, None)[:2]
        )
        if call.cotangents[-1] is not None and _computes_state_from_returned_cell(inputs.device.type):
            of_cells -= cell.of_cells_by(of_states)
        deltas = cell.pull_back(of_states, of_cells)
        return _shares(cell, of_states, deltas, "", _SequenceLayout(), call.samples)


@cache
def _computes_state_from_returned_cell(device: str) -> bool:
    """Whether the c that ``torch.lstm_cell`` returns is the one that it computes h from; a fused kernel returns copies.

    If it is, the cotangent that arrives at c has the part that comes from h already.
    """
    with torch.enable_grad():
        weight = torch.zeros(4, 1, device=device, requires_grad=True)
        state = torch.zeros(1, 1, device=device)
        h, c = torch.lstm_cell(state, (state, state), weight, weight)
    return h.grad_fn is not c.grad_fn


@dataclass(frozen=True)
class _SequenceLayout:
    """Order of the caller's tensors, which become (T, N, ...), time first; packed sequences are sorted by length.

    Attributes:
        batch_first: the caller's tensors have the batch first.
        present: (T, N), which steps there are; None if all.
        sorting: (N,), the caller's position of each sequence; None if it is the same.
        unsorting: its inverse.
    """

    batch_first: bool = False
    present: Tensor | None = None
    sorting: Tensor | None = None
    unsorting: Tensor | None = None

    def time_first(self, tensor: Tensor) -> Tensor:
        """The caller's sequences, or the data of packed ones, as (T, N, features): zero where no step is."""
        if self.present is not None:
            padded = tensor.new_zeros(*self.present.shape, tensor.shape[-1])
            padded[self.present] = tensor
            return padded
        return tensor.transpose(0, 1) if self.batch_first else tensor

    def padded(self, tensor: Tensor) -> Tensor:
        """(T, N, features) with zero where no step is."""
        return tensor if self.present is None else tensor * self.present[:, :, None]

    def sorted(self, states: Tensor) -> Tensor:
        """The caller's (layers, N, features)."""
        return states if self.sorting is None else states.index_select(1, self.sorting)

    def by_sample(self, tensor: Tensor, samples: SampleCount) -> Tensor:
        """(n, positions, features) in the caller's order, from (T, N, features)."""
        tensor = tensor.transpose(0, 1)
        if self.unsorting is not None:
            tensor = tensor[self.unsorting]
        return by_sample(tensor, samples)

    def reversed(self, tensor: Tensor) -> Tensor:
        """Each sequence of (T, N, features) from its end to its start, a copy."""
        if self.present is None:
            return tensor.flip(0)
        steps = torch.arange(tensor.shape[0], device=tensor.device)[:, None]
        lengths = self.present.sum(0)
        backwards = torch.where(self.present, lengths - 1 - steps, steps)
        return tensor[backwards, torch.arange(tensor.shape[1], device=tensor.device)]

    def add_at_the_end(self, sequences: Tensor, final: Tensor) -> None:
        """Add (N, features) to the last step of each sequence of (T, N, features), in place."""
        if self.present is None:
            sequences[-1] += final
        else:
            sequences[self.present.sum(0) - 1, torch.arange(final.shape[0], device=final.device)] += final

    def dropout(self, like: Tensor, probability: float) -> Tensor:
        """Mask by which the next dropout multiplies sequences (T, N, features), drawn for the present steps."""
        if self.present is None:
            return F.dropout(torch.ones_like(like, memory_format=torch.contiguous_format), probability)
        return self.time_first(F.dropout(torch.ones_like(like[self.present]), probability))


def _arguments(
    layer: nn.RNNBase, dtype: torch.dtype, input: Tensor | PackedSequence, hx: Any
) -> tuple[Tensor, list[Tensor], _SequenceLayout]:
    """The input (T, N, in), the initial states, each (layers·directions, N, features), and the layout."""
    if isinstance(input, PackedSequence):
        data, sizes, sorting, unsorting = input
        present = (torch.arange(int(sizes[0])) < sizes[:, None]).to(data.device)
        layout = _SequenceLayout(False, present, sorting, unsorting)
    elif input.dim() == 3:
        data, layout = input, _SequenceLayout(layer.batch_first)
    else:
        raise Uncovered("it read one sequence without a batch dimension")
    inputs = layout.time_first(data.detach()).to(dtype)
    if hx is not None:
        states = (hx,) if isinstance(hx, Tensor) else hx
        return inputs, [layout.sorted(state.detach()).to(dtype) for state in states], layout
    widths = [layer.proj_size or layer.hidden_size]
    if layer.mode == "LSTM":
        widths.append(layer.hidden_size)
    stacked = len(recurrent_places(layer))
    return inputs, [inputs.new_zeros(stacked, inputs.shape[1], width) for width in widths], layout


def _forward(
    layer: nn.RNNBase, dtype: torch.dtype, inputs: Tensor, initial: Sequence[Tensor], layout: _SequenceLayout
) -> tuple[list[list[Cell]], list[Tensor]]:
    """The directions of each level, and the masks of the dropout between the levels; none without dropout."""
    levels: list[list[Cell]] = []
    masks: list[Tensor] = []
    for level in range(layer.num_layers):
        if level > 0:
            inputs = _joined(levels[-1], layout)
            if layer.training and layer.dropout > 0:
                masks.append(layout.dropout(inputs, layer.dropout))
                inputs = inputs * masks[-1]
        cells = []
        for direction, place in enumerate(recurrent_places(layer, level)):
            states = [state[level * (1 + layer.bidirectional) + direction] for state in initial]
            along = layout.reversed(inputs) if direction else inputs
            cells.append(CELLS[layer.mode](along, cell_weights(layer, f"_{place}", dtype), states))
        levels.append(cells)
    return levels, masks


def _backward(
    layer: nn.RNNBase,
    levels: list[list[Cell]],
    masks: list[Tensor],
    of_outputs: Tensor | None,
    of_final: Sequence[Tensor | None],
    layout: _SequenceLayout,
    samples: SampleCount,
) -> dict[str, Contribution]:
    contributions: dict[str, Contribution] = {}
    for level in range(layer.num_layers - 1, -1, -1):
        of_inputs: list[Tensor] = []
        for direction, (cell, place) in enumerate(zip(levels[level], recurrent_places(layer, level), strict=True)):
            of_sequence = torch.zeros_like(cell.states[1:])
            if of_outputs is not None:
                mine = of_outputs.chunk(len(levels[level]), 2)[direction]
                of_sequence += layout.reversed(mine) if direction else mine
            of_cells = of_sequence.new_zeros(*of_sequence.shape[:2], layer.hidden_size)
            for of_states, final in zip((of_sequence, of_cells), of_final, strict=False):
                if final is not None:
                    layout.add_at_the_end(of_states, final[level * len(levels[level]) + direction])
            deltas = cell.pull_back(of_sequence, of_cells)
            contributions |= _shares(cell, of_sequence, deltas, f"_{place}", layout, samples)
            if level > 0:
                of_input = deltas[0] @ cell.weights.weight_ih
                of_inputs.append(layout.reversed(of_input) if direction else of_input)
        if level > 0:
            of_outputs = torch.stack(of_inputs).sum(0)
            if masks:
                of_outputs *= masks[level - 1]
    return contributions


def _shares(
    cell: Cell,
    of_states: Tensor,
    deltas: tuple[Tensor, Tensor],
    suffix: str,
    layout: _SequenceLayout,
    samples: SampleCount,
) -> dict[str, Contribution]:
    """Contributions of the weights and biases whose names end so, from cotangents of states and pre-activations."""
    uses = {"ih": (cell.inputs, deltas[0]), "hh": (cell.states[:-1], deltas[1]), "hr": (cell.projected, of_states)}
    contributions: dict[str, Contribution] = {}
    for kind, (multiplied, delta) in uses.items():
        if multiplied is None:
            continue
        outer = Outer(layout.by_sample(multiplied, samples), layout.by_sample(delta, samples))
        contributions[f"weight_{kind}{suffix}"] = outer
        if cell.weights.bias_ih is not None and kind != "hr":
            contributions[f"bias_{kind}{suffix}"] = Dense(outer.cotangents.sum(1))
    return contributions


def _joined(cells: Sequence[Cell], layout: _SequenceLayout) -> Tensor:
    """(T, N, directions·features), the output of a level."""
    states = [cell.states[1:] for cell in cells]
    return torch.cat([layout.reversed(s) if direction else s for direction, s in enumerate(states)], 2)
