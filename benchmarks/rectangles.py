"""Rectangles of Larochelle et al. (2007), official or made: whether an outline is wider than tall.

Of the recipe, in the directory of a checkout: ``lightning-struct structured_image fit
--data=benchmarks.rectangles.RectanglesDataModule --data.generate=true ...`` (docs/recipes/structured_image.md).
"""

from pathlib import Path
from typing import Any

import torch

from lightning_struct.data.flat_images import FlatImagesDataModule
from lightning_struct.data.in_memory import LabelledSamples, split_in_order
from lightning_struct.data.larochelle import SITE, SIZE, read_amat

RECTANGLE_FILES = ("rectangles_train.amat", "rectangles_test.amat")
LEAST_DIFFERENCE = 3


class RectanglesDataModule(FlatImagesDataModule):
    """Rectangles: 1,020 / 180 / 50,000 images of 28 x 28 for training, validation and test.

    Samples are (pixels, label): (784,) float32, standardised (:class:`FlatImagesDataModule`), and int64: 1 for an
    outline that is wider than tall in the images of the generator.

    The official files are those of Larochelle et al. (2007). With ``generate`` the images are made by
    :func:`generate_rectangles`, which follows the authors' description, always the same ones; ``synthetic`` makes
    others for each ``seed``.

    Args:
        data_dir: directory with ``rectangles_train.amat`` and ``rectangles_test.amat``.
        train_size: training images, those kept for validation included.
        test_size: test images.
        **options: ``generate``, ``synthetic`` and further options, see :class:`FlatImagesDataModule` and
            :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files cannot be had or are damaged, or have fewer images than asked for; for a
            number out of its range.

    Example:
        >>> data = RectanglesDataModule(generate=True, train_size=100, test_size=10)
        >>> data.setup("fit")
        >>> [len(part) for part in data.splits]
        [85, 15, 10]
    """

    title = "Rectangles"
    files = f"{' and '.join(RECTANGLE_FILES)} of {SITE}"

    def __init__(
        self, data_dir: str = "data", *, train_size: int = 1_200, test_size: int = 50_000, **options: Any
    ) -> None:
        super().__init__(data_dir, train_size, test_size, **options)

    def make(self) -> tuple[LabelledSamples, LabelledSamples]:
        sizes = (self.train_size, self.test_size)
        train, test = split_in_order(generate_rectangles(sum(sizes), seed=self.seed if self.synthetic else 0), sizes)
        return train, test

    def read(self) -> tuple[LabelledSamples, LabelledSamples]:
        train, test = (read_amat(Path(self.data_dir) / file) for file in RECTANGLE_FILES)
        return train, test


def generate_rectangles(count: int, *, seed: int = 0) -> LabelledSamples:
    """White outlines, one pixel thick, on black, as Larochelle et al. describe them.

    Width and height are uniform in 1 to 28 pixels, drawn again where they differ by less than 3; the place is uniform
    among those where the rectangle fits in.

    Args:
        count: number of images.
        seed: the same seed gives the same images and labels.

    Returns:
        Images (count, 784), float32, values 0 and 1; labels (count,), int64, 1 where the width is greater.

    Example:
        >>> images, labels = generate_rectangles(3)
        >>> images.shape, labels.tolist()
        (torch.Size([3, 784]), [0, 1, 0])
    """
    generator = torch.Generator().manual_seed(seed)
    sides = torch.empty(0, 2, dtype=torch.int64)
    while len(sides) < count:
        drawn = torch.randint(1, SIZE + 1, (count, 2), generator=generator)
        sides = torch.cat([sides, drawn[(drawn[:, 0] - drawn[:, 1]).abs() >= LEAST_DIFFERENCE]])
    sides = sides[:count]
    first = (torch.rand(count, 2, generator=generator) * (SIZE + 1 - sides)).long()  # top and left
    last = first + sides - 1
    place = torch.arange(SIZE)
    within = (place >= first[..., None]) & (place <= last[..., None])
    on_edge = (place == first[..., None]) | (place == last[..., None])
    rows, columns = within.unbind(1)
    edge_rows, edge_columns = on_edge.unbind(1)
    outlines = (rows[:, :, None] & edge_columns[:, None]) | (edge_rows[:, :, None] & columns[:, None])
    return outlines.flatten(1).float(), (sides[:, 1] > sides[:, 0]).long()
