"""Small files in the official layouts: 30 training and 8 test samples, each of which has its number."""

import bz2
import hashlib
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from benchmarks.rectangles import RECTANGLE_FILES, RectanglesDataModule
from lightning_struct import data
from lightning_struct.data.cifar import CHANNEL_MEAN, CHANNEL_STD, CLASSES
from lightning_struct.data.larochelle import FILES

TRAIN, TEST = range(30), range(30, 38)
PARTS = (("train", TRAIN), ("test", TEST))


def prepared(datamodule):
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def write_mnist(directory, monkeypatch=None):
    """Image number n is n + 1 in the middle and n in its first pixel; its label is n % 10."""
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, numbers in (("train", np.array(TRAIN)), ("t10k", np.array(TEST))):
        images = np.zeros((len(numbers), 28, 28), np.uint8)
        images[:, 8:20, 8:20] = 1 + numbers[:, None, None]
        images[:, 0, 0] = numbers
        header = np.array([0x0803, len(numbers), 28, 28], ">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([0x0801, len(numbers)], ">i4").tobytes()
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + (numbers % 10).astype(np.uint8).tobytes())


def write_usps(directory, monkeypatch):
    for file, numbers in (("usps.bz2", TRAIN), ("usps.t.bz2", TEST)):
        pixels = [[-1 + 2 * (number + 0.5) / 255, *[-1.0] * 255] for number in numbers]
        lines = [" ".join(f"{i + 1}:{pixel:.6f}" for i, pixel in enumerate(row)) for row in pixels]
        text = "\n".join(f"{number % 10 + 1} {line}" for number, line in zip(numbers, lines, strict=True))
        (directory / file).write_bytes(bz2.compress(text.encode()))


def color_of(number):
    return (number, 100, 200 - number)


def write_cifar(directory, monkeypatch):
    """Images whose first pixel has the colour of their number, with checksums to match."""
    folder = directory / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return name, hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(numbers):
        pixels = np.zeros((len(numbers), 3, 32, 32), np.uint8)
        pixels[:, :, 0, 0] = [color_of(number) for number in numbers]
        return {"data": pixels.reshape(len(numbers), -1), "labels": [number % 10 for number in numbers]}

    files = [write(f"data_batch_{i + 1}", batch(part.tolist())) for i, part in enumerate(np.array_split(TRAIN, 5))]
    monkeypatch.setattr(CIFAR10, "train_list", files)
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", batch(TEST))])
    name, checksum = write("batches.meta", {"label_names": list(CLASSES)})
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": checksum})


def write_images(directory, monkeypatch=None, size=32):
    for part, numbers in PARTS:
        for number in numbers:
            (directory / part / CLASSES[number % 10]).mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (size, size))
            image.putpixel((0, 0), color_of(number))
            image.save(directory / part / CLASSES[number % 10] / f"{number}.png")
    for name in {*CLASSES} - {CLASSES[number % 10] for number in TEST}:  # there are images of all classes
        (directory / "test" / name).mkdir()
        Image.new("RGB", (size, size), color_of(99)).save(directory / "test" / name / "other.png")


def write_reviews(directory, monkeypatch=None):
    """Review number n, of class n % 2, has n + 1 words."""
    for part, numbers in PARTS:
        for number in numbers:
            path = directory / "aclImdb" / part / ("neg", "pos")[number % 2] / f"{number}_7.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("good " * (number + 1), encoding="utf-8")
    (directory / "aclImdb" / "train" / "unsup").mkdir()
    (directory / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("no label")


def write_amat(directory, monkeypatch, files):
    """Images whose first pixel is their number in hundredths."""
    lines = [f"{number / 100} {'0 ' * 783}{number % 2}" for number in (*TRAIN, *TEST)]
    if len(files) == 1:
        (directory / files[0]).write_text("\n".join(lines))
        monkeypatch.setattr("lightning_struct.data.larochelle.TRAIN_SIZE", len(TRAIN))
    else:
        (directory / files[0]).write_text("\n".join(lines[: len(TRAIN)]))
        (directory / files[1]).write_text("\n".join(lines[len(TRAIN) :]))


def packed(write, contents, directory, monkeypatch):
    """Archives instead of the folders that ``write`` makes."""
    write(directory, monkeypatch)
    for archive, content in contents.items():
        with tarfile.open(directory / archive, "w:gz") as members:
            members.add(directory / content, content)
        (directory / content).rename(directory / f"packed_{content}")
    if "cifar-10-python.tar.gz" in contents:
        checksum = hashlib.md5((directory / "cifar-10-python.tar.gz").read_bytes()).hexdigest()
        monkeypatch.setattr(CIFAR10, "tgz_md5", checksum)


def from_first_pixel(inputs):
    return (inputs[:, 0] * 255).round().long()


def from_color(inputs):
    colors = 255 * (inputs[:, :, 0, 0] * torch.tensor(CHANNEL_STD) + torch.tensor(CHANNEL_MEAN))
    return colors[:, 0].round().long()


def from_length(inputs):
    return inputs.ne(0).sum(dim=1) - 1


@dataclass(frozen=True)
class Layout:
    """Official files of a data module.

    Attributes:
        kind: the class of the data module.
        write: writes its files.
        shape: of a sample.
        number: finds the numbers of samples in their inputs.
        damaged: the file that is cut off by tests, and the path that an error names.
        classes: the label of a sample is its number modulo this.
        is_own: nobody can download these files, so that none is to be deleted.
    """

    kind: type
    write: Callable
    shape: tuple[int, ...]
    number: Callable
    damaged: tuple[str, str]
    classes: int = 10
    is_own: bool = False

    def made(self, directory, **options):
        sizes = {"train_size": 20, "val_size": 10, "test_size": 8, "download": False}
        return self.kind(data_dir=str(directory), **{**sizes, **options})


COLOR, WORDS = (3, 32, 32), (200,)
BIRD, REVIEW = "train/bird/2.png", "aclImdb/train/pos/1_7.txt"
JPEG = {f"cifar10_jpeg_{part}.tar.gz": part for part, _ in PARTS}
CIFAR, BATCHES = "cifar-10-python.tar.gz", "cifar-10-batches-py"
IMAGES = "MNIST/raw/train-images-idx3-ubyte"
LAYOUTS = {
    "MNIST": Layout(data.MNISTDataModule, write_mnist, (784,), from_first_pixel, (IMAGES, "MNIST/raw")),
    "USPS": Layout(data.USPSDataModule, write_usps, (256,), from_first_pixel, ("usps.bz2",) * 2),
    "CIFAR-10": Layout(data.CIFAR10DataModule, write_cifar, COLOR, from_color, (f"{BATCHES}/data_batch_3", BATCHES)),
    "CIFAR-10, packed": Layout(
        data.CIFAR10DataModule, partial(packed, write_cifar, {CIFAR: BATCHES}), COLOR, from_color, (CIFAR,) * 2
    ),
    "images": Layout(data.CIFAR10DataModule, write_images, COLOR, from_color, (BIRD,) * 2, is_own=True),
    "images, packed": Layout(
        data.CIFAR10DataModule, partial(packed, write_images, JPEG), COLOR, from_color,
        ("cifar10_jpeg_train.tar.gz",) * 2, is_own=True,
    ),
    "IMDB": Layout(data.IMDBDataModule, write_reviews, WORDS, from_length, (REVIEW,) * 2, 2, is_own=True),
    "IMDB, packed": Layout(
        data.IMDBDataModule, partial(packed, write_reviews, {"aclImdb_v1.tar.gz": "aclImdb"}), WORDS, from_length,
        ("aclImdb_v1.tar.gz",) * 2, 2,
    ),
    "IMDB, a part": Layout(
        data.IMDBDataModule, partial(packed, write_reviews, {"aclImdb_some.tar.gz": "aclImdb"}), WORDS, from_length,
        ("aclImdb_some.tar.gz",) * 2, 2,
    ),
}  # fmt: skip
AMAT = {name: (data.MNISTVariantDataModule, files, {"variant": name}) for name, files in FILES.items()}
AMAT["rectangles"] = (RectanglesDataModule, RECTANGLE_FILES, {})
