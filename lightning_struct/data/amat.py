"""The text files of Larochelle et al. (2007): a line for each image, its pixels and then its label."""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SITE = "https://sites.google.com/a/lisa.iro.umontreal.ca/public_static_twiki"


def read_amat(path: Path, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    """Read one file.

    Args:
        path: of the file; lines that begin with ``#`` at its head are passed over.
        pixels: numbers before the label of each line.
        classes: labels are 0 to ``classes - 1``.

    Returns:
        Images (n, pixels), float32, in the order of the file; labels (n,), int64.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has anything but numbers, a line is too short or too long, or a label is no class.
    """
    with path.open("rb") as file:
        begin = file.tell()
        while file.readline().startswith(b"#"):
            begin = file.tell()
        file.seek(begin)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # numpy's word for text that is no number
            try:
                numbers = np.fromfile(file, dtype=np.float64, sep=" ")
            except DeprecationWarning as error:
                raise ValueError(f"{path.name} has more than numbers: {error}") from error
    if numbers.size == 0 or numbers.size % (pixels + 1):
        raise ValueError(f"{path.name} has {numbers.size} numbers, not lines of {pixels} pixels and a label")
    table = numbers.reshape(-1, pixels + 1)
    labels = table[:, -1]
    if not np.isin(labels, np.arange(classes)).all():
        raise ValueError(f"{path.name} has labels that are none of the {classes} classes: a line is cut")
    return torch.from_numpy(table[:, :-1].astype(np.float32)), torch.from_numpy(labels.astype(np.int64))
