"""LSTM on IMDB: two layers of 512 units (Zhang et al., Revisiting recursive least squares, section VI-A).

Run it by ``python -m lightning_struct.recipes.imdb_lstm fit``.
"""

from collections.abc import Sequence

from lightning_struct.data import IMDBDataModule
from lightning_struct.models import Classifier
from lightning_struct.recipes.cli import CLASSIFIER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe("imdb_lstm", Classifier, IMDBDataModule, CLASSIFIER_RESULTS, args)


if __name__ == "__main__":
    run_command(main)
