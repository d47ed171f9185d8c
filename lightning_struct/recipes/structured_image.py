"""Structured matrices in a hidden layer: images of Thomas et al., Appendix F.1 (Tables 1, 6 to 13).

Run it by ``python -m lightning_struct.recipes.structured_image fit``.

The configs are one for each class of matrices, in a network with a single hidden layer of 784 units, on MNIST-bg-rot.
Other data sets, ranks and rates are options::

    --data.generate=true                                    the images made anew from MNIST
    --data.variant=noise                                    MNIST-noise
    --data=RectanglesDataModule --model.num_classes=2 --model.network.num_classes=2
    --data=CIFAR10DataModule --data.grey=true --data.train_size=42500 --data.val_size=7500 --model.network.pixels=1024
    --data=NORBDataModule --model.num_classes=6 --model.network.num_classes=6 --model.network.pixels=1024
    --model.network.layer.rank=16                           Figure 3, Tables 8 and 9
    --data.train_fraction=0.25                              Tables 10 and 11
    --model.optimizer.lr=0.0005                             the grid of the paper: 0.0002, 0.0005, 0.001, 0.002

The network with convolutions of Tables 7, 9 and 11 is ``lenet_CLASS.yaml``, or any config with
``--model.network=lightning_struct.models.lenet --model.network.layer.bias=true``, and ``--model.network.size=32`` for
images of 32 x 32, ``--model.network.channels=3`` for coloured ones. The generalisation gap of Table 12 is printed at
the end.

Pruning (Tables 8 and 9) begins with a trained network: ``fit --config unstructured.yaml``, then
``fit --config pruned.yaml --model.network.checkpoint=CHECKPOINT``.
"""

from collections.abc import Sequence

from lightning_struct.data import InMemoryDataModule
from lightning_struct.models import Classifier
from lightning_struct.recipes.cli import STRUCTURED_CLASSIFIER_RESULTS, RecipeCLI, run_recipe
from lightning_struct.recipes.errors import run_command


def main(args: Sequence[str] | None = None) -> RecipeCLI:
    """Run the recipe on ``args``, by default on the command line of this process."""
    return run_recipe(
        "structured_image", Classifier, InMemoryDataModule, STRUCTURED_CLASSIFIER_RESULTS, args, subclass_mode_data=True
    )


if __name__ == "__main__":
    run_command(main)
