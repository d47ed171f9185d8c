import torch

from lightning_struct.data.synthetic import synthetic_digits


def test_shapes_and_ranges_are_those_of_flat_labelled_images():
    images, labels = synthetic_digits(50, 16)
    assert images.shape == (50, 256) and images.dtype == torch.float32 and 0 <= images.min() and images.max() <= 1
    assert labels.shape == (50,) and labels.dtype == torch.int64 and set(labels.tolist()) <= set(range(10))


def test_same_seed_gives_the_same_sample():
    images, labels = synthetic_digits(20, 28, seed=4)
    again, labels_again = synthetic_digits(20, 28, seed=4)
    assert torch.equal(images, again) and torch.equal(labels, labels_again)


def test_figures_of_one_sample_are_recognised_in_another():
    images, labels = synthetic_digits(600, 16, seed=1)
    others, other_labels = synthetic_digits(200, 16, seed=2)
    nearest = labels[torch.cdist(others, images).argmin(dim=1)]
    assert (nearest == other_labels).float().mean() > 0.9
