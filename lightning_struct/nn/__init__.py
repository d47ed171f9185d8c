"""Layers and their initialisation, on torch alone."""

from lightning_struct.nn.init import sparse_normal_

__all__ = ["sparse_normal_"]
