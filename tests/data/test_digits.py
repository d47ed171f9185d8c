import bz2

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchvision.datasets import USPS

from lightning_struct.data import MNISTDataModule, USPSDataModule
from tests.data.official import prepared, write_mnist

MNIST_SIZES = {"train_size": 20, "val_size": 10, "test_size": 8}
USPS_SIZES = {"train_size": 20, "val_size": 5, "test_size": 11}


def write_usps(directory, train=24, test=12):
    """Images whose first pixel is their number, in the layout of USPS, whose reader truncates (pixel + 1) / 2 * 255."""
    for file, count, start in (("usps.bz2", train, 0), ("usps.t.bz2", test, train)):
        lines = []
        for number in range(start, start + count):
            pixels = [-1 + 2 * (number + 0.5) / 255, *[-1.0] * 255]
            lines.append(f"{number % 10 + 1} " + " ".join(f"{i + 1}:{pixel:.6f}" for i, pixel in enumerate(pixels)))
        (directory / file).write_bytes(bz2.compress("\n".join(lines).encode()))


def numbers(split):
    return (split.tensors[0][:, 0] * 255).round().int().tolist()


def test_mnist_is_cut_within_its_official_parts(tmp_path):
    write_mnist(tmp_path)
    splits = prepared(MNISTDataModule(str(tmp_path), download=False, **MNIST_SIZES)).splits
    assert sorted(numbers(splits.train) + numbers(splits.val)) == list(range(30))
    assert sorted(numbers(splits.test)) == list(range(30, 38))
    assert len(splits.train) == 20


def test_usps_sets_partition_the_pooled_images(tmp_path):
    write_usps(tmp_path)
    splits = prepared(USPSDataModule(str(tmp_path), download=False, **USPS_SIZES)).splits
    assert sorted(numbers(splits.train) + numbers(splits.val) + numbers(splits.test)) == list(range(36))
    assert [len(split) for split in splits] == [20, 5, 11]


@pytest.mark.parametrize(
    ("datamodule", "write", "sizes", "pixels"),
    [(MNISTDataModule, write_mnist, MNIST_SIZES, 784), (USPSDataModule, write_usps, USPS_SIZES, 256)],
)
def test_samples_are_flat_pixels_in_the_unit_interval_with_their_label(tmp_path, datamodule, write, sizes, pixels):
    write(tmp_path)
    images, labels = prepared(datamodule(str(tmp_path), download=False, **sizes)).splits.train.tensors
    assert images.shape == (20, pixels) and images.dtype == torch.float32 and 0 <= images.min() and images.max() <= 1
    assert labels.tolist() == [int(number) % 10 for number in (images[:, 0] * 255).round()]


def test_cut_does_not_depend_on_the_seed_of_the_draws(tmp_path):
    write_usps(tmp_path)
    first, second = (
        prepared(USPSDataModule(str(tmp_path), download=False, seed=seed, **USPS_SIZES)) for seed in (0, 1)
    )
    assert numbers(first.splits.train) == numbers(second.splits.train)


def test_files_that_are_there_are_not_downloaded_again(tmp_path, no_network):
    write_mnist(tmp_path)
    assert len(prepared(MNISTDataModule(str(tmp_path), download=True, **MNIST_SIZES)).splits.train) == 20


def test_damaged_file_is_one_clear_error(tmp_path):
    write_usps(tmp_path)
    (tmp_path / "usps.bz2").write_bytes(b"not bzip2")
    with pytest.raises(MisconfigurationException, match="USPS is damaged: .*usps.bz2 cannot be read"):
        prepared(USPSDataModule(str(tmp_path), download=False, **USPS_SIZES))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda content: content[:1000], "has 1,000 bytes, but its header announces 23,536"),
        (lambda content: content[:10], "has 10 bytes, less than the header"),
        (lambda content: content[:4] + b"\x7f\xff\xff\xff" + content[8:], "header announces 1,683,627,179,264"),
        (lambda content: b"<html>" + content, "does not begin as an idx file"),
    ],
)
def test_damaged_mnist_without_download_says_which_file_to_delete(tmp_path, damage, problem):
    path = write_mnist(tmp_path) / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(MisconfigurationException) as error:
        prepared(MNISTDataModule(str(tmp_path), download=False, **MNIST_SIZES))
    assert problem in str(error.value) and f"delete {path}" in str(error.value)


def test_labels_of_mnist_out_of_range_are_refused(tmp_path):
    write_mnist(tmp_path, label=255)
    with pytest.raises(
        MisconfigurationException, match="train-labels-idx1-ubyte gives sample 29 .* the label 255, not one of 0 to 9"
    ):
        prepared(MNISTDataModule(str(tmp_path), download=False, **MNIST_SIZES))


def test_other_count_of_labels_than_of_images_is_refused(tmp_path):
    raw = write_mnist(tmp_path)
    (raw / "train-labels-idx1-ubyte").write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(MisconfigurationException, match="train-labels-idx1-ubyte has 8 labels for 30 images"):
        prepared(MNISTDataModule(str(tmp_path), download=False, **MNIST_SIZES))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda words: [b"12", *words[1:]], "gives line 4 the label 11, not one of 0 to 9"),
        (lambda words: words[:-1], "has 256 numbers in line 4, not 257"),
        (lambda words: [*words, b"257:0"], "has 258 numbers in line 4, not 257"),
        (lambda words: [*words[:-1], b"256:nan"], "gives line 4 the pixel nan, not a number from -1.001 to 1.001"),
        (lambda words: [*words[:-1], b"256:inf"], "gives line 4 the pixel inf"),
        (lambda words: [words[0], b"1:1e9", *words[2:]], r"gives line 4 the pixel 1e\+09"),
        (lambda words: [*words[:-1], b"256:x"], "has more than numbers in line 4: .*x"),
    ],
)
def test_damaged_lines_of_usps_are_refused(tmp_path, damage, problem):
    write_usps(tmp_path)
    lines = bz2.decompress((tmp_path / "usps.t.bz2").read_bytes()).splitlines()
    lines[3] = b" ".join(damage(lines[3].split()))
    (tmp_path / "usps.t.bz2").write_bytes(bz2.compress(b"\n".join(lines)))
    with pytest.raises(MisconfigurationException, match=f"usps.t.bz2 {problem}"):
        prepared(USPSDataModule(str(tmp_path), download=False, **USPS_SIZES))


def test_pixels_of_usps_are_those_of_torchvision(tmp_path):
    write_usps(tmp_path)
    data = USPSDataModule(str(tmp_path), download=False)
    for train, (images, labels) in zip((True, False), data.read(download=False), strict=True):
        official = USPS(str(tmp_path), train=train)
        assert torch.equal(images, torch.from_numpy(official.data).flatten(1))
        assert labels.tolist() == official.targets


def test_missing_torchvision_names_the_extra(tmp_path, no_torchvision):
    write_mnist(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"MNIST needs torchvision(.|\n)*lightning-struct\[recipes\]"):
        prepared(MNISTDataModule(str(tmp_path), download=False, **MNIST_SIZES))


def test_more_images_than_there_are_is_refused(tmp_path):
    write_usps(tmp_path)
    with pytest.raises(MisconfigurationException, match="from the 36 samples of USPS: choose smaller sizes"):
        prepared(USPSDataModule(str(tmp_path), download=False))
