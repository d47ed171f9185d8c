"""Images of Larochelle et al. (2007): digits that are turned, or lie on noise or on pictures."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from lightning_struct.data.curves import synthetic_digits
from lightning_struct.data.digits import MNISTDataModule
from lightning_struct.data.files import DamagedFileError, naming_file
from lightning_struct.data.flat_images import FlatImagesDataModule
from lightning_struct.data.in_memory import LabelledSamples, split_at_random, split_in_order
from lightning_struct.utilities.checks import check

SITE = "https://sites.google.com/a/lisa.iro.umontreal.ca/public_static_twiki"
SIZE = 28
NOISE_BANDWIDTH, PICTURES, PICTURE_SIZE, LEAST_TEXTURE = 6.0, 20, 256, 0.1

Variant = Literal["rotation", "background", "background_rotation", "noise"]
FILES: dict[str, tuple[str, ...]] = {
    "rotation": tuple(f"mnist_all_rotation_normalized_float_{part}.amat" for part in ("train_valid", "test")),
    "background": tuple(f"mnist_background_images_{part}.amat" for part in ("train", "test")),
    "background_rotation": tuple(
        f"mnist_all_background_images_rotation_normalized_{part}.amat" for part in ("train_valid", "test")
    ),
    "noise": ("mnist_noise_variations_all_1.amat",),  # of six; the paper does not name the one that it has
}
TRAIN_SIZE = 12_000
TEST_SIZES = {"rotation": 50_000, "background": 50_000, "background_rotation": 50_000, "noise": 2_000}
MOST_SYNTHETIC = 10_000  # test images, which are made within seconds


class MNISTVariantDataModule(FlatImagesDataModule):
    """MNIST-bg-rot, MNIST-noise and their relatives: 10,200 / 1,800 / 50,000 images of 28 x 28.

    Of noise there are 2,000 test images. Samples are (pixels, label): (784,) float32, standardised
    (:class:`FlatImagesDataModule`), and int64.

    For example::

        data = MNISTVariantDataModule(variant="noise", generate=True, data_dir="data")
        Trainer().fit(Classifier(single_hidden_layer(784, 10)), datamodule=data)

    The official files are those of Larochelle et al., "An empirical evaluation of deep architectures on problems with
    many factors of variation" (2007); pixels keep the order of the files, which have some of the images on their side.
    With ``generate``, the images are made anew from MNIST by :func:`vary_digits`, which follows the authors'
    description: they are not the official ones, and accuracies on them are to be compared with each other alone. They
    are always the same, whatever the ``seed``: 12,000 training images and the test images are digits drawn from all
    70,000 of MNIST, none twice.

    Args:
        variant: ``"rotation"``, ``"background"`` (pictures), ``"background_rotation"`` (both) or ``"noise"``.
        data_dir: directory with the official ``.amat`` files, or with ``MNIST/raw`` for ``generate``.
        train_size: training images, those kept for validation included.
        test_size: test images; None takes those of Table 15: 2,000 for noise, else 50,000, or 10,000 if ``synthetic``.
        download: whether missing files of MNIST may be downloaded for ``generate``; the official ones cannot.
        **options: ``generate`` (from MNIST), ``synthetic`` (from figures that are made, too) and further options, see
            :class:`FlatImagesDataModule` and :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: for an unknown variant or a number out of its range; if the files are missing or
            are damaged, or have fewer images than asked for.

    Example:
        >>> data = MNISTVariantDataModule("noise", synthetic=True, batch_size=10, train_size=20, test_size=5)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([10, 784]), torch.int64)
    """

    def __init__(
        self,
        variant: Variant = "background_rotation",
        data_dir: str = "data",
        *,
        train_size: int = TRAIN_SIZE,
        test_size: int | None = None,
        download: bool = True,
        **options: Any,
    ) -> None:
        check("variant", variant, isinstance(variant, str) and variant in FILES, f"one of {', '.join(FILES)}")
        if test_size is None:
            official = TEST_SIZES[variant]
            test_size = min(official, MOST_SYNTHETIC) if options.get("synthetic") else official
        super().__init__(data_dir, train_size, test_size, **options)
        self.title = f"MNIST-{variant.replace('_', '-')}"  # type: ignore[misc]
        self.variant = variant
        self.files = f"{' and '.join(FILES[variant])} of {SITE}"
        self.digits = MNISTDataModule(data_dir, download=download)

    def prepare_data(self) -> None:
        if self.generate and not self.synthetic:
            self.digits.prepare_data()

    def make(self) -> tuple[LabelledSamples, LabelledSamples]:
        sizes = (self.train_size, self.test_size)
        if self.synthetic:  # figures stand in for the digits
            images, labels = synthetic_digits(sum(sizes), SIZE, seed=self.seed)
        else:
            both = zip(*self.digits.read_or_explain(download=False), strict=True)
            images, labels = (torch.cat(parts) for parts in both)
            named = {"train_size": self.train_size, "test_size": self.test_size}
            chosen = torch.cat(split_at_random(len(images), named, of="MNIST"))
            images, labels = images[chosen].float() / 255, labels[chosen]
        varied = vary_digits(images, self.variant, seed=self.seed if self.synthetic else 0)
        train, test = split_in_order((varied, labels), sizes)
        return train, test

    def read(self) -> tuple[LabelledSamples, LabelledSamples]:
        parts = [read_amat(Path(self.data_dir) / file) for file in FILES[self.variant]]
        if self.variant != "noise":
            return parts[0], parts[1]
        images, labels = parts[0]  # one file: the training images come first
        return (images[:TRAIN_SIZE], labels[:TRAIN_SIZE]), (images[TRAIN_SIZE:], labels[TRAIN_SIZE:])


def read_amat(path: Path) -> LabelledSamples:
    """Read the images and labels of one ``.amat`` file: a line holds the pixels of an image, row by row, and its label.

    Returns:
        Images (n, 784), float32, in the order of the file; labels (n,), int64.

    Raises:
        OSError: if the file cannot be read.
        DamagedFileError: if a line is too short or too long, or has anything but numbers; names file and line.
    """
    with naming_file(path):
        table = torch.from_numpy(np.loadtxt(path, dtype=np.float32, ndmin=2))
    if table.shape[1] != SIZE * SIZE + 1:
        raise DamagedFileError(path, f"has {table.shape[1]} numbers in a line, not {SIZE * SIZE} pixels and a label")
    return table[:, :-1].contiguous(), table[:, -1].long()


def vary_digits(images: Tensor, variant: Variant, *, noise_correlation: float = 1.0, seed: int = 0) -> Tensor:
    """Turn digits, and put them on a ground, as Larochelle et al. describe it.

    A digit is turned about the middle of its image by an angle that is uniform in [0, 2π), by bilinear interpolation.
    The ground is noise (:func:`uniform_noise`) or a piece of a picture (:func:`picture_patches`); of digit and ground,
    the brighter is seen: the description only says that the ground is put into the image.

    Args:
        images: bright digits on black, (n, 784), floating dtype, values in [0, 1].
        variant: ``"rotation"``, ``"background"``, ``"background_rotation"`` or ``"noise"``.
        noise_correlation: correlation of the noise, υ in [0, 1].
        seed: the same seed gives the same images.

    Returns:
        Images (n, 784), of the dtype of ``images``, values in [0, 1].
    """
    generator = Generator().manual_seed(seed)
    if variant in ("rotation", "background_rotation"):
        images = rotate(images, 2 * math.pi * torch.rand(len(images), generator=generator))
    if variant == "rotation":
        return images
    if variant == "noise":
        ground = uniform_noise(len(images), noise_correlation, generator=generator)
    else:
        ground = picture_patches(len(images), generator=generator)
    return torch.maximum(images, ground.to(images.dtype))


def rotate(images: Tensor, angles: Tensor) -> Tensor:
    """Square images (n, pixels), turned about their middle by ``angles`` (n,), radians; black comes in from outside."""
    size = math.isqrt(images.shape[1])
    cos, sin = angles.cos().to(images.dtype), angles.sin().to(images.dtype)
    zero = torch.zeros_like(cos)
    turns = torch.stack([torch.stack([cos, -sin, zero], -1), torch.stack([sin, cos, zero], -1)], 1)
    squares = images.view(-1, 1, size, size)
    grid = F.affine_grid(turns, list(squares.shape), align_corners=False)
    return F.grid_sample(squares, grid, align_corners=False).clamp_(0, 1).flatten(1)  # rounding may leave [0, 1]


def uniform_noise(count: int, correlation: float, *, generator: Generator) -> Tensor:
    """Grounds whose pixels are each uniform in [0, 1], and like their neighbours.

    The description of the series of noise by Larochelle et al., section 4.3: s ~ N(0, (1 - υ) I + υ K), K a Gaussian
    kernel of bandwidth 6 pixels, goes through its distribution function, (1 + erf(s / √2)) / 2. The six official sets
    have υ of 0, .2, .4, .6, .8 and 1. After 12 epochs an unstructured layer has 82 % with 0 and 73 % with 1 (one run
    each); the paper's 65 % are nearer to 1.

    Args:
        count: number of grounds.
        correlation: υ in [0, 1]; 0 is noise without any.
        generator: source of the random numbers.

    Returns:
        (count, 784), float32.
    """
    white, smooth = torch.randn(2, count, SIZE, SIZE, generator=generator)
    place = torch.arange(SIZE, dtype=torch.float64)
    kernel = torch.exp(-((place[:, None] - place) ** 2) / (2 * NOISE_BANDWIDTH**2))
    values, vectors = torch.linalg.eigh(kernel)  # the kernel over the plane is the product of those over its two axes
    root = (vectors * values.clamp(min=0).sqrt() @ vectors.T).float()
    field = math.sqrt(1 - correlation) * white + math.sqrt(correlation) * (root @ smooth @ root)
    return (0.5 * (1 + torch.erf(field / math.sqrt(2)))).flatten(1)


def picture_patches(count: int, size: int = SIZE, *, generator: Generator) -> Tensor:
    """Grounds cut at random places from 20 pictures.

    Larochelle et al. took 20 pictures from the internet and left out pieces with little texture. Here the pictures are
    made: noise whose amplitudes fall with the frequency as in photographs, between 1/f and 1/f², stretched to [0, 1].
    Pieces with a standard deviation below 0.1 are drawn again.

    Args:
        count: number of grounds.
        size: height and width in pixels.
        generator: source of the random numbers.

    Returns:
        (count, size * size), float32, values in [0, 1].
    """
    pictures = make_pictures(generator)
    patches = torch.empty(0, size * size)
    while len(patches) < count:
        which = torch.randint(PICTURES, (count, 1, 1), generator=generator)
        top, left = torch.randint(PICTURE_SIZE - size + 1, (2, count, 1, 1), generator=generator)
        span = torch.arange(size)
        drawn = pictures[which, top + span[:, None], left + span].flatten(1)
        patches = torch.cat([patches, drawn[drawn.std(dim=1) >= LEAST_TEXTURE]])
    return patches[:count]


def make_pictures(generator: Generator) -> Tensor:
    """The pictures of :func:`picture_patches`, (20, 256, 256), float32, values in [0, 1]."""
    noise = torch.randn(PICTURES, PICTURE_SIZE, PICTURE_SIZE, generator=generator)
    frequency = torch.fft.fftfreq(PICTURE_SIZE)[:, None].hypot(torch.fft.rfftfreq(PICTURE_SIZE))
    frequency[0, 0] = 1 / PICTURE_SIZE
    slope = torch.linspace(1, 2, PICTURES)[:, None, None]
    pictures = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency**slope, s=noise.shape[1:])
    flat = pictures.flatten(1)
    low, high = (flat.quantile(share, dim=1)[:, None, None] for share in (0.02, 0.98))
    return ((pictures - low) / (high - low)).clamp_(0, 1)
