import pytest

from lightning_struct import data
from lightning_struct.utilities.namespaces import MisconfigurationException

WITH_DIRECTORIES = [
    data.CIFAR10DataModule,
    data.CharactersDataModule,
    data.IMDBDataModule,
    data.MNISTDataModule,
    data.MNISTVariantDataModule,
    data.NORBDataModule,
    data.RectanglesDataModule,
    data.TextCorpusDataModule,
    data.USPSDataModule,
]


@pytest.mark.parametrize(
    ("datamodule", "option"),
    [
        *((datamodule, "data_dir") for datamodule in WITH_DIRECTORIES),
        (data.CharactersDataModule, "text_file"),
        (data.TextCorpusDataModule, "text_file"),
    ],
)
def test_files_are_looked_for_in_the_home_directory_that_is_meant(datamodule, option, tmp_path, monkeypatch):
    if datamodule is data.IMDBDataModule:
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
        data.CharactersDataModule(str(file)).setup("fit")
    assert "name the directory that has them (--data.data_dir), or any text (--data.text_file)" in str(error.value)
