"""Layers of a module that RLS trains, and their weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

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
from lightning_struct.optim.memory import bytes_as_text, check_memory, table
from lightning_struct.optim.requirements import LOWER_PRECISION, refuse_lazy
from lightning_struct.optim.rls.forms import LARGEST_FULL
from lightning_struct.optim.rls.layers import LayerReader, layer_reader
from lightning_struct.optim.rls.settings import Settings
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
        settings: of the optimizer.

    Attributes:
        weights: all that are trained.
        of_layers: the weights of each layer by their names below it.
        incomplete: layers with parameters that are not trained yet.
    """

    def __init__(self, layers: list[tuple[str, nn.Module, LayerReader]], settings: Settings) -> None:
        self._names = {layer: name for name, layer, _ in layers}
        self._settings = settings
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
            weights = self.of_layers[layer]
            for matrix in kind.matrices(layer):
                parameter = parameters.get(matrix.weight)
                if parameter is not None and matrix.weight not in weights and is_trained(parameter):
                    weights[matrix.weight] = self._use(layer, parameter, matrix)
                    bias = parameters.get(matrix.bias or "")
                    if bias is None or not is_trained(bias) or (bias, matrix.bias_rows.start) in self._taken:
                        weights[matrix.weight].add_layer(None)
                    else:
                        self._taken.add((bias, matrix.bias_rows.start))
                        weights[matrix.weight].add_layer(Bias(bias, matrix.bias_rows))
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
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"RLS needs weights in float32 or float64, but {name} is {parameter.dtype}; {LOWER_PRECISION}"
                )
            self._of_parameter[parameter] = TrainedWeight(
                name, parameter, self._settings, groups=matrix.groups, transposed=matrix.transposed
            )
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


def summary_table(weights: Sequence[TrainedWeight]) -> str:
    """A line for each trained weight: its name, the form and size of P, and the memory that this takes."""
    rows = [("weight", "form", "P", "memory")]
    for weight in weights:
        first, *others = weight.shape
        size = " x ".join(str(number) for number in ([first] if first > 1 else []) + others)
        rows.append((weight.name, weight.form_name, size, bytes_as_text(weight.memory)))
    rows.append(("total", "", "", bytes_as_text(sum(weight.memory for weight in weights))))
    return table(rows)


def memory_in_words(weights: Sequence[TrainedWeight]) -> str:
    """The memory that P of these weights takes, and how many have a form that was chosen by their size."""
    memory = bytes_as_text(sum(weight.memory for weight in weights))
    text = f"RLS takes {memory} for P; weights that it trains: {len(weights)}"
    chosen = [weight for weight in weights if weight.settings.form is None and weight.form_name == "low_rank"]
    if not chosen:
        return text
    return (
        f"{text}; {len(chosen)} with more than {LARGEST_FULL:,} inputs have the low-rank form (form='full' for the "
        "exact one)"
    )


def check_inverses_fit(weights: Sequence[TrainedWeight]) -> None:
    """Compare the memory that all P take with the free memory of their devices.

    Raises:
        MemoryError: they take more; named are the largest of them and the remedies.
    """
    on_device: dict[torch.device, list[TrainedWeight]] = defaultdict(list)
    for weight in weights:
        on_device[weight.parameter.device].append(weight)
    for device, there in on_device.items():
        check_memory(
            "The matrices P of RLS",
            {weight.name: (weight.memory, f"{weight.features} inputs") for weight in there},
            device,
            "Use form='low_rank' or 'rank1', or exclude layers",
        )


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
    layers = {name: known for name, known, _ in layers_to_train(module, set())}
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
