"""The structure of a compressed model as plain data, so that its weights can be loaded into the model that it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_struct.nn.attention import PROJECTIONS, own_linear, with_projections
from lightning_struct.nn.channels import ChannelLinear, PatchLinear, as_matrix, in_place_of
from lightning_struct.nn.replace import put_in_place, replacement, take_hooks
from lightning_struct.nn.structured import StructuredLinear

Structure = dict[str, dict[str, Any]]
"""The class of each structured layer and its arguments, by the name of what it stands for."""

_NOT_ARGUMENTS = ("self", "in_features", "out_features", "bias", "device", "dtype")


def layer_structure(model: nn.Module) -> Structure:
    """Which structured layers a model has, as plain data: for a checkpoint, or for JSON. ::

        torch.save({"structure": layer_structure(small), "weights": small.state_dict()}, "small.pt")

        saved = torch.load("small.pt")
        small = apply_structure(Network(), saved["structure"])
        small.load_state_dict(saved["weights"])

    Args:
        model: any.

    Returns:
        The class of each structured layer and its arguments, by the name of what it stands for.

    Raises:
        TypeError: a layer's class has an argument that is not an attribute of the layer, or no plain value.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> layer_structure(nn.Sequential(LowRank(16, 8, rank=2), nn.Linear(8, 4)))
        {'0': {'class': 'LowRank', 'rank': 2}}
    """
    named = dict(model.named_modules(remove_duplicate=False))
    structure: Structure = {}
    for name, layer in named.items():
        if isinstance(layer, StructuredLinear):
            above = name.rpartition(".")[0]
            in_convolution = isinstance(named[above], ChannelLinear | PatchLinear)
            structure[above if in_convolution else name] = {"class": type(layer).__name__, **_arguments(layer)}
    return structure


def apply_structure(model: nn.Module, structure: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    """Put structured layers into a model as they are in a compressed one, with weights still to be loaded.

    Args:
        model: as the compressed one was before, changed in place. Layers that have their structure already stay.
        structure: what :func:`layer_structure` returned.

    Returns:
        ``model``; the new layer if it is a layer itself.

    Raises:
        ValueError: a class is unknown; the model has no layer of a name, or one that has no matrix.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> small = nn.Sequential(LowRank(16, 8, rank=2), nn.Linear(8, 4))
        >>> model = apply_structure(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), layer_structure(small))
        >>> model.load_state_dict(small.state_dict())
        <All keys matched successfully>
    """
    present = layer_structure(model)
    structure = {name: entry for name, entry in structure.items() if present.get(name) != dict(entry)}
    if not structure:
        return model
    attentions = _call_attention(model, structure)
    made: dict[nn.Module, nn.Module] = {}
    places: list[tuple[str, nn.Module]] = []
    put_in_place(model, attentions)
    named = dict(model.named_modules(remove_duplicate=False))
    for name, entry in structure.items():
        old = named.get(name)
        linear = None if old is None else as_matrix(old)
        if old is None or linear is None:
            found = "no such layer" if old is None else f"a {type(old).__name__}"
            raise ValueError(
                f"the structure has {entry['class']} for {name or 'the model'}, where {type(model).__name__} has "
                f"{found}: make the model with the arguments of the one that was compressed"
            )
        if old not in made:
            made[old] = in_place_of(old, _new_layer(name, linear, entry))
            take_hooks(made[old], old)
        places.append((name, made[old]))
    put_in_place(model, places)
    return next((layer for name, layer in places if not name), model)


def _arguments(layer: StructuredLinear) -> dict[str, Any]:
    """The arguments of the class that the layer was made with, as far as they have no default or differ from it."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(layer).__init__).parameters.items():
        if name in _NOT_ARGUMENTS:
            continue
        value = layer.weight_parameters if name == "parameters" else vars(layer).get(name, parameter.default)
        if not isinstance(value, int | float | str | None):
            raise TypeError(f"{type(layer).__name__} has the argument {name!r}, which the layer does not know any more")
        if value != parameter.default:
            arguments[name] = value
    return arguments


def _new_layer(name: str, linear: nn.Linear, entry: Mapping[str, Any]) -> nn.Module:
    arguments = {key: value for key, value in entry.items() if key != "class"}
    known = {of.__name__: of for of in _classes(StructuredLinear)}  # type: ignore[type-abstract]
    if entry["class"] not in known:
        raise ValueError(f"the structure has the class {entry['class']}, which is not known: import its module first")

    def factory(in_features: int, out_features: int, bias: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return known[entry["class"]](in_features, out_features, bias=bias, **arguments)

    return replacement(name, linear, factory)


def _classes(of: type[StructuredLinear]) -> Iterator[type[StructuredLinear]]:
    for derived in of.__subclasses__():
        yield derived
        yield from _classes(derived)


def _call_attention(model: nn.Module, structure: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    """Attention that calls its projections, where the structure has one of them."""
    made: dict[nn.Module, nn.Module] = {}
    places: list[tuple[str, nn.Module]] = []
    for name, attention in model.named_modules(remove_duplicate=False):
        parts = {f"{name}.{part}" if name else part for part in PROJECTIONS}
        if isinstance(attention, nn.MultiheadAttention) and parts & set(structure):
            if attention not in made:
                called = with_projections(attention, lambda _, linear: own_linear(linear))
                assert called is not None
                take_hooks(called, attention)
                made[attention] = called
            places.append((name, made[attention]))
    return places
