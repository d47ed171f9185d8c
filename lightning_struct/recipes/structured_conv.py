"""Structured matrices in place of a convolution of CIFAR-10: Thomas et al., section 5.2 and Table 3.

Run it by ``python -m lightning_struct.recipes.structured_conv fit``.

Each config is a row of the table.
"""

from collections.abc import Sequence

from lightning_struct.data import CIFAR10DataModule
from lightning_struct.models import Classifier
from lightning_struct.recipes.cli import STRUCTURED_CLASSIFIER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe("structured_conv", Classifier, CIFAR10DataModule, STRUCTURED_CLASSIFIER_RESULTS, args)


if __name__ == "__main__":
    run_command(main)
