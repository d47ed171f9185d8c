"""Layers of a module that RLS trains, and their weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_struct.functional.layers import Matrix, hidden_layers, kind_of, plain_named_modules
from lightning_struct.optim.rls.layers import LayerReader, layer_reader
from lightning_struct.optim.rls.weights import Bias, TrainedWeight


def layers_to_train(module: nn.Module, excluded: set[nn.Module]) -> list[tuple[str, nn.Module, LayerReader]]:
    """Name, layer and reader of each layer that RLS trains.

    Raises:
        ValueError: a layer has no shape yet.
    """
    layers, hidden = [], hidden_layers(module)
    for name, layer in plain_named_modules(module):
        if any(is_lazy(parameter) for parameter in layer.parameters(recurse=False)):
            raise ValueError(
                f"{name or 'the module'} ({type(layer).__name__}) has no shape yet: call the module once before making RLS"
            )
        reader = layer_reader(layer)
        if reader is not None and layer not in excluded and layer not in hidden:
            layers.append((name, layer, reader))
    return layers


def trained_weights(
    layers: list[tuple[str, nn.Module, LayerReader]], excluded: set[nn.Module], forgetting: float
) -> dict[nn.Module, dict[str, TrainedWeight]]:
    """The weights of each layer by their names below it: one for each parameter that is trained, however many use it.

    Args:
        layers: of :func:`layers_to_train`.
        excluded: modules whose parameters are not trained, in whatever layer else they are used.
        forgetting: λ.

    Raises:
        ValueError: a weight is neither float32 nor float64; layers with one weight see it as other matrices.
    """
    left_alone = {parameter for module in excluded for parameter in module.parameters(recurse=False)}
    of_parameter: dict[nn.Parameter, TrainedWeight] = {}
    taken: set[tuple[nn.Parameter, int | None]] = set()  # biases, by their parameters and first rows
    of_layers: dict[nn.Module, dict[str, TrainedWeight]] = {}
    for name, layer, _ in layers:
        kind = kind_of(layer)
        assert kind is not None
        trained = {
            own: parameter
            for own, parameter in layer.named_parameters(remove_duplicate=False)
            if parameter.requires_grad and parameter not in left_alone
        }
        of_layers[layer] = {}
        for matrix in kind.matrices(layer):
            if (parameter := trained.get(matrix.weight)) is None:
                continue
            if parameter not in of_parameter:
                of_parameter[parameter] = _new_weight(
                    f"{name}.{matrix.weight}" if name else matrix.weight, parameter, matrix, forgetting
                )
            weight = of_layers[layer][matrix.weight] = of_parameter[parameter]
            if (weight.groups, weight.transposed) != (matrix.groups, matrix.transposed):
                raise ValueError(
                    f"{weight.name} is the weight of layers with {weight.groups} and with {matrix.groups} groups, or of one "
                    "that is stored as (in, out) and of one that is not: exclude one"
                )
            bias = trained.get(matrix.bias or "")
            if bias is None or (bias, matrix.bias_rows.start) in taken:
                weight.add_layer(None)
            else:
                taken.add((bias, matrix.bias_rows.start))
                weight.add_layer(Bias(bias, matrix.bias_rows))
    return of_layers


def _new_weight(name: str, parameter: nn.Parameter, matrix: Matrix, forgetting: float) -> TrainedWeight:
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"RLS needs weights in float32 or float64, but {name} is {parameter.dtype}; for lower precision keep float32 "
            "weights and use autocast to bfloat16 (bf16-mixed)"
        )
    return TrainedWeight(name, parameter, groups=matrix.groups, transposed=matrix.transposed, forgetting=forgetting)
