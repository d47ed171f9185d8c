"""η by the names of modules and weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_struct.functional.layers.registry import plain_name, plain_named_modules


class GradientScales:
    """η by the names of modules and weights.

    Args:
        scale: of all, or a dict of it by the names of modules or weights.
        module: of which they are the names.

    Raises:
        ValueError: a name is none of them.
    """

    def __init__(self, scale: float | Mapping[str, float], module: nn.Module) -> None:
        self._all = None if isinstance(scale, Mapping) else float(scale)
        self._by_name = (
            {plain_name(name): float(value) for name, value in scale.items()} if isinstance(scale, Mapping) else {}
        )
        modules = {name for name, _ in plain_named_modules(module)}
        parameters = {plain_name(name) for name, _ in module.named_parameters()}
        if unknown := self._by_name.keys() - modules - parameters:
            raise ValueError(
                f"gradient_scale names {', '.join(map(repr, sorted(unknown)))}, which are neither modules nor "
                "parameters"
            )

    def of(self, weight: str) -> float:
        """η of a weight by its name: that of the longest name that is above it, or its own."""
        if self._all is not None:
            return self._all
        parts = weight.split(".")
        above = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        return next((self._by_name[name] for name in above if name in self._by_name), 1.0)
