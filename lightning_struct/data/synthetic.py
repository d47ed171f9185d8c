"""Procedural stand-ins for labelled data sets of grey images."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_struct.data.curves import MARGIN, render_curves

CLASSES = 10
STROKES = 2
JITTER = 0.06


def synthetic_digits(count: int, size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of ten kinds of figure, each of two curved strokes whose points are shifted at random.

    The ten figures are the same for every ``seed`` and ``count``, so that what is learned on one sample holds on
    another.

    Args:
        count: number of images.
        size: height and width in pixels.
        seed: the same seed gives the same images and labels.

    Returns:
        Images (count, size * size), float32, values in [0, 1]; labels (count,), int64, in 0 to 9.
    """
    figures = torch.rand(CLASSES, STROKES, 3, 2, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    points = figures[labels] + JITTER * torch.randn(count, STROKES, 3, 2, generator=generator)
    points = MARGIN + (size - 1 - 2 * MARGIN) * points
    images = torch.cat([render_curves(part.flatten(0, 1), size) for part in points.split(512)])
    return images.view(count, STROKES, -1).amax(dim=1), labels
