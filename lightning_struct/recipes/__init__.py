"""Runnable benchmark tasks: ``python -m lightning_struct.recipes.NAME {fit,validate,test,predict}``.

The recipes are values in :data:`~lightning_struct.recipes.catalogue.RECIPES`. Each name there can be imported as a
module of this package: all of them are the file ``recipe.py``, executed under that name.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from lightning_struct.recipes.catalogue import RECIPES


class RecipeFinder(MetaPathFinder):
    """Finds ``lightning_struct.recipes.NAME`` for each recipe."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name not in RECIPES:
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name("recipe.py"))


sys.meta_path.append(RecipeFinder())
