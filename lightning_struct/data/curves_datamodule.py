"""CURVES as a LightningDataModule."""

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_struct.data.curves import generate_curves
from lightning_struct.data.in_memory import (
    InMemoryDataModule,
    LoaderOptions,
    Splits,
    Unpack,
    image_dataset,
)
from lightning_struct.utilities.checks import check_counts
from lightning_struct.utilities.namespaces import MisconfigurationException


class CurvesDataModule(InMemoryDataModule):
    """CURVES: 20,000 / 2,000 / 8,000 images of 28 x 28 for training, validation and test, made when they are needed.

    Samples are (pixels,): (784,) float32 in [0, 1]. The images are always procedural
    (:func:`~lightning_struct.data.curves.generate_curves`): they follow the description of the original file, and are
    not that file. They are the same for every ``seed``.

    Args:
        batch_size: training samples in a step, over all processes together.
        train_size: training images.
        val_size: validation images.
        test_size: test images.
        synthetic: always true: there is nothing but the procedural images.
        **loader: further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if one of the sets would be empty, and for ``synthetic=False``.

    Example:
        >>> data = CurvesDataModule(batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> (images,) = next(iter(data.train_dataloader()))
        >>> images.shape
        torch.Size([10, 784])
    """

    def __init__(
        self,
        batch_size: int = 250,
        *,
        train_size: int = 20_000,
        val_size: int = 2_000,
        test_size: int = 8_000,
        synthetic: bool = True,
        **loader: Unpack[LoaderOptions],
    ) -> None:
        super().__init__(batch_size, **loader)
        if not synthetic:
            raise MisconfigurationException("CURVES are always made procedurally: leave out data.synthetic=false.")
        check_counts(train_size=train_size, val_size=val_size, test_size=test_size)
        self.sizes = (train_size, val_size, test_size)

    def load_splits(self) -> Splits:
        rank_zero_info(f"CURVES: making {sum(self.sizes):,} images of curves through three random points.")
        images = generate_curves(sum(self.sizes))
        parts = zip(("train", "val", "test"), images.split(self.sizes), strict=True)
        return Splits(**{key: image_dataset(f"CURVES ({key})", part) for key, part in parts})
