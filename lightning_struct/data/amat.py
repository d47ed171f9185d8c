"""Reader of ``.amat`` files, the text format of the image sets of Larochelle et al. (2007).

A line stands for an image: its pixels, row by row, and then its label, as decimal numbers between spaces. Lines that
begin with ``#`` may stand at the head.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_struct.data.files import DamagedFileError, check_labels

SITE = "https://sites.google.com/a/lisa.iro.umontreal.ca/public_static_twiki"


def read_amat(path: Path, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    """Read the images and labels of one ``.amat`` file.

    Args:
        path: path of the file.
        pixels: count of the numbers before the label of each line.
        classes: labels are 0 to ``classes - 1``.

    Returns:
        Images (n, pixels), float32, in the order of the file; labels (n,), int64.

    Raises:
        OSError: if the file cannot be read.
        DamagedFileError: if it has anything but numbers, a line is too short or too long, or a label is out of range.
    """
    with path.open("rb") as file:
        begin = file.tell()
        while file.readline().startswith(b"#"):
            begin = file.tell()
        file.seek(begin)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", DeprecationWarning
            )  # text that is not a number; since numpy 2.4 a ValueError
            try:
                numbers = np.fromfile(file, dtype=np.float64, sep=" ")
            except (DeprecationWarning, ValueError) as error:
                raise DamagedFileError(path, f"has more than numbers: {error}") from error
    if numbers.size == 0 or numbers.size % (pixels + 1):
        raise DamagedFileError(path, f"has {numbers.size} numbers, not lines of {pixels} pixels and a label")
    table = numbers.reshape(-1, pixels + 1)
    labels = torch.from_numpy(table[:, -1].copy())
    check_labels(path, labels, classes)
    return torch.from_numpy(table[:, :-1].astype(np.float32)), labels.long()
