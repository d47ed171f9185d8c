"""Deep autoencoder of MNIST: 784-1000-500-250-30 and back (Emirahmetoglu & Stewart, section 6).

Run it by ``python -m lightning_struct.recipes.mnist_autoencoder fit``.
"""

from collections.abc import Sequence

from lightning_struct.data import MNISTDataModule
from lightning_struct.models import Autoencoder
from lightning_struct.recipes.cli import AUTOENCODER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe("mnist_autoencoder", Autoencoder, MNISTDataModule, AUTOENCODER_RESULTS, args)


if __name__ == "__main__":
    run_command(main)
