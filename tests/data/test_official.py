"""What holds of every data module: its samples, synthetic ones, and the errors for files that cannot be had."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.norb import NORBDataModule
from benchmarks.rectangles import RectanglesDataModule
from lightning_struct import data
from tests.data.official import AMAT, BATCHES, CIFAR, LAYOUTS, REVIEW, TRAIN, prepared, write_amat, write_images

LITTLE = {"train_size": 20, "val_size": 5, "test_size": 6}
FLAT = {"train_size": 20, "test_size": 6}
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
    "NORBDataModule": ((12_000, 10_000), FLAT, (1024,)),
}
ALL = DOWNLOADED | OTHERS
MADE_ALIKE = ("CurvesDataModule",)  # for every seed
FILES = {  # that errors name
    "MNISTVariantDataModule": ("mnist_all_background_images_rotation_normalized_test.amat of https", "data.generate"),
    "RectanglesDataModule": ("rectangles_train.amat and rectangles_test.amat of https", "--data.generate=true"),
    "TextCorpusDataModule": ("wiki.train.tokens", "wiki.test.tokens", "https", "or any text (--data.text_file)"),
}
REMEDY = "--data.synthetic=true"


def made(name, **options):
    ours = {"RectanglesDataModule": RectanglesDataModule, "NORBDataModule": NORBDataModule}
    return {**vars(data), **ours}[name](**options)


@pytest.fixture
def torchtext():
    return pytest.importorskip("torchtext", reason="torchtext of the extra 'text' is not installed")


@pytest.fixture(params=LAYOUTS)
def layout(request, torchtext, tmp_path, monkeypatch):
    """A layout whose files are in the temporary folder."""
    LAYOUTS[request.param].write(tmp_path, monkeypatch)
    return LAYOUTS[request.param]


def test_sets_partition_the_official_parts_whatever_the_seed_and_nothing_is_downloaded(layout, tmp_path, no_network):
    splits, others = (prepared(layout.made(tmp_path, seed=seed, download=True)).splits for seed in (0, 1))
    numbers = [layout.number(part.tensors[0]) for part in splits]
    for part, of_part, other in zip(splits, numbers, others, strict=True):
        inputs, labels = part.tensors
        assert inputs.shape[1:] == layout.shape and labels.dtype == torch.int64
        assert torch.equal(labels[of_part < 50], (of_part % layout.classes)[of_part < 50])
        assert torch.equal(inputs, other.tensors[0]) and torch.equal(labels, other.tensors[1])
    if layout.kind is data.USPSDataModule:  # which pools both parts
        assert sorted(torch.cat(numbers).tolist()) == list(range(38))
    else:
        assert sorted(torch.cat(numbers[:2]).tolist()) == list(TRAIN) and numbers[2].min() >= len(TRAIN)
    assert list(map(len, splits)) == [20, 10, 8]


def test_a_file_that_is_cut_off_is_named_with_what_to_do(layout, tmp_path):
    file, named = (tmp_path / path for path in layout.damaged)
    content = file.read_bytes()
    file.write_bytes(b"caf\xe9" if file.suffix == ".txt" else content[: len(content) // 2])
    with pytest.raises(MisconfigurationException, match=f"is damaged: {named} ") as error:
        prepared(layout.made(tmp_path))
    delete, replace = f"delete {named}, so that", f"put a whole copy in place of {named}"
    assert (replace if layout.is_own else delete) in str(error.value) and REMEDY in str(error.value)
    assert not layout.is_own or "download" not in str(error.value)
    assert file.name != CIFAR or not (tmp_path / BATCHES).exists()


@pytest.mark.parametrize("name", AMAT)
def test_pixels_of_texts_are_standardised_and_keep_their_labels(name, tmp_path, monkeypatch):
    kind, files, options = AMAT[name]
    write_amat(tmp_path, monkeypatch, files)
    splits = prepared(kind(data_dir=str(tmp_path), train_size=30, test_size=8, **options)).splits
    assert list(map(len, splits)) == [26, 4, 8]
    first, labels = torch.cat([part.tensors[0][:, 0] for part in splits]), torch.cat([p.tensors[1] for p in splits])
    numbers = ((first - first.min()) / (first.max() - first.min()) * 37).round().long()
    assert sorted(numbers[:30].tolist()) == list(TRAIN) and torch.equal(labels, numbers % 2)
    pixels = splits.train.tensors[0]
    assert pixels.mean(0).abs().max() < 1e-6 and pixels[:, 0].std(correction=0) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 .1 1\n.5 1\n", "has 3 numbers in a line, not 784 pixels and a label|columns changed"),
        ("0 " * 785 + "\n<html> 1 1\n", "cannot be read"),
        ("0 " * 784 + "1\n" + "nan " * 784 + "1\n", "Pixels of .* must lie in"),
        ("7 " * 784 + "1\n", "Pixels of .* must lie in"),
    ],
)
def test_texts_that_are_no_images_are_refused(tmp_path, text, problem):
    for file in AMAT["rectangles"][1]:
        (tmp_path / file).write_text(text * 9)
    with pytest.raises(MisconfigurationException, match=problem):
        prepared(RectanglesDataModule(str(tmp_path), train_size=7, test_size=2))


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
    sizes = (17, 3, 6) if "val_size" not in options else (20, 5, 6)
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
    parts = (f"is not in {tmp_path}/data, or is damaged there", "--data.data_dir", REMEDY)
    assert all(part in str(error.value) for part in (*parts, *downloads, *FILES.get(name, ())))
    assert ("download" in str(error.value)) == bool(downloads)


@pytest.mark.parametrize("name", DOWNLOADED)
@pytest.mark.usefixtures("torchtext", "no_network")
def test_failing_download_names_the_directory_and_the_remedies_and_leaves_no_folder(name, tmp_path):
    module = made(name, data_dir=str(tmp_path / "new" / "data"))
    with pytest.raises(MisconfigurationException, match=r"call prepare_data\(\)") as error:
        module.setup("fit")
    assert "allow the download" not in str(error.value)
    with pytest.raises(MisconfigurationException) as error:
        module.prepare_data()
    parts = (f"{getattr(data, name).title} could not be downloaded to", str(tmp_path), "no network", REMEDY)
    assert all(part in str(error.value) for part in parts)
    assert not (tmp_path / "new" / "data").exists()


def test_other_sizes_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="val_size must be at least 1, but is 0"):
        data.MNISTDataModule(val_size=0)
    LAYOUTS["MNIST"].write(tmp_path)
    with pytest.raises(MisconfigurationException, match="Cannot take .*choose smaller sizes"):
        prepared(LAYOUTS["MNIST"].made(tmp_path, train_size=100))


@pytest.mark.parametrize(
    ("size", "renamed", "message"),
    [(32, "zebra", "zebra, not those of the ten classes"), (28, "airplane", "png is not 32 x 32 pixels")],
)
def test_other_images_are_refused(tmp_path, size, renamed, message):
    write_images(tmp_path, size=size)
    (tmp_path / "train" / "airplane").rename(tmp_path / "train" / renamed)
    with pytest.raises(MisconfigurationException, match=message):
        prepared(LAYOUTS["images"].made(tmp_path))


def test_a_class_without_reviews_is_refused(tmp_path, torchtext):
    LAYOUTS["IMDB"].write(tmp_path)
    (tmp_path / REVIEW).parent.rename(tmp_path / "aclImdb" / "elsewhere")
    with pytest.raises(MisconfigurationException, match="has no reviews in train/pos"):
        prepared(LAYOUTS["IMDB"].made(tmp_path))
