"""Which modules of a model are meant, by names, patterns, modules, classes and functions."""

import glob
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from lightning_struct.nn.attention import PROJECTIONS

Selector = str | nn.Module | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A name with or without wildcards, a module, a class of modules, or a function of the name and the module."""

Model = TypeVar("Model", bound=nn.Module)
"""The given module with other layers within; or the replacement, if it is a layer itself."""


class Selection:
    """The modules of a model that ``include`` means and ``exclude`` does not.

    A name, a pattern, a module or a class stands for all that is below it, too. The projections of
    ``nn.MultiheadAttention``, which are no modules there, have the names ``q_proj``, ``k_proj``, ``v_proj`` and
    ``out_proj`` below its name.

    Args:
        model: root of the names.
        include: None: all.
        exclude: None: nothing.

    Raises:
        ValueError: a name, a pattern, a module or a class of ``include`` or ``exclude`` is not in the model.
        TypeError: a selector is something else, such as a number.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> selection = Selection(model, exclude="2")
        >>> [name for name, layer in model.named_modules() if selection.has(name, layer)]
        ['', '0', '1']
    """

    def __init__(
        self,
        model: nn.Module,
        include: Selector | Iterable[Selector] | None = None,
        exclude: Selector | Iterable[Selector] | None = None,
    ) -> None:
        self._included = None if include is None else _Selectors("include", include, model)
        self._excluded = _Selectors("exclude", () if exclude is None else exclude, model)

    def has(self, name: str, module: nn.Module, owner: nn.Module | None = None) -> bool:
        """Whether a module is meant.

        Args:
            name: its name in the model.
            module: itself, or one that computes as it does if it is none of the model's.
            owner: the attention that it is a projection of.
        """
        return self.why_not(name, module, owner) is None

    def why_not(self, name: str, module: nn.Module, owner: nn.Module | None = None) -> str | None:
        """The reason for which a module is not meant; None if it is. Arguments as of :meth:`has`."""
        if self._excluded.match(name, module, owner):
            return "exclude has it"
        if self._included is not None and not self._included.match(name, module, owner):
            return "include does not have it"
        return None

    def names(self, name: str, module: nn.Module) -> bool:
        """Whether ``include`` has the module itself or its full name: who wrote that means this one."""
        return self._included is not None and (name in self._included.names or id(module) in self._included.given)


def is_at_or_below(name: str, pattern: str) -> bool:
    """Whether the pattern is or matches a name, or that of a module above it.

    Example:
        >>> is_at_or_below("encoder.0.weight", "enc*.0"), is_at_or_below("encoder.0", "0")
        (True, False)
    """
    while name:
        if name == pattern or fnmatchcase(name, pattern):
            return True
        name = name.rpartition(".")[0]
    return False


def sharing_weights(model: nn.Module) -> set[nn.Module]:
    """The modules that share a weight with another module, such as an embedding and a head."""
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    return {module for of in holders.values() if len(of) > 1 for module in of}


class _Selectors:
    """The selectors of one argument."""

    def __init__(self, argument: str, selectors: Selector | Iterable[Selector], model: nn.Module) -> None:
        if isinstance(selectors, str | nn.Module) or callable(selectors) or not isinstance(selectors, Iterable):
            selectors = [selectors]
        self.names: set[str] = set()
        self.patterns: list[str] = []
        self.given: set[int] = set()
        self.modules: set[int] = set()
        self.predicates: list[Callable[[str, nn.Module], bool]] = []
        named = dict(model.named_modules(remove_duplicate=False))
        for name, module in list(named.items()):
            if isinstance(module, nn.MultiheadAttention):
                named |= {f"{name}.{part}" if name else part: module for part in PROJECTIONS}
        for selector in selectors:
            if isinstance(selector, str):
                if selector in named:
                    self.names.add(selector)
                    self.patterns.append(glob.escape(selector))  # it may have brackets
                elif any(fnmatchcase(name, selector) for name in named):
                    self.patterns.append(selector)
                else:
                    below = [name for name in named if name.endswith(f".{selector}")]
                    hint = f": '*.{selector}' names {below[0]}{' and others' * (len(below) > 1)}" if below else ""
                    raise ValueError(f"{argument} names {selector!r}, which is not in {type(model).__name__}{hint}")
            elif isinstance(selector, nn.Module):
                if all(selector is not module for module in named.values()):
                    raise ValueError(f"{argument} has a module that is not in {type(model).__name__}: {selector}")
                self.given.add(id(selector))
                self.modules.update(map(id, selector.modules()))
            elif isinstance(selector, type) and issubclass(selector, nn.Module):
                meant = [module for module in model.modules() if isinstance(module, selector)]
                if not meant:
                    raise ValueError(f"{argument} has {selector.__name__}, and {type(model).__name__} has none")
                self.modules.update(id(below) for module in meant for below in module.modules())
            elif callable(selector) and not isinstance(selector, type):
                self.predicates.append(selector)
            else:
                kinds = "names such as '0', patterns, modules, their classes, and functions of name and module"
                raise TypeError(f"{argument} takes {kinds}, but has {selector!r}")

    def match(self, name: str, module: nn.Module, owner: nn.Module | None) -> bool:
        return (
            id(module) in self.modules
            or id(owner) in self.modules
            or any(is_at_or_below(name, pattern) for pattern in self.patterns)
            or any(predicate(name, module) for predicate in self.predicates)
        )
