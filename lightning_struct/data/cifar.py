"""CIFAR-10: labelled colour images, standardised."""

from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_struct.data.curves import synthetic_digits
from lightning_struct.data.files import Content, DamagedFileError, naming_file, read_files, require_torchvision
from lightning_struct.data.flat_images import mean_and_std
from lightning_struct.data.in_memory import BatchedTensorDataset, DownloadedDataModule, Draws, LabelledSamples
from lightning_struct.functional.checks import check_types

IMAGE_SIZE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
OFFICIAL_DIRECTORY, OFFICIAL_ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
OFFICIAL_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_STD = (0.2470, 0.2435, 0.2616)
CHUNK = 1024  # images that are coloured at a time
FORMATS = "bmp|jpg|jpeg|pgm|png|ppm|tif|tiff|webp"


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

    The official files come first: those in ``cifar-10-batches-py``, or the archive of them, which is unpacked beside
    itself. Without them, the images are those of ``data_dir/train/CLASS`` and ``data_dir/test/CLASS``, one file for
    each image in any usual format, or those of archives of such directories, which are read as they are.

    Args:
        data_dir: directory with ``cifar-10-python.tar.gz`` or with ``cifar-10-batches-py`` as torchvision keeps it; or
            with the directories ``train`` and ``test``; or with ``cifar10_jpeg_train.tar.gz`` and
            ``cifar10_jpeg_test.tar.gz``.
        batch_size: training samples in a step, over all processes together; None takes 128.
        draws: shuffled passes by ``"epoch"``, as for None, or ``"independent"`` draws.
        train_size: training images; None takes 45,000.
        val_size: validation images; None takes 5,000.
        test_size: test images; None takes 10,000.
        grey: grey images instead of coloured ones.
        **options: ``download``, ``synthetic`` and further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files are missing or are damaged, or have fewer images than asked for, and
            if one of the sets would be empty.

    Example:
        >>> data = CIFAR10DataModule(synthetic=True, batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([10, 3, 32, 32]), torch.int64)
    """

    title = "CIFAR-10"
    files = (
        f"{OFFICIAL_ARCHIVE}, or {OFFICIAL_DIRECTORY}, or train/CLASS/*.jpg and test/CLASS/*.jpg, or "
        "cifar10_jpeg_train.tar.gz and cifar10_jpeg_test.tar.gz,"
    )
    usual_sizes = (45_000, 5_000, 10_000)

    def __init__(
        self,
        data_dir: str = "data",
        batch_size: int | None = None,
        draws: Draws | None = None,
        *,
        grey: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(data_dir, batch_size, draws, **options)
        check_types(CIFAR10DataModule.__init__, locals())
        self.grey = grey

    @property
    def archive(self) -> Path:
        """Path of the official archive, there or not."""
        return Path(self.data_dir) / OFFICIAL_ARCHIVE

    def source(self, part: str) -> Path:
        """The directory in which the directory of a part stands, or else the archive of that part."""
        directory = Path(self.data_dir)
        return directory if (directory / part).is_dir() else directory / f"cifar10_jpeg_{part}.tar.gz"

    @property
    def has_own_files(self) -> bool:
        official = (Path(self.data_dir) / OFFICIAL_DIRECTORY).is_dir() or self.archive.is_file()
        return self.source("train").exists() and not official

    @property
    def has_files(self) -> bool:
        directory = Path(self.data_dir) / OFFICIAL_DIRECTORY
        return self.has_own_files or all((directory / file).is_file() for file in OFFICIAL_FILES)

    def prepare_data(self) -> None:
        if self.archive.is_file() and not self.synthetic and not self.has_files:
            self.read_or_explain(download=False)  # unpacks it
        super().prepare_data()

    def read(self, download: bool) -> tuple[LabelledSamples, LabelledSamples]:
        if self.has_own_files:
            return read_images(self.source("train"), "train"), read_images(self.source("test"), "test")
        train = read_official(self.data_dir, train=True, download=download)
        return train, read_official(self.data_dir, train=False, download=download)

    def make_synthetic(self, count: int) -> LabelledSamples:
        return synthetic_color_images(count, IMAGE_SIZE, seed=self.seed)

    def make_datasets(self, parts: list[LabelledSamples]) -> list[BatchedTensorDataset]:
        if self.grey:
            inputs = [as_grey(images) for images, _ in parts]
            mean, std = mean_and_std(inputs[0])
            inputs = [images.sub_(mean).div_(std) for images in inputs]
        else:
            inputs = [standardized(images) for images, _ in parts]
        return [BatchedTensorDataset(images, labels) for images, (_, labels) in zip(inputs, parts, strict=True)]


def standardized(images: Tensor) -> Tensor:
    """uint8 images (n, 3, height, width) as float32 of mean 0 and standard deviation 1 over CIFAR-10, per channel."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CHANNEL_MEAN, CHANNEL_STD))
    return images.float().div_(255).sub_(mean).div_(std)


def as_grey(images: Tensor) -> Tensor:
    """uint8 images (n, 3, height, width) as flat grey ones, (n, height * width), float32 in [0, 1]."""
    return images.float().mean(dim=1).div_(255).flatten(1)


def read_official(data_dir: str, train: bool, download: bool) -> LabelledSamples:
    """Read the files as torchvision keeps them, which compares their checksums before it unpickles them.

    The official archive is unpacked if it is there and they are not, after its checksum has been compared.

    Returns:
        Images (n, 3, 32, 32), uint8; labels (n,), int64.

    Raises:
        DamagedFileError: if a file is not the official one.
        RuntimeError: if a file is missing.
    """
    require_torchvision("CIFAR-10")
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    directory, archive = Path(data_dir) / OFFICIAL_DIRECTORY, Path(data_dir) / OFFICIAL_ARCHIVE
    unpacks = archive.is_file() and not directory.is_dir()
    if unpacks and not check_integrity(str(archive), CIFAR10.tgz_md5):
        raise DamagedFileError(archive, f"is not the official file, whose MD5 checksum is {CIFAR10.tgz_md5}")
    try:
        part = CIFAR10(data_dir, train=train, download=download or unpacks)
    except RuntimeError as error:
        if download or not directory.is_dir():
            raise
        raise DamagedFileError(directory, f"does not have the official files ({error})") from error
    return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)


def read_images(source: Path, part: str) -> LabelledSamples:
    """Read the images of a part, ``"train"`` or ``"test"``: one directory for each class, or an archive of them.

    Returns:
        Images (n, 3, 32, 32), uint8, in the order of classes and names of files; labels (n,), int64.

    Raises:
        ValueError: if the classes are not those of CIFAR-10.
        DamagedFileError: if an image cannot be read, or is not 32 x 32.
    """
    require_torchvision("CIFAR-10")
    pattern = rf"{part}/([^/]+)/([^/]+\.(?i:{FORMATS}))"
    found = {content.match.groups(): read_image(content) for content in read_files(source, f"{part}/*/*", pattern)}
    classes = sorted({name for name, _ in found})
    if tuple(classes) != CLASSES:
        raise ValueError(f"{source} has in {part} the directories {', '.join(classes)}, not those of the ten classes")
    names = sorted(found)
    return torch.stack([found[name] for name in names]), torch.tensor([CLASSES.index(name) for name, _ in names])


def read_image(content: Content) -> Tensor:
    """Read an image of 32 x 32 pixels: (3, 32, 32), uint8.

    Raises:
        DamagedFileError: if it cannot be read, or has another size.
    """
    from PIL import Image
    from torchvision.transforms.functional import pil_to_tensor

    with naming_file(content.path, content.place), Image.open(BytesIO(content.data)) as image:
        if image.size != (IMAGE_SIZE, IMAGE_SIZE):
            raise DamagedFileError(content.path, f"{content.place}is not {IMAGE_SIZE} x {IMAGE_SIZE} pixels")
        return pil_to_tensor(image.convert("RGB"))


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
