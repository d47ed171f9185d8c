"""Fully connected classifier of MNIST: 784-512-10 (Zhang et al., Revisiting recursive least squares, section VI-A).

Run it by ``python -m lightning_struct.recipes.mnist_fnn fit``.
"""

from collections.abc import Sequence

from lightning_struct.data import MNISTDataModule
from lightning_struct.models import Classifier
from lightning_struct.recipes.cli import CLASSIFIER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe("mnist_fnn", Classifier, MNISTDataModule, CLASSIFIER_RESULTS, args)


if __name__ == "__main__":
    run_command(main)
