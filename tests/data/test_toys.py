import pytest
import torch

from lightning_struct.data.toys import INSTANCES, TOYS, make_toys


def made(count, *, cluttered, instances=range(INSTANCES), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return make_toys(count, 32, cluttered=cluttered, instances=instances, generator=generator)


@pytest.mark.parametrize("cluttered", [False, True])
def test_images_are_grey_values_with_a_label_each(cluttered):
    images, labels = made(60, cluttered=cluttered)
    assert images.shape == (60, 1024) and images.min() >= 0 and images.max() <= 1
    assert labels.dtype == torch.int64 and set(labels.tolist()) == set(range(TOYS + cluttered))


def test_a_plain_image_has_its_toy_in_the_middle_and_an_even_ground():
    images, _ = made(50, cluttered=False)
    squares = images.view(-1, 32, 32)
    ground = squares[:, 0, 0]
    assert ground.unique().numel() == 1
    assert torch.equal(squares[:, 0], ground[:, None].expand(-1, 32))
    assert ((squares[:, 12:20, 12:20] - ground[:, None, None]).abs() > 0.02).flatten(1).any(1).all()


def test_toys_are_seen_from_other_sides_and_differ():
    images, labels = made(200, cluttered=False, instances=[3])
    for kind in range(TOYS):
        assert len(images[labels == kind].unique(dim=0)) > 20


def test_what_is_learned_of_some_toys_holds_for_others():
    images, labels = made(500, cluttered=False, instances=(4, 6, 7, 8, 9))
    others, truth = made(200, cluttered=False, instances=(0, 1, 2, 3, 5), seed=1)
    nearest = labels[torch.cdist(others, images).argmin(dim=1)]
    assert (nearest == truth).float().mean() > 0.5


def test_the_same_generator_makes_the_same_images():
    assert torch.equal(made(10, cluttered=True)[0], made(10, cluttered=True)[0])


def test_a_single_image_may_show_none_of_the_toys():
    assert {int(made(1, cluttered=True, seed=seed)[1]) for seed in range(20)} >= {0, TOYS}
