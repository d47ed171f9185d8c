"""IMDB: words and their numbers, synthetic reviews, the vocabulary of a checkpoint."""

import sys

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import IMDBDataModule
from lightning_struct.data.imdb import encode, synthetic_reviews
from tests.data.official import LAYOUTS, prepared, write_reviews

SIZES = {"train_size": 20, "val_size": 10, "test_size": 8}


@pytest.fixture
def torchtext():
    return pytest.importorskip("torchtext", reason="torchtext of the extra 'text' is not installed")


def test_words_are_numbered_by_their_frequency_in_the_training_reviews(tmp_path, torchtext):
    for part, text in (("train", "A film, a FILM. A<br />film"), ("test", "a new film.")):
        for name in ("neg", "pos"):
            (tmp_path / "aclImdb" / part / name).mkdir(parents=True)
            for number in range(2):
                (tmp_path / "aclImdb" / part / name / f"{number}.txt").write_text(text)
    sizes = {"train_size": 3, "val_size": 1, "test_size": 2, "download": False, "max_length": 6}
    datamodule = prepared(IMDBDataModule(str(tmp_path), **sizes))
    assert datamodule.vocabulary == ["<pad>", "<unk>", "a", "film", ",", "."]
    assert datamodule.splits.test.tensors[0][0].tolist() == [2, 1, 3, 5, 0, 0]


def test_vocabulary_has_the_most_frequent_words(tmp_path, torchtext):
    write_reviews(tmp_path)
    for path in tmp_path.glob("aclImdb/*/*/*.txt"):
        path.write_text(" ".join(f"w{n} " * (30 - n) for n in range(20)))
    datamodule = prepared(IMDBDataModule(str(tmp_path), vocabulary_size=12, download=False, **SIZES))
    assert datamodule.vocabulary[2:] == [f"w{n}" for n in range(10)]


def test_the_last_words_of_long_reviews_are_kept():
    assert encode([["a", "b", "c"], ["a"]], {"a": 2, "b": 3, "c": 4}, 2).tolist() == [[3, 4], [2, 0]]


@pytest.mark.parametrize("text", [[], ["new"], ["<pad>"]])
def test_every_review_has_something_to_read(text):
    assert encode([text], {"<pad>": 0, "<unk>": 1, "a": 2}, 3).tolist() == [[1, 0, 0]]


def test_the_directory_comes_before_an_archive(tmp_path, torchtext):
    write_reviews(tmp_path)
    (tmp_path / "aclImdb_v1.tar.gz").write_bytes(b"damaged")
    assert len(prepared(LAYOUTS["IMDB"].made(tmp_path)).splits.train) == 20


def test_a_download_has_its_name_when_it_is_complete(tmp_path, torchtext, monkeypatch):
    LAYOUTS["IMDB, packed"].write(tmp_path, monkeypatch)
    content, target = (tmp_path / "aclImdb_v1.tar.gz").read_bytes(), tmp_path / "data"

    def download_url(url, root, filename, md5):
        assert not (target / "aclImdb_v1.tar.gz").exists()
        target.mkdir()
        (target / filename).write_bytes(content)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)
    prepared(IMDBDataModule(str(target), download=True, **SIZES))
    assert [path.name for path in target.iterdir()] == ["aclImdb_v1.tar.gz"]


def test_missing_and_other_torchtext_are_refused_before_anything_is_downloaded(torchtext, monkeypatch, no_network):
    monkeypatch.setattr(torchtext, "__version__", "0.18.0")
    with pytest.raises(MisconfigurationException, match=r"torchtext 0.6 .*found is 0.18.0"):
        IMDBDataModule().prepare_data()
    monkeypatch.setitem(sys.modules, "torchtext", None)
    with pytest.raises(MisconfigurationException, match=r"pip install 'lightning-struct\[text\]'"):
        IMDBDataModule().prepare_data()


@pytest.mark.parametrize("vocabulary_size", [10, 20_000])
def test_synthetic_reviews_are_words_of_the_vocabulary_and_then_padding(vocabulary_size):
    words, labels = synthetic_reviews(200, 16, vocabulary_size)
    lengths = words.ne(0).sum(dim=1)
    assert torch.equal(words.ne(0), torch.arange(16) < lengths.unsqueeze(1))
    assert words[words > 0].min() >= 2 and words.max() < vocabulary_size
    assert sorted(set(lengths.tolist())) == list(range(4, 17)) and labels.unique().tolist() == [0, 1]


def test_opinions_of_synthetic_reviews_tell_their_label():
    words, labels = synthetic_reviews(500, 200, 20_000)
    blame, praise = (((words >= low) & (words < low + 20)).sum(dim=1) for low in (2, 22))
    assert (praise > blame).eq(labels).float().mean() > 0.9


def test_checkpoint_of_another_vocabulary_is_refused():
    saved = prepared(IMDBDataModule(synthetic=True, vocabulary_size=30, **SIZES)).state_dict()
    prepared(IMDBDataModule(synthetic=True, vocabulary_size=30, seed=1, **SIZES)).load_state_dict(saved)
    with pytest.raises(MisconfigurationException, match=r"another vocabulary \(30 words\).*\(20 words\)"):
        prepared(IMDBDataModule(synthetic=True, vocabulary_size=20, **SIZES)).load_state_dict(saved)
