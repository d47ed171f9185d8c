import math

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.rectangles import generate_rectangles
from lightning_struct.data import MNISTVariantDataModule
from lightning_struct.data.larochelle import FILES, picture_patches, rotate, uniform_noise, vary_digits
from tests.data.official import prepared, write_mnist

VARIANTS = list(FILES)
SIZES = {"train_size": 20, "test_size": 8}


def generator():
    return torch.Generator().manual_seed(0)


def test_rectangles_are_outlines_whose_sides_differ_and_labels_say_which_is_longer():
    images, labels = generate_rectangles(500)
    images = images.view(-1, 28, 28)
    height, width = (images.any(dim=axis).sum(dim=1) for axis in (2, 1))  # of what is white
    assert torch.equal(labels, (width > height).long()) and 0.4 < labels.float().mean() < 0.6
    assert (height - width).abs().min() == 3
    thick = (height > 1) & (width > 1)
    outlines = torch.where(thick, 2 * (height + width) - 4, height * width)
    assert torch.equal(images.sum(dim=(1, 2)).long(), outlines)


def splits_of(**options):
    return prepared(MNISTVariantDataModule(**{**SIZES, **options})).splits


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_made_of_digits_none_of_them_used_twice(tmp_path, variant):
    write_mnist(tmp_path)
    splits = splits_of(
        variant=variant, generate=True, data_dir=str(tmp_path), download=False, train_size=28, test_size=10
    )
    labels = torch.cat([part.tensors[1] for part in splits])
    options = {"data_dir": str(tmp_path), "download": False, "train_size": 28, "test_size": 10, "seed": 1}
    again = splits_of(variant=variant, generate=True, **options)
    assert torch.equal(again.val.tensors[1], splits.val.tensors[1])
    assert sorted(labels.tolist()) == sorted(number % 10 for number in range(38))
    assert splits.train.tensors[0].shape == (24, 784) and splits.train.tensors[0].dtype == torch.float32


def test_generating_without_mnist_names_the_remedies(tmp_path, no_network):
    with pytest.raises(MisconfigurationException, match="MNIST could not be downloaded"):
        splits_of(generate=True, data_dir=str(tmp_path))


def test_quarter_turns_are_exact():
    images = torch.rand(3, 784, generator=generator())
    turned = rotate(images, torch.tensor([0.5 * math.pi, math.pi, 1.5 * math.pi])).view(3, 28, 28)
    expected = [torch.rot90(image, turns) for image, turns in zip(images.view(3, 28, 28), (1, 2, 3), strict=True)]
    assert torch.allclose(turned, torch.stack(expected), atol=1e-4)


def test_digits_are_turned_by_every_angle():
    bar = torch.zeros(28, 28)
    bar[13:15, 14:26] = 1  # to the right
    turned = vary_digits(bar.flatten().expand(4000, 784), "rotation").view(-1, 28, 28)
    place = torch.arange(28) - 13.5
    right, up = (turned * place).sum((1, 2)), -(turned * place[:, None]).sum((1, 2))
    shares = torch.histc(torch.atan2(up, right), 8, -math.pi, math.pi) / 4000
    assert (shares - 1 / 8).abs().max() < 0.025


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
def test_noise_is_uniform_and_correlated_as_described(correlation):
    pixels = uniform_noise(4000, correlation, generator=generator())[:, [400, 401, 400 + 28 * 4, 400 + 28 * 4 + 3]]
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    assert (pixels.quantile(levels, dim=0) - levels[:, None]).abs().max() < 0.04
    normal = math.sqrt(2) * torch.erfinv(2 * pixels.double() - 1)
    found = torch.corrcoef(normal.clamp(-6, 6).T)[0, 1:]
    expected = correlation * torch.exp(-torch.tensor([1.0, 16.0, 25.0], dtype=torch.float64) / 72)
    assert torch.allclose(found, expected, atol=0.05)


def test_pieces_of_pictures_have_texture():
    patches = picture_patches(300, generator=generator())
    assert patches.shape == (300, 784) and 0 <= patches.min() and patches.max() <= 1
    assert patches.std(dim=1).min() >= 0.1


def test_of_digit_and_ground_the_brighter_is_seen():
    digits = torch.zeros(50, 784)
    digits[:, 100] = 0.9
    varied = vary_digits(digits, "noise", seed=1)
    ground = vary_digits(torch.zeros(50, 784), "noise", seed=1)
    assert torch.equal(varied, torch.maximum(digits, ground)) and varied.std() > 0.1
