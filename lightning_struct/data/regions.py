"""Regions that points are drawn from: boxes, and the faces of boxes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from lightning_struct.utilities.namespaces import MisconfigurationException


class Region(ABC):
    """A set of points that can be drawn from; a subclass implements :meth:`sample`.

    Example:
        >>> class Disc(Region):
        ...     def sample(self, count, generator):
        ...         squares, turns = torch.rand(2, count, 1, generator=generator, dtype=torch.float64)
        ...         angles = 2 * torch.pi * turns
        ...         return squares.sqrt() * torch.cat([angles.cos(), angles.sin()], dim=1)
        >>> Disc().sample(2, torch.Generator().manual_seed(0)).norm(dim=1) <= 1
        tensor([True, True])
    """

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` points, uniformly distributed, each independent of the others.

        Args:
            count: at least 0.
            generator: the only source of chance, on the CPU.

        Returns:
            (count, d), float64.
        """


class Box(Region):
    """The points between two corners. Where these have a coordinate in common, so have all points.

    Args:
        low: lowest value of each coordinate.
        high: highest value of each coordinate.

    Raises:
        MisconfigurationException: corners of different or no length, with NaN or infinity, or a ``low`` above its
            ``high``.

    Example:
        >>> start = Box(low=[-1.0, 0.0], high=[1.0, 0.0])  # x in [-1, 1] at t = 0
        >>> start.sample(2, torch.Generator().manual_seed(0))
        tensor([[...,  0.0000],
                [...,  0.0000]], dtype=torch.float64)
    """

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        if isinstance(low, int | float) or isinstance(high, int | float):
            raise MisconfigurationException(
                f"The corners of a Box are lists, one number for each coordinate: Box([{low}], [{high}]), "
                f"not Box({low}, {high})"
            )
        self.low, self.high = (torch.tensor(list(corner), dtype=torch.float64) for corner in (low, high))
        if self.low.shape != self.high.shape or self.low.numel() == 0 or not (self.low <= self.high).all():
            raise MisconfigurationException(
                f"A Box has a low and a high value for each coordinate, not low={list(low)} and high={list(high)}"
            )
        if not (self.low.isfinite().all() and self.high.isfinite().all()):
            raise MisconfigurationException(f"A Box is finite, not from {list(low)} to {list(high)}")

    @property
    def dimension(self) -> int:
        """Coordinates of a point."""
        return len(self.low)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return self.low + (self.high - self.low) * torch.rand(
            count, self.dimension, generator=generator, dtype=torch.float64
        )

    def grid(self, count: int) -> Tensor:
        """Points of a regular grid, corners included, as many along each coordinate.

        Args:
            count: the most points that the grid may have, at least two along each coordinate.

        Returns:
            (n, d), float64, the last coordinate changing first.

        Raises:
            MisconfigurationException: fewer points than corners.

        Example:
            >>> Box([0.0, 0.0], [1.0, 2.0]).grid(count=5)
            tensor([[0., 0.],
                    [0., 2.],
                    [1., 0.],
                    [1., 2.]], dtype=torch.float64)
        """
        along = int(count ** (1 / self.dimension) + 1e-9)
        if along < 2:
            raise MisconfigurationException(
                f"A grid of {count} points has none for each of the {2**self.dimension} corners: ask for more"
            )
        axes = [
            torch.linspace(low, high, along, dtype=torch.float64) for low, high in zip(self.low, self.high, strict=True)
        ]
        return torch.cartesian_prod(*axes).reshape(-1, self.dimension)


class Faces(Region):
    """Faces of a box, its boundary: points where one of the coordinates is at its lowest or highest value.

    Faces are drawn from in proportion to their areas.

    Args:
        box: the box.
        coordinates: those whose ends make faces; None for all. A box in space and time has its spatial boundary where
            the coordinates of space are at their ends.

    Raises:
        MisconfigurationException: coordinates that are none of the box, or whose faces have no area.

    Example:
        >>> sides = Faces(Box(low=[-1.0, 0.0], high=[1.0, 1.0]), coordinates=[0])  # x = -1 or x = 1, at all times
        >>> sides.sample(100, torch.Generator().manual_seed(0))[:, 0].unique()
        tensor([-1.,  1.], dtype=torch.float64)
    """

    def __init__(self, box: Box, coordinates: Sequence[int] | None = None) -> None:
        chosen = list(range(box.dimension) if coordinates is None else coordinates)
        if not chosen or not set(chosen) <= set(range(box.dimension)):
            raise MisconfigurationException(
                f"coordinates={coordinates} must be some of 0 to {box.dimension - 1}, those of the box"
            )
        self.box = box
        self._sides = list(product(chosen, (box.low, box.high)))
        sizes = (box.high - box.low).tolist()
        areas = [math.prod(size for i, size in enumerate(sizes) if i != side) for side, _ in self._sides]
        if not sum(areas) > 0:
            raise MisconfigurationException(
                f"The faces of coordinates {chosen} have no area in a box from {box.low.tolist()} to "
                f"{box.high.tolist()}: choose others, or take a Box, which may be flat, for each face"
            )
        self._areas = torch.tensor(areas, dtype=torch.float64)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        points = self.box.sample(count, generator)
        if count == 0:
            return points
        drawn = torch.multinomial(self._areas, count, replacement=True, generator=generator)
        for number, (coordinate, corner) in enumerate(self._sides):
            points[drawn == number, coordinate] = corner[coordinate]
        return points
