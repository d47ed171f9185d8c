"""A small ResNet on CIFAR-10, or a character transformer, that is trained, compressed and trained on within one fit.

Run it by one of

- ``python -m lightning_struct.recipes.compress_network fit``
- ``python -m lightning_struct.recipes.compress_network fit --config transformer --data.text_file=FILE``

The goal is an option of the callback ``Compression``; how far another one goes, and what a loss is worth::

    --config resnet_loss           the smallest network whose outputs change by no more than so much

What became of which layer is printed when that happens, and the errors at the end.
"""

from collections.abc import Sequence

from lightning_struct.data import InMemoryDataModule
from lightning_struct.models import Classifier
from lightning_struct.recipes.cli import CLASSIFIER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe(
        "compress_network", Classifier, InMemoryDataModule, CLASSIFIER_RESULTS, args, subclass_mode_data=True
    )


if __name__ == "__main__":
    run_command(main)
