import bz2
import urllib.request
from urllib.error import URLError

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import MNISTDataModule, USPSDataModule

MNIST_SIZES = {"train_size": 20, "val_size": 10, "test_size": 8}
USPS_SIZES = {"train_size": 20, "val_size": 5, "test_size": 11}


def write_mnist(directory, train=30, test=8):
    """Images whose first pixel is their number, in the official layout."""
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count, start in (("train", train, 0), ("t10k", test, train)):
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(start, start + count)
        header = np.array([0x0803, count, 28, 28], ">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = (np.arange(start, start + count) % 10).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(np.array([0x0801, count], ">i4").tobytes() + labels.tobytes())


def write_usps(directory, train=24, test=12):
    """The same for USPS, whose reader truncates (pixel + 1) / 2 * 255."""
    for file, count, start in (("usps.bz2", train, 0), ("usps.t.bz2", test, train)):
        lines = []
        for number in range(start, start + count):
            pixels = [-1 + 2 * (number + 0.5) / 255, *[-1.0] * 255]
            lines.append(f"{number % 10 + 1} " + " ".join(f"{i + 1}:{pixel:.6f}" for i, pixel in enumerate(pixels)))
        (directory / file).write_bytes(bz2.compress("\n".join(lines).encode()))


def prepared(datamodule):
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def numbers(split):
    return (split.tensors[0][:, 0] * 255).round().int().tolist()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def test_default_sizes_are_those_of_table_1():
    assert MNISTDataModule().sizes == {"train": 50_000, "val": 10_000, "test": 10_000}
    assert USPSDataModule().sizes == {"train": 6_800, "val": 1_000, "test": 1_498}


def test_mnist_test_images_are_the_official_ones(tmp_path):
    write_mnist(tmp_path)
    splits = prepared(MNISTDataModule(str(tmp_path), download=False, **MNIST_SIZES)).splits
    assert sorted(numbers(splits.test)) == list(range(30, 38))


def test_mnist_training_and_validation_images_partition_the_official_training_set(tmp_path):
    write_mnist(tmp_path)
    splits = prepared(MNISTDataModule(str(tmp_path), download=False, **MNIST_SIZES)).splits
    assert sorted(numbers(splits.train) + numbers(splits.val)) == list(range(30))
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


@pytest.mark.parametrize("datamodule", [MNISTDataModule, USPSDataModule])
def test_missing_files_name_the_directory_and_the_remedies(tmp_path, datamodule):
    with pytest.raises(MisconfigurationException) as error:
        prepared(datamodule(str(tmp_path / "nowhere"), download=False))
    for part in (str(tmp_path / "nowhere"), "--data.data_dir", "--data.download=true", "--data.synthetic=true"):
        assert part in str(error.value)


@pytest.mark.parametrize("datamodule", [MNISTDataModule, USPSDataModule])
def test_failing_download_names_the_directory_and_the_remedies(tmp_path, datamodule, no_network):
    with pytest.raises(MisconfigurationException) as error:
        prepared(datamodule(str(tmp_path), download=True))
    for part in ("could not be downloaded to", str(tmp_path), "no network", "--data.synthetic=true"):
        assert part in str(error.value)


def test_damaged_file_is_one_clear_error(tmp_path):
    write_usps(tmp_path)
    (tmp_path / "usps.bz2").write_bytes(b"not bzip2")
    with pytest.raises(MisconfigurationException, match="is damaged there"):
        prepared(USPSDataModule(str(tmp_path), download=False, **USPS_SIZES))


def test_more_images_than_there_are_is_refused(tmp_path):
    write_usps(tmp_path)
    with pytest.raises(MisconfigurationException, match="from 36 samples: choose smaller sizes"):
        prepared(USPSDataModule(str(tmp_path), download=False))


@pytest.mark.parametrize(
    ("datamodule", "sizes", "pixels"), [(MNISTDataModule, MNIST_SIZES, 784), (USPSDataModule, USPS_SIZES, 256)]
)
def test_synthetic_sets_have_the_same_shapes_and_need_no_files(tmp_path, no_network, datamodule, sizes, pixels):
    splits = prepared(datamodule(str(tmp_path / "nowhere"), synthetic=True, **sizes)).splits
    assert [split.tensors[0].shape for split in splits] == [
        (sizes[f"{part}_size"], pixels) for part in ("train", "val", "test")
    ]


def test_synthetic_sets_say_so(tmp_path, caplog):
    with caplog.at_level("INFO"):
        prepared(USPSDataModule(synthetic=True, **USPS_SIZES))
    assert "USPS: procedurally made figures" in caplog.text
