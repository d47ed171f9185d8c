import gzip
import struct

import numpy as np
import pytest
import torch

from benchmarks.norb import (
    INSTANCES,
    TEST_STEMS,
    TOYS,
    TRAIN_STEMS,
    NORBDataModule,
    make_small,
    make_toys,
    read_left_images,
)
from lightning_struct.data.files import DamagedFileError

BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54


def write_matrix(path, kind, array, pack=False):
    """The official layout: kind, number of dimensions, at least three sizes, elements."""
    sizes = [*array.shape, *[1] * max(0, 3 - array.ndim)]
    content = struct.pack(f"<{2 + len(sizes)}i", kind, array.ndim, *sizes) + array.tobytes()
    if pack:
        path.with_suffix(".mat.gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_pair(directory, stem, first, count, size=108, pack=False):
    """Image number n is n everywhere in the left eye, and 255 in the right one; its class is n % 6."""
    numbers = np.arange(first, first + count)
    images = np.full((count, 2, size, size), 255, np.uint8)
    images[:, 0] = numbers[:, None, None]
    write_matrix(directory / f"{stem}-dat.mat", BYTES, images, pack)
    write_matrix(directory / f"{stem}-cat.mat", INTEGERS, (numbers % 6).astype("<i4"), pack)


def prepared(directory, **options):
    data = NORBDataModule(data_dir=str(directory), **options)
    data.setup("fit")
    return data.splits


@pytest.mark.parametrize("pack", [False, True])
def test_all_files_are_read_packed_or_not(tmp_path, pack):
    stems = [*TRAIN_STEMS, *TEST_STEMS]
    assert len(stems) == 12
    for number, stem in enumerate(stems):
        write_pair(tmp_path, stem, 2 * number, 2, pack=pack)
    splits = prepared(tmp_path, train_size=20, test_size=4)
    assert [len(part) for part in splits] == [17, 3, 4] and splits.train.tensors[0].shape == (17, 1024)
    assert sorted(splits.test.tensors[1].tolist()) == [20 % 6, 21 % 6, 22 % 6, 23 % 6]


def test_left_images_and_labels_belong_together(tmp_path):
    write_pair(tmp_path, "some", 0, 10)
    images, labels = read_left_images(tmp_path, "some")
    assert torch.equal(images, torch.arange(10, dtype=torch.uint8)[:, None].expand(10, 1024))
    assert labels.tolist() == [number % 6 for number in range(10)]


def test_more_images_than_a_block_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.norb.BLOCK", 3)
    write_pair(tmp_path, "some", 0, 10, size=32)
    assert read_left_images(tmp_path, "some")[0][:, 0].tolist() == list(range(10))


def test_images_are_made_smaller_by_averaging():
    image = torch.zeros(1, 64, 64, dtype=torch.uint8)
    image[0, :2, :2] = torch.tensor([[100, 0], [100, 200]])
    small = make_small(image)
    assert small.shape == (1, 1024) and small[0, 0] == 100 and small[0, 1:].sum() == 0


def test_made_images_are_always_the_same():
    sizes = {"train_size": 8, "test_size": 8}
    made, again = (prepared("nowhere", generate=True, seed=seed, **sizes) for seed in (0, 1))
    torch.testing.assert_close(made.test.tensors[0], again.test.tensors[0])


def damaged(directory, damage):
    write_pair(directory, "some", 0, 4, size=32)
    cat, dat = (directory / f"some-{kind}.mat" for kind in ("cat", "dat"))
    if damage == "short":
        dat.write_bytes(dat.read_bytes()[:-5])
    elif damage == "no matrix":
        cat.write_bytes(b"<html>" + cat.read_bytes())
    elif damage == "other count":
        write_matrix(cat, INTEGERS, np.arange(5, dtype="<i4"))
    elif damage == "no archive":
        dat.rename(directory / "some-dat.mat.gz")
    elif damage == "short archive":
        (directory / "some-dat.mat.gz").write_bytes(gzip.compress(dat.read_bytes())[:-20])
        dat.unlink()
    elif damage.startswith("enormous"):
        content = struct.pack("<5i", INTEGERS, 2, 10**6, 10**6, 1) + bytes(16)
        cat.write_bytes(content)
        if damage == "enormous archive":
            (directory / "some-cat.mat.gz").write_bytes(gzip.compress(content))
            cat.unlink()
    elif damage == "negative":
        cat.write_bytes(struct.pack("<5i", INTEGERS, 1, -1, 1, 1))
    else:
        cat.unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("short", DamagedFileError, "some-dat.mat has 8,211 bytes, which cannot hold"),
        ("short archive", DamagedFileError, "some-dat.mat.gz cannot be read .*ended before"),
        ("no matrix", DamagedFileError, "some-cat.mat begins with .* no matrix of NORB"),
        ("other count", DamagedFileError, "some-dat.mat is uint8 .* not 5 pairs of images"),
        ("no archive", DamagedFileError, "some-dat.mat.gz cannot be read .*ot a gzipped file"),
        ("enormous", DamagedFileError, r"some-cat.mat has 36 bytes, which cannot hold the \(1000000, 1000000\)"),
        ("enormous archive", DamagedFileError, "some-cat.mat.gz has .* bytes, which cannot hold"),
        ("negative", DamagedFileError, "some-cat.mat has .* cannot hold"),
        ("missing", FileNotFoundError, "some-cat.mat.gz"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, error, message):
    damaged(tmp_path, damage)
    with pytest.raises(error, match=message):
        read_left_images(tmp_path, "some")


def made(count, seed=0):
    return make_toys(count, 32, instances=range(INSTANCES), generator=torch.Generator().manual_seed(seed))


def test_images_are_grey_values_with_a_label_each():
    images, labels = made(60)
    assert images.shape == (60, 1024) and images.min() >= 0 and images.max() <= 1
    assert labels.dtype == torch.int64 and set(labels.tolist()) == set(range(TOYS + 1))


def test_a_single_image_may_show_none_of_the_toys():
    assert {int(made(1, seed=seed)[1]) for seed in range(8)} >= {0, TOYS}
