import pytest
import torch

from lightning_struct.data.curves import curve_path, generate_curves, render_curves


def test_path_meets_its_three_points():
    points = 28 * torch.rand(200, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    path = curve_path(points, steps=4001)
    nearest = torch.cdist(points, path).amin(dim=-1)
    assert nearest.max() < 0.02
    assert torch.allclose(path[:, [0, -1]], points[:, [0, 2]])


def test_path_of_points_in_line_is_straight():
    points = torch.tensor([[[2.0, 2.0], [10.0, 10.0], [25.0, 25.0]]])
    path = curve_path(points)
    assert torch.allclose(path[..., 0], path[..., 1], atol=1e-4)


def test_stroke_is_bright_on_the_curve_and_dark_away_from_it():
    points = torch.tensor([[[4.0, 14.0], [14.0, 14.0], [24.0, 14.0]]])
    image = render_curves(points).view(28, 28)
    assert image[14, 5:24].min() > 0.95 and image[:10].max() < 1e-6 and image[18:].max() < 1e-6


def test_stroke_edges_are_anti_aliased():
    points = torch.tensor([[[4.0, 14.0], [14.0, 14.0], [24.0, 14.0]]])
    edge = render_curves(points).view(28, 28)[13, 14]
    assert 0.2 < edge < 0.8


def test_columns_come_first_in_points():
    points = torch.tensor([[[4.0, 20.0], [10.0, 20.0], [24.0, 20.0]]])
    image = render_curves(points).view(28, 28)
    assert image[20].sum() > 15 and image[:, 20].sum() < 3


def test_coincident_points_give_a_finite_image():
    assert torch.isfinite(render_curves(torch.full((1, 3, 2), 14.0))).all()


def test_images_are_flat_float32_pixels_in_the_unit_interval():
    images = generate_curves(300, seed=1)
    assert images.shape == (300, 784) and images.dtype == torch.float32
    assert images.min() == 0 and images.max() <= 1


def test_same_seed_gives_the_same_images_and_another_seed_others():
    images = generate_curves(20, seed=1)
    assert torch.equal(images, generate_curves(20, seed=1)) and not torch.equal(images, generate_curves(20, seed=2))


def test_no_ink_is_cut_off_by_the_border():
    border = generate_curves(2000).view(-1, 28, 28)
    assert (border[:, [0, -1]].amax(dim=(1, 2)) > 0.9).float().mean() < 0.01


@pytest.mark.parametrize(
    ("count", "size", "message"), [(0, 28, "count must be"), (5, 5, "size must be greater than 5")]
)
def test_wrong_arguments_are_named(count, size, message):
    with pytest.raises(ValueError, match=message):
        generate_curves(count, size=size)
