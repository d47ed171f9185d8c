"""Per-sample gradients, layer by layer: contributions, rules for them, and the recorder that gathers them by hooks."""

from lightning_struct.functional.layers.per_sample.contributions import (
    Contribution,
    Convolution,
    Dense,
    Lookup,
    Outer,
    Uncovered,
)

__all__ = ["Contribution", "Convolution", "Dense", "Lookup", "Outer", "Uncovered"]
