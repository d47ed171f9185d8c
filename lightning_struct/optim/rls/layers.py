"""Layers that RLS trains, and their readers: the rows that one call multiplied by each of the trained weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lightning_struct.functional.layers.calls import LayerCall
from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.registry import (
    hidden_layers,
    kind_of,
    plain_named_modules,
)
from lightning_struct.optim.requirements import refuse_lazy
from lightning_struct.optim.rls.gain_limit import sample_size
from lightning_struct.optim.rls.patches import batch_sum, patch_sample, patch_sum
from lightning_struct.optim.rls.recurrent import LevelByLevel, kernel_runs, recurrent_rows, watch
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
    parameter = layer._parameters.get(name or "")
    return next((place for place, bias in enumerate(weight.biases) if bias is parameter), None)


def _rows(inputs: Tensor, features: int) -> Tensor:
    """(r, features)"""
    return inputs.reshape(inputs.numel() // features, features)


def _read_affine(call: LayerCall, layer: TrainedLayer, watched: None) -> Uses:
    (matrix,) = layer.matrices
    weight = layer.weights[matrix.weight]
    if not call.input.numel():
        return []
    rows = _rows(call.input, weight.features)
    use = Use(
        batch_sum(rows.to(weight.dtype))[None], len(rows), None, _bias(weight, call.layer, matrix.bias),
        weight.kept_rows(rows), weight.sample(rows), positions=call.input.ndim > 2,
    )  # fmt: skip
    return [(weight, use)]


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
    return [(weight, Use(total, rows, bias=bias, sample=sample, positions=True))]


def _read_recurrent(call: LayerCall, layer: TrainedLayer, watched: LevelByLevel | None) -> Uses:
    uses: Uses = []
    for run in kernel_runs(call, watched):
        steps, sequences, read = recurrent_rows(call.layer, run)
        for name, total, rows in read if steps else ():
            if (weight := layer.weights.get(f"weight_{name}")) is not None:
                bias = _bias(weight, call.layer, f"bias_{name}")
                sample = weight.sample(_rows(rows, weight.features))
                uses.append((weight, Use(total[None], steps, sequences, bias, sample=sample)))
    return uses


_CONVOLUTION = LayerReader(_read_convolution)
# By the base of the kind of layer.
_READERS: dict[type[nn.Module], LayerReader] = {
    nn.Linear: LayerReader(_read_affine),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONVOLUTION),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _CONVOLUTION),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), LayerReader(_read_recurrent, watch)),
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
