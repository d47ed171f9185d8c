"""MNIST and USPS: hand-written digits as flat grey pixels, with their labels."""

from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import torch

from lightning_struct.data.curves import synthetic_digits
from lightning_struct.data.files import naming_file, require_torchvision
from lightning_struct.data.flat_images import as_float
from lightning_struct.data.in_memory import (
    BatchedTensorDataset,
    DownloadedDataModule,
    LabelledSamples,
    Splits,
    split_at_random,
)


class DigitsDataModule(DownloadedDataModule):
    """Base of MNIST and USPS: images are in [0, 1]. torchvision has a class of the same title."""

    image_size: ClassVar[int]
    names: ClassVar[tuple[str, ...]]
    """The files, training part first."""

    usual_loaders = (300, "independent", 1000)

    @property
    def paths(self) -> list[Path]:
        """Paths of the files, there or to come."""
        return [Path(self.data_dir) / name for name in self.names]

    @property
    def has_files(self) -> bool:
        return all(path.is_file() for path in self.paths)

    def read(self, download: bool) -> tuple[LabelledSamples, LabelledSamples]:
        return self._read_part(True, download), self._read_part(False, download)

    def _read_part(self, train: bool, download: bool) -> LabelledSamples:
        """The official training or test part: images (n, pixels), uint8, and labels (n,), int64."""
        require_torchvision(self.title)
        from torchvision import datasets

        half = len(self.names) // 2
        paths = self.paths[:half] if train else self.paths[half:]
        damaged = paths[0] if len(paths) == 1 else paths[0].parent
        with naming_file(damaged) if all(map(Path.is_file, paths)) else nullcontext():
            part = getattr(datasets, self.title)(self.data_dir, train=train, download=download)
        return torch.as_tensor(part.data).flatten(1), torch.as_tensor(part.targets)

    def make_synthetic(self, count: int) -> LabelledSamples:
        return synthetic_digits(count, self.image_size, seed=self.seed)

    def make_datasets(self, parts: list[LabelledSamples]) -> list[BatchedTensorDataset]:
        named = zip(Splits._fields, parts, strict=True)
        return [BatchedTensorDataset(as_float(f"{self.title} ({key})", part[0]), part[1]) for key, part in named]


class MNISTDataModule(DigitsDataModule):
    """MNIST: 50,000 / 10,000 / 10,000 images of 28 x 28 for training, validation and test.

    Training and validation images are parts of the official training set, cut by a fixed seed; the test images are the
    official ones. Samples are (pixels, label): (784,) float32 in [0, 1], and int64.

    For example::

        Trainer().fit(model, datamodule=MNISTDataModule(data_dir="data", batch_size=300))

    Args:
        data_dir: directory with ``MNIST/raw`` as torchvision keeps it.
        batch_size: training samples in a step, over all processes together; None takes 300.
        train_size: training images; None takes 50,000.
        val_size: validation images; None takes 10,000.
        test_size: test images; None takes 10,000.
        **options: ``download``, ``synthetic`` and further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files are missing or are damaged, or have fewer images than asked for, and
            if one of the sets would be empty.

    Example:
        >>> data = MNISTDataModule(synthetic=True, batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([10, 784]), torch.int64)
    """

    title = "MNIST"
    image_size = 28
    names = tuple(
        f"MNIST/raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )
    files = ", ".join(names)
    usual_sizes = (50_000, 10_000, 10_000)


class USPSDataModule(DigitsDataModule):
    """USPS: 6,800 / 1,000 / 1,498 images of 16 x 16 for training, validation and test.

    The paper has another edition of the data, 11,000 images, and cuts it into 8,000 / 1,000 / 2,000. Here the
    7,291 + 2,007 images that torchvision offers are pooled and cut by a fixed seed, in nearly the same proportions.
    Samples are (pixels, label): (256,) float32 in [0, 1], and int64.

    For example::

        Trainer().fit(model, datamodule=USPSDataModule(data_dir="data", batch_size=200))

    Args:
        data_dir: directory with ``usps.bz2`` and ``usps.t.bz2``.
        batch_size: training samples in a step, over all processes together; None takes 200.
        train_size: training images; None takes 6,800.
        val_size: validation images; None takes 1,000.
        test_size: test images; None takes 1,498.
        **options: ``download``, ``synthetic`` and further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files are missing or are damaged, or have fewer images than asked for, and
            if one of the sets would be empty.

    Example:
        >>> data = USPSDataModule(synthetic=True, batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([10, 256]), torch.int64)
    """

    title = "USPS"
    image_size = 16
    names = ("usps.bz2", "usps.t.bz2")
    files = ", ".join(names)
    usual_sizes = (6_800, 1_000, 1_498)
    usual_loaders = (200, "independent", 1000)

    def cut(self, official: tuple[LabelledSamples, LabelledSamples]) -> list[LabelledSamples]:
        images, labels = (torch.cat(both) for both in zip(*official, strict=True))
        sizes = {f"{key}_size": self.sizes[key] for key in ("train", "test", "val")}
        train, test, val = split_at_random(len(images), sizes, of=self.title)
        return [(images[part], labels[part]) for part in (train, val, test)]
