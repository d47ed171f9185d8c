import pytest

from lightning_struct.data import (
    CharactersDataModule,
    CIFAR10DataModule,
    IMDBDataModule,
    MNISTDataModule,
    MNISTVariantDataModule,
    NORBDataModule,
    RectanglesDataModule,
    TextCorpusDataModule,
    USPSDataModule,
)
from lightning_struct.utilities.namespaces import MisconfigurationException

WITH_DIRECTORIES = [
    CIFAR10DataModule,
    CharactersDataModule,
    IMDBDataModule,
    MNISTDataModule,
    MNISTVariantDataModule,
    NORBDataModule,
    RectanglesDataModule,
    TextCorpusDataModule,
    USPSDataModule,
]


@pytest.mark.parametrize(
    ("datamodule", "option"),
    [
        *((datamodule, "data_dir") for datamodule in WITH_DIRECTORIES),
        (CharactersDataModule, "text_file"),
        (TextCorpusDataModule, "text_file"),
    ],
)
def test_files_are_looked_for_in_the_home_directory_that_is_meant(datamodule, option, tmp_path, monkeypatch):
    if datamodule is IMDBDataModule:
        pytest.importorskip("torchtext")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MisconfigurationException) as error:
        datamodule(**{option: "~/data"}).setup("fit")
    home = tmp_path / "data" if option == "data_dir" else tmp_path
    assert f"is not in {home}, or is damaged there" in str(error.value)


def test_a_file_in_place_of_the_directory_is_not_said_to_be_damaged(tmp_path):
    file = tmp_path / "some.txt"
    file.touch()
    with pytest.raises(MisconfigurationException, match=f"The text is not in {file}") as error:
        CharactersDataModule(str(file)).setup("fit")
    assert "name the directory that has them (--data.data_dir), or any text (--data.text_file)" in str(error.value)
