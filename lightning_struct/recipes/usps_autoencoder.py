"""Deep autoencoder of USPS: 256-400-200-100-50-25 and back (Emirahmetoglu & Stewart, section 6).

Run it by ``python -m lightning_struct.recipes.usps_autoencoder fit``.
"""

from collections.abc import Sequence

from lightning_struct.data import USPSDataModule
from lightning_struct.models import Autoencoder
from lightning_struct.recipes.cli import AUTOENCODER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe("usps_autoencoder", Autoencoder, USPSDataModule, AUTOENCODER_RESULTS, args)


if __name__ == "__main__":
    run_command(main)
