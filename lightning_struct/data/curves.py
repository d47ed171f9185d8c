"""Procedural images of smooth curves, after the CURVES data set of Hinton & Salakhutdinov (2006).

The original file is one sample of "curves generated from three randomly chosen points in two dimensions"; its generator
was never published. Here a curve is the parabola through the three points, drawn as a thin stroke: like the original,
the images have six degrees of freedom.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

IMAGE_SIZE = 28
STROKE_RADIUS = 0.7
INK = 1.4
MARGIN = 2.0
STEPS = 96
CHUNK = 1024


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

    Raises:
        ValueError: if ``count`` is not positive, or ``size`` leaves no room inside the margin.

    Example:
        >>> generate_curves(2).shape
        torch.Size([2, 784])
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, but is {count}")
    if size <= 2 * MARGIN + 1:
        raise ValueError(f"size must be greater than {2 * MARGIN + 1:.0f}, but is {size}")
    generator = torch.Generator().manual_seed(seed)
    points = MARGIN + (size - 1 - 2 * MARGIN) * torch.rand(count, 3, 2, generator=generator)
    return torch.cat([render_curves(part, size) for part in points.split(CHUNK)])
