import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import CurvesDataModule


def small_curves(**arguments):
    datamodule = CurvesDataModule(**({"train_size": 40, "val_size": 12, "test_size": 7} | arguments))
    datamodule.setup("fit")
    return datamodule


def test_default_sizes_are_those_of_table_1():
    datamodule = CurvesDataModule()
    assert datamodule.sizes == (20_000, 2_000, 8_000) and datamodule.batch_size == 250


def test_sets_are_float32_images_of_the_asked_sizes():
    shapes = [(split.tensors[0].shape, split.tensors[0].dtype) for split in small_curves().splits]
    assert shapes == [((count, 784), torch.float32) for count in (40, 12, 7)]


def test_sets_are_disjoint():
    images = torch.cat([split.tensors[0] for split in small_curves().splits])
    assert len(images.unique(dim=0)) == 59


def test_images_do_not_depend_on_the_seed_of_the_draws():
    first, second = small_curves(seed=0), small_curves(seed=1)
    assert torch.equal(first.splits.train.tensors[0], second.splits.train.tensors[0])


def test_sets_are_made_once():
    datamodule = small_curves()
    train = datamodule.splits.train
    datamodule.setup("test")
    assert datamodule.splits.train is train


def test_says_that_the_images_are_made(caplog):
    with caplog.at_level("INFO"):
        small_curves()
    assert "CURVES: making 59 images" in caplog.text


def test_real_files_are_not_promised():
    with pytest.raises(MisconfigurationException, match="always made procedurally"):
        CurvesDataModule(synthetic=False)
