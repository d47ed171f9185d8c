import math

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.rectangles import RectanglesDataModule, generate_rectangles
from lightning_struct.data.flat_images import as_float, mean_and_std
from tests.data.official import prepared


def loaded(**options):
    return prepared(RectanglesDataModule(generate=True, train_size=200, test_size=30, **options)).splits


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


def test_validation_images_are_those_of_a_fixed_cut():
    labels = [loaded(**options).val.tensors[1] for options in ({}, {"train_fraction": 0.25}, {"seed": 3})]
    assert all(torch.equal(labels[0], other) for other in labels[1:])


def test_training_fraction_is_drawn_by_the_seed():
    def drawn(seed):
        return loaded(train_fraction=0.25, seed=seed).train.tensors[1]

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))


def test_training_and_validation_images_are_the_training_part_and_test_images_the_rest():
    images = generate_rectangles(230)[0]
    splits = loaded()
    # a white pixel is above the mean and a black one below it, but where it has never been white
    lit = images[:200].any(dim=0)

    def seen(*parts):
        return sorted((torch.cat(parts)[:, lit] > 0).int().tolist())

    inputs = [part.tensors[0] for part in splits]
    assert seen(*inputs[:2]) == seen(images[:200]) and seen(inputs[2]) == seen(images[200:])


def test_pixels_are_standardised_over_the_training_images_alone():
    splits = loaded()
    images = splits.train.tensors[0]
    deviations = images.std(dim=0, correction=0)
    assert images.mean(dim=0).abs().max() < 1e-5
    assert ((deviations - 1).abs() < 1e-4).logical_or(deviations == 0).all()
    assert splits.val.tensors[0].mean(dim=0).abs().max() > 0.05


def test_constant_pixels_are_only_centred():
    images = torch.tensor([[0.5, 0.0], [0.5, 1.0]])
    mean, std = mean_and_std(images)
    assert mean.tolist() == [0.5, 0.5] and std.tolist() == [1.0, 0.5]


def test_bytes_and_numbers_are_the_same_images():
    numbers = torch.tensor([[0.0, 1.0]])
    assert torch.equal(as_float("x", (255 * numbers).to(torch.uint8)), as_float("x", numbers))


def test_pixels_out_of_range_are_refused():
    with pytest.raises(MisconfigurationException, match="must lie in"):
        as_float("x", torch.tensor([[0.5, math.nan]]))


def test_set_without_images_is_refused():
    with pytest.raises(MisconfigurationException, match="Rectangles .val. has no images"):
        RectanglesDataModule(generate=True, train_size=2, test_size=5).setup("fit")


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in ("val", "train") for v in (None, 0, 1.5)] + [("val", 1.0)])
def test_fractions_out_of_range_are_named(name, value):
    with pytest.raises(MisconfigurationException, match=f"{name}_fraction must be .*, but is {value}"):
        loaded(**{f"{name}_fraction": value})
