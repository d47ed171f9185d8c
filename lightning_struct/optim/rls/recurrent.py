"""Sums of the rows that the input and recurrent weights of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` multiply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from lightning_struct.functional.layers import recurrent_places
from lightning_struct.optim.rls.patches import batch_sum


class LevelByLevel(TorchFunctionMode):
    """Runs the levels of a stack one after the other where its layer would run them in one call, and keeps their outputs.

    The kernels keep the states of all levels but the last to themselves. One call for each level computes the same, bit for
    bit on a CPU, and in the same time. Under cuDNN the levels no longer overlap and dropout draws other random numbers.

    Attributes:
        between: of each level but the last, its outputs and what the next one read, (T, N, features), or the data of packed
            sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, function: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", None) in ("lstm", "gru", "rnn_tanh", "rnn_relu") and not kwargs:
            return self._run(function, *args)
        return function(*args, **(kwargs or {}))

    def _run(self, function: Any, data: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        # The sizes of packed sequences are the first argument, or whether the batch comes first is the last.
        packed = isinstance(arguments[2], list | tuple)
        sizes, arguments = (arguments[:1], arguments[1:]) if packed else ((), arguments)
        hx, weights, bias, levels, dropout, train, bidirectional, *batch_first = arguments
        turned = batch_first == [True]
        end = () if packed else (False,)
        data = data.transpose(0, 1) if turned else data  # as the kernels do before they draw dropout
        states = hx if function.__name__ == "lstm" else (hx,)
        directions = 1 + bidirectional
        final: list[tuple[Tensor, ...]] = []
        for level, of_level in enumerate(_chunks(weights, levels)):
            here = slice(level * directions, (level + 1) * directions)
            start = [state[here].contiguous() for state in states]
            initial = start if function.__name__ == "lstm" else start[0]
            output, *last = function(data, *sizes, initial, of_level, bias, 1, 0.0, train, bidirectional, *end)
            final.append(tuple(last))
            data = output
            if level < levels - 1:
                data = F.dropout(output, dropout, train)
                self.between.append((output.detach(), data.detach()))
        return (data.transpose(0, 1) if turned else data, *(torch.cat(parts) for parts in zip(*final, strict=True)))


def _chunks(weights: Sequence[Tensor], levels: int) -> list[list[Tensor]]:
    size = len(weights) // levels
    return [list(weights[level * size : (level + 1) * size]) for level in range(levels)]


def watch(layer: nn.RNNBase) -> LevelByLevel | None:
    """The context for a call of the layer; None for a layer of one level, which keeps nothing to itself."""
    return LevelByLevel() if layer.num_layers > 1 else None


class RecurrentRows(NamedTuple):
    """Sums for one direction of one level.

    Attributes:
        place: how the names of its parameters end.
        inputs: (in,), the sum of x_t over all steps of all sequences.
        states: (state,), that of h_{t-1}.
        steps: how many there are.
        sequences: T is steps / sequences.
    """

    place: str
    inputs: Tensor
    states: Tensor
    steps: int
    sequences: int


def recurrent_rows(
    layer: nn.RNNBase, inputs: Tensor | PackedSequence, initial: Any, outputs: Any, watched: LevelByLevel | None
) -> list[RecurrentRows]:
    """Sums of the rows that all weights of a layer multiplied in one call: the sum of h_{t-1} is that of h_t without the last, with h_0.

    Args:
        layer: the layer.
        inputs: with ``initial`` what it was called with; packed sequences count their own steps only.
        initial: h_0, or h_0 and c_0, or None for zeros.
        outputs: what it returned.
        watched: what it was called under.
    """
    if isinstance(inputs, PackedSequence):
        data, top = inputs.data, outputs[0].data
    else:
        data, top = inputs, outputs[0]
    final = outputs[1][0] if layer.mode == "LSTM" else outputs[1]  # (levels·directions, [N,] state), as initial
    if initial is not None and layer.mode == "LSTM":
        initial = initial[0]
    steps, sequences = data.numel() // data.shape[-1], final.numel() // (final.shape[0] * final.shape[-1])
    between = [] if watched is None else watched.between
    if len(between) != layer.num_layers - 1:
        raise RuntimeError(
            f"a {type(layer).__name__} of {layer.num_layers} levels was run in a way that hides their states"
        )
    reads = [data, *(read for _, read in between)]
    returned = [*(output for output, _ in between), top]
    dtype = layer.all_weights[0][0].dtype

    def total(tensor: Tensor) -> Tensor:
        return batch_sum(tensor.detach().reshape(-1, tensor.shape[-1]).to(dtype))

    rows = []
    for level, (read, output) in enumerate(zip(reads, returned, strict=True)):
        of_inputs, places = total(read), recurrent_places(layer, level)
        for direction, (place, of_states) in enumerate(zip(places, total(output).chunk(len(places)), strict=True)):
            number = level * len(places) + direction
            of_states = of_states - total(final[number])
            if initial is not None:
                of_states = of_states + total(initial[number])
            rows.append(RecurrentRows(place, of_inputs, of_states, steps, sequences))
    return rows
