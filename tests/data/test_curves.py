import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import CurvesDataModule
from lightning_struct.data.curves import curve_path, generate_curves, render_curves, synthetic_digits


def test_path_meets_its_three_points():
    points = 28 * torch.rand(50, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    path = curve_path(points, steps=4001)
    nearest = torch.cdist(points, path).amin(dim=-1)
    assert nearest.max() < 0.02
    assert torch.allclose(path[:, [0, -1]], points[:, [0, 2]])


def test_stroke_is_bright_on_the_curve_and_dark_away_from_it():
    points = torch.tensor([[[4.0, 14.0], [14.0, 14.0], [24.0, 14.0]]])
    image = render_curves(points).view(28, 28)
    assert image[14, 5:24].min() > 0.95 and image[:10].max() < 1e-6 and image[18:].max() < 1e-6
    images = generate_curves(20, seed=1)
    assert images.shape == (20, 784) and images.dtype == torch.float32 and images.min() == 0 and images.max() <= 1
    assert torch.equal(images, generate_curves(20, seed=1)) and not torch.equal(images, generate_curves(20, seed=2))


def test_coincident_points_give_a_finite_image():
    assert torch.isfinite(render_curves(torch.full((1, 3, 2), 14.0))).all()


def test_no_ink_is_cut_off_by_the_border():
    border = generate_curves(500).view(-1, 28, 28)
    assert (border[:, [0, -1]].amax(dim=(1, 2)) > 0.9).float().mean() < 0.02


def test_real_files_are_not_promised():
    with pytest.raises(MisconfigurationException, match="always made procedurally"):
        CurvesDataModule(synthetic=False)


def test_figures_of_one_sample_are_recognised_in_another():
    images, labels = synthetic_digits(150, 16, seed=1)
    assert images.dtype == torch.float32 and 0 <= images.min() and images.max() <= 1
    others, other_labels = synthetic_digits(100, 16, seed=2)
    nearest = labels[torch.cdist(others, images).argmin(dim=1)]
    assert (nearest == other_labels).float().mean() > 0.9
