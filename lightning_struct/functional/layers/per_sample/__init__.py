"""Per-sample gradients, layer by layer: contributions, rules for them, and the recorder that gathers them by hooks."""

from lightning_struct.functional.layers.per_sample.contributions import Contribution, Dense, Lookup, Outer, Uncovered
from lightning_struct.functional.layers.per_sample.convolution import Convolution

__all__ = ["Contribution", "Convolution", "Dense", "Lookup", "Outer", "Uncovered"]
