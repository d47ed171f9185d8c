"""Modules in eval mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """A context in which a module and all below it are in eval mode; afterwards each is in the mode that it was in."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
