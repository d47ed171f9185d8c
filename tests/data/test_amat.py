import pytest
import torch

from lightning_struct.data.amat import read_amat
from lightning_struct.data.files import DamagedFileError


def read(directory, text, pixels, classes):
    path = directory / "some.amat"
    path.write_text(text)
    return read_amat(path, pixels, classes)


def test_lines_are_pixels_and_a_label(tmp_path):
    images, labels = read(tmp_path, "#size: 1 3\n#sizes: 2 1 0\n0.0 0.25 1 2.0\n\n 1e-3 0.5 0 0.0\n", 3, 3)
    assert torch.equal(images, torch.tensor([[0.0, 0.25, 1.0], [1e-3, 0.5, 0.0]])) and images.dtype == torch.float32
    assert labels.tolist() == [2, 0] and labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no lines of numbers"),
        ("0 .1 1\n.5 1\n", "has 2 numbers in line 2, not 3"),
        ("# head\n\n0 1\n0 .1 .2 1\n", "has 2 numbers in line 3, not 3"),  # six numbers, as in two right lines
        ("0.5 1 1\n<html> 1 1\n", "has more than numbers in line 2: .*<html>"),
        ("0.5 1 1\n1 0.5 0.25\n", "gives line 2 the label 0.25, not one of 0 to 1"),
        ("0.5 1 2\n", "gives line 1 the label 2, not one of 0 to 1"),
        ("0.5 1 -1\n", "the label -1"),
        ("0.5 1 nan\n", "the label nan"),
        ("0.5 1 1\n0.5 nan 1\n", "gives line 2 the pixel nan, not a number from 0 to 1"),
        ("0.5 inf 1\n", "the pixel inf"),
        ("0.5 1e9 1\n", r"the pixel 1e\+09"),
        ("-0.5 1 1\n", "the pixel -0.5"),
    ],
)
def test_damaged_files_are_refused_with_line_and_value(tmp_path, text, problem):
    with pytest.raises(
        DamagedFileError, match=f"some.amat {problem if problem[0] in 'hg' else f'gives line 1 {problem}'}"
    ):
        read(tmp_path, text, 2, 2)
