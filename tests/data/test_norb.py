import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.norb import INSTANCES, TOYS, NORBDataModule, make_toys


def test_made_images_are_always_the_same():
    made, again = (NORBDataModule(generate=True, seed=seed, train_size=8, test_size=8) for seed in (0, 1))
    made.setup("fit")
    again.setup("fit")
    torch.testing.assert_close(made.splits.test.tensors[0], again.splits.test.tensors[0])


def test_the_official_files_are_not_read():
    with pytest.raises(MisconfigurationException, match=r"there is no reader(.|\n)*--data.generate=true"):
        NORBDataModule().setup("fit")


def made(count, seed=0):
    return make_toys(count, 32, instances=range(INSTANCES), generator=torch.Generator().manual_seed(seed))


def test_images_are_grey_values_with_a_label_each():
    images, labels = made(60)
    assert images.shape == (60, 1024) and images.min() >= 0 and images.max() <= 1
    assert labels.dtype == torch.int64 and set(labels.tolist()) == set(range(TOYS + 1))


def test_a_single_image_may_show_none_of_the_toys():
    assert {int(made(1, seed=seed)[1]) for seed in range(8)} >= {0, TOYS}
