"""NORB: toys seen by the left eye, on cluttered grounds or on plain ones, in 32 x 32 grey pixels."""

import gzip
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.data.files import DamagedFileError, check_labels, naming_file, read_or_explain
from lightning_struct.data.flat_images import FlatImagesDataModule, FlatImagesOptions
from lightning_struct.data.in_memory import LabelledImages, Unpack
from lightning_struct.data.toys import make_toys
from lightning_struct.utilities.namespaces import MisconfigurationException

SIZE = 32
SITES = {
    "jittered_cluttered": "https://cs.nyu.edu/~ylclab/data/norb-v1.0/",
    "small": "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
}
CLASSES = {"jittered_cluttered": 6, "small": 5}
TRAIN_SIZES = {"jittered_cluttered": 291_600, "small": 24_300}
TEST_SIZES = {"jittered_cluttered": 58_320, "small": 24_300}
MADE_TRAIN_SIZE, MADE_TEST_SIZE = 12_000, 10_000
TRAIN_INSTANCES, TEST_INSTANCES = (4, 6, 7, 8, 9), (0, 1, 2, 3, 5)  # as the names of the files have them
STEMS: dict[str, dict[str, tuple[str, ...]]] = {
    "jittered_cluttered": {
        "train": tuple(f"norb-5x46789x9x18x6x2x108x108-training-{number:02}" for number in range(1, 11)),
        "test": tuple(f"norb-5x01235x9x18x6x2x108x108-testing-{number:02}" for number in (1, 2)),
    },
    "small": {
        "train": ("smallnorb-5x46789x9x18x6x2x96x96-training",),
        "test": ("smallnorb-5x01235x9x18x6x2x96x96-testing",),
    },
}
# the types of the files that NORB consists of; the format has others
ELEMENT_TYPES: dict[int, np.dtype] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}
BLOCK = 512  # pairs of images
MOST_DIMENSIONS = 8
DEFLATE_RATIO = 1032  # the most bytes that a byte of a .gz file can stand for


class NORBDataModule(FlatImagesDataModule):
    """NORB: 247,860 / 43,740 / 58,320 images of 32 x 32 for training, validation and test (LeCun et al., 2004).

    Samples are (pixels, label): (1024,) float32, standardised (:class:`FlatImagesDataModule`), and int64, 0 to 5:
    animal, human, plane, truck, car, none. Images are those of the left camera, made smaller by averaging.

    For example::

        model = Classifier(single_hidden_layer(1024, 6), num_classes=6)
        Trainer().fit(model, datamodule=NORBDataModule(data_dir="data"))

    With ``generate`` the images are made by :func:`~lightning_struct.data.toys.make_toys` in the layout of NORB: five
    kinds of toys, ten of each, of which five are trained on and the other five tested with. They are not the official
    ones, and accuracies on them are to be compared with each other alone. They are always the same; ``synthetic`` makes
    others for each ``seed``.

    The files are read one after another, a block of images at a time; in memory are 1 kB for an image as it is read,
    and 4 kB for one as it is trained on, together at most 1.9 GB.

    Args:
        edition: ``"jittered_cluttered"``, that of the paper, or ``"small"``, 24,300 + 24,300 images of five classes on
            plain grounds.
        data_dir: directory with the official files, ``norb-5x46789x9x18x6x2x108x108-training-01-dat.mat`` and so on,
            packed (``.mat.gz``) or not.
        train_size: training images, those kept for validation included; None takes all of the edition, or makes 12,000.
        test_size: test images; None takes all of the edition, or makes 10,000.
        generate: make the images instead of reading the official files.
        synthetic: the same, from ``seed``.
        **options: further options, see :class:`FlatImagesDataModule` and :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if the files cannot be had or are damaged, or have fewer images than asked for; for a
            number out of its range.

    Example:
        >>> data = NORBDataModule(synthetic=True, batch_size=10, train_size=20, test_size=5)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.dtype
        (torch.Size([10, 1024]), torch.int64)
    """

    title = "NORB"

    def __init__(
        self,
        edition: Literal["jittered_cluttered", "small"] = "jittered_cluttered",
        data_dir: str = "data",
        *,
        train_size: int | None = None,
        test_size: int | None = None,
        generate: bool = False,
        synthetic: bool = False,
        **options: Unpack[FlatImagesOptions],
    ) -> None:
        if edition not in STEMS:
            raise MisconfigurationException(f"edition must be 'jittered_cluttered' or 'small', but is {edition!r}")
        made = generate or synthetic
        sizes = (MADE_TRAIN_SIZE, MADE_TEST_SIZE) if made else (TRAIN_SIZES[edition], TEST_SIZES[edition])
        super().__init__(
            train_size=sizes[0] if train_size is None else train_size,
            test_size=sizes[1] if test_size is None else test_size,
            **options,
        )
        self.edition = edition
        self.data_dir = os.path.expanduser(data_dir)
        self.generate = generate
        self.synthetic = synthetic

    def load_parts(self) -> tuple[LabelledImages, LabelledImages]:
        if self.generate or self.synthetic:
            rank_zero_info("NORB: made by our own generator; these are not the official images.")
            generator = torch.Generator().manual_seed(self.seed if self.synthetic else 0)
            make = partial(make_toys, size=SIZE, cluttered=self.edition != "small", generator=generator)
            return make(self.train_size, instances=TRAIN_INSTANCES), make(self.test_size, instances=TEST_INSTANCES)
        stems = STEMS[self.edition]
        return read_or_explain(
            self.title,
            lambda: (self._read(stems["train"]), self._read(stems["test"])),
            data_dir=self.data_dir,
            files=f"the dat and cat files {stems['train'][0]}-dat.mat[.gz] to {stems['test'][-1]}-cat.mat[.gz] "
            f"of {SITES[self.edition]}",
            generate=True,
        )

    def _read(self, stems: tuple[str, ...]) -> LabelledImages:
        directory = Path(self.data_dir)
        parts = [read_left_images(directory, stem) for stem in stems]
        for stem, (_, labels) in zip(stems, parts, strict=True):
            check_labels(packed_or_not(directory, f"{stem}-cat.mat"), labels, CLASSES[self.edition])
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return images, labels


def read_left_images(directory: Path, stem: str) -> LabelledImages:
    """Read one pair of files of NORB.

    Returns:
        Images of the left camera, made smaller, (n, 1024), uint8; labels (n,), int64.

    Raises:
        OSError: if a file is missing.
        DamagedFileError: if a file is not a binary matrix, ends early, or is not the labels or the images of its pair.
    """
    with open_matrix(packed_or_not(directory, f"{stem}-cat.mat")) as (file, shape, dtype):
        labels = torch.from_numpy(read_elements(file, math.prod(shape), dtype).astype(np.int64))
    path = packed_or_not(directory, f"{stem}-dat.mat")
    with open_matrix(path) as (file, shape, dtype):
        if len(shape) != 4 or shape[1] != 2 or dtype != np.uint8 or shape[0] != len(labels):
            raise DamagedFileError(path, f"is {dtype} {shape}, not {len(labels)} pairs of images, uint8")
        images = torch.cat([make_small(pairs[:, 0]) for pairs in read_blocks(file, shape)])
    return images, labels


def packed_or_not(directory: Path, name: str) -> Path:
    """Path of the file of this name, or else of its packed form with ``.gz`` behind it."""
    plain = directory / name
    return plain if plain.exists() else directory / f"{name}.gz"


def open_packed_or_not(path: Path) -> BinaryIO:
    """Open a file to read its content, unpacked if it ends in ``.gz``."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


@contextmanager
def open_matrix(path: Path) -> Iterator[tuple[BinaryIO, tuple[int, ...], np.dtype]]:
    """A binary matrix, opened behind its header, with its shape and type.

    The header has the kind of element, the number of dimensions, and at least three sizes, int32 each.

    Raises:
        DamagedFileError: if the header is another, or announces more than the file can hold; and for what is raised
            about the content within the ``with`` block.
    """
    with naming_file(path), open_packed_or_not(path) as file:
        kind, dimensions = (int(number) for number in read_elements(file, 2, np.dtype("<i4")))
        if kind not in ELEMENT_TYPES or not 1 <= dimensions <= MOST_DIMENSIONS:
            raise DamagedFileError(path, f"begins with {kind:#x} and {dimensions} dimensions: it is no matrix of NORB")
        # of fewer than three dimensions, the other sizes are filled up
        shape = tuple(read_elements(file, max(dimensions, 3), np.dtype("<i4"))[:dimensions].tolist())
        size = path.stat().st_size
        most = (DEFLATE_RATIO * size if path.suffix == ".gz" else size) - file.tell()
        if min(shape) < 0 or math.prod(shape) * ELEMENT_TYPES[kind].itemsize > most:
            raise DamagedFileError(path, f"has {size:,} bytes, which cannot hold the {shape} elements of its header")
        yield file, shape, ELEMENT_TYPES[kind]


def read_elements(file: BinaryIO, count: int, dtype: np.dtype) -> np.ndarray:
    """Read the next ``count`` elements.

    Raises:
        EOFError: if there are fewer.
    """
    content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise EOFError(f"it ends before its {count} elements")
    return np.frombuffer(content, dtype)


def read_blocks(file: BinaryIO, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Read a uint8 matrix of this shape, 512 of its first dimension at a time."""
    for start in range(0, shape[0], BLOCK):
        block = (min(BLOCK, shape[0] - start), *shape[1:])
        yield torch.from_numpy(read_elements(file, math.prod(block), np.dtype("u1")).reshape(block).copy())


def make_small(images: Tensor) -> Tensor:
    """uint8 images (n, height, width), averaged to (n, 1024)."""
    return F.adaptive_avg_pool2d(images.float()[:, None], SIZE).round().to(torch.uint8).flatten(1)
