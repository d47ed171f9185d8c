import gzip
import io
import tarfile

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import IMDBDataModule
from lightning_struct.data.files import DamagedFileError
from lightning_struct.data.imdb import encode, read_reviews, synthetic_reviews
from tests.data.official import prepared

SIZES = {"train_size": 6, "val_size": 4, "test_size": 4}


def write_directory(directory, train=None, test=None):
    """Reviews in the official layout: by default number n, of class n % 2, has n + 1 words."""
    parts = {"train": train or ["good " * (n + 1) for n in range(10)]}
    parts["test"] = test or ["good " * (n + 1) for n in range(10, 14)]
    for part, texts in parts.items():
        for number, text in enumerate(texts):
            path = directory / "aclImdb" / part / ("neg", "pos")[number % 2] / f"{number}_7.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    (directory / "aclImdb" / "train" / "unsup").mkdir()
    (directory / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("no label")


def pack(directory, name="aclImdb_v1.tar.gz", remove=True):
    """The directory as an archive instead."""
    with tarfile.open(directory / name, "w:gz") as archive:
        archive.add(directory / "aclImdb", "aclImdb")
    if remove:
        (directory / "aclImdb").rename(directory / "elsewhere")
    return directory / name


@pytest.fixture(params=["directory", "archive", "archive of a subset"])
def layout(request, tmp_path):
    """Directory with reviews in one of the layouts."""
    write_directory(tmp_path)
    if request.param != "directory":
        pack(tmp_path, "aclImdb_v1.tar.gz" if request.param == "archive" else "aclImdb_subset.tar.gz")
    return tmp_path


@pytest.fixture
def torchtext():
    return pytest.importorskip("torchtext", reason="torchtext of the extra 'text' is not installed")


def numbers(split):
    """Of reviews, by their lengths."""
    return split.tensors[0].ne(0).sum(dim=1) - 1


def test_reviews_are_read_in_the_same_order_from_every_layout(layout):
    reviews = read_reviews(str(layout))
    assert [len(text.split()) - 1 for text in reviews["train"].texts] == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    assert reviews["train"].labels == [0] * 5 + [1] * 5 and reviews["test"].labels == [0, 0, 1, 1]


def test_the_directory_comes_before_an_archive(tmp_path):
    write_directory(tmp_path)
    archive = pack(tmp_path, remove=False)
    archive.write_bytes(b"damaged")
    assert len(read_reviews(str(tmp_path))["train"].texts) == 10


def test_training_and_validation_reviews_partition_the_official_training_set(layout, torchtext):
    splits = prepared(IMDBDataModule(str(layout), download=False, **SIZES)).splits
    assert sorted([*numbers(splits.train).tolist(), *numbers(splits.val).tolist()]) == list(range(10))
    assert sorted(numbers(splits.test).tolist()) == [10, 11, 12, 13]
    assert torch.equal(splits.train.tensors[1], numbers(splits.train) % 2)


def test_words_are_numbered_by_their_frequency_in_the_training_reviews(tmp_path, torchtext):
    write_directory(tmp_path, train=["A film, a FILM. A<br />film"] * 4, test=["a new film."] * 2)
    sizes = {"train_size": 3, "val_size": 1, "test_size": 2}
    datamodule = prepared(IMDBDataModule(str(tmp_path), max_length=6, download=False, **sizes))
    assert datamodule.vocabulary == ["<pad>", "<unk>", "a", "film", ",", "."]
    assert datamodule.splits.test.tensors[0][0].tolist() == [2, 1, 3, 5, 0, 0]


def test_vocabulary_has_the_most_frequent_words(tmp_path, torchtext):
    write_directory(tmp_path, train=[" ".join(f"w{n} " * (30 - n) for n in range(20))] * 2)
    sizes = {"train_size": 1, "val_size": 1, "test_size": 2}
    datamodule = prepared(IMDBDataModule(str(tmp_path), vocabulary_size=12, download=False, **sizes))
    assert datamodule.vocabulary[2:] == [f"w{n}" for n in range(10)]


def test_the_last_words_of_long_reviews_are_kept():
    assert encode([["a", "b", "c"], ["a"]], {"a": 2, "b": 3, "c": 4}, 2).tolist() == [[3, 4], [2, 0]]


@pytest.mark.parametrize("text", [[], ["new"], ["<pad>"]])
def test_every_review_has_something_to_read(text):
    assert encode([text], {"<pad>": 0, "<unk>": 1, "a": 2}, 3).tolist() == [[1, 0, 0]]


def test_reviews_that_are_there_are_not_downloaded(layout, torchtext, no_network):
    assert len(prepared(IMDBDataModule(str(layout), download=True, **SIZES)).splits.train) == 6


def test_a_download_has_its_name_when_it_is_complete(tmp_path, torchtext, monkeypatch):
    write_directory(tmp_path)
    content = pack(tmp_path).read_bytes()
    target = tmp_path / "data"

    def download_url(url, root, filename, md5):
        assert not (target / "aclImdb_v1.tar.gz").exists()
        target.mkdir()
        (target / filename).write_bytes(content)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)
    prepared(IMDBDataModule(str(target), download=True, **SIZES))
    assert [path.name for path in target.iterdir()] == ["aclImdb_v1.tar.gz"]


def test_missing_torchtext_names_the_extra_before_anything_is_downloaded(tmp_path, no_torchtext, no_network):
    with pytest.raises(MisconfigurationException, match=r"pip install 'lightning-struct\[text\]'"):
        IMDBDataModule(str(tmp_path), download=True).prepare_data()


def test_other_torchtext_is_refused(torchtext, monkeypatch):
    monkeypatch.setattr(torchtext, "__version__", "0.18.0")
    with pytest.raises(MisconfigurationException, match=r"torchtext 0.6 .*found is 0.18.0"):
        IMDBDataModule().prepare_data()


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_damaged_archive_is_refused(tmp_path, keep):
    write_directory(tmp_path)
    archive = pack(tmp_path)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DamagedFileError, match="aclImdb_v1.tar.gz cannot be read"):
        read_reviews(str(tmp_path))


def archive_with(directory, name, content=b"", **attributes):
    """An archive whose first entry is the one that is given."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for attribute, value in attributes.items():
        setattr(entry, attribute, value)
    with tarfile.open(directory / "aclImdb_v1.tar.gz", "w:gz") as archive:
        archive.addfile(entry, io.BytesIO(content))
    return directory


REVIEW = "aclImdb/train/pos/0_7.txt"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"name": REVIEW, "type": tarfile.SYMTYPE, "linkname": "nowhere.txt"}, f"{REVIEW} as a link or directory"),
        ({"name": REVIEW, "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}, "as a link"),
        ({"name": "/" + REVIEW, "content": b"good"}, f"the path /{REVIEW}, which leads out of it"),
        ({"name": "aclImdb/../../x.txt", "content": b"good"}, "which leads out of it"),
        ({"name": REVIEW, "content": b"\xff"}, f"{REVIEW}, which is not UTF-8"),
    ],
)
def test_entries_of_an_archive_that_are_no_reviews_are_refused(tmp_path, entry, problem):
    with pytest.raises(DamagedFileError, match=f"aclImdb_v1.tar.gz has .*{problem}"):
        read_reviews(str(archive_with(tmp_path, **entry)))


def test_an_enormous_review_of_an_archive_is_refused_before_it_is_read(tmp_path):
    with gzip.open(tmp_path / "aclImdb_v1.tar.gz", "wb") as archive:
        entry = tarfile.TarInfo(REVIEW)
        entry.size = 600_000_000
        archive.write(entry.tobuf())
        archive.write(b"a" * 10_000)
    with pytest.raises(DamagedFileError, match=f"has 600,000,000 bytes in {REVIEW}; a review has at most 1,000,000"):
        read_reviews(str(tmp_path))


def test_a_damaged_review_of_a_directory_is_not_to_be_deleted(tmp_path, torchtext):
    write_directory(tmp_path)
    path = tmp_path / REVIEW
    path.write_bytes(b"caf\xe9")
    with pytest.raises(MisconfigurationException, match=f"put a whole copy in place of {path}") as error:
        IMDBDataModule(str(tmp_path)).setup("fit")
    assert "download" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "error", "problem"),
    [
        ("size", DamagedFileError, "0_7.txt has 600,000,000 bytes; a review has at most 1,000,000"),
        ("link", DamagedFileError, "0_7.txt is no ordinary file"),
        ("none", FileNotFoundError, "has no reviews in test/pos"),
    ],
)
def test_damaged_directories_are_refused_before_they_are_read(tmp_path, damage, error, problem):
    write_directory(tmp_path)
    if damage == "size":
        with (tmp_path / REVIEW).open("wb") as file:
            file.truncate(600_000_000)  # takes no place on the disk
    elif damage == "link":
        (tmp_path / REVIEW).symlink_to("nowhere")
    else:
        (tmp_path / "aclImdb" / "test" / "pos").rename(tmp_path / "elsewhere")
        (tmp_path / "aclImdb" / "test" / "pos").mkdir()
    with pytest.raises(error, match=problem):
        read_reviews(str(tmp_path))


@pytest.mark.parametrize("name", ["max_length", "vocabulary_size"])
def test_empty_samples_and_vocabularies_are_refused(name):
    with pytest.raises(MisconfigurationException, match=f"{name} must be at least [0-9]+, but is 0"):
        IMDBDataModule(**{name: 0})


@pytest.mark.parametrize("vocabulary_size", [10, 20_000])
def test_synthetic_reviews_are_words_of_the_vocabulary_and_then_padding(vocabulary_size):
    words, labels = synthetic_reviews(200, 16, vocabulary_size)
    lengths = words.ne(0).sum(dim=1)
    assert torch.equal(words.ne(0), torch.arange(16) < lengths.unsqueeze(1))
    assert words[words > 0].min() >= 2 and words.max() < vocabulary_size
    assert sorted(set(lengths.tolist())) == list(range(4, 17)) and labels.unique().tolist() == [0, 1]


def test_opinions_of_synthetic_reviews_tell_their_label():
    words, labels = synthetic_reviews(500, 200, 20_000)
    blame = ((words >= 2) & (words < 22)).sum(dim=1)
    praise = ((words >= 22) & (words < 42)).sum(dim=1)
    assert (praise > blame).eq(labels).float().mean() > 0.9


def test_checkpoint_of_another_vocabulary_is_refused():
    saved = prepared(IMDBDataModule(synthetic=True, vocabulary_size=30, **SIZES)).state_dict()
    prepared(IMDBDataModule(synthetic=True, vocabulary_size=30, seed=1, **SIZES)).load_state_dict(saved)
    with pytest.raises(MisconfigurationException, match=r"another vocabulary \(30 words\).*\(20 words\)"):
        prepared(IMDBDataModule(synthetic=True, vocabulary_size=20, **SIZES)).load_state_dict(saved)
