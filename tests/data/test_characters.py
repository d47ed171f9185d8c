"""Windows of characters: what a text becomes, and what is said of one that cannot be had."""

import pytest

from lightning_struct.data import CharactersDataModule
from lightning_struct.utilities.namespaces import MisconfigurationException


def test_windows_follow_each_other_in_the_text(tmp_path):
    (tmp_path / "some.txt").write_text("abcdefghijé" * 40, encoding="utf-8")
    data = CharactersDataModule(text_file=str(tmp_path / "some.txt"), steps=10, train_size=5)
    data.setup("fit")
    inputs, targets = data.splits.train.tensors
    assert inputs.shape == targets.shape == (5, 10) and len(data.splits.val) == len(data.splits.test) == 2
    assert inputs[0].tolist() == [ord(c) for c in "abcdefghij"] and targets[0].tolist()[-1] == 127
    assert inputs[1].tolist() == inputs[0].tolist()


def test_a_text_too_short_for_a_set_is_named_as_that(tmp_path):
    (tmp_path / "some.txt").write_text("a few words", encoding="utf-8")
    with pytest.raises(MisconfigurationException, match="the train set needs a window, but the text has 0 windows"):
        CharactersDataModule(text_file=str(tmp_path / "some.txt")).setup("fit")


def test_errors_name_the_remedy():
    with pytest.raises(MisconfigurationException, match="train_size is 9999, but the text has 2768 windows of 64"):
        CharactersDataModule(synthetic=True, train_size=9999).setup("fit")
    with pytest.raises(MisconfigurationException, match="steps must be at least 1"):
        CharactersDataModule(steps=0)
