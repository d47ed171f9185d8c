"""Per-sample gradient contributions of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, and of their cells.

The fused kernels keep the pre-activations of the gates to themselves. Here a layer is run again from its recorded input
and initial state, step by step in time, and then backwards from the cotangents of its outputs by the recurrences
written out below; both cost the products with the recurrent weight and a few elementwise operations. What results is
one cotangent δ_t for each pre-activation: a weight's share of one sample is Σ_t δ_t a_tᵀ with what it multiplied, a_t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_struct.functional.layer_call import LayerCall, Samples
from lightning_struct.functional.layers import recurrent_places
from lightning_struct.functional.per_sample.contributions import Contribution, Dense, Outer, Uncovered
from lightning_struct.functional.per_sample.rerun import by_sample, check_rerun


def recurrent_contributions(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share of the gradients that one call of a recurrent layer gives its weights and biases.

    Stacked, bidirectional, batch first or not, with projections, with or without an initial state; of packed sequences
    the samples are in the order that they had before sorting. Dropout between the layers needs the random generators as
    they were before the call (see :func:`~lightning_struct.functional.randomness.restored_random_state`).

    Args:
        call: of ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``. Its cotangents are first that of the output sequence, last those
            of h_n or of h_n and c_n. Its ``samples`` are as :func:`~.rerun.by_sample` takes them.

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
        mode = next(mode for kind, mode in _MODES.items() if isinstance(layer, kind))
        if hx is None:
            initial = [inputs.new_zeros(len(inputs), layer.hidden_size, dtype=dtype)] * (2 if mode == "LSTM" else 1)
        else:
            initial = [state.detach().to(dtype) for state in ((hx,) if isinstance(hx, Tensor) else hx)]
        if mode == "RNN":
            mode = f"RNN_{layer.nonlinearity.upper()}"
        cell = _CELLS[mode](inputs.to(dtype)[None], _weights(layer, "", dtype), initial)
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
    """Whether the c that ``torch.lstm_cell`` returns is what it computes h from; a fused kernel returns copies.

    If it is, the cotangent that arrives at c has what comes from h already.
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

    def by_sample(self, tensor: Tensor, samples: Samples) -> Tensor:
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
) -> tuple[list[list[_Cell]], list[Tensor]]:
    """The directions of each level, and the masks of the dropout between the levels; none without dropout."""
    levels: list[list[_Cell]] = []
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
            cells.append(_CELLS[layer.mode](along, _weights(layer, f"_{place}", dtype), states))
        levels.append(cells)
    return levels, masks


def _backward(
    layer: nn.RNNBase,
    levels: list[list[_Cell]],
    masks: list[Tensor],
    of_outputs: Tensor | None,
    of_final: Sequence[Tensor | None],
    layout: _SequenceLayout,
    samples: Samples,
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
    cell: _Cell,
    of_states: Tensor,
    deltas: tuple[Tensor, Tensor],
    suffix: str,
    layout: _SequenceLayout,
    samples: Samples,
) -> dict[str, Contribution]:
    """Of the weights and biases of a cell whose names end so, from the cotangents of its states and pre-activations."""
    uses = {
        "ih": (cell.inputs, deltas[0]),
        "hh": (cell.states[:-1], deltas[1]),
        "hr": (cell.projected, of_states),
    }
    contributions: dict[str, Contribution] = {}
    for kind, (multiplied, delta) in uses.items():
        if multiplied is None:
            continue
        outer = Outer(layout.by_sample(multiplied, samples), layout.by_sample(delta, samples))
        contributions[f"weight_{kind}{suffix}"] = outer
        if cell.weights.bias_ih is not None and kind != "hr":
            contributions[f"bias_{kind}{suffix}"] = Dense(outer.cotangents.sum(1))
    return contributions


def _joined(cells: Sequence[_Cell], layout: _SequenceLayout) -> Tensor:
    """(T, N, directions·features), the output of a level."""
    return torch.cat(
        [layout.reversed(cell.states[1:]) if direction else cell.states[1:] for direction, cell in enumerate(cells)], 2
    )


class _CellWeights(NamedTuple):
    """One direction: weight_ih (gates·hidden, in), weight_hh (gates·hidden, state), weight_hr (state, hidden)."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None


def _weights(layer: nn.Module, suffix: str, dtype: torch.dtype) -> _CellWeights:
    weights = {name: getattr(layer, name + suffix, None) for name in _CellWeights._fields}
    return _CellWeights(**{name: weight.detach().to(dtype) for name, weight in weights.items() if weight is not None})


class _Cell(ABC):
    """One direction of one level, run over time when it is made.

    Args:
        inputs: (T, N, in), in the order in which the direction reads them.
        weights: its own.
        initial: h_0, (N, state), and for an LSTM c_0, (N, hidden).

    Attributes:
        states: (T + 1, N, state), h_0 to h_T.
        projected: (T, N, hidden), what a projection multiplied; None without.
    """

    projected: Tensor | None = None

    def __init__(self, inputs: Tensor, weights: _CellWeights, initial: Sequence[Tensor]) -> None:
        self.inputs, self.weights = inputs, weights
        self.states = _states(inputs.shape[0], initial[0])

    def of_cells_by(self, of_states: Tensor) -> Tensor:
        """The cotangents that those of h_t give c_t within the step, where h_t is computed from c_t."""
        return torch.zeros_like(of_states)

    @abstractmethod
    def pull_back(self, of_states: Tensor, of_cells: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of W_ih x_t + b_ih and of W_hh h_{t-1} + b_hh, each (T, N, gates·hidden).

        Args:
            of_states: (T, N, state), of h_1..h_T but for what reaches them through later steps, which is added in
                place.
            of_cells: (T, N, hidden), likewise of c_1..c_T; for an LSTM only.
        """

    def _both_biases(self) -> Tensor | None:
        if self.weights.bias_ih is None or self.weights.bias_hh is None:
            return None
        return self.weights.bias_ih + self.weights.bias_hh


class _Plain(_Cell):
    """h_t = φ(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh) with φ = tanh, or relu."""

    def __init__(self, inputs: Tensor, weights: _CellWeights, initial: Sequence[Tensor], *, relu: bool) -> None:
        super().__init__(inputs, weights, initial)
        squash, recurrent = torch.relu if relu else torch.tanh, weights.weight_hh.t().contiguous()
        for t, activation in enumerate(F.linear(inputs, weights.weight_ih, self._both_biases())):
            self.states[t + 1] = squash(activation.addmm_(self.states[t], recurrent))
        states = self.states[1:]
        self._slope = (states > 0).to(states.dtype) if relu else 1 - states * states

    def pull_back(self, of_states: Tensor, of_cells: Tensor) -> tuple[Tensor, Tensor]:
        deltas = torch.empty_like(of_states)
        for t in range(len(deltas) - 1, -1, -1):
            torch.mul(of_states[t], self._slope[t], out=deltas[t])
            if t > 0:
                of_states[t - 1].addmm_(deltas[t], self.weights.weight_hh)
        return deltas, deltas


class _LongShortTermMemory(_Cell):
    """c_t = f∘c_{t-1} + i∘g and h_t = o∘tanh(c_t), or W_hr times it; σ for i, f, o and tanh for g."""

    def __init__(self, inputs: Tensor, weights: _CellWeights, initial: Sequence[Tensor]) -> None:
        super().__init__(inputs, weights, initial)
        cells = _states(inputs.shape[0], initial[1])
        squashed, recurrent = torch.empty_like(cells[1:]), weights.weight_hh.t().contiguous()
        gates = F.linear(inputs, weights.weight_ih, self._both_biases()).unflatten(2, (4, -1))
        for t, now in enumerate(gates):
            now.flatten(1).addmm_(self.states[t], recurrent)
            (i, f), g, o = now[:, :2].sigmoid_().unbind(1), now[:, 2].tanh_(), now[:, 3].sigmoid_()
            torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g)
            output = o * torch.tanh(cells[t + 1], out=squashed[t])
            self.states[t + 1] = output if weights.weight_hr is None else output @ weights.weight_hr.t()
        i, f, g, o = gates.unbind(2)
        outputs = o * squashed
        self.projected = None if weights.weight_hr is None else outputs
        # derivatives of c_t in the pre-activations of i, f, g, and in c_{t-1}; of o∘tanh(c_t) in that of o, and in c_t
        self._of_cell = torch.stack([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g * g)], 2)
        self._kept = f
        self._of_gate = outputs * (1 - o)
        self._through = o * (1 - squashed * squashed)

    def of_cells_by(self, of_states: Tensor) -> Tensor:
        return of_states * self._through

    def pull_back(self, of_states: Tensor, of_cells: Tensor) -> tuple[Tensor, Tensor]:
        deltas = of_cells.new_empty(*of_cells.shape[:2], 4, of_cells.shape[2])
        for t in range(len(deltas) - 1, -1, -1):
            of_output = of_states[t] if self.weights.weight_hr is None else of_states[t] @ self.weights.weight_hr
            of_cell = of_cells[t].addcmul_(of_output, self._through[t])
            torch.mul(of_cell[:, None], self._of_cell[t], out=deltas[t, :, :3])
            torch.mul(of_output, self._of_gate[t], out=deltas[t, :, 3])
            if t > 0:
                of_states[t - 1].addmm_(deltas[t].flatten(1), self.weights.weight_hh)
                of_cells[t - 1].addcmul_(of_cell, self._kept[t])
        return deltas.flatten(2), deltas.flatten(2)


class _GatedUnit(_Cell):
    """h_t = (1 - z)∘n + z∘h_{t-1} with n = tanh(W_n x_t + b_n + r∘q) and q = U_n h_{t-1} + d_n; σ for r and z."""

    def __init__(self, inputs: Tensor, weights: _CellWeights, initial: Sequence[Tensor]) -> None:
        super().__init__(inputs, weights, initial)
        gates = F.linear(inputs, weights.weight_ih, weights.bias_ih).unflatten(2, (3, -1))
        candidates, recurrent = torch.empty_like(self.states[1:]), weights.weight_hh.t().contiguous()
        for t, now in enumerate(gates):
            products = self.states[t] @ recurrent
            products = (products if weights.bias_hh is None else products.add_(weights.bias_hh)).view_as(now)
            r, z = now[:, :2].add_(products[:, :2]).sigmoid_().unbind(1)
            candidates[t] = products[:, 2]
            n = now[:, 2].addcmul_(r, candidates[t]).tanh_()
            torch.lerp(n, self.states[t], z, out=self.states[t + 1])
        r, z, n = gates.unbind(2)
        # derivatives of h_t in the pre-activations of r and z, in those of n from the inputs' and the state's side, in
        # h_{t-1}
        self._of_candidate = (1 - z) * (1 - n * n)
        of_reset = self._of_candidate * candidates * r * (1 - r)
        self._of_gates = torch.stack([of_reset, (self.states[:-1] - n) * z * (1 - z), self._of_candidate * r], 2)
        self._kept = z

    def pull_back(self, of_states: Tensor, of_cells: Tensor) -> tuple[Tensor, Tensor]:
        deltas = torch.empty_like(self._of_gates)
        for t in range(len(deltas) - 1, -1, -1):
            torch.mul(of_states[t][:, None], self._of_gates[t], out=deltas[t])
            if t > 0:
                of_states[t - 1].addmm_(deltas[t].flatten(1), self.weights.weight_hh)
                of_states[t - 1].addcmul_(of_states[t], self._kept[t])
        of_candidates = of_states * self._of_candidate
        return torch.cat([deltas[:, :, :2].flatten(2), of_candidates], 2), deltas.flatten(2)


_CELLS: dict[str, Callable[[Tensor, _CellWeights, Sequence[Tensor]], _Cell]] = {
    "RNN_TANH": partial(_Plain, relu=False),
    "RNN_RELU": partial(_Plain, relu=True),
    "LSTM": _LongShortTermMemory,
    "GRU": _GatedUnit,
}


_MODES = {nn.RNNCell: "RNN", nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}


def _states(steps: int, initial: Tensor) -> Tensor:
    """(steps + 1, N, features), the first of them ``initial`` and the others to be filled."""
    states = initial.new_empty(steps + 1, *initial.shape)
    states[0] = initial
    return states
