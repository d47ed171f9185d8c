from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import TextCorpusDataModule
from lightning_struct.data.text_corpus import TITLES, ColumnLoader, build_vocabulary, cut_text, synthetic_text

LAYOUTS = {
    "tokens": ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    "txt": ("train.txt", "valid.txt", "test.txt"),
}
TEXTS = ("the cat sat\n\n the <unk> cat\n", "the dog sat\n", "a cat")
VOCABULARY = ["the", "cat", "sat", "<eos>", "<unk>"]


def write(directory, layout="tokens"):
    directory.mkdir(exist_ok=True)
    for name, text in zip(LAYOUTS[layout], TEXTS, strict=True):
        (directory / name).write_text(text, encoding="utf-8")


def columns(text, *arguments, **options):
    return list(ColumnLoader(torch.arange(text), *arguments, **options))


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("folder", ["", "wikitext-2"])
def test_words_of_the_training_text_are_numbered_in_their_order(tmp_path, layout, folder):
    write(tmp_path / folder, layout)
    corpus = TextCorpusDataModule(str(tmp_path)).corpus
    assert corpus.vocabulary == VOCABULARY
    assert [part.tolist() for part in corpus[1:]] == [[0, 1, 2, 3, 3, 0, 4, 1, 3], [0, 4, 2, 3], [4, 1, 3]]
    if layout == "tokens":
        (tmp_path / folder / "train.txt").write_text("other words")  # the official files come before others
    fewer = TextCorpusDataModule(str(tmp_path), train_size=3, test_size=1).corpus
    assert [len(part) for part in fewer[1:]] == [3, 4, 1]
    with pytest.raises(MisconfigurationException, match="train_size is 50, but there are 9 words"):
        TextCorpusDataModule(str(tmp_path), train_size=50).setup("fit")


def test_unknown_words_get_the_last_number_where_the_training_text_has_none():
    corpus = build_vocabulary(["a", "b", "a"], ["c"], ["b", "c"])
    assert corpus.vocabulary == ["a", "b", "<unk>"] and corpus.test.tolist() == [1, 2]


def test_one_text_is_cut_into_three_parts_and_its_rare_words_are_unknown(tmp_path):
    words = ["often"] * 85 + ["twice"] * 2 + ["thrice"] * 3 + ["twice"] * 5 + ["new"] * 5
    train, val, test = cut_text(words, least_count=3)
    assert train == ["often"] * 85 + ["<unk>"] * 2 + ["thrice"] * 3
    assert val == ["<unk>"] * 5 and test == ["<unk>"] * 5
    (tmp_path / "some.txt").write_text(" ".join(words[:-1]))  # the end of the line is a word
    corpus = TextCorpusDataModule(text_file=str(tmp_path / "some.txt")).corpus
    assert corpus.vocabulary == ["often", "<unk>", "thrice"] and [len(part) for part in corpus[1:]] == [90, 5, 5]
    fewer = TextCorpusDataModule(text_file=str(tmp_path / "some.txt"), least_count=4).corpus
    assert fewer.vocabulary == ["often", "<unk>"]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6])
def test_every_word_but_the_first_of_a_column_is_told_once(steps):
    loader = ColumnLoader(torch.arange(14), 2, steps)
    next(iter(loader))  # an epoch that is left is begun anew
    batches = list(loader)
    for words, targets in batches:
        assert torch.equal(words + 1, targets) and (len(words) == steps or words is batches[-1][0])
    assert torch.cat([targets for _, targets in batches]).T.tolist() == [[*range(1, 7)], [*range(8, 14)]]
    assert len(loader) == len(batches)


def test_processes_share_the_columns():
    whole = columns(40, 4, 3)
    shares = [columns(40, 4, 3, processes=2, rank=rank) for rank in (0, 1)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert torch.equal(torch.cat([part[0] for part in parts], dim=1), batch[0])


@pytest.mark.parametrize("read", [3, 7])
def test_resumed_epoch_goes_on_with_the_next_batch_and_the_following_one_begins_anew(read):
    whole, resumed = ColumnLoader(torch.arange(40), 2, 3), ColumnLoader(torch.arange(40), 2, 3)
    batches, reading = list(whole), iter(whole)
    assert len([next(reading) for _ in range(read)]) == read <= len(batches)
    if read == len(batches):
        assert next(reading, None) is None
    resumed.load_state_dict(whole.state_dict())
    for expected in (batches[read:] or batches, batches):
        assert [batch[0].tolist() for batch in resumed] == [batch[0].tolist() for batch in expected]


def test_printed_datamodule_names_the_words_of_each_part():
    data = TextCorpusDataModule(synthetic=True, train_size=1200, val_size=50, test_size=60, synthetic_vocabulary=90)
    assert str(data) == "TextCorpusDataModule: not read yet"
    data.setup("fit")
    assert str(data) == "TextCorpusDataModule: words train 1,200, val 50, test 60; vocabulary 90"


def test_columns_that_cannot_be_shared_are_refused():
    with pytest.raises(MisconfigurationException, match="cannot be shared by 2"):
        ColumnLoader(torch.arange(9), 5, 3, processes=2)


def test_synthetic_text_has_few_followers_of_each_word():
    text = synthetic_text(20_000, 12)
    followers = {pair: None for pair in zip(text[:-1].tolist(), text[1:].tolist(), strict=True)}
    assert text.shape == (20_000,) and set(text.tolist()) <= set(range(12))
    assert len(followers) < 12 * 8 + 64  # and the seams


def test_synthetic_texts_of_one_language_depend_on_the_seed():
    def text(seed):
        data = TextCorpusDataModule(
            synthetic=True, synthetic_vocabulary=30, train_size=90, val_size=20, test_size=10, seed=seed
        )
        assert data.vocabulary_size == 30
        return torch.cat(data.corpus[1:])

    assert torch.equal(text(1), text(1)) and not torch.equal(text(1), text(2)) and len(text(1)) == 120


@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_another_text_file_is_named_by_its_option(tmp_path, content):
    if content is not None:
        (tmp_path / "some.txt").write_text(content)
    with pytest.raises(MisconfigurationException, match=r"or name another file \(--data.text_file\)") as error:
        TextCorpusDataModule(text_file=str(tmp_path / "some.txt")).setup("fit")
    assert "data_dir" not in str(error.value) and "some.txt" in str(error.value)
    assert content is None or "there is no word in it" in str(error.value)


@pytest.mark.parametrize(("part", "count"), [("train", 3), ("val", 0), ("test", 0)])
def test_text_of_a_few_words_is_refused_by_its_part_and_file(tmp_path, part, count):
    file = tmp_path / "some.txt"
    file.write_text("two words")
    data = TextCorpusDataModule(text_file=str(file))
    message = f"The {TITLES[part]} part of {file} has {count} words, too few for .* columns of two"
    with pytest.raises(MisconfigurationException, match=message):
        getattr(data, f"{part}_dataloader")()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Path.mkdir, "Is a directory"),
        (
            lambda path: path.write_bytes(b"caf\xe9"),
            "is not UTF-8, to which a text in another encoding is to be converted",
        ),
    ],
    ids=["directory", "latin-1"],
)
def test_what_is_no_text_is_not_to_be_deleted(tmp_path, make, problem):
    make(tmp_path / "some")
    with pytest.raises(MisconfigurationException, match=problem) as error:
        TextCorpusDataModule(text_file=str(tmp_path / "some")).setup("fit")
    assert "delete" not in str(error.value)


def test_checkpoint_of_another_vocabulary_is_refused(tmp_path):
    write(tmp_path)
    data = TextCorpusDataModule(str(tmp_path))
    data.load_state_dict(data.state_dict())
    with pytest.raises(MisconfigurationException, match="another vocabulary .2 words. .* here .5 words."):
        data.load_state_dict({"vocabulary": ["the", "cat"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, but is 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"val_size": 0}, "val_size must be at least 1"),
        ({"synthetic_vocabulary": 8}, "synthetic_vocabulary must be at least 9, but is 8"),
        ({"seed": -1}, "seed must be at least 0, but is -1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        TextCorpusDataModule(**options)
