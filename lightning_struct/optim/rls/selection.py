"""Layers of a module that RLS trains, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import nn

from lightning_struct.functional.layers.kinds import Matrix
from lightning_struct.functional.layers.registry import (
    excluded_modules,
    hidden_layers,
    is_affine,
    kind_of,
    plain_named_modules,
)
from lightning_struct.optim.requirements import LOWER_PRECISION, refuse_lazy
from lightning_struct.optim.rls.forms import InverseSettings
from lightning_struct.optim.rls.layers import LayerReader, layer_reader
from lightning_struct.optim.rls.memory import check_inverses_fit
from lightning_struct.optim.rls.statistics import Bias
from lightning_struct.optim.rls.weights import TrainedWeight


def layers_to_train(module: nn.Module, excluded: set[nn.Module]) -> list[tuple[str, nn.Module, LayerReader]]:
    """Name, layer and reader of each layer that RLS trains.

    Raises:
        ValueError: a parameter has no shape yet.
    """
    refuse_lazy(dict(module.named_parameters()), "RLS")
    layers, hidden = [], hidden_layers(module)
    for name, layer in plain_named_modules(module):
        reader = layer_reader(layer)
        if reader is not None and layer not in excluded and layer not in hidden:
            layers.append((name, layer, reader))
    return layers


class WeightTable:
    """The weights of layers: one for each parameter that is trained, however many layers use it.

    Args:
        layers: of :func:`layers_to_train`.
        inverses: settings of their P.
        sequence_layers: those whose positions are steps of sequences.

    Attributes:
        weights: all that are trained.
        of_layers: the weights of each layer by their names below it.
        incomplete: layers with parameters that are not trained yet.
    """

    def __init__(
        self,
        layers: list[tuple[str, nn.Module, LayerReader]],
        inverses: InverseSettings,
        sequence_layers: Sequence[nn.Module],
    ) -> None:
        self._names = {layer: name for name, layer, _ in layers}
        self._inverses, self._sequence_layers = inverses, sequence_layers
        self.weights: list[TrainedWeight] = []
        self._of_parameter: dict[nn.Parameter, TrainedWeight] = {}
        self._taken: set[tuple[nn.Parameter, int | None]] = set()  # biases, by their parameters and first rows
        self.of_layers: dict[nn.Module, dict[str, TrainedWeight]] = {layer: {} for layer in self._names}
        self.incomplete = set(self._names)

    def extend(self, is_trained: Callable[[nn.Parameter], bool]) -> list[TrainedWeight]:
        """Take in all weights that are trained now, with those of their biases that are; returned are the new ones.

        Raises:
            ValueError: a weight is neither float32 nor float64; layers with one weight see it as other matrices.
            MemoryError: their P take more than is free.
        """
        before = len(self._of_parameter)
        for layer in [layer for layer in self._names if layer in self.incomplete]:
            kind = kind_of(layer)
            assert kind is not None
            parameters = dict(layer.named_parameters(remove_duplicate=False))
            weights, reads_sequences = self.of_layers[layer], layer in self._sequence_layers
            for matrix in kind.matrices(layer):
                parameter = parameters.get(matrix.weight)
                if parameter is not None and matrix.weight not in weights and is_trained(parameter):
                    weights[matrix.weight] = self._use(layer, parameter, matrix)
                    bias = parameters.get(matrix.bias or "")
                    if bias is None or not is_trained(bias) or (bias, matrix.bias_rows.start) in self._taken:
                        weights[matrix.weight].add_layer(None, reads_sequences)
                    else:
                        self._taken.add((bias, matrix.bias_rows.start))
                        weights[matrix.weight].add_layer(Bias(bias, matrix.bias_rows), reads_sequences)
            if all(matrix.weight in weights for matrix in kind.matrices(layer)):
                self.incomplete.discard(layer)
        new = list(self._of_parameter.values())[before:]
        check_inverses_fit(new)
        self.weights += new
        return new

    def frozen(self) -> list[str]:
        """Names of the weights that do not require gradients."""
        frozen = []
        for layer in [layer for layer in self._names if layer in self.incomplete]:
            kind, parameters = kind_of(layer), dict(layer.named_parameters(remove_duplicate=False))
            assert kind is not None
            for matrix in kind.matrices(layer):
                parameter = parameters.get(matrix.weight)
                if parameter is not None and not parameter.requires_grad:
                    frozen.append(self._name_of(layer, matrix))
        return frozen

    def without_parameter(self) -> list[str]:
        """Names of the layers whose weights are computed from parameters, as by ``weight_norm`` or pruning."""
        return [
            name or type(layer).__name__
            for layer, name in self._names.items()
            if (kind := kind_of(layer)) is not None
            and not {matrix.weight for matrix in kind.matrices(layer)} <= set(layer._parameters)
        ]

    def _use(self, layer: nn.Module, parameter: nn.Parameter, matrix: Matrix) -> TrainedWeight:
        if parameter not in self._of_parameter:
            name = self._name_of(layer, matrix)
            self._of_parameter[parameter] = _new_weight(name, parameter, matrix, self._inverses)
        weight = self._of_parameter[parameter]
        if (weight.groups, weight.transposed) != (matrix.groups, matrix.transposed):
            raise ValueError(
                f"{weight.name} is the weight of layers with {weight.groups} and with {matrix.groups} groups, or of "
                "one that is stored as (in, out) and of one that is not: exclude one"
            )
        return weight

    def _name_of(self, layer: nn.Module, matrix: Matrix) -> str:
        name = self._names[layer]
        return f"{name}.{matrix.weight}" if name else matrix.weight


def _new_weight(name: str, parameter: nn.Parameter, matrix: Matrix, inverses: InverseSettings) -> TrainedWeight:
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"RLS needs weights in float32 or float64, but {name} is {parameter.dtype}; {LOWER_PRECISION}")
    return TrainedWeight(name, parameter, inverses, groups=matrix.groups, transposed=matrix.transposed)


def affine_layers(
    module: nn.Module, layers: Sequence[str | nn.Module], trained: Container[nn.Module], argument: str
) -> list[nn.Module]:
    """The layers that are named or given.

    Raises:
        ValueError: one of them is no linear layer that RLS trains; the message calls what was given by ``argument``.
    """
    given = [layers] if isinstance(layers, str | nn.Module) else layers
    found = []
    for item in given:
        (layer, *below) = excluded_modules(module, [item], argument)
        if below or layer not in trained or not is_affine(layer):
            raise ValueError(f"{argument} has {item!r}, which is no linear layer that RLS trains")
        found.append(layer)
    return found


def modules_beside(module: nn.Module, layer: nn.Module) -> set[nn.Module]:
    """All modules of ``module`` but the layer and those that contain it."""
    by_name = dict(module.named_modules(remove_duplicate=False))
    parts_of_names = [name.split(".") for name, found in by_name.items() if found is layer]
    names = {".".join(parts[:i]) for parts in parts_of_names for i in range(len(parts) + 1)}
    return {*by_name.values()} - {by_name[name] for name in names}


def linear_layer(module: nn.Module, layer: str | nn.Module | None) -> nn.Module:
    """The linear layer that is named or given; with None that of a module that has no other layer for RLS.

    Raises:
        ValueError: it is none that RLS trains; or there are none, or several, to choose from.
    """
    layers = {name: known for name, known, _ in layers_to_train(module, set())}
    if layer is not None:
        return affine_layers(module, [layer], layers.values(), "layer")[0]
    linear = [known for known in layers.values() if is_affine(known)]
    if not linear:
        raise ValueError(f"RLS.exact trains one linear layer, and {type(module).__name__} has none")
    if len(layers) > 1:
        raise ValueError(
            f"RLS.exact trains one linear layer, and {type(module).__name__} has the layers {', '.join(layers)}: name "
            "the one whose outputs are compared with the targets, layer='head' or the like"
        )
    return linear[0]
