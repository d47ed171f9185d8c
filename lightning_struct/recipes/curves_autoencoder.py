"""Deep autoencoder of CURVES: 784-400-200-100-50-25-6 and back (Emirahmetoglu & Stewart, section 6).

Run it by ``python -m lightning_struct.recipes.curves_autoencoder fit``.
"""

from collections.abc import Sequence

from lightning_struct.data import CurvesDataModule
from lightning_struct.models import Autoencoder
from lightning_struct.recipes.cli import AUTOENCODER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe("curves_autoencoder", Autoencoder, CurvesDataModule, AUTOENCODER_RESULTS, args)


if __name__ == "__main__":
    run_command(main)
