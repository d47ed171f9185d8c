"""The module of each recipe: ``python -m lightning_struct.recipes.NAME fit`` executes this file under that name."""

from collections.abc import Sequence

from lightning_struct.recipes.catalogue import RECIPES
from lightning_struct.recipes.cli import RecipeCLI, run_recipe
from lightning_struct.recipes.messages import run_command

NAME = __spec__.name.rpartition(".")[2]
if NAME in RECIPES:
    __doc__ = f"Recipe {NAME}: {RECIPES[NAME].trains}.\n\nRun it by ``python -m {__spec__.name} fit``."


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe(NAME, args)


if __name__ == "__main__":
    run_command(main)
