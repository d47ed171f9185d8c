"""CIFAR-10: labelled colour images, standardised."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_struct.data.curves import synthetic_digits
from lightning_struct.data.files import DamagedFileError, check_values, naming_file, require_torchvision
from lightning_struct.data.flat_images import mean_and_std
from lightning_struct.data.in_memory import (
    BatchedTensorDataset,
    DownloadedDataModule,
    LabelledImages,
    Splits,
    choose_at_random,
    split_in_order,
)

IMAGE_SIZE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
OFFICIAL_DIRECTORY = "cifar-10-batches-py"
OFFICIAL_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_STD = (0.2470, 0.2435, 0.2616)
CHUNK = 1024  # images that are coloured at a time


class CIFAR10DataModule(DownloadedDataModule):
    """CIFAR-10: 45,000 / 5,000 / 10,000 images of 32 x 32 in three colours for training, validation and test.

    Training and validation images are parts of the official training set, cut by a fixed seed; the test images are the
    official ones. Samples are (image, label): (3, 32, 32) float32, and int64 in the order of :data:`CLASSES`. Images
    are standardised: of values in [0, 1], ``CHANNEL_MEAN`` is subtracted, the mean of each colour over the official
    training set, and the rest divided by ``CHANNEL_STD``, their standard deviation.

    For example::

        Trainer().fit(Classifier(mini_vgg()), datamodule=CIFAR10DataModule(data_dir="data", batch_size=128))

    Grey images are the means of the three colours, flat, (1024,); each pixel is standardised by its own mean and
    standard deviation over the training images instead.

    The official files are read where they are. Where they are not, the images are those of ``data_dir/train/CLASS`` and
    ``data_dir/test/CLASS``, one file for each image in any format that PIL opens, if there are such directories.

    Args:
        data_dir: directory with ``cifar-10-batches-py`` as torchvision keeps it, or with the directories ``train`` and
            ``test``.
        batch_size: training samples in a step, over all processes together.
        draws: shuffled passes by ``"epoch"`` or ``"independent"`` draws.
        eval_batch_size: validation, test and prediction samples at a time, per process.
        train_size: training images.
        val_size: validation images.
        test_size: test images.
        grey: grey images instead of coloured ones.
        **options: ``download``, ``synthetic`` and further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files cannot be had or are damaged, or have fewer images than asked for, and
            if one of the sets would be empty.

    Example:
        >>> data = CIFAR10DataModule(synthetic=True, batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([10, 3, 32, 32]), torch.int64)
    """

    title = "CIFAR-10"
    files = f"{OFFICIAL_DIRECTORY}, or train/CLASS/*.jpg and test/CLASS/*.jpg,"

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int = 128,
        draws: Literal["independent", "epoch"] = "epoch",
        *,
        eval_batch_size: int = 500,
        train_size: int = 45_000,
        val_size: int = 5_000,
        test_size: int = 10_000,
        grey: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            data_dir, batch_size, draws, eval_batch_size=eval_batch_size,
            train_size=train_size, val_size=val_size, test_size=test_size, **options,
        )  # fmt: skip
        self.grey = grey

    @property
    def has_directories(self) -> bool:
        # official files come first
        directory = Path(self.data_dir)
        return (directory / "train").is_dir() and not (directory / OFFICIAL_DIRECTORY).is_dir()

    @property
    def has_files(self) -> bool:
        directory = Path(self.data_dir) / OFFICIAL_DIRECTORY
        return self.has_directories or all((directory / file).is_file() for file in OFFICIAL_FILES)

    def read(self, download: bool) -> tuple[LabelledImages, LabelledImages]:
        if self.has_directories:
            return read_directory(Path(self.data_dir) / "train"), read_directory(Path(self.data_dir) / "test")
        train = read_official(self.data_dir, train=True, download=download)
        return train, read_official(self.data_dir, train=False, download=download)

    def make_synthetic(self) -> Splits:
        sizes = list(self.sizes.values())
        return self._splits(split_in_order(synthetic_color_images(sum(sizes), IMAGE_SIZE, seed=self.seed), sizes))

    def cut(self, official: tuple[LabelledImages, LabelledImages]) -> Splits:
        return self._splits(list(choose_at_random(self.title, *official, self.sizes).values()))

    def _splits(self, parts: list[LabelledImages]) -> Splits:
        if self.grey:
            scaled = [as_grey(images) for images, _ in parts]
            mean, std = mean_and_std(scaled[0])
            inputs = [images.sub_(mean).div_(std) for images in scaled]
        else:
            inputs = [standardized(images) for images, _ in parts]
        return Splits(
            *(BatchedTensorDataset(images, labels) for images, (_, labels) in zip(inputs, parts, strict=True))
        )


def standardized(images: Tensor) -> Tensor:
    """uint8 images (n, 3, height, width) as float32 of mean 0 and standard deviation 1 over CIFAR-10, per channel."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CHANNEL_MEAN, CHANNEL_STD))
    return images.float().div_(255).sub_(mean).div_(std)


def as_grey(images: Tensor) -> Tensor:
    """uint8 images (n, 3, height, width) as flat grey ones, (n, height * width), float32 in [0, 1]."""
    return images.float().mean(dim=1).div_(255).flatten(1)


def read_official(data_dir: str, train: bool, download: bool) -> LabelledImages:
    """Read the files as torchvision keeps them, which compares their checksums before it unpickles them.

    Returns:
        Images (n, 3, 32, 32), uint8; labels (n,), int64.

    Raises:
        DamagedFileError: if a file is not the official one.
        RuntimeError: if a file is missing.
    """
    require_torchvision("CIFAR-10")
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    directory = Path(data_dir) / OFFICIAL_DIRECTORY
    try:
        part = CIFAR10(data_dir, train=train, download=download)
    except RuntimeError:
        for name, md5 in [*CIFAR10.train_list, *CIFAR10.test_list, [CIFAR10.meta["filename"], CIFAR10.meta["md5"]]]:
            path = directory / name
            if not download and path.is_file() and not check_integrity(str(path), md5):
                raise DamagedFileError(path, f"is not the official file, whose MD5 checksum is {md5}") from None
        raise
    labels = torch.tensor(part.targets)
    check_values(directory, "label", labels, 0, len(CLASSES) - 1)
    return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), labels


def read_directory(directory: Path) -> LabelledImages:
    """Read one directory of images for each class.

    Returns:
        Images (n, 3, 32, 32), uint8; labels (n,), int64.

    Raises:
        ValueError: if the classes are not those of CIFAR-10.
        DamagedFileError: if an image cannot be read, or is not 32 x 32.
    """
    require_torchvision("CIFAR-10")
    from torchvision.datasets import ImageFolder

    part = ImageFolder(str(directory), loader=read_image)
    if tuple(part.classes) != CLASSES:
        raise ValueError(f"{directory} has the directories {', '.join(part.classes)}, not those of the ten classes")
    images = torch.empty(len(part), 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8)
    for number, (image, _) in enumerate(part):
        images[number] = image
    return images, torch.tensor(part.targets)


def read_image(path: str) -> Tensor:
    """Read an image of 32 x 32 pixels: (3, 32, 32), uint8. The size is checked before the pixels are decoded.

    Raises:
        DamagedFileError: if it cannot be read, or has another size.
    """
    from PIL import Image
    from torchvision.transforms.functional import pil_to_tensor

    try:
        with naming_file(Path(path)), Image.open(path) as image:
            if image.size != (IMAGE_SIZE, IMAGE_SIZE):
                width, height = image.size
                raise DamagedFileError(Path(path), f"is {width} x {height} pixels, not {IMAGE_SIZE} x {IMAGE_SIZE}")
            return pil_to_tensor(image.convert("RGB"))
    except Image.DecompressionBombError as error:
        raise DamagedFileError(Path(path), f"is not {IMAGE_SIZE} x {IMAGE_SIZE} pixels: {error}") from error


def synthetic_color_images(count: int, size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The figures of :func:`synthetic_digits` in a colour of their own on a ground of another, both drawn at random.

    Args:
        count: number of images.
        size: height and width in pixels.
        seed: the same seed gives the same images and labels.

    Returns:
        Images (count, 3, size, size), uint8; labels (count,), int64, in 0..9.
    """
    ink, labels = synthetic_digits(count, size, seed=seed)
    colors = torch.rand(2, count, 3, 1, 1, generator=torch.Generator().manual_seed(seed))
    ground, figure = 0.5 * colors[0], 0.5 + 0.5 * colors[1]  # never alike, so that the figure can be seen
    parts = zip(*(tensor.split(CHUNK) for tensor in (ground, figure, ink.view(count, 1, size, size))), strict=True)
    images = [(back + (front - back) * drawn).mul_(255).round_().to(torch.uint8) for back, front, drawn in parts]
    return torch.cat(images), labels
