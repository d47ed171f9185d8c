"""Sums of the rows that input and recurrent weights of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` multiply."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from lightning_struct.functional.layers.calls import LayerCall
from lightning_struct.functional.layers.kinds import recurrent_places
from lightning_struct.functional.layers.registry import kind_of
from lightning_struct.optim.rls.patches import batch_sum


class KernelRun(NamedTuple):
    """Tensors of one run of a recurrent kernel; packed sequences are given by their data, (steps, features).

    Attributes:
        reads: the inputs of each level, (T, N, features).
        outputs: the outputs of each level, of the same form.
        initial: h_0, (levels·directions, [N,] state); None for zeros.
        final: h_T, likewise.
    """

    reads: list[Tensor]
    outputs: list[Tensor]
    initial: Tensor | None
    final: Tensor


class LevelByLevel(TorchFunctionMode):
    """Runs the levels of a stack one by one, though its layer would run them in one call, and keeps their outputs.

    The kernels keep the states of all levels but the last to themselves. One call for each level computes the same, bit
    for bit on a CPU, and in the same time. Under cuDNN the levels no longer overlap and dropout draws other random
    numbers.

    Attributes:
        runs: the runs of kernels, in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[KernelRun] = []

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
        reads, outputs = [], []
        for level, of_level in enumerate(_chunks(weights, levels)):
            here = slice(level * directions, (level + 1) * directions)
            start = [state[here].contiguous() for state in states]
            initial = start if function.__name__ == "lstm" else start[0]
            output, *last = function(data, *sizes, initial, of_level, bias, 1, 0.0, train, bidirectional, *end)
            final.append(tuple(last))
            reads.append(data.detach())
            outputs.append(output.detach())
            data = F.dropout(output, dropout, train) if level < levels - 1 else output
        ends = [torch.cat(parts) for parts in zip(*final, strict=True)]
        self.runs.append(KernelRun(reads, outputs, states[0].detach(), ends[0].detach()))
        return (data.transpose(0, 1) if turned else data, *ends)


def _chunks(weights: Sequence[Tensor], levels: int) -> list[list[Tensor]]:
    size = len(weights) // levels
    return [list(weights[level * size : (level + 1) * size]) for level in range(levels)]


def watch(layer: nn.RNNBase) -> LevelByLevel | None:
    """The context for a call of the layer; None if the call itself shows all: one level, and torch's forward."""
    kind = kind_of(layer)
    own_forward = kind is not None and type(layer).forward is not getattr(kind.base, "forward", None)
    return LevelByLevel() if layer.num_layers > 1 or own_forward else None


def kernel_runs(call: LayerCall, watched: LevelByLevel | None) -> list[KernelRun]:
    """The runs of kernels in one call of a layer.

    Args:
        call: of ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``, with its outputs.
        watched: the context of :func:`watch` that it was made in.
    """
    if watched is not None:
        return watched.runs
    inputs, initial = call.argument(0, "input"), call.argument(1, "hx", None)
    outputs, final = call.outputs
    if isinstance(inputs, PackedSequence):
        inputs, outputs = inputs.data, outputs.data
    if call.layer.mode == "LSTM":
        final, initial = final[0], None if initial is None else initial[0]
    return [KernelRun([inputs], [outputs], initial, final)]


def recurrent_rows(layer: nn.RNNBase, run: KernelRun) -> tuple[int, int, list[tuple[str, Tensor, Tensor]]]:
    """Sums of the rows that the weights of a layer multiplied in one run of its kernel: of x̄ in (80) and (92).

    The sum of h_{t-1} is the sum of h_t without the last one, plus h_0. Packed sequences count their own steps only.

    Returns:
        The number of steps of all sequences; the number of sequences; and, for each weight, the end of its name, as
        ``"ih_l0"``, the sum of x_t, (in,), or of h_{t-1}, (state,), over all steps, and all x_t, (..., in), or h_t,
        (..., state).
    """
    data, final = run.reads[0], run.final
    steps, sequences = data.numel() // data.shape[-1], final.numel() // (final.shape[0] * final.shape[-1])
    dtype = torch.promote_types(layer.all_weights[0][0].dtype, torch.float32)

    def total(tensor: Tensor) -> Tensor:
        return batch_sum(tensor.detach().reshape(tensor.numel() // tensor.shape[-1], tensor.shape[-1]).to(dtype))

    rows = []
    for level, (read, output) in enumerate(zip(run.reads, run.outputs, strict=True)):
        of_inputs, places = total(read), recurrent_places(layer, level)
        states = output.detach().chunk(len(places), -1)
        sums = total(output).chunk(len(places))
        for number, place, of_states, state in zip(count(level * len(places)), places, sums, states, strict=False):
            of_states = of_states - total(final[number])
            if run.initial is not None:
                of_states = of_states + total(run.initial[number])
            rows += [(f"ih_{place}", of_inputs, read.detach()), (f"hh_{place}", of_states, state)]
    return steps, sequences, rows
