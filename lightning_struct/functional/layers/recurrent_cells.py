"""One direction of one level of ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``, run over time, and its derivative both ways.

The fused kernels keep the pre-activations of the gates to themselves. Here the recurrences are written out: forwards
when a cell is made, backwards from the cotangents of its states, and forwards again for their tangents. Each costs the
products with the recurrent weight and a few elementwise operations for each step in time; all that does not depend on
the states of the pass is computed for all steps at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CellWeights(NamedTuple):
    """One direction: weight_ih (gates·hidden, in), weight_hh (gates·hidden, state), weight_hr (state, hidden)."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None


class CellTangents(NamedTuple):
    """Tangents of the weights of a cell, shaped like them; None for zero."""

    weight_ih: Tensor | None = None
    weight_hh: Tensor | None = None
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    weight_hr: Tensor | None = None


def cell_weights(layer: nn.Module, suffix: str, dtype: torch.dtype) -> CellWeights:
    """The weights of a layer whose names end so, in a dtype and without gradients."""
    weights = {name: getattr(layer, name + suffix, None) for name in CellWeights._fields}
    return CellWeights(**{name: weight.detach().to(dtype) for name, weight in weights.items() if weight is not None})


class Cell(ABC):
    """One direction of one level, run over time when it is made.

    Args:
        inputs: (T, N, in), in the order in which the direction reads them.
        weights: its own.
        initial: h_0, (N, state), and for an LSTM c_0, (N, hidden).

    Attributes:
        states: (T + 1, N, state), h_0 to h_T.
        last_cell: (N, hidden), c_T; None but for an LSTM.
        projected: (T, N, hidden), the input of a projection; None without.
    """

    last_cell: Tensor | None = None
    projected: Tensor | None = None

    def __init__(self, inputs: Tensor, weights: CellWeights, initial: Sequence[Tensor]) -> None:
        self.inputs, self.weights = inputs, weights
        self.states = _states(inputs.shape[0], initial[0])

    def of_cells_by(self, of_states: Tensor) -> Tensor:
        """The cotangents that those of h_t give c_t within the step, in which h_t is computed from c_t."""
        return torch.zeros_like(of_states)

    @abstractmethod
    def pull_back(self, of_states: Tensor, of_cells: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of W_ih x_t + b_ih and of W_hh h_{t-1} + b_hh, each (T, N, gates·hidden).

        Args:
            of_states: (T, N, state), of h_1..h_T but for the part that reaches them through later steps, which is added
                in place.
            of_cells: (T, N, hidden), likewise of c_1..c_T; for an LSTM only.
        """

    @abstractmethod
    def push_forward(self, of_inputs: Tensor | None, of_weights: CellTangents) -> tuple[Tensor, Tensor | None]:
        """Tangents of h_1..h_T, (T, N, state), and of c_T, (N, hidden), or None but for an LSTM.

        Args:
            of_inputs: tangents of the inputs, shaped like them; None for zero.
            of_weights: those of the weights.
        """

    def _both_biases(self) -> Tensor | None:
        if self.weights.bias_ih is None or self.weights.bias_hh is None:
            return None
        return self.weights.bias_ih + self.weights.bias_hh

    def _tangents_by_inputs(self, of_inputs: Tensor | None, of_weights: CellTangents) -> Tensor:
        """Tangents of W_ih x_t + b_ih, (T, N, gates·hidden), a new tensor."""
        shape = (*self.inputs.shape[:2], self.weights.weight_ih.shape[0])
        found = _affine(self.inputs, of_weights.weight_ih, of_weights.bias_ih, shape)
        return found if of_inputs is None else found.add_(of_inputs @ self.weights.weight_ih.t())

    def _tangents_by_states(self, of_weights: CellTangents) -> Tensor:
        """Tangents of W_hh h_{t-1} + b_hh while h_{t-1} stays, (T, N, gates·hidden), a new tensor."""
        shape = (*self.inputs.shape[:2], self.weights.weight_hh.shape[0])
        return _affine(self.states[:-1], of_weights.weight_hh, of_weights.bias_hh, shape)


class _Plain(Cell):
    """h_t = φ(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh) with φ = tanh, or relu."""

    def __init__(self, inputs: Tensor, weights: CellWeights, initial: Sequence[Tensor], *, relu: bool) -> None:
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

    def push_forward(self, of_inputs: Tensor | None, of_weights: CellTangents) -> tuple[Tensor, None]:
        tangents = self._tangents_by_inputs(of_inputs, of_weights).add_(self._tangents_by_states(of_weights))
        recurrent = self.weights.weight_hh.t()
        for t, now in enumerate(tangents):
            if t > 0:
                now.addmm_(tangents[t - 1], recurrent)
            now.mul_(self._slope[t])
        return tangents, None


class _LongShortTermMemory(Cell):
    """c_t = f∘c_{t-1} + i∘g and h_t = o∘tanh(c_t), or W_hr times it; σ for i, f, o and tanh for g."""

    def __init__(self, inputs: Tensor, weights: CellWeights, initial: Sequence[Tensor]) -> None:
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
        self.last_cell = cells[-1]
        i, f, g, o = gates.unbind(2)
        outputs, entered, kept = o * squashed, i * g, f * cells[:-1]
        self.projected = None if weights.weight_hr is None else outputs
        # derivatives of c_t in the pre-activations of i, f, g, and in c_{t-1}; of o∘tanh(c_t) in that of o, and in c_t
        self._of_cell = torch.stack(
            [_less_share(entered, entered, i), _less_share(kept, kept, f), _less_share(i, entered, g)], 2
        )
        self._kept = f
        self._of_gate = _less_share(outputs, outputs, o)
        self._through = _less_share(o, outputs, squashed)

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

    def push_forward(self, of_inputs: Tensor | None, of_weights: CellTangents) -> tuple[Tensor, Tensor]:
        of_gates = self._tangents_by_inputs(of_inputs, of_weights).add_(self._tangents_by_states(of_weights))
        of_gates = of_gates.unflatten(2, (4, -1))
        recurrent, projection = self.weights.weight_hh.t(), self.weights.weight_hr
        tangents, of_cell = torch.zeros_like(self.states[1:]), torch.zeros_like(of_gates[0, :, 0])
        if of_weights.weight_hr is not None and self.projected is not None:
            torch.matmul(self.projected, of_weights.weight_hr.t(), out=tangents)
        for t, now in enumerate(of_gates):
            if t > 0:
                now.flatten(1).addmm_(tangents[t - 1], recurrent)
            of_cell.mul_(self._kept[t]).add_((now[:, :3] * self._of_cell[t]).sum(1))
            of_output = torch.mul(now[:, 3], self._of_gate[t], out=tangents[t] if projection is None else None)
            of_output.addcmul_(of_cell, self._through[t])
            if projection is not None:
                tangents[t].addmm_(of_output, projection.t())
        return tangents, of_cell


class _GatedUnit(Cell):
    """h_t = (1 - z)∘n + z∘h_{t-1} with n = tanh(W_n x_t + b_n + r∘q) and q = U_n h_{t-1} + d_n; σ for r and z."""

    def __init__(self, inputs: Tensor, weights: CellWeights, initial: Sequence[Tensor]) -> None:
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

    def push_forward(self, of_inputs: Tensor | None, of_weights: CellTangents) -> tuple[Tensor, None]:
        by_inputs = self._tangents_by_inputs(of_inputs, of_weights).view_as(self._of_gates)
        of_products = self._tangents_by_states(of_weights).view_as(self._of_gates)
        tangents = (by_inputs[:, :, :2] * self._of_gates[:, :, :2]).sum(2)
        tangents.addcmul_(by_inputs[:, :, 2], self._of_candidate)
        recurrent = self.weights.weight_hh.t()
        for t, now in enumerate(of_products):
            if t > 0:
                now.flatten(1).addmm_(tangents[t - 1], recurrent)
                tangents[t].addcmul_(tangents[t - 1], self._kept[t])
            tangents[t].add_((now * self._of_gates[t]).sum(1))
        return tangents, None


CELLS: dict[str, Callable[[Tensor, CellWeights, Sequence[Tensor]], Cell]] = {
    "RNN_TANH": partial(_Plain, relu=False),
    "RNN_RELU": partial(_Plain, relu=True),
    "LSTM": _LongShortTermMemory,
    "GRU": _GatedUnit,
}


def _states(steps: int, initial: Tensor) -> Tensor:
    """(steps + 1, N, features), the first of them ``initial`` and the others to be filled."""
    states = initial.new_empty(steps + 1, *initial.shape)
    states[0] = initial
    return states


def _affine(inputs: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """inputs·weightᵀ + bias, with None for zero, a new tensor of that shape."""
    if weight is not None:
        return F.linear(inputs, weight, bias)
    return inputs.new_zeros(shape) if bias is None else bias.expand(shape).clone()


def _less_share(whole: Tensor, part: Tensor, share: Tensor) -> Tensor:
    """whole - part∘share."""
    return torch.addcmul(whole, part, share, value=-1.0)
