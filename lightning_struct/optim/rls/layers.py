"""Readers of layers: the rows that one call of a layer multiplied by each of the weights that RLS trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.layer_call import LayerCall
from lightning_struct.functional.layers import Matrix, kind_of, owned_parameters
from lightning_struct.functional.per_sample.projections import RecordedCalls, rows_used
from lightning_struct.optim.rls.patches import batch_sum, patch_sum
from lightning_struct.optim.rls.recurrent import LevelByLevel, kernel_runs, recurrent_rows, watch
from lightning_struct.optim.rls.weights import TrainedWeight, Use

# By the name of the weight below its layer, of those that RLS trains.
TrainedWeights = Mapping[str, TrainedWeight]


@dataclass(frozen=True)
class LayerReader:
    """The way in which RLS sees what the layers of one kind multiply.

    Attributes:
        read: the uses of the trained weights in one call; the last argument is what ``watch`` made.
        watch: what a call must be made under for ``read`` to see everything; it may make None.
    """

    read: Callable[[LayerCall, TrainedWeights, Any], list[Use]]
    watch: Callable[[Any], AbstractContextManager[Any] | None] | None = None


def layer_reader(layer: nn.Module) -> LayerReader | None:
    """The reader of a layer; None for a layer that RLS does not train."""
    kind = kind_of(layer)
    return None if kind is None or kind.base is None else _READERS.get(kind.base)


def _matrices(layer: nn.Module) -> Sequence[Matrix]:
    kind = kind_of(layer)
    assert kind is not None
    return kind.matrices(layer)


def _bias(layer: nn.Module, weight: TrainedWeight, name: str | None) -> int | None:
    return None if name is None else weight.bias_index(layer._parameters.get(name))


def _read_affine(call: LayerCall, weights: TrainedWeights, watched: None) -> list[Use]:
    (matrix,) = _matrices(call.layer)
    weight = weights[matrix.weight]
    inputs = call.input.reshape(-1, weight.features)
    total = batch_sum(inputs.to(weight.parameter.dtype))
    kept = inputs if weight.keeps_rows(inputs) else None
    return [Use(weight, total[None], (len(inputs),), bias=_bias(call.layer, weight, matrix.bias), inputs=kept)]


def _read_convolution(call: LayerCall, weights: TrainedWeights, watched: None) -> list[Use]:
    weight = weights["weight"]
    total, rows = patch_sum(call.layer, call.input)
    return [Use(weight, total, (rows,) * call.layer.groups, bias=_bias(call.layer, weight, "bias"))]


def _read_recurrent(call: LayerCall, weights: TrainedWeights, watched: LevelByLevel | None) -> list[Use]:
    uses = []
    for rows in (rows for run in kernel_runs(call, watched) for rows in recurrent_rows(call.layer, run)):
        for kind, total in (("ih", rows.inputs), ("hh", rows.states)):
            if (weight := weights.get(f"weight_{kind}_{rows.place}")) is not None:
                bias = _bias(call.layer, weight, f"bias_{kind}_{rows.place}")
                uses.append(Use(weight, total[None], (rows.steps,), rows.sequences, bias))
    return uses


def _read_attention(call: LayerCall, weights: TrainedWeights, watched: RecordedCalls) -> list[Use]:
    """Uses from the calls that the layer makes of ``linear``; dropout of the attention is in what they read."""
    bias_of = {matrix.weight: matrix.bias for matrix in _matrices(call.layer)}
    read: dict[str, dict[int, tuple[Tensor, int]]] = defaultdict(dict)
    parameters = {name: weight.parameter for name, weight in weights.items()}
    for made in watched.calls:
        inputs = made.inputs.detach().reshape(-1, made.inputs.shape[-1])
        total = batch_sum(inputs.to(made.weight.dtype))
        for name, rows in rows_used(made, parameters).items():
            size = weights[name].outputs
            for group in range(rows.start // size, rows.stop // size):
                read[name][group] = total, len(inputs)
    uses = []
    for name, of_groups in read.items():
        totals, counts = zip(*(of_groups[group] for group in sorted(of_groups)), strict=True)
        bias = weights[name].bias_index(owned_parameters(call.layer).get(bias_of[name] or ""))
        uses.append(Use(weights[name], torch.stack(totals), counts, bias=bias))
    return uses


_CONVOLUTION = LayerReader(_read_convolution)
_RECURRENT = LayerReader(_read_recurrent, watch)
# By the base of the kind of layer.
_READERS: dict[type[nn.Module], LayerReader] = {
    nn.Linear: LayerReader(_read_affine),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.RNN: _RECURRENT,
    nn.LSTM: _RECURRENT,
    nn.GRU: _RECURRENT,
    nn.MultiheadAttention: LayerReader(_read_attention, lambda layer: RecordedCalls()),
}
