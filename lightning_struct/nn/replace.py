"""Replacement of the linear layers of a model by structured ones."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from lightning_struct.functional.layers import as_linear, hidden_layers, is_affine
from lightning_struct.nn.structured import StructuredLinear

_log = logging.getLogger(__name__)

LayerFactory = Callable[..., nn.Module]
"""Called as ``factory(in_features, out_features, bias=bias)``; or a ``from_linear``, called on the layer itself."""
Selection = str | nn.Module | Callable[[str, nn.Module], bool]
"""A name with or without wildcards, a module, or a function of the name and the module."""


def replace_linear(
    model: nn.Module,
    factory: LayerFactory,
    *,
    include: Selection | Iterable[Selection] | None = None,
    exclude: Selection | Iterable[Selection] | None = None,
) -> nn.Module:
    """Put a structured layer where each ``nn.Linear`` stands, in place; also where a layer stands that was declared by its
    matrix (see :func:`~lightning_struct.functional.layers.register_layer`). ::

        model = replace_linear(model, functools.partial(LDRSubdiagonal, rank=2), exclude="head")
        model = replace_linear(model, functools.partial(LDRSubdiagonal.from_linear, rank=2))    # near to its weights
        print(replacement_report(model))

    New layers have the device, the dtype and the mode of the old ones. A layer that stands at several places is replaced
    by one layer at all of them. What is replaced is logged at level INFO. The output projection of an
    ``nn.MultiheadAttention`` is left as it is, and logged too: attention reads its weight, and does not call it.

    Make the optimizer after this: the old parameters are gone. A weight that a replaced layer had together with another
    module, such as an embedding, is theirs alone from then on; that is logged as a warning.

    Args:
        model: searched with everything below it. If it is an ``nn.Linear`` itself, the new layer is returned.
        factory: called as ``factory(in_features, out_features, bias=bias)``; or the ``from_linear`` of a class, by itself
            or in a ``functools.partial``, called on the old layer, or on an ``nn.Linear`` with its weight and bias.
        include: names ("encoder.0"), patterns ("encoder.*.up"), modules, or functions of (name, module); a name or a module
            stands for all that is below it, too. None: all.
        exclude: likewise, what is left as it is.

    Returns:
        ``model``.

    Raises:
        ValueError: nothing is replaced, or a name, a pattern or a module of ``include`` or ``exclude`` is not in the model.

    Example:
        >>> from lightning_struct.nn import LowRank
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> model = replace_linear(model, functools.partial(LowRank, rank=3), exclude="2")
        >>> [type(layer).__name__ for layer in model]
        ['LowRank', 'ReLU', 'Linear']
    """
    included = None if include is None else _Selector("include", include, model)
    excluded = _Selector("exclude", () if exclude is None else exclude, model)
    in_attention = set(map(id, hidden_layers(model, of_other_forwards=True)))
    replacements: dict[int, nn.Module] = {}
    places: list[tuple[str, nn.Module]] = []
    for name, layer in model.named_modules(remove_duplicate=False):
        if not is_affine(layer):
            continue
        if (included is not None and not included.has(name, layer)) or excluded.has(name, layer):
            continue
        if id(layer) in in_attention:
            _log.info("%s is left as it is: nn.MultiheadAttention reads its weight", name)
            continue
        if id(layer) not in replacements:
            replacements[id(layer)] = _replacement(as_linear(layer), factory)
            _log.info("%s: %s -> %s", name or "the model", layer, _described(replacements[id(layer)]))
        places.append((name, replacements[id(layer)]))
    if not replacements:
        raise ValueError(
            "replace_linear replaces nothing: no nn.Linear that is included and not excluded (and not inside of an "
            f"nn.MultiheadAttention) is in {type(model).__name__}; lightning_struct.functional.register_layer declares "
            "layers of other types to be linear"
        )
    _warn_of_ties(model, [name for name, _ in places])
    for name, replacement in places:  # only now: an error leaves the model as it was
        if not name:
            return replacement
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacement)
    return model


def replacement_report(model: nn.Module) -> str:
    """A table of the structured layers below ``model``.

    Its columns are the name, the class, the parameters, those of a dense layer, the compression ratio, and the relative
    error of those that were made from a trained layer.

    Example:
        >>> from lightning_struct.nn import Circulant
        >>> header, row = replacement_report(nn.Sequential(Circulant(64, 64))).splitlines()
        >>> row.split()
        ['0', 'Circulant', '64', '4,096', '64.0']
    """
    rows = [("layer", "class", "parameters", "dense", "compression", "error")]
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear):
            error = "" if layer.approximation_error is None else f"{layer.approximation_error:.3g}"
            dense = layer.in_features * layer.out_features
            ratio = f"{layer.compression_ratio:.1f}"
            rows.append(
                (name or "(model)", type(layer).__name__, f"{layer.weight_parameters:,}", f"{dense:,}", ratio, error)
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _warn_of_ties(model: nn.Module, replaced: list[str]) -> None:
    """Log the modules that share a weight with a replaced layer, such as an embedding."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for tied in names.values():
        gone = [name for name in tied if name in replaced]
        kept = [name for name in tied if name not in replaced]
        if gone and kept:
            _log.warning("%s had its weight together with %s, and no longer has", ", ".join(gone), ", ".join(kept))


class _Selector:
    """A selection of modules by names, patterns, modules and functions."""

    def __init__(self, argument: str, selections: Selection | Iterable[Selection], model: nn.Module) -> None:
        if isinstance(selections, str | nn.Module) or callable(selections):
            selections = [selections]
        self.names: list[str] = []
        self.modules: set[int] = set()
        self.predicates: list[Callable[[str, nn.Module], bool]] = []
        named = dict(model.named_modules(remove_duplicate=False))
        for selection in selections:
            if isinstance(selection, str):
                if not any(fnmatchcase(name, selection) for name in named):
                    raise ValueError(f"{argument} names {selection!r}, which is not in {type(model).__name__}")
                self.names.append(selection)
            elif isinstance(selection, nn.Module):
                if all(selection is not module for module in named.values()):
                    raise ValueError(f"{argument} has a module that is not in {type(model).__name__}: {selection}")
                self.modules.update(map(id, selection.modules()))
            else:
                self.predicates.append(selection)

    def has(self, name: str, module: nn.Module) -> bool:
        return (
            id(module) in self.modules
            or any(fnmatchcase(above, selection) for above in _with_parents(name) for selection in self.names)
            or any(predicate(name, module) for predicate in self.predicates)
        )


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _replacement(linear: nn.Linear, factory: LayerFactory) -> nn.Module:
    if _is_from_linear(factory):
        return factory(linear)
    layer = factory(linear.in_features, linear.out_features, bias=linear.bias is not None)
    return layer.to(linear.weight.device, linear.weight.dtype).train(linear.training)


def _is_from_linear(factory: LayerFactory) -> bool:
    while isinstance(factory, functools.partial):
        factory = factory.func
    return getattr(factory, "__name__", "") == "from_linear"


def _described(layer: nn.Module) -> str:
    if not isinstance(layer, StructuredLinear):
        return str(layer)
    error = "" if layer.approximation_error is None else f", relative error {layer.approximation_error:.3g}"
    return f"{layer}, {layer.compression_ratio:.1f} times fewer parameters{error}"
