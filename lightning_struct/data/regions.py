"""Regions from which points are drawn: boxes, balls, their boundaries, and what is made of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.checks import Count, Points, as_tensor, check_calls, checked, positive_size
from lightning_struct.utilities.namespaces import MisconfigurationException


def _check_dimension(points: Tensor, dimension: int) -> None:
    if points.shape[1] != dimension:
        raise ValueError(f"points must be (n, {dimension}), but are {tuple(points.shape)}")


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

    Attributes:
        size: number of its points; None, as usually, if there are as many as one draws.
    """

    size: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_calls(cls, "sample", "contains")

    @abstractmethod
    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        """``count`` points, uniformly distributed; a region of several parts may stratify them.

        Args:
            count: at least 0; of a region with a ``size`` at most that is drawn.
            generator: the only source of chance, on the CPU.

        Returns:
            (count, d), float64.
        """

    def contains(self, points: Points) -> Tensor:
        """Whether points (n, d) are in the region, (n,), bool.

        Raises:
            NotImplementedError: the class does not say.
        """
        raise NotImplementedError(f"{type(self).__name__} has no contains(points), which a region without it needs")


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

    @checked
    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
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

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
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
        along = int(positive_size("count", count) ** (1 / self.dimension) + 1e-9)
        if along < 2:
            raise MisconfigurationException(
                f"A grid of {count} points has none for each of the {2**self.dimension} corners: ask for more"
            )
        ends = zip(self.low, self.high, strict=True)
        axes = [torch.linspace(low, high, along, dtype=torch.float64) for low, high in ends]
        return torch.cartesian_prod(*axes).reshape(-1, self.dimension)

    def contains(self, points: Points) -> Tensor:
        _check_dimension(points, self.dimension)
        return ((points >= self.low.to(points)) & (points <= self.high.to(points))).all(1)

    def check_inside(self, points: Tensor, name: str) -> None:
        """Refuse points outside of the box.

        Args:
            points: (n, d).
            name: of the box.

        Raises:
            ValueError: names the box and the first point that is outside.
        """
        outside = ~self.contains(points)
        if outside.any():
            low, high, at = self.low.to(points).tolist(), self.high.to(points).tolist(), points[outside][0].tolist()
            raise ValueError(f"{name} is from {low} to {high}: the point {at} is outside of it")


class Faces(Region):
    """Faces of a box, its boundary: points where one of the coordinates is at its lowest or highest value.

    Each face has its share of the points in proportion to its area, rounded at random, and at least one point. From
    fewer points than faces, as many faces have one each, drawn in proportion to their areas, none twice.

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

    @checked
    def __init__(self, box: Box, coordinates: Sequence[int] | None = None) -> None:
        chosen = list(dict.fromkeys(range(box.dimension) if coordinates is None else coordinates))
        if not chosen or not set(chosen) <= set(range(box.dimension)):
            raise MisconfigurationException(
                f"coordinates={coordinates} must be some of 0 to {box.dimension - 1}, those of the box"
            )
        self.box = box
        sizes = (box.high - box.low).tolist()
        areas = {side: math.prod(size for i, size in enumerate(sizes) if i != side) for side in chosen}
        self._sides = [(side, end) for side, end in product(chosen, (box.low, box.high)) if areas[side] > 0]
        if not self._sides:
            raise MisconfigurationException(
                f"The faces of coordinates {chosen} have no area in a box from {box.low.tolist()} to "
                f"{box.high.tolist()}: choose others, or take a Box, which may be flat, for each face"
            )
        shares = torch.tensor([areas[side] for side, _ in self._sides], dtype=torch.float64)
        self._areas = shares / shares.sum()

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        points = self.box.sample(count, generator)
        drawn = self._draw_faces(count, generator)
        for number, (coordinate, corner) in enumerate(self._sides):
            points[drawn == number, coordinate] = corner[coordinate]
        return points

    def _draw_faces(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers of the faces of ``count`` points, (count,), in random order."""
        faces = len(self._sides)
        if count < faces:
            return torch.multinomial(self._areas, count, generator=generator) if count else torch.empty(0)
        shares, single = count * self._areas, torch.zeros(faces, dtype=torch.bool)
        while (small := shares < 1).any():  # small faces get one point each, the others share the rest
            single |= small
            rest = (count - single.sum()) / self._areas[~single].sum()
            shares = torch.where(single, 1.0, rest * self._areas)
        # systematic sampling: a face has its share, rounded down or up, and on average exactly
        numbers = shares.floor()
        ends = (shares - numbers).cumsum(0)
        ends[-1] = count - numbers.sum()
        start = torch.rand((), generator=generator, dtype=torch.float64)
        numbers += (ends + start).floor().diff(prepend=torch.zeros(1, dtype=torch.float64))
        drawn = torch.repeat_interleave(torch.arange(faces), numbers.long())
        return drawn[torch.randperm(count, generator=generator)]


class _Round(Region):
    @checked
    def __init__(self, center: Sequence[float], radius: float) -> None:
        self.center, self.radius = torch.tensor(list(center), dtype=torch.float64), float(radius)
        if self.center.numel() == 0 or not self.center.isfinite().all() or not 0 < self.radius < math.inf:
            raise MisconfigurationException(
                f"A {type(self).__name__} has a finite center and radius > 0, not center={list(center)} and "
                f"radius={radius}"
            )


class Ball(_Round):
    """The points within a distance of a center: an interval, a disc, a ball.

    Args:
        center: its coordinates.
        radius: > 0.

    Raises:
        MisconfigurationException: no coordinates, or numbers that are not finite, or a radius that is not positive.

    Example:
        >>> hole = Ball([0.3, 0.3], radius=0.1)
        >>> hole.contains(torch.tensor([[0.3, 0.35], [0.0, 0.0]]))
        tensor([ True, False])
    """

    @property
    def boundary(self) -> Sphere:
        """The points at the distance of the radius."""
        return Sphere(self.center.tolist(), self.radius)

    def contains(self, points: Points) -> Tensor:
        _check_dimension(points, len(self.center))
        return (points - self.center.to(points)).norm(dim=1) <= self.radius

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        lengths = torch.rand(count, 1, generator=generator, dtype=torch.float64) ** (1 / len(self.center))
        return self.center + self.radius * lengths * _directions(count, len(self.center), generator)


class Sphere(_Round):
    """The points at a distance of a center, as the boundary of a disc or ball.

    Args:
        center: its coordinates.
        radius: > 0.

    Raises:
        MisconfigurationException: no coordinates, or numbers that are not finite, or a radius that is not positive.

    Example:
        >>> Sphere([0.0, 0.0], radius=2.0).sample(2, torch.Generator().manual_seed(0)).norm(dim=1)
        tensor([2., 2.], dtype=torch.float64)
    """

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        return self.center + self.radius * _directions(count, len(self.center), generator)


def _directions(count: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Unit vectors (count, dimension), uniformly distributed."""
    return torch.nn.functional.normalize(torch.randn(count, dimension, generator=generator, dtype=torch.float64))


class Segment(Region):
    """The points of a straight line from one point to another.

    Args:
        start: coordinates of one end.
        end: of the other one.

    Example:
        >>> Segment([0.0, 1.0], [1.0, 0.0]).sample(2, torch.Generator().manual_seed(0)).sum(1)
        tensor([1., 1.], dtype=torch.float64)
    """

    @checked
    def __init__(self, start: Sequence[float], end: Sequence[float]) -> None:
        self.start, self.end = (torch.tensor(list(point), dtype=torch.float64) for point in (start, end))
        if self.start.shape != self.end.shape or not torch.stack([self.start, self.end]).isfinite().all():
            raise MisconfigurationException(f"A segment has two finite ends, not {list(start)} and {list(end)}")

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        return self.start + (self.end - self.start) * torch.rand(count, 1, generator=generator, dtype=torch.float64)


class Without(Region):
    """A region without the points of others, as a box with holes.

    Args:
        region: it.
        holes: regions with :meth:`Region.contains`.

    Raises:
        ValueError: when points are drawn, if the holes leave less than a thousandth of the region.

    Example:
        >>> ring = Without(Ball([0.0, 0.0], 1.0), Ball([0.0, 0.0], 0.9))
        >>> ring.sample(3, torch.Generator().manual_seed(0)).norm(dim=1) > 0.9
        tensor([True, True, True])
    """

    @checked
    def __init__(self, region: Region, *holes: Region) -> None:
        self.region, self.holes = region, holes

    def contains(self, points: Points) -> Tensor:
        return self.region.contains(points) & self._is_left(points)

    def _is_left(self, points: Tensor) -> Tensor:
        return ~torch.stack([hole.contains(points) for hole in self.holes]).any(0)

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        found = self.region.sample(0, generator)
        for _ in range(1000):
            if len(found) >= count:
                return found[:count]
            points = self.region.sample(count, generator)
            found = torch.cat([found, points[self._is_left(points)]])
        raise ValueError(f"The holes leave {len(found)} of {1000 * count} points: too few to draw {count} points")


class Union(Region):
    """Several regions as one, each with its share of the points.

    Args:
        regions: with points of the same number of coordinates.
        shares: of the points, > 0, in proportion; the same for all by default.

    Raises:
        MisconfigurationException: no regions, or shares that are not one for each.

    Example:
        >>> holes = Union(*(Sphere([x, 0.0], 0.1) for x in (-0.3, 0.3)))
        >>> (holes.sample(10, torch.Generator().manual_seed(0))[:, 0] > 0).sum()
        tensor(5)
    """

    @checked
    def __init__(self, *regions: Region, shares: Sequence[float] | None = None) -> None:
        self.regions, of_all = regions, torch.tensor(list(shares or [1.0] * len(regions)), dtype=torch.float64)
        if not regions or len(of_all) != len(regions) or not (of_all > 0).all():
            raise MisconfigurationException(
                f"A union has regions and a share > 0 for each, not {len(regions)} regions and shares={shares}"
            )
        self._ends = of_all.cumsum(0) / of_all.sum()

    def contains(self, points: Points) -> Tensor:
        return torch.stack([region.contains(points) for region in self.regions]).any(0)

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        start = torch.rand((), generator=generator, dtype=torch.float64)  # shares are rounded up or down at random
        ends = (count * self._ends + start).floor()
        numbers = ends.diff(prepend=torch.zeros(1, dtype=torch.float64)).long().tolist()
        return torch.cat([region.sample(n, generator) for region, n in zip(self.regions, numbers, strict=True)])


class Product(Region):
    """Points whose first coordinates are of one region, and whose last ones are of another, as of space and time.

    Args:
        first: region of the first coordinates.
        last: region of the last ones.

    Example:
        >>> cylinder = Product(Ball([0.0, 0.0], 1.0), Box([0.0], [2.0]))  # a disc, at times from 0 to 2
        >>> cylinder.sample(2, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3])
    """

    @checked
    def __init__(self, first: Region, last: Region) -> None:
        self.first, self.last = first, last

    def contains(self, points: Points) -> Tensor:
        columns = self.first.sample(0, torch.Generator()).shape[1]
        return self.first.contains(points[:, :columns]) & self.last.contains(points[:, columns:])

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        return torch.cat([region.sample(count, generator) for region in (self.first, self.last)], dim=1)


class Table(Region):
    """Rows of a table, as of places with measurements beside their coordinates.

    A batch has as many rows as the count of this region says, at most all of them, none twice; their number stays if
    that of points grows. The residual takes the columns apart.

    Args:
        rows: (n, columns).

    Raises:
        MisconfigurationException: it has no rows, other dimensions, or NaN or infinity.

    Example:
        >>> data = Table(torch.tensor([[0.0, 1.0], [0.5, 0.8]]))  # u at two places
        >>> data.sample(10, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 2])
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = as_tensor("rows", rows).double()
        if self.rows.dim() != 2 or not len(self.rows) or not self.rows.isfinite().all():
            raise MisconfigurationException(
                f"A table has rows (n, columns) of finite numbers, not {tuple(self.rows.shape)}"
            )

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return len(self.rows)

    def sample(self, count: Count, generator: torch.Generator) -> Tensor:
        return self.rows[torch.randperm(len(self.rows), generator=generator)[:count]]
