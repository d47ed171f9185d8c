"""Shares of samples in gradients: :mod:`lightning_struct.functional.layers.per_sample`, under its first name."""

from lightning_struct.functional.layers.per_sample import Contribution, Convolution, Dense, Lookup, Outer, Uncovered

__all__ = ["Contribution", "Convolution", "Dense", "Lookup", "Outer", "Uncovered"]
