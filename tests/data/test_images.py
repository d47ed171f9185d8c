"""Images: colours and grey, standardised pixels, fractions of a training set."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.rectangles import RectanglesDataModule
from lightning_struct.data import CIFAR10DataModule
from lightning_struct.data.cifar import as_grey, standardized, synthetic_color_images
from tests.data.official import prepared


def test_colours_are_standardised_by_their_published_means_and_deviations():
    black, white = (standardized(torch.full((1, 3, 2, 2), value, dtype=torch.uint8)) for value in (0, 255))
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(black[0, :, 0, 0], -mean / std)
    torch.testing.assert_close(white[0, :, 1, 1], (1 - mean) / std)


def test_synthetic_figures_are_brighter_than_their_ground():
    images, _ = synthetic_color_images(20, 16)
    corner, brightest = images[:, :, 0, 0], images.flatten(2).amax(dim=2)
    assert (corner <= 128).all() and (brightest >= 127).all()


def test_grey_images_are_flat_and_the_means_of_the_colours():
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    images[1, :, 0, 5] = torch.tensor([255, 0, 51])
    grey = as_grey(images)
    assert grey.shape == (2, 1024) and grey[1, 5].item() == pytest.approx(0.4) and grey.sum() == grey[1, 5]


def grey_images():
    return prepared(CIFAR10DataModule(grey=True, synthetic=True, train_size=20, val_size=5, test_size=4)).splits


def loaded(**options):
    return prepared(RectanglesDataModule(generate=True, train_size=200, test_size=30, **options)).splits


@pytest.mark.parametrize("make", [grey_images, loaded])
def test_pixels_are_standardised_over_the_training_images_alone(make):
    splits = make()
    images = splits.train.tensors[0]
    deviations = images.std(dim=0, correction=0)
    assert images.mean(dim=0).abs().max() < 1e-5
    assert ((deviations - 1).abs() < 1e-4).logical_or(deviations == 0).all()
    assert splits.val.tensors[0].mean(dim=0).abs().max() > 0.05


@pytest.mark.parametrize(
    ("fractions", "sizes"),
    [
        ({}, (170, 30)),
        ({"val_fraction": 0.1}, (180, 20)),
        ({"train_fraction": 0.25}, (50, 30)),
        ({"train_fraction": 0.75}, (150, 30)),
        ({"train_fraction": 0.9}, (170, 30)),  # what validation leaves
    ],
)
def test_fractions_are_of_all_training_images(fractions, sizes):
    splits = loaded(**fractions)
    assert (len(splits.train), len(splits.val)) == sizes


def test_a_training_fraction_follows_the_seed_and_validation_images_do_not():
    drawn, same, other = (loaded(train_fraction=0.25, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(drawn.train.tensors[1], same.train.tensors[1])
    assert not torch.equal(drawn.train.tensors[1], other.train.tensors[1])
    assert torch.equal(loaded().val.tensors[1], drawn.val.tensors[1])


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in ("val", "train") for v in (None, 0, 1.5)] + [("val", 1.0)])
def test_fractions_out_of_range_are_named(name, value):
    with pytest.raises(MisconfigurationException, match=f"{name}_fraction must be .*, but is {value}"):
        loaded(**{f"{name}_fraction": value})
