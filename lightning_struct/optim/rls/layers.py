"""Layers that RLS trains, and their readers: the rows that one call multiplied by each of the trained weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers.calls import LayerCall
from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.per_sample.inner_calls import RecordedCalls, rows_used
from lightning_struct.functional.layers.registry import (
    base_call,
    hidden_layers,
    kind_of,
    plain_named_modules,
)
from lightning_struct.optim.requirements import refuse_lazy
from lightning_struct.optim.rls.gain_limit import sample_rows, sample_size
from lightning_struct.optim.rls.patches import batch_sum, patch_sample, patch_sum
from lightning_struct.optim.rls.recurrent import (
    LevelByLevel,
    cell_states,
    goes_on,
    kernel_runs,
    note_states,
    recurrent_rows,
    watch,
)
from lightning_struct.optim.rls.statistics import Use
from lightning_struct.optim.rls.weights import TrainedWeight

Uses: TypeAlias = list[tuple[TrainedWeight, Use]]


@dataclass(frozen=True)
class LayerReader:
    """The way in which RLS sees the rows that the layers of one kind multiply.

    Attributes:
        read: the uses of the trained weights in one call of a layer; the last argument is the context from ``watch``.
        watch: makes the context in which a call shows everything to ``read``; None if the call needs none.
    """

    read: Callable[[LayerCall, TrainedLayer, Any], Uses]
    watch: Callable[[Any], AbstractContextManager[Any] | None] | None = None


class TrainedLayer(NamedTuple):
    """A layer that RLS trains.

    Attributes:
        name: its name below the module.
        reader: of its calls.
        matrices: that it multiplies by.
        weights: those that are trained, by their names below the layer.
    """

    name: str
    reader: LayerReader
    matrices: Sequence[Matrix]
    weights: dict[str, TrainedWeight]

    def is_complete(self) -> bool:
        """Whether all its weights are trained."""
        return len(self.weights) == len(self.matrices)

    def name_of(self, matrix: Matrix) -> str:
        """Name of a weight below the module."""
        return f"{self.name}.{matrix.weight}" if self.name else matrix.weight


def layer_reader(layer: nn.Module) -> LayerReader | None:
    """The reader of a layer; None for a layer that RLS does not train."""
    kind = kind_of(layer)
    return None if kind is None or kind.base is None else _READERS.get(kind.base)


def _bias(weight: TrainedWeight, layer: nn.Module, name: str | None) -> int | None:
    """The index of a layer's bias in ``weight.biases``; None if it is not there."""
    below, _, own = (name or "").rpartition(".")
    parameter = layer.get_submodule(below)._parameters.get(own)
    return next((place for place, bias in enumerate(weight.biases) if bias.parameter is parameter), None)


def _rows(inputs: Tensor, features: int) -> Tensor:
    """(r, features)"""
    return inputs.reshape(inputs.numel() // features, features)


def _use(weight: TrainedWeight, inputs: Tensor, bias: int | None, sequences: int | None = None) -> Use:
    """The use of a weight without groups that multiplied inputs (..., n)."""
    rows = _rows(inputs, weight.features)
    kept = weight.kept_rows(rows) if sequences is None else None
    return Use(
        batch_sum(rows.to(weight.dtype))[None], (len(rows),), sequences, bias, kept, weight.sample(rows),
        positions=sequences is None and inputs.ndim > 2,
    )  # fmt: skip


def _read_affine(call: LayerCall, layer: TrainedLayer, watched: None) -> Uses:
    (matrix,) = layer.matrices
    weight = layer.weights[matrix.weight]
    if not call.input.numel():
        return []
    return [(weight, _use(weight, call.input, _bias(weight, call.layer, matrix.bias)))]


def _read_convolution(call: LayerCall, layer: TrainedLayer, watched: None) -> Uses:
    weight = layer.weights["weight"]
    if not call.outputs.numel():
        return []
    positions = call.outputs.shape[-len(call.layer.kernel_size) :]
    total, rows = patch_sum(call.layer, call.input.to(weight.dtype), positions)
    sample = None
    if weight.takes_samples:
        number = sample_size(rows, weight.features)
        sample = patch_sample(call.layer, call.input, positions, number).to(weight.dtype)
    bias = _bias(weight, call.layer, "bias")
    return [(weight, Use(total, (rows,) * call.layer.groups, bias=bias, sample=sample, positions=True))]


def _read_recurrent(call: LayerCall, layer: TrainedLayer, watched: LevelByLevel | None) -> Uses:
    uses: Uses = []
    for run in kernel_runs(call, watched):
        steps, sequences, read = recurrent_rows(call.layer, run)
        for name, total, rows in read if steps else ():
            if (weight := layer.weights.get(f"weight_{name}")) is not None:
                bias = _bias(weight, call.layer, f"bias_{name}")
                sample = weight.sample(_rows(rows, weight.features))
                uses.append((weight, Use(total[None], (steps,), sequences, bias, sample=sample)))
    return uses


def _read_cell(call: LayerCall, layer: TrainedLayer, watched: None) -> Uses:
    call = base_call(call)
    states = cell_states(call)
    sequences = 0 if goes_on(call.layer, states) else call.input.numel() // call.layer.input_size
    note_states(call.layer, call.outputs)
    return [
        (weight, _use(weight, read, _bias(weight, call.layer, f"bias_{kind}"), sequences))
        for kind, read in (("ih", call.input), ("hh", states[0].detach()))
        if (weight := layer.weights.get(f"weight_{kind}")) is not None and read.numel()
    ]


def _read_attention(call: LayerCall, layer: TrainedLayer, watched: RecordedCalls) -> Uses:
    """Uses from the calls that the layer makes of ``linear``, whose inputs come after the dropout of the attention."""
    weights, bias_of = layer.weights, {matrix.weight: matrix.bias for matrix in layer.matrices}
    read: dict[str, dict[int, Tensor]] = defaultdict(dict)
    parameters = {name: weight.parameter for name, weight in weights.items()}
    for made in watched.calls:
        inputs = _rows(made.inputs.detach(), made.inputs.shape[-1])
        for name, rows in rows_used(made, parameters).items():
            size = weights[name].outputs
            for group in range(rows.start // size, rows.stop // size):
                read[name][group] = inputs
    uses: Uses = []
    for name, by_group in read.items():
        weight, of_groups = weights[name], [by_group[group] for group in sorted(by_group)]
        counts = tuple(map(len, of_groups))
        if all(counts):
            distinct = {id(rows): rows for rows in of_groups}  # which groups may share
            totals = {i: batch_sum(rows.to(weight.dtype)) for i, rows in distinct.items()}
            total, sample = torch.stack([totals[id(rows)] for rows in of_groups]), None
            if weight.takes_samples:
                number = sample_size(min(counts), weight.features)
                samples = {i: sample_rows(rows, number).to(weight.dtype) for i, rows in distinct.items()}
                sample = torch.stack([samples[id(rows)] for rows in of_groups])
            uses.append((weight, Use(total, counts, bias=_bias(weight, call.layer, bias_of[name]), sample=sample)))
    return uses


_CONVOLUTION = LayerReader(_read_convolution)
# By the base of the kind of layer.
_READERS: dict[type[nn.Module], LayerReader] = {
    nn.Linear: LayerReader(_read_affine),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONVOLUTION),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _CONVOLUTION),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), LayerReader(_read_recurrent, watch)),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), LayerReader(_read_cell)),
    nn.MultiheadAttention: LayerReader(_read_attention, lambda layer: RecordedCalls()),
}


def layers_to_train(module: nn.Module, excluded: set[nn.Module]) -> dict[nn.Module, TrainedLayer]:
    """The layers that RLS trains; no weight is trained yet.

    Raises:
        ValueError: a parameter has no shape yet.
    """
    refuse_lazy(dict(module.named_parameters()), "RLS")
    layers, left_out = {}, excluded | hidden_layers(module)
    for name, layer in plain_named_modules(module):
        kind, reader = kind_of(layer), layer_reader(layer)
        if kind is not None and reader is not None and layer not in left_out:
            layers[layer] = TrainedLayer(name, reader, kind.matrices(layer), {})
    return layers
