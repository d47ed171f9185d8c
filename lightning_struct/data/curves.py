"""CURVES and figures that stand in for digits: procedural images of smooth curves.

CURVES is made after the data set of Hinton & Salakhutdinov (2006).

The original file is one sample of "curves generated from three randomly chosen points in two dimensions"; its generator
was never published. Here a curve is the parabola through the three points, drawn as a thin stroke: like the original,
the images have six degrees of freedom.
"""

import math
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_struct.data.in_memory import InMemoryDataModule, Splits, image_dataset
from lightning_struct.functional.checks import check_types
from lightning_struct.utilities.checks import check_counts
from lightning_struct.utilities.namespaces import MisconfigurationException

IMAGE_SIZE, STEPS, CHUNK = 28, 96, 1024
STROKE_RADIUS, INK, MARGIN = 0.7, 1.4, 2.0

KINDS, STROKES, JITTER, DRAWINGS = 10, 2, 0.06, 300  # of the figures that stand in for digits


def curve_path(points: Tensor, steps: int = STEPS) -> Tensor:
    """Points along the parabolas through triples of points.

    The inner point is met at a time in proportion to the square root of the distances (centripetal parametrisation),
    which keeps the curve close to its points.

    Args:
        points: (n, 3, 2), floating dtype, any unit.
        steps: points along each curve, at equal steps of the parameter.

    Returns:
        (n, steps, 2), from each first point to each last.
    """
    start, middle, end = points.unsqueeze(2).unbind(dim=1)
    first, second = (middle - start).norm(dim=-1, keepdim=True).sqrt(), (end - middle).norm(dim=-1, keepdim=True).sqrt()
    turn = (first / (first + second).clamp_min(torch.finfo(points.dtype).tiny)).clamp(0.05, 0.95)
    time = torch.linspace(0, 1, steps, dtype=points.dtype, device=points.device).view(1, -1, 1)
    return (
        start * (time - turn) * (time - 1) / turn
        + middle * time * (time - 1) / (turn * (turn - 1))
        + end * time * (time - turn) / (1 - turn)
    )


def render_curves(points: Tensor, size: int = IMAGE_SIZE) -> Tensor:
    """Draw the curves through triples of points as anti-aliased strokes.

    A stroke is the line integral of a Gaussian of standard deviation ``STROKE_RADIUS`` pixels, so that one matrix
    product of column and row profiles draws a whole image; its core saturates at 1.

    Args:
        points: (n, 3, 2), floating dtype, (column, row) in pixels; the centre of the first pixel is (0, 0).
        size: height and width in pixels.

    Returns:
        (n, size * size), values in [0, 1], of the dtype of ``points``, rows of pixels one after the other.
    """
    path = curve_path(points)
    length = (path[:, 1:] - path[:, :-1]).norm(dim=-1)
    centre = (path[:, 1:] + path[:, :-1]) / 2
    pixels = torch.arange(size, dtype=points.dtype, device=points.device)
    columns, rows = torch.exp(-((centre.unsqueeze(-1) - pixels) ** 2) / (2 * STROKE_RADIUS**2)).unbind(dim=2)
    weighted_rows = rows * (length * INK / (STROKE_RADIUS * math.sqrt(2 * math.pi))).unsqueeze(-1)
    return (weighted_rows.transpose(1, 2) @ columns).clamp_(0, 1).flatten(1)


def generate_curves(count: int, *, seed: int = 0, size: int = IMAGE_SIZE) -> Tensor:
    """Random curves; 30,000 of them take a few seconds.

    Args:
        count: number of images.
        seed: the same seed gives the same images.
        size: height and width in pixels.

    Returns:
        (count, size * size), float32, values in [0, 1].

    Example:
        >>> generate_curves(2).shape
        torch.Size([2, 784])
    """
    generator = torch.Generator().manual_seed(seed)
    points = MARGIN + (size - 1 - 2 * MARGIN) * torch.rand(count, 3, 2, generator=generator)
    return torch.cat([render_curves(part, size) for part in points.split(CHUNK)])


def synthetic_digits(count: int, size: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of ten kinds of figure, each of two curved strokes whose points are shifted at random.

    The ten figures are the same for every ``seed`` and ``count``, so that a network that learns one sample fits
    another. Of each stroke there are at most 300 drawings; an image has one of them for either stroke.

    Args:
        count: number of images.
        size: height and width in pixels.
        seed: the same seed gives the same images and labels.

    Returns:
        Images (count, size * size), float32, values in [0, 1]; labels (count,), int64, in 0 to 9.
    """
    figures = torch.rand(KINDS, STROKES, 1, 3, 2, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    drawings = min(count, DRAWINGS)
    points = figures + JITTER * torch.randn(KINDS, STROKES, drawings, 3, 2, generator=generator)
    points = MARGIN + (size - 1 - 2 * MARGIN) * points
    drawn = torch.cat([render_curves(part, size) for part in points.flatten(0, 2).split(CHUNK)])
    drawn = drawn.view(KINDS, STROKES, drawings, -1)
    labels = torch.randint(KINDS, (count,), generator=generator)
    first, second = torch.randint(drawings, (STROKES, count), generator=generator)
    return torch.maximum(drawn[labels, 0, first], drawn[labels, 1, second]), labels


class CurvesDataModule(InMemoryDataModule):
    """CURVES: 20,000 / 2,000 / 8,000 images of 28 x 28 for training, validation and test, made when they are needed.

    Samples are (pixels,): (784,) float32 in [0, 1]. The images are always procedural
    (:func:`~lightning_struct.data.curves.generate_curves`): they follow the description of the original file, and are
    not that file. They are the same for every ``seed``.

    Args:
        batch_size: training samples in a step, over all processes together.
        train_size: training images.
        val_size: validation images.
        test_size: test images.
        synthetic: always true: there is nothing but the procedural images.
        **loader: further options of the loaders, see :class:`InMemoryDataModule`.

    Raises:
        MisconfigurationException: if one of the sets would be empty, and for ``synthetic=False``.

    Example:
        >>> data = CurvesDataModule(batch_size=10, train_size=20, val_size=5, test_size=5)
        >>> data.setup("fit")
        >>> (images,) = next(iter(data.train_dataloader()))
        >>> images.shape
        torch.Size([10, 784])
    """

    def __init__(
        self,
        batch_size: int = 250,
        *,
        train_size: int = 20_000,
        val_size: int = 2_000,
        test_size: int = 8_000,
        synthetic: bool = True,
        **loader: Any,
    ) -> None:
        super().__init__(batch_size, **loader)
        if synthetic is not True:
            raise MisconfigurationException("CURVES are always made procedurally: leave out data.synthetic=false.")
        check_counts(train_size=train_size, val_size=val_size, test_size=test_size)
        check_types(CurvesDataModule.__init__, locals())
        self.sizes = (train_size, val_size, test_size)

    def load_splits(self) -> Splits:
        rank_zero_info(f"CURVES: making {sum(self.sizes):,} images of curves through three random points.")
        images = generate_curves(sum(self.sizes))
        parts = zip(("train", "val", "test"), images.split(self.sizes), strict=True)
        return Splits(**{key: image_dataset(f"CURVES ({key})", part) for key, part in parts})
