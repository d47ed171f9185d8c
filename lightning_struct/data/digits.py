"""MNIST and USPS: hand-written digits as flat grey pixels, with their labels."""

import bz2
import math
import os
import struct
from abc import abstractmethod
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_struct.data.files import (
    DamagedFileError,
    check_labels,
    naming_file,
    read_or_explain,
    require_torchvision,
)
from lightning_struct.data.in_memory import (
    InMemoryDataModule,
    LabelledImages,
    LoaderOptions,
    Splits,
    Unpack,
    choose_at_random,
    image_dataset,
    split_at_random,
    split_in_order,
)
from lightning_struct.data.synthetic import synthetic_digits
from lightning_struct.utilities.checks import check_counts

CLASSES = 10
CHUNK = 1 << 20  # bytes


class DigitsOptions(LoaderOptions, total=False):
    """Keyword arguments of :class:`DigitsDataModule` that MNIST and USPS pass on."""

    download: bool
    synthetic: bool


class DigitsDataModule(InMemoryDataModule):
    """Base of MNIST and USPS: files or their procedural stand-in, cut into three sets.

    Where downloading is allowed, a damaged file is downloaded again; it stays until that has succeeded.

    Args:
        data_dir: directory with the files.
        batch_size: training samples in a step, over all processes together.
        train_size: training images.
        val_size: validation images.
        test_size: test images.
        download: whether missing files may be downloaded.
        synthetic: procedurally made figures of the same shapes instead of the files; nothing is read or downloaded.
        **loader: further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if one of the sets would be empty.
    """

    title: ClassVar[str]
    image_size: ClassVar[int]
    files: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        data_dir: str,
        batch_size: int,
        *,
        train_size: int,
        val_size: int,
        test_size: int,
        download: bool = True,
        synthetic: bool = False,
        **loader: Any,
    ) -> None:
        super().__init__(batch_size, **loader)
        self.data_dir = os.path.expanduser(data_dir)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        check_counts(train_size=train_size, val_size=val_size, test_size=test_size)
        self.download = download
        self.synthetic = synthetic

    @abstractmethod
    def read(self, train: bool, download: bool) -> LabelledImages:
        """The official training or test part: images (n, pixels), uint8, and labels (n,), int64."""

    @abstractmethod
    def check_file(self, path: Path) -> None:
        """Raise ``DamagedFileError`` if this one of :attr:`files` is not whole."""

    @abstractmethod
    def choose(self, official_train: LabelledImages, official_test: LabelledImages) -> dict[str, LabelledImages]:
        """The three sets, by name, from the two official parts."""

    def prepare_data(self) -> None:
        if self.synthetic or not self.download:
            return
        put_aside: dict[Path, Path] = {}
        for path in self._paths:
            try:
                if path.is_file():
                    self.check_file(path)
            except DamagedFileError as error:
                rank_zero_warn(f"{self.title} is downloaded again: {error}.")
                put_aside[path] = path.replace(path.with_name(f"{path.name}.damaged"))
        try:
            if not all(path.is_file() for path in self._paths):
                self.read_both(download=True)
        finally:
            for path, aside in put_aside.items():
                if path.is_file():
                    aside.unlink()
                else:
                    aside.replace(path)  # it could not be downloaded

    def load_splits(self) -> Splits:
        if self.synthetic:
            rank_zero_info(f"{self.title}: procedurally made figures of the same shapes stand in for the real images.")
            sizes = self.sizes.values()
            figures = synthetic_digits(sum(sizes), self.image_size, seed=self.seed)
            parts = dict(zip(self.sizes, split_in_order(figures, list(sizes)), strict=True))
        else:
            chosen = self.choose(*self.read_both(download=False))
            parts = {key: (images.float() / 255, labels) for key, (images, labels) in chosen.items()}
        return Splits(**{key: image_dataset(f"{self.title} ({key})", *part) for key, part in parts.items()})

    @property
    def _paths(self) -> list[Path]:
        return [Path(self.data_dir) / file for file in self.files]

    def read_both(self, download: bool) -> tuple[LabelledImages, LabelledImages]:
        """Both official parts, or the error that names the remedies."""
        return read_or_explain(
            self.title,
            lambda: (self.read(train=True, download=download), self.read(train=False, download=download)),
            data_dir=self.data_dir,
            files=", ".join(self.files),
            download=download,
            prepares=self.download,
        )


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
    files = tuple(
        f"MNIST/raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 300,
        *,
        train_size: int = 50_000,
        val_size: int = 10_000,
        test_size: int = 10_000,
        **options: Unpack[DigitsOptions],
    ) -> None:
        super().__init__(data_dir, batch_size, train_size=train_size, val_size=val_size, test_size=test_size, **options)

    def read(self, train: bool, download: bool) -> LabelledImages:
        require_torchvision(self.title)
        from torchvision.datasets import MNIST

        image_file, label_file = self._paths[:2] if train else self._paths[2:]
        for path in (image_file, label_file):
            if path.is_file():
                self.check_file(path)
        part = MNIST(self.data_dir, train=train, download=download)
        if len(part.data) != len(part.targets):
            raise DamagedFileError(label_file, f"has {len(part.targets)} labels for {len(part.data)} images")
        check_labels(label_file, part.targets, CLASSES)
        return part.data.flatten(1), part.targets

    def check_file(self, path: Path) -> None:
        check_idx_file(path, () if "labels" in path.name else (self.image_size, self.image_size))

    def choose(self, official_train: LabelledImages, official_test: LabelledImages) -> dict[str, LabelledImages]:
        return choose_at_random(self.title, official_train, official_test, self.sizes)


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
    files = ("usps.bz2", "usps.t.bz2")

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 200,
        *,
        train_size: int = 6_800,
        val_size: int = 1_000,
        test_size: int = 1_498,
        **options: Unpack[DigitsOptions],
    ) -> None:
        super().__init__(data_dir, batch_size, train_size=train_size, val_size=val_size, test_size=test_size, **options)

    def read(self, train: bool, download: bool) -> LabelledImages:
        require_torchvision(self.title)
        from torchvision.datasets import USPS

        path = self._paths[0 if train else 1]
        with naming_file(path) if path.is_file() else nullcontext():
            part = USPS(self.data_dir, train=train, download=download)
        labels = torch.tensor(part.targets)
        check_labels(path, labels, CLASSES)
        return torch.from_numpy(part.data).flatten(1), labels

    def check_file(self, path: Path) -> None:
        require_torchvision(self.title)
        from torchvision.datasets import USPS
        from torchvision.datasets.utils import check_integrity

        if any(check_integrity(str(path), md5) for _, name, md5 in USPS.split_list.values() if name == path.name):
            return
        with naming_file(path), bz2.open(path) as file:
            while file.read(CHUNK):
                pass

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
