import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import RectanglesDataModule
from lightning_struct.data.rectangles import generate_rectangles


def prepared(**options):
    data = RectanglesDataModule(train_size=20, test_size=8, **options)
    data.setup("fit")
    return data.splits


@pytest.fixture(scope="module")
def rectangles():
    images, labels = generate_rectangles(500)
    return images.view(-1, 28, 28), labels


def sides(images):
    """Heights and widths of what is white."""
    return [images.any(dim=axis).sum(dim=1) for axis in (2, 1)]


def test_default_sizes_are_those_of_table_15():
    data = RectanglesDataModule()
    assert (data.train_size, data.test_size, data.val_fraction) == (1_200, 50_000, 0.15)


def test_label_says_which_side_is_longer(rectangles):
    images, labels = rectangles
    height, width = sides(images)
    assert torch.equal(labels, (width > height).long()) and 0.4 < labels.float().mean() < 0.6


def test_sides_differ_by_three_pixels_at_least(rectangles):
    height, width = sides(rectangles[0])
    assert (height - width).abs().min() == 3


def test_images_are_outlines_one_pixel_thick(rectangles):
    images = rectangles[0]
    height, width = sides(images)
    thick = (height > 1) & (width > 1)
    assert torch.equal(images.sum(dim=(1, 2))[thick].long(), (2 * (height + width) - 4)[thick])
    assert torch.equal(images.sum(dim=(1, 2))[~thick].long(), (height * width)[~thick])


def test_outlines_lie_everywhere(rectangles):
    assert rectangles[0].any(dim=0).all()


def test_same_seed_gives_the_same_images():
    assert torch.equal(generate_rectangles(5, seed=1)[0], generate_rectangles(5, seed=1)[0])


def test_generated_images_do_not_depend_on_the_seed_and_synthetic_ones_do():
    def labels(**options):
        return prepared(**options).test.tensors[1].tolist()

    assert labels(generate=True, seed=1) == labels(generate=True, seed=2)
    assert labels(synthetic=True, seed=1) != labels(synthetic=True, seed=2)


def test_official_files_are_read(tmp_path):
    for part, count, start in (("train", 20, 0), ("test", 8, 20)):
        lines = [f"{(start + number) / 100} {'0 ' * 783}{number % 2}" for number in range(count)]
        (tmp_path / f"rectangles_{part}.amat").write_text("\n".join(lines))
    splits = prepared(data_dir=str(tmp_path))
    assert [len(part) for part in splits] == [17, 3, 8]
    assert splits.test.tensors[0][:, 0].min() > splits.train.tensors[0][:, 0].max()


def test_missing_files_are_an_error_that_names_the_remedies(tmp_path):
    with pytest.raises(MisconfigurationException) as error:
        prepared(data_dir=str(tmp_path))
    for remedy in ("rectangles_train.amat and rectangles_test.amat of https", "--data.generate", "--data.synthetic"):
        assert remedy in str(error.value)
    assert "download" not in str(error.value)
