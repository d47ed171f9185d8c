"""The list of the structured classes, and their arguments for a number of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_struct.nn.baselines import Circulant, PrunedLinear
from lightning_struct.nn.classic import (
    CauchyLike,
    GeneratorLinear,
    HankelLike,
    LowRank,
    ToeplitzLike,
    VandermondeLike,
)
from lightning_struct.nn.hadamard import Fastfood, RandomizedHadamard
from lightning_struct.nn.ldr import LDRSubdiagonal, LDRTridiagonal
from lightning_struct.nn.monarch import Butterfly, Monarch
from lightning_struct.nn.structured import StructuredLinear

_CLASSES: tuple[type[StructuredLinear], ...] = (
    *(LDRSubdiagonal, LDRTridiagonal, ToeplitzLike, HankelLike, VandermondeLike, CauchyLike, LowRank),
    *(Monarch, Butterfly, Circulant, Fastfood, RandomizedHadamard, PrunedLinear),
)
STRUCTURED_CLASSES: dict[str, type[StructuredLinear]] = {layer.__name__: layer for layer in _CLASSES}
"""All structured classes of this package by their names; each takes the place of ``nn.Linear`` by replace_linear."""


def layer_of_rank(name: str, rank: int) -> Callable[..., StructuredLinear]:
    """A factory of layers of one class, with the generators of a rank or as many parameters as :class:`LowRank` has.

    ``Monarch``, ``Butterfly``, ``Circulant`` and ``Fastfood`` have the number of parameters that goes with their sizes.

    Args:
        name: a key of ``STRUCTURED_CLASSES``.
        rank: r, at least 1. ``LowRank`` has r (m + n) parameters.

    Returns:
        A function of ``in_features``, ``out_features`` and options of the class, such as ``bias``.

    Example:
        >>> [layer_of_rank(name, 2)(64, 64).weight_parameters for name in ("LowRank", "PrunedLinear", "Circulant")]
        [256, 256, 64]
    """
    layer_class: Any = STRUCTURED_CLASSES[name]

    def make(in_features: int, out_features: int, **options: Any) -> StructuredLinear:
        parameters = rank * (in_features + out_features)
        if issubclass(layer_class, GeneratorLinear):
            options["rank"] = rank
        elif layer_class is RandomizedHadamard:
            options["terms"] = max(1, parameters // max(in_features, out_features))
        elif layer_class is PrunedLinear:
            options["parameters"] = parameters
        layer: StructuredLinear = layer_class(in_features, out_features, **options)
        return layer

    return make
