"""Lightning under both of its names: ``lightning.pytorch`` and ``pytorch_lightning`` have the same classes twice.

Callbacks, mixins and data modules import this module, as ``L``, instead of either of them. The classes below join those
of each namespace when a project imports it. So a project that uses one does not load the other, and one that uses both
can give the same object to Trainers of both. Annotations, too, are by names of this module: the command line runs the
imports that a module has for type checkers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BasePredictionWriter, Callback
    from lightning.pytorch.core import LightningDataModule
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
else:
    Trainer = Any  # in annotations alone
    LightningModule = object  # likewise, and as base of the mixins: they are put before the module

    class _Unjoined:
        """Base until Lightning is imported: bases that are built in, as ``object`` is, could not be exchanged."""

    class Callback(_Unjoined):
        """Base of callbacks: a ``Callback`` of each namespace that is imported."""

    class BasePredictionWriter(_Unjoined):
        """A ``BasePredictionWriter`` of each namespace that is imported."""

    class LightningDataModule(_Unjoined):
        """Base of data modules: a ``LightningDataModule`` of each namespace that is imported."""

        def __init__(self):
            if not lightning_classes("core.LightningDataModule"):  # its attributes are needed from here on
                import_module(NAMESPACES[0])
            super().__init__()

    class _UnjoinedException(Exception):
        """The same for exceptions, whose built-in base is ``Exception``."""

    class MisconfigurationException(_UnjoinedException):
        """A ``MisconfigurationException`` of each imported namespace, so that a project catches its own."""


NAMESPACES = ("lightning.pytorch", "pytorch_lightning")

_JOINS: dict[type, str] = {
    Callback: "callbacks.Callback",
    BasePredictionWriter: "callbacks.BasePredictionWriter",
    LightningDataModule: "core.LightningDataModule",
    MisconfigurationException: "utilities.exceptions.MisconfigurationException",
}


def lightning_classes(path: str) -> tuple[Any, ...]:
    """The class of each namespace that is imported, to be the second argument of ``isinstance`` and ``issubclass``.

    Args:
        path: of the class within a namespace.

    Example:
        >>> import lightning.pytorch
        >>> lightning.pytorch.callbacks.TQDMProgressBar in lightning_classes("callbacks.TQDMProgressBar")
        True
    """
    imported = [space for space in NAMESPACES if hasattr(sys.modules.get(space), "Trainer")]  # not: is being imported
    return tuple(_class_of(space, path) for space in imported)


@cache
def _class_of(namespace: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{namespace}.{module}".rstrip(".")), name)


def _join() -> None:
    for ours, path in _JOINS.items():
        ours.__bases__ = lightning_classes(path) or ours.__bases__


class _JoinWhenImported(MetaPathFinder):
    """Leaves it to the other finders to find a namespace, and joins it when it has been imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname not in NAMESPACES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_join(module: ModuleType) -> None:
                execute(module)
                _join()

            vars(spec.loader)["exec_module"] = execute_and_join
        return spec


_join()
sys.meta_path.insert(0, _JoinWhenImported())
