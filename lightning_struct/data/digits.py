"""MNIST and USPS: hand-written digits as flat grey pixels, with their labels."""

import bz2
import math
import struct
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch

from lightning_struct.data.curves import synthetic_digits
from lightning_struct.data.files import DamagedFileError, check_values, naming_file, read_table, require_torchvision
from lightning_struct.data.in_memory import (
    DownloadedDataModule,
    LabelledImages,
    Splits,
    choose_at_random,
    image_dataset,
    split_at_random,
    split_in_order,
)

CLASSES = 10
USPS_MOST = 1.001  # pixels of the file are in [-1, 1], but for the rounding of its decimals


class DigitsDataModule(DownloadedDataModule):
    """Base of MNIST and USPS: images are in [0, 1]."""

    image_size: ClassVar[int]
    names: ClassVar[tuple[str, ...]]
    """The files, training part first."""

    @abstractmethod
    def read_part(self, paths: list[Path], train: bool, download: bool) -> LabelledImages:
        """The official training or test part from its files: images (n, pixels), uint8, and labels (n,), int64."""

    def choose(self, official_train: LabelledImages, official_test: LabelledImages) -> dict[str, LabelledImages]:
        """The three sets, by name, from the two official parts."""
        return choose_at_random(self.title, official_train, official_test, self.sizes)

    @property
    def paths(self) -> list[Path]:
        """Paths of the files, there or to come."""
        return [Path(self.data_dir) / name for name in self.names]

    @property
    def has_files(self) -> bool:
        return all(path.is_file() for path in self.paths)

    def read(self, download: bool) -> tuple[LabelledImages, LabelledImages]:
        half = len(self.names) // 2
        train = self.read_part(self.paths[:half], train=True, download=download)
        return train, self.read_part(self.paths[half:], train=False, download=download)

    def make_synthetic(self) -> Splits:
        figures = synthetic_digits(sum(self.sizes.values()), self.image_size, seed=self.seed)
        parts = split_in_order(figures, list(self.sizes.values()))
        return self._splits(dict(zip(self.sizes, parts, strict=True)))

    def cut(self, official: tuple[LabelledImages, LabelledImages]) -> Splits:
        chosen = self.choose(*official)
        return self._splits({key: (images.float() / 255, labels) for key, (images, labels) in chosen.items()})

    def _splits(self, parts: dict[str, LabelledImages]) -> Splits:
        return Splits(**{key: image_dataset(f"{self.title} ({key})", *part) for key, part in parts.items()})


class MNISTDataModule(DigitsDataModule):
    """MNIST: 50,000 / 10,000 / 10,000 images of 28 x 28 for training, validation and test.

    Training and validation images are parts of the official training set, cut by a fixed seed; the test images are the
    official ones. Samples are (pixels, label): (784,) float32 in [0, 1], and int64.

    For example::

        Trainer().fit(model, datamodule=MNISTDataModule(data_dir="data", batch_size=300))

    Args:
        data_dir: directory with ``MNIST/raw`` as torchvision keeps it.
        batch_size: training samples in a step, over all processes together.
        train_size: training images.
        val_size: validation images.
        test_size: test images.
        **options: ``download``, ``synthetic`` and further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files cannot be had or are damaged, or have fewer images than asked for, and
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

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 300,
        *,
        train_size: int = 50_000,
        val_size: int = 10_000,
        test_size: int = 10_000,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, batch_size, train_size=train_size, val_size=val_size, test_size=test_size, **options)

    def read_part(self, paths: list[Path], train: bool, download: bool) -> LabelledImages:
        require_torchvision(self.title)
        from torchvision.datasets import MNIST

        for path, shape in zip(paths, ((self.image_size, self.image_size), ()), strict=True):
            if path.is_file():
                check_idx_file(path, shape)
        part = MNIST(self.data_dir, train=train, download=download)
        if len(part.data) != len(part.targets):
            raise DamagedFileError(paths[1], f"has {len(part.targets)} labels for {len(part.data)} images")
        check_values(paths[1], "label", part.targets, 0, CLASSES - 1)
        return part.data.flatten(1), part.targets


class USPSDataModule(DigitsDataModule):
    """USPS: 6,800 / 1,000 / 1,498 images of 16 x 16 for training, validation and test.

    The paper has another edition of the data, 11,000 images, and cuts it into 8,000 / 1,000 / 2,000. Here the
    7,291 + 2,007 images that torchvision offers are pooled and cut by a fixed seed, in nearly the same proportions.
    Samples are (pixels, label): (256,) float32 in [0, 1], and int64.

    For example::

        Trainer().fit(model, datamodule=USPSDataModule(data_dir="data", batch_size=200))

    Args:
        data_dir: directory with ``usps.bz2`` and ``usps.t.bz2``.
        batch_size: training samples in a step, over all processes together.
        train_size: training images.
        val_size: validation images.
        test_size: test images.
        **options: ``download``, ``synthetic`` and further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files cannot be had or are damaged, or have fewer images than asked for, and
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

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 200,
        *,
        train_size: int = 6_800,
        val_size: int = 1_000,
        test_size: int = 1_498,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, batch_size, train_size=train_size, val_size=val_size, test_size=test_size, **options)

    def read_part(self, paths: list[Path], train: bool, download: bool) -> LabelledImages:
        (path,) = paths
        if not path.is_file():
            require_torchvision(self.title)
            from torchvision.datasets import USPS

            USPS(self.data_dir, train=train, download=download)
        with naming_file(path), bz2.open(path, "rt", encoding="utf-8") as file:
            # "label index:pixel index:pixel ...", labels from 1
            rows = ([word.rpartition(":")[2] for word in line.split()] for line in file)
            table, lines = read_table(path, rows, 1 + self.image_size**2)
        labels, images = table[:, 0] - 1, table[:, 1:].float()
        check_values(path, "pixel", images, -USPS_MOST, USPS_MOST, lines)
        check_values(path, "label", labels, 0, CLASSES - 1, lines)
        return ((images + 1) / 2 * 255).clamp_(0, 255).to(torch.uint8), labels.long()  # truncated, as by torchvision

    def choose(self, official_train: LabelledImages, official_test: LabelledImages) -> dict[str, LabelledImages]:
        images, labels = (torch.cat(both) for both in zip(official_train, official_test, strict=True))
        sizes = {f"{key}_size": self.sizes[key] for key in ("train", "test", "val")}
        train, test, val = split_at_random(len(images), sizes, of=self.title)
        return {key: (images[part], labels[part]) for key, part in (("train", train), ("val", val), ("test", test))}


def check_idx_file(path: Path, sample_shape: tuple[int, ...]) -> None:
    """Check that an idx file of bytes is as long as its header says. Nothing but the header is read.

    The header has four bytes, 0, 0, 8 (for uint8) and the number of dimensions, and each size as a big-endian int32.

    Args:
        path: path of the file.
        sample_shape: all sizes but the first, the number of samples.

    Raises:
        DamagedFileError: if the header is another, or the file is too short or too long.
    """
    dimensions = 1 + len(sample_shape)
    header = struct.Struct(f">{1 + dimensions}i")
    with path.open("rb") as file:
        content = file.read(header.size)
    length = path.stat().st_size
    if len(content) < header.size:
        raise DamagedFileError(path, f"has {length} bytes, less than the header of an idx file")
    kind, count, *sizes = header.unpack(content)
    if kind != 0x0800 + dimensions or count < 0 or tuple(sizes) != sample_shape:
        raise DamagedFileError(path, f"does not begin as an idx file of bytes, samples of shape {sample_shape}, does")
    expected = header.size + count * math.prod(sample_shape)
    if length != expected:
        raise DamagedFileError(path, f"has {length:,} bytes, but its header announces {expected:,}")
