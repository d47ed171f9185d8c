import hashlib
import pickle
import tarfile
import zlib

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torchvision.datasets import CIFAR10

from lightning_struct.data import CIFAR10DataModule
from lightning_struct.data.cifar import CHANNEL_MEAN, CHANNEL_STD, CLASSES, as_grey, synthetic_color_images
from tests.data.official import prepared

ARCHIVE = "cifar-10-python.tar.gz"
SIZES = {"train_size": 15, "val_size": 10, "test_size": 8}


def color_of(number):
    return (number, 100, 200 - number)


def write_official(directory, monkeypatch, train=25, test=8, label=None):
    """Images whose first pixel has the colour of their number, in the official layout, with checksums to match."""
    folder = directory / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return name, hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(numbers):
        data = np.zeros((len(numbers), 3, 32, 32), np.uint8)
        for row, number in enumerate(numbers):
            data[row, :, 0, 0] = color_of(number)
        labels = [number % 10 for number in numbers]
        if label is not None:
            labels[-1] = label if numbers[-1] == train - 1 else labels[-1]
        return {"data": data.reshape(len(numbers), -1), "labels": labels}

    parts = np.array_split(np.arange(train), 5)
    files = [write(f"data_batch_{index + 1}", batch(part.tolist())) for index, part in enumerate(parts)]
    monkeypatch.setattr(CIFAR10, "train_list", files)
    monkeypatch.setattr(CIFAR10, "test_list", [write("test_batch", batch(list(range(train, train + test))))])
    name, checksum = write("batches.meta", {"label_names": list(CLASSES)})
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": checksum})


def write_directories(directory, train=25, test=8, size=32):
    """The same as one directory of PNG files for each class."""
    for part, numbers in (("train", range(train)), ("test", range(train, train + test))):
        for name in CLASSES:
            (directory / part / name).mkdir(parents=True)
        for number in numbers:
            image = Image.new("RGB", (size, size))
            image.putpixel((0, 0), color_of(number))
            image.save(directory / part / CLASSES[number % 10] / f"{number}.png")
    for name in CLASSES:  # torchvision refuses a class without images
        if not any((directory / "test" / name).iterdir()):
            Image.new("RGB", (size, size)).save(directory / "test" / name / "black.png")


def colors(split):
    """Of the first pixel, undone to 0..255: (n, 3)."""
    images = split.tensors[0][:, :, 0, 0]
    return (255 * (images * torch.tensor(CHANNEL_STD) + torch.tensor(CHANNEL_MEAN))).round().int()


def pack(directory, name, *contents):
    """An archive in place of what it has."""
    with tarfile.open(directory / name, "w:gz") as archive:
        for content in contents:
            archive.add(directory / content, content)
            (directory / content).rename(directory / f"packed_{content}")


@pytest.fixture(params=["official", "official archive", "directories", "archives"])
def layout(request, tmp_path, monkeypatch):
    """Directory with images in one of the layouts."""
    if request.param.startswith("official"):
        write_official(tmp_path, monkeypatch)
        if request.param == "official archive":
            pack(tmp_path, ARCHIVE, "cifar-10-batches-py")
            monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((tmp_path / ARCHIVE).read_bytes()).hexdigest())
    else:
        write_directories(tmp_path)
        if request.param == "archives":
            for part in ("train", "test"):
                pack(tmp_path, f"cifar10_jpeg_{part}.tar.gz", part)
    return tmp_path


def test_official_images_are_standardised_and_training_and_validation_set_partition_the_training_part(layout):
    splits = prepared(CIFAR10DataModule(str(layout), download=False, **SIZES)).splits
    numbers = torch.cat([colors(splits.train), colors(splits.val)])[:, 0]
    assert sorted(numbers.tolist()) == list(range(25)) and len(splits.train) == 15
    assert set(colors(splits.test)[:, 0].tolist()) <= {0, *range(25, 33)}
    images, labels = splits.train.tensors
    assert images.shape == (15, 3, 32, 32) and images.dtype == torch.float32 and labels.dtype == torch.int64
    black = -torch.tensor(CHANNEL_MEAN) / torch.tensor(CHANNEL_STD)
    assert torch.allclose(images[:, :, 5, 7], black.expand(15, 3))
    expected = torch.tensor([color_of(number) for number in colors(splits.train)[:, 0].tolist()])
    assert torch.equal(colors(splits.train), expected) and torch.equal(labels, expected[:, 0].long() % 10)


def test_cut_does_not_depend_on_the_seed_of_the_shuffles(tmp_path, monkeypatch):
    write_official(tmp_path, monkeypatch)
    first, second = (
        prepared(CIFAR10DataModule(str(tmp_path), download=False, seed=seed, **SIZES)).splits.train for seed in (0, 1)
    )
    assert torch.equal(first.tensors[0], second.tensors[0])


def test_images_that_are_there_are_not_downloaded(layout, no_network):
    assert len(prepared(CIFAR10DataModule(str(layout), download=True, **SIZES)).splits.train) == 15


def test_batches_are_shuffled_passes_through_an_ordinary_loader():
    datamodule = prepared(CIFAR10DataModule(synthetic=True, batch_size=6, **SIZES))
    batches = [labels for _, labels in datamodule.train_dataloader()]
    assert [len(labels) for labels in batches] == [6, 6, 3]
    assert torch.equal(torch.cat(batches).sort().values, datamodule.splits.train.tensors[1].sort().values)


def test_directories_of_other_classes_are_refused(tmp_path):
    write_directories(tmp_path)
    (tmp_path / "train" / "airplane").rename(tmp_path / "train" / "zebra")
    with pytest.raises(MisconfigurationException, match="zebra, not those of the ten classes"):
        prepared(CIFAR10DataModule(str(tmp_path), download=False, **SIZES))


def test_images_of_another_size_are_refused(tmp_path):
    write_directories(tmp_path, size=28)
    with pytest.raises(MisconfigurationException, match="is 28 x 28 pixels, not 32 x 32"):
        prepared(CIFAR10DataModule(str(tmp_path), download=False, **SIZES))


def test_images_that_claim_an_enormous_size_are_refused_before_they_are_decoded(tmp_path):
    write_directories(tmp_path)
    path = tmp_path / "train" / "bird" / "2.png"
    content = path.read_bytes()
    header = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + content[24:29]
    path.write_bytes(content[:12] + header + zlib.crc32(header).to_bytes(4, "big") + content[33:])
    with pytest.raises(MisconfigurationException, match="2.png is not 32 x 32 pixels"):
        prepared(CIFAR10DataModule(str(tmp_path), download=False, **SIZES))


def test_damaged_image_is_named(tmp_path):
    write_directories(tmp_path)
    path = tmp_path / "train" / "bird" / "2.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(MisconfigurationException, match="CIFAR-10 is damaged: .*2.png cannot be read") as error:
        prepared(CIFAR10DataModule(str(tmp_path), download=False, **SIZES))
    # images of directories are not downloaded, so that none is to be deleted for it
    assert f"put a whole copy in place of {path}" in str(error.value) and "download" not in str(error.value)


def test_damaged_official_file_is_named(tmp_path, monkeypatch):
    write_official(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(MisconfigurationException, match="data_batch_3 is not the official file(.|\n)*delete"):
        prepared(CIFAR10DataModule(str(tmp_path), download=True, **SIZES))


def test_archive_that_is_not_the_official_one_is_named_and_not_unpacked(tmp_path, monkeypatch, no_network):
    write_official(tmp_path, monkeypatch)
    pack(tmp_path, ARCHIVE, "cifar-10-batches-py")
    with pytest.raises(MisconfigurationException, match=f"{ARCHIVE} is not the official file(.|\n)*delete"):
        prepared(CIFAR10DataModule(str(tmp_path), download=True, **SIZES))
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_damaged_image_of_an_archive_is_named(tmp_path):
    write_directories(tmp_path)
    path = tmp_path / "train" / "bird" / "2.png"
    path.write_bytes(path.read_bytes()[:60])
    for part in ("train", "test"):
        pack(tmp_path, f"cifar10_jpeg_{part}.tar.gz", part)
    with pytest.raises(MisconfigurationException, match="jpeg_train.tar.gz has train/bird/2.png, which cannot be read"):
        prepared(CIFAR10DataModule(str(tmp_path), download=False, **SIZES))


def test_labels_out_of_range_are_refused(tmp_path, monkeypatch):
    write_official(tmp_path, monkeypatch, label=11)
    with pytest.raises(
        MisconfigurationException, match="cifar-10-batches-py gives sample 24 .* the label 11, not one of"
    ):
        prepared(CIFAR10DataModule(str(tmp_path), download=False, **SIZES))


def test_synthetic_figures_are_brighter_than_their_ground():
    images, _ = synthetic_color_images(20, 16)
    corner, brightest = images[:, :, 0, 0], images.flatten(2).amax(dim=2)
    assert (corner <= 128).all() and (brightest >= 127).all()


def test_grey_images_are_flat_and_the_means_of_the_colours():
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    images[1, :, 0, 5] = torch.tensor([255, 0, 51])
    grey = as_grey(images)
    assert grey.shape == (2, 1024) and grey[1, 5].item() == pytest.approx(0.4) and grey.sum() == grey[1, 5]


def test_grey_images_are_standardised_for_each_pixel_over_the_training_images():
    splits = prepared(CIFAR10DataModule(grey=True, synthetic=True, train_size=60, val_size=10, test_size=8)).splits
    images = splits.train.tensors[0]
    assert [part.tensors[0].shape[1:] for part in splits] == [(1024,)] * 3
    assert images.mean(0).abs().max() < 1e-5 and (images.std(0, correction=0) - 1).abs().max() < 1e-4
    assert splits.val.tensors[0].mean(0).abs().max() > 0.05
