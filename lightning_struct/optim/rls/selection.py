"""Layers of a module that RLS trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.registry import (
    excluded_modules,
    hidden_layers,
    is_affine,
    kind_of,
    plain_named_modules,
)
from lightning_struct.optim.requirements import refuse_lazy
from lightning_struct.optim.rls.layers import LayerReader, layer_reader
from lightning_struct.optim.rls.weights import TrainedWeight


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


def modules_beside(module: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """All modules of ``module`` but the layer and those that contain it."""
    by_name = dict(module.named_modules(remove_duplicate=False))
    parts_of_names = [name.split(".") for name, found in by_name.items() if found is layer]
    names = {".".join(parts[:i]) for parts in parts_of_names for i in range(len(parts) + 1)}
    containing = {by_name[name] for name in names}
    return [found for found in module.modules() if found not in containing]


def linear_layer(module: nn.Module, layer: str | nn.Module | None) -> nn.Module:
    """The linear layer that is named or given; with None that of a module that has no other layer for RLS.

    Raises:
        ValueError: it is none that RLS trains; or there are none, or several, to choose from.
    """
    layers = {trained.name: layer for layer, trained in layers_to_train(module, set()).items()}
    if layer is not None:
        (chosen, *below) = excluded_modules(module, [layer], "layer")
        if below or chosen not in layers.values() or not is_affine(chosen):
            raise ValueError(f"layer has {layer!r}, which is no linear layer that RLS trains")
        return chosen
    linear = [known for known in layers.values() if is_affine(known)]
    if not linear:
        raise ValueError(f"RLS.exact trains one linear layer, and {type(module).__name__} has none")
    if len(layers) > 1:
        raise ValueError(
            f"RLS.exact trains one linear layer, and {type(module).__name__} has the layers {', '.join(layers)}: name "
            "the one whose outputs are compared with the targets, layer='head' or the like"
        )
    return linear[0]
