import pytest
import torch

from lightning_struct.data.amat import read_amat


def write(directory, text):
    path = directory / "some.amat"
    path.write_text(text)
    return path


def test_lines_are_pixels_and_a_label(tmp_path):
    path = write(tmp_path, "0.0 0.25 1 2.0\n 1e-3 0.5 0 0.0\n")
    images, labels = read_amat(path, pixels=3, classes=3)
    assert torch.equal(images, torch.tensor([[0.0, 0.25, 1.0], [1e-3, 0.5, 0.0]])) and images.dtype == torch.float32
    assert labels.tolist() == [2, 0] and labels.dtype == torch.int64


def test_comments_at_the_head_are_passed_over(tmp_path):
    path = write(tmp_path, "#size: 1 3\n#sizes: 2 1 0\n0.5 1 1\n")
    assert read_amat(path, pixels=2, classes=2)[0].tolist() == [[0.5, 1.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 numbers"),
        ("0.5 1 1\n0.5 1\n", "has 5 numbers, not lines of 2 pixels and a label"),
        ("0.5 1 1\n<html> 1 1\n", "some.amat has more than numbers"),
        ("0.5 1 1\n1 0.5 0.25\n", "some.amat gives sample 1 .* the label 0.25, not one of 0 to 1"),
        ("0.5 1 2\n", "some.amat gives sample 0 .* the label 2, not one of 0 to 1"),
        ("0.5 1 nan\n", "the label nan"),
    ],
)
def test_damaged_file_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_amat(write(tmp_path, text), pixels=2, classes=2)
