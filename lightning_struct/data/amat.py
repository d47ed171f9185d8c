"""Texts of images, ``.amat``: a line holds the pixels of an image, row by row, and its label, between spaces."""

from pathlib import Path

import torch
from torch import Tensor

from lightning_struct.data.files import check_values, naming_file, read_table


def read_amat(path: Path, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    """Read the images and labels of one ``.amat`` file. Lines that begin with ``#`` are comments.

    Args:
        path: path of the file.
        pixels: count of the numbers before the label of each line.
        classes: labels are 0 to ``classes - 1``.

    Returns:
        Images (n, pixels), float32, values in [0, 1], in the order of the file; labels (n,), int64.

    Raises:
        OSError: if the file cannot be read.
        DamagedFileError: if a line is too short or too long, or has anything but numbers, a pixel outside [0, 1], or a
            label out of range; names file, line and value.
    """
    with naming_file(path), path.open(encoding="utf-8") as file:
        rows = ([] if line.startswith("#") else line.split() for line in file)
        table, lines = read_table(path, rows, pixels + 1)
    images, labels = table[:, :-1], table[:, -1]
    check_values(path, "pixel", images, 0, 1, lines)
    check_values(path, "label", labels, 0, classes - 1, lines)
    return images.to(torch.float32, memory_format=torch.contiguous_format), labels.long()
