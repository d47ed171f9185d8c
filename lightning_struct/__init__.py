"""Second-order optimizers, structured layers and growing batches as plug-ins for PyTorch Lightning.

The public names are imported when they are first used, so that ``import lightning_struct`` alone loads neither torch
nor Lightning::

    from lightning_struct import SHF, GrowingBatchSize

They are listed once, as imports in ``__init__.pyi``, which type checkers read too.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.4.0"

_STUB = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
_HOME_OF = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
