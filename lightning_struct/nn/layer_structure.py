"""Compressed models in files: their structure as plain data, and copies for inference."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.checks import checked
from lightning_struct.functional.layers.registry import linear_with
from lightning_struct.nn.attention import PROJECTIONS
from lightning_struct.nn.channels import CONVOLUTIONS, ChannelLinear, PatchLinear, as_matrix, in_place_of
from lightning_struct.nn.convolutions import BlockStructured, blocks_in_place_of
from lightning_struct.nn.replace import LayerFactory, called_attention, put_in_place, replacement
from lightning_struct.nn.selection import Model
from lightning_struct.nn.structured import StructuredLinear
from lightning_struct.nn.torch_modules import copy_hooks, take_hooks

Structure = dict[str, dict[str, Any]]
"""The class of each structured layer and its arguments, by the name that stands for it. A class from outside of this
package has its module before its name, as ``"package.module:Name"``."""

_NOT_ARGUMENTS = ("self", "in_features", "out_features", "bias", "device", "dtype")


@checked
def layer_structure(model: nn.Module) -> Structure:
    """Which structured layers a model has, as plain data: for a checkpoint, or for JSON.

    For example::

        torch.save({"structure": layer_structure(small), "weights": small.state_dict()}, "small.pt")

        saved = torch.load("small.pt")
        small = apply_structure(Network(), saved["structure"])
        small.load_state_dict(saved["weights"])

    A :class:`~lightning_struct.nn.BlockStructured` in place of a convolution is listed. Of modules of your own, such as
    a :class:`~lightning_struct.nn.StructuredLSTM`, the structured layers in them are, but they are not: the code that
    makes the network has to make them.

    Args:
        model: any.

    Returns:
        The class of each structured layer and its arguments, by the name of the layer that it replaces.

    Raises:
        TypeError: a layer's class has an argument that is not an attribute of the layer, or no plain value.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> layer_structure(nn.Sequential(LowRank(16, 8, rank=2), nn.Linear(8, 4)))
        {'0': {'class': 'LowRank', 'rank': 2}}
    """
    structure: Structure = {}
    parts: set[nn.Module] = set()  # of what is listed
    for name, layer in model.named_modules(remove_duplicate=False):
        if layer not in parts and (entry := structure_entry(layer)) is not None:
            structure[name] = entry
            parts |= set(layer.modules()) - {layer}
    return structure


@checked
def apply_structure(model: Model, structure: Mapping[str, Mapping[str, Any]]) -> Model:
    """Put structured layers into a model as they are in a compressed one, with weights still to be loaded.

    Args:
        model: as the compressed one was before, changed in place. Layers that have their structure already stay.
        structure: a result of :func:`layer_structure`.

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
    present = dict(model.named_modules(remove_duplicate=False))
    structure = {
        name: entry
        for name, entry in structure.items()
        if name not in present or structure_entry(present[name]) != entry
    }
    if not structure:
        return model

    def has_projections(name: str, attention: nn.Module) -> bool:
        return any((f"{name}.{part}" if name else part) in structure for part in PROJECTIONS)

    with called_attention(model, has_projections) as (called, _):
        return put_in_place(called, _new_layers(called, structure))


def _new_layers(model: nn.Module, structure: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, nn.Module]]:
    """The layers of a structure by their names, for a model whose attention calls its projections."""
    made: dict[nn.Module, nn.Module] = {}
    places: list[tuple[str, nn.Module]] = []
    named = dict(model.named_modules(remove_duplicate=False))
    for name, entry in structure.items():
        old = named.get(name)
        new = None if old is None else made.get(old) or _in_place_of(name, old, entry)
        if old is None or new is None:
            above = name
            while above not in named:
                above = above.rpartition(".")[0]
            at = "" if above == name else f" at {above!r}"
            found = f"a {type(named[above]).__name__}{at}" if above or not name else "no such layer"
            raise ValueError(
                f"the structure has {entry['class']} for {name or 'the model'}, but {type(model).__name__} has "
                f"{found}: make the model with the arguments of the one that was compressed, and "
                "with its other parts: adapters (add_adapters), and modules of your own, such as a StructuredLSTM"
            )
        if old not in made:
            take_hooks(new, old)
            made[old] = new
        places.append((name, new))
    return places


def structure_entry(layer: nn.Module) -> dict[str, Any] | None:
    """The entry of a layer in a structure; None for layers that it does not list."""
    if isinstance(layer, ChannelLinear | PatchLinear):
        return structure_entry(layer.linear)
    if isinstance(layer, StructuredLinear):
        return {"class": _name_of(type(layer)), **_arguments(layer)}
    if not isinstance(layer, BlockStructured):
        return None
    first, *others = (structure_entry(block) for block in layer.blocks)
    if first is None or any(other != first for other in others):
        return None
    in_shape = {} if layer.in_shape is None else {"in_shape": list(layer.in_shape)}
    out_size = {} if layer.out_shape is None else {"out_size": list(layer.out_shape)}
    return {"class": "BlockStructured", "size": layer.size, **in_shape, **out_size, "blocks": first}


def _in_place_of(name: str, old: nn.Module, entry: Mapping[str, Any]) -> nn.Module | None:
    """The replacement of a layer in the structure; None if the layer has no matrix."""
    if entry["class"] == "BlockStructured":
        if type(old) not in CONVOLUTIONS:
            return None
        size = torch.Size(entry.get("in_shape", [entry["size"]]))
        return blocks_in_place_of(name, old, size, entry.get("out_size"), layer_factory(entry["blocks"]))
    linear = as_matrix(old)
    return None if linear is None else in_place_of(old, replacement(name, linear, layer_factory(entry)))


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


def layer_factory(entry: Mapping[str, Any]) -> LayerFactory:
    """Makes layers of the class and with the arguments of an entry."""
    known, name = {_name_of(layer_class): layer_class for layer_class in _derived(StructuredLinear)}, entry["class"]
    if name not in known:
        raise ValueError(f"the structure has the class {name}, which is not known: import its module first")
    arguments = {key: value for key, value in entry.items() if key != "class"}

    def factory(in_features: int, out_features: int, bias: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return known[name](in_features, out_features, bias=bias, **arguments)

    return factory


def _name_of(layer_class: type[StructuredLinear]) -> str:
    """The name of a class of this package; of others with the module, since they may be named alike."""
    is_ours = layer_class.__module__.partition(".")[0] == __name__.partition(".")[0]
    return layer_class.__name__ if is_ours else f"{layer_class.__module__}:{layer_class.__qualname__}"


def _derived(layer_class: type[StructuredLinear]) -> Iterator[type[StructuredLinear]]:
    for derived in layer_class.__subclasses__():
        yield from (derived, *_derived(derived))


@checked
def freeze(model: Model, *, dense: bool = False) -> Model:
    """A copy of the model for inference: its structured layers are in eval mode, and need no gradients.

    So they prepare once for many calls what multiplies fastest: see :class:`StructuredLinear`. Other layers stay as
    they are, trainable and in their mode. Hooks are copied, and tensors that the model has kept from a computation
    without their history.

    Args:
        model: stays as it is.
        dense: put an ``nn.Linear`` with the same matrix in place of each structured layer, for tools that do not know
            these, such as ``torch.onnx.export``. Matrices take as much memory as the dense model.

    Raises:
        ValueError: a parameter has NaN or infinite entries, or a buffer was averaged.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> model = nn.Sequential(LDRSubdiagonal(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> freeze(model, dense=True)[0]
        Linear(in_features=256, out_features=256, bias=True)
        >>> torch.allclose(freeze(model)(torch.ones(256)), model(torch.ones(256)), atol=1e-4)
        True
    """
    copied: dict[int, Any] = {}  # by the ids, as the second argument of copy.deepcopy
    for module in model.modules():  # tensors of a computation, which torch does not copy with their history
        computed = [value for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf]
        copied.update({id(tensor): tensor.detach().clone() for tensor in computed})
    structured = [layer for layer in model.modules() if isinstance(layer, StructuredLinear)]
    for layer in structured:
        layer.check_values()
        if dense:
            with torch.inference_mode(False), torch.no_grad():
                linear = linear_with(layer.weight.clone(), None if layer.bias is None else layer.bias.clone(), False)
            copied[id(layer)] = linear
    result = copy.deepcopy(model, copied)
    for layer in structured:
        frozen = copied[id(layer)].eval().requires_grad_(False)
        if dense:
            copy_hooks(frozen, layer, copied)
    return result
