"""Parametrizations of weights that can be pickled, and taken out of a copy alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def add_parametrization(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Parametrize a weight as ``torch.nn.utils.parametrize`` does, such that the module can be pickled.

    torch gives each parametrized module a class of its own, which no other process would find, and refuses to pickle
    it. Here it is pickled by the class that it had before, from which such a class is made anew.

    Args:
        module: has the weight, and no parametrization of other than here.
        name: of the weight.
        parametrization: maps the weight to that with which the module computes.
    """
    parametrize.register_parametrization(module, name, parametrization)
    _make_picklable(type(module))


@torch.no_grad()
def remove_parametrizations(module: nn.Module) -> None:
    """Make parametrized weights plain parameters. torch's own function would change deep copies of the module, too."""
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    plain: dict[str, nn.Parameter | None] = {
        name: nn.Parameter(getattr(module, name), requires_grad=bool(weights.original.requires_grad))
        for name, weights in parametrizations.items()
    }
    del module.parametrizations
    module.__class__ = type(module).__bases__[0]
    module._parameters = plain | module._parameters  # weights come before biases again


def _make_picklable(parametrized: Any) -> None:
    """Give a class that torch has made for a parametrized module another way of being pickled."""
    if "__getstate__" in vars(parametrized):  # which refuses
        del parametrized.__getstate__
    parametrized.__reduce_ex__ = _reduced


def _reduced(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """What pickle needs to make a parametrized module again."""
    plain = type(module).__bases__[0]
    reduced: Any = super(type(module), module).__reduce_ex__(max(2, protocol))  # made by a function, from the class
    assert isinstance(module.parametrizations, nn.ModuleDict)
    return _unfilled, (plain, tuple(module.parametrizations)), *reduced[2:]


def _unfilled(plain: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module without attributes, of a class like that which torch makes for weights of these names."""
    module = plain.__new__(plain)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        add_parametrization(module, name, nn.Identity())
    vars(module).clear()
    return module
