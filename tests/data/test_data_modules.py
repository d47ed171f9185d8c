"""What holds of every data module: its sizes, its synthetic data, and the errors for files that cannot be had."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.norb import NORBDataModule
from benchmarks.rectangles import RectanglesDataModule
from lightning_struct import data
from tests.data.official import prepared

LITTLE = {"train_size": 20, "val_size": 5, "test_size": 6}
FLAT = {"train_size": 20, "test_size": 6}
WORDS = {**LITTLE, "steps": 3, "batch_size": 2, "eval_batch_size": 1}
# By the name of the module: sizes of training, validation and test, those of a little one, and shape of its inputs.
DOWNLOADED = {
    "MNISTDataModule": ((50_000, 10_000, 10_000), LITTLE, (784,)),
    "USPSDataModule": ((6_800, 1_000, 1_498), LITTLE, (256,)),
    "CIFAR10DataModule": ((45_000, 5_000, 10_000), LITTLE, (3, 32, 32)),
    "IMDBDataModule": ((20_000, 5_000, 25_000), {**LITTLE, "max_length": 9}, (9,)),
}
OTHERS = {
    "CurvesDataModule": ((20_000, 2_000, 8_000), LITTLE, (784,)),
    "MNISTVariantDataModule": ((12_000, 50_000), FLAT, (784,)),
    "RectanglesDataModule": ((1_200, 50_000), FLAT, (784,)),
    "NORBDataModule": ((291_600, 58_320), FLAT, (1024,)),
}
ALL = DOWNLOADED | OTHERS
MADE_ALIKE = ("CurvesDataModule",)  # for every seed
FILES = {  # that errors name
    "MNISTVariantDataModule": ("mnist_all_background_images_rotation_normalized_test.amat of https", "data.generate"),
    "RectanglesDataModule": ("rectangles_train.amat and rectangles_test.amat of https", "--data.generate=true"),
    "NORBDataModule": ("training-01-dat.mat[.gz]", "https://cs.nyu.edu/", "--data.generate=true"),
    "TextCorpusDataModule": ("wiki.train.tokens", "wiki.test.tokens", "https", "or any text (--data.text_file)"),
}


def made(name, **options):
    return {**vars(data), "RectanglesDataModule": RectanglesDataModule, "NORBDataModule": NORBDataModule}[name](
        **options
    )


@pytest.fixture
def torchtext():
    return pytest.importorskip("torchtext", reason="torchtext of the extra 'text' is not installed")


@pytest.mark.parametrize("name", ALL)
def test_default_sizes_are_those_of_the_papers(name):
    module = made(name)
    found = module.sizes if hasattr(module, "sizes") else (module.train_size, module.test_size)
    assert tuple(found.values() if isinstance(found, dict) else found) == ALL[name][0]
    assert getattr(module, "val_fraction", 0.15) == 0.15


@pytest.mark.parametrize("name", ALL)
def test_synthetic_sets_need_no_files_and_follow_the_seed(name, no_network, no_torchtext, caplog):
    options = ALL[name][1] if name in MADE_ALIKE else {"data_dir": "nowhere", **ALL[name][1]}
    with caplog.at_level("INFO"):
        first, other = (prepared(made(name, synthetic=True, seed=seed, **options)).splits for seed in (0, 1))
    sizes = (17, 3, 6) if options.keys() >= FLAT.keys() and "val_size" not in options else (20, 5, 6)
    assert [part.tensors[0].shape for part in first] == [(size, *ALL[name][2]) for size in sizes]
    assert torch.equal(first.test.tensors[0], other.test.tensors[0]) == (name in MADE_ALIKE)
    assert name not in DOWNLOADED or "procedurally made samples" in caplog.text


@pytest.mark.parametrize("name", [*DOWNLOADED, *FILES])
@pytest.mark.usefixtures("torchtext")
def test_missing_files_are_looked_for_in_the_home_directory_and_the_remedies_are_named(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"download": False} if name in DOWNLOADED else {}
    with pytest.raises(MisconfigurationException) as error:
        prepared(made(name, data_dir="~/data", **options))
    downloads = ("--data.download=true",) if name in DOWNLOADED else ()
    parts = (f"is not in {tmp_path}/data, or is damaged there", "--data.data_dir", "--data.synthetic=true")
    assert all(part in str(error.value) for part in (*parts, *downloads, *FILES.get(name, ())))
    assert ("download" in str(error.value)) == bool(downloads)


@pytest.mark.parametrize("name", DOWNLOADED)
@pytest.mark.usefixtures("torchtext", "no_network")
def test_failing_download_names_the_directory_and_the_remedies_and_leaves_no_folder(name, tmp_path):
    with pytest.raises(MisconfigurationException) as error:
        prepared(made(name, data_dir=str(tmp_path / "new" / "data")))
    parts = (f"{getattr(data, name).title} could not be downloaded to", str(tmp_path), "no network", "data.synthetic")
    assert all(part in str(error.value) for part in parts)
    assert not (tmp_path / "new" / "data").exists()


@pytest.mark.parametrize("name", DOWNLOADED)
@pytest.mark.usefixtures("torchtext")
def test_a_set_up_without_the_download_says_what_downloads(name, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"call prepare_data\(\)") as error:
        made(name, data_dir=str(tmp_path)).setup("fit")
    assert "allow the download" not in str(error.value)


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [0, -5])
@pytest.mark.parametrize("part", ["train_size", "val_size", "test_size"])
@pytest.mark.parametrize("name", DOWNLOADED)
def test_empty_sets_are_refused(name, part, size):
    with pytest.raises(MisconfigurationException, match=f"{part} must be at least 1, but is {size}"):
        made(name, **{part: size})


def test_text_files_are_looked_for_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MisconfigurationException, match=f"is not in {tmp_path}, or is damaged there"):
        data.TextCorpusDataModule(text_file="~/data").setup("fit")


def test_a_file_in_place_of_the_directory_is_not_said_to_be_damaged(tmp_path):
    file = tmp_path / "some.txt"
    file.touch()
    with pytest.raises(MisconfigurationException, match=f"The text is not in {file}"):
        data.TextCorpusDataModule(str(file)).setup("fit")
