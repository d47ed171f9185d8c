"""Differential equations with their conditions: the regions in which they hold, and residuals of a function there."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_struct.functional.checks import checked
from lightning_struct.functional.jacobian.derivatives import laplacian, partial_derivatives
from lightning_struct.utilities.checks import check, check_counts, is_count
from lightning_struct.utilities.namespaces import MisconfigurationException

# Points (n, d) to values (n,), or (n, k) for k unknown functions, each row by itself.
Field: TypeAlias = Callable[[Tensor], Tensor]

# Half as many integrate the example to rounding; from 400 on NumPy's weights underflow.
_QUADRATURE_NODES = 200


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
        """``count`` points, uniformly distributed; a region of several parts may stratify them.

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
        ends = zip(self.low, self.high, strict=True)
        axes = [torch.linspace(low, high, along, dtype=torch.float64) for low, high in ends]
        return torch.cartesian_prod(*axes).reshape(-1, self.dimension)

    def check_inside(self, points: Tensor, name: str) -> None:
        """Refuse points outside of the box.

        Args:
            points: (n, d).
            name: of the box.

        Raises:
            ValueError: names the box and the first point that is outside.
        """
        low, high = self.low.to(points), self.high.to(points)
        outside = ((points < low) | (points > high)).any(1)
        if outside.any():
            at = points[outside][0].tolist()
            raise ValueError(f"{name} is from {low.tolist()} to {high.tolist()}: the point {at} is outside of it")


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

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
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


class DifferentialEquation(ABC):
    """A differential equation for a function u of points, with its boundary and initial conditions.

    A subclass sets the attributes and implements :meth:`residual`; :meth:`solution` is for those whose solution is
    known. Unknown coefficients are parameters of an equation that is a module, too: ``class
    MyEquation(DifferentialEquation, nn.Module)``.

    Attributes:
        domain: the region in which the solution is wanted.
        regions: where residuals are: a region by the name of each block. The block ``"interior"`` is the domain.
        coordinates: names of the coordinates of a point, for pictures.
        time: index of the coordinate that is time, if the equation is to be solved in intervals of time, one after
            another, from the block ``"initial"`` on. The conditions of that block hold at the beginning, are linear in
            u, and depend on the point by its other coordinates alone; all others hold at all times. None by default.
        periodic: coordinates in which the solution is periodic, with the domain as its period. None by default.
        unknowns: number of unknown functions; 1 by default.

    Example:
        An oscillator u'' + u = 0 with u = 0 and u' = 1 at time 0:

        >>> class Oscillator(DifferentialEquation):
        ...     domain = Box([0.0], [6.0])
        ...     regions = {"interior": domain, "start": Box([0.0], [0.0])}
        ...     coordinates = ("t",)
        ...
        ...     def residual(self, block, u, points):
        ...         values, first, second = partial_derivatives(u, points, twice=[0])
        ...         return second[0] + values if block == "interior" else torch.stack([values, first[0] - 1], dim=1)
        >>> Oscillator().residual("start", lambda x: torch.sin(x[:, 0]), torch.tensor([[0.0]]))
        tensor([[0., 0.]])
    """

    domain: Box
    regions: Mapping[str, Region]
    coordinates: tuple[str, ...]
    time: int | None = None
    periodic: Sequence[int] = ()
    unknowns: int = 1

    @abstractmethod
    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        """Residuals of a function at points of a block, each of its own point alone.

        Args:
            block: name of the region.
            u: the function: maps points (n, d) to values (n,), or (n, k) for k unknown functions.
            points: (n, d).

        Returns:
            (n,), or (n, k) if a point has k conditions.
        """

    def residuals(self, u: Field, points: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Residuals of a function at points of any of the blocks, by block.

        Raises:
            ValueError: there is no such block.
        """
        unknown = [block for block in points if block not in self.regions]
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no block {', '.join(unknown)}: its blocks are {', '.join(self.regions)}"
            )
        return {block: self.residual(block, u, at) for block, at in points.items()}

    def solution(self, points: Tensor) -> Tensor:
        """The solution at points (n, d): in the shape of the values of ``u``, mostly (n,).

        Raises:
            NotImplementedError: it is not known.
        """
        raise NotImplementedError(f"{type(self).__name__} has no solution that is known")

    @property
    def is_solved(self) -> bool:
        """Whether :meth:`solution` is known."""
        return type(self).solution is not DifferentialEquation.solution


def check_equation(equation: object) -> None:
    """Refuse a value that is no equation, as its name or its class, and one without a domain or regions.

    Raises:
        MisconfigurationException: it is none, or something is missing.
    """
    if not isinstance(equation, DifferentialEquation):
        raise MisconfigurationException(
            f"equation must be a DifferentialEquation, such as Poisson(dimension=2), but is {equation!r}"
        )
    if missing := [name for name in ("domain", "regions") if not hasattr(equation, name)]:
        raise MisconfigurationException(
            f"{type(equation).__name__} has no {' and no '.join(missing)}: set them in the class, as "
            "domain = Box([0.0], [1.0]) and regions = {'interior': domain}"
        )
    name, dimension = type(equation).__name__, equation.domain.dimension
    check(f"unknowns of {name}", equation.unknowns, is_count(equation.unknowns), "a whole number >= 1")
    given = [*equation.periodic] if equation.time is None else [equation.time, *equation.periodic]
    if len(set(given)) < len(given) or not set(given) <= set(range(dimension)):
        raise MisconfigurationException(
            f"{name} has time={equation.time} and periodic={equation.periodic}, which must be different ones of the "
            f"coordinates 0 to {dimension - 1} of its domain"
        )
    if equation.time is not None and "initial" not in equation.regions:
        raise MisconfigurationException(
            f"{name} has time={equation.time}, but no block 'initial' of conditions to begin with"
        )


class Poisson(DifferentialEquation):
    """Poisson's equation -Δu = f on the unit cube, with values given on the whole boundary.

    The solutions, with f and the boundary values made from them, are those of the experiments in Dangel, Müller and
    Zeinhofer, Kronecker-Factored Approximate Curvature for Physics-Informed Neural Networks (2024).

    Args:
        dimension: of space.
        form: of the solution: ``"product"``: Π sin πx_i, which is zero on the boundary; ``"sum"``: Σ cos πx_i.

    Raises:
        MisconfigurationException: a dimension below 1, or another form.

    Example:
        >>> points = torch.rand(3, 2, dtype=torch.float64)
        >>> equation = Poisson(dimension=2)
        >>> equation.residual("interior", equation.solution, points).abs().max() < 1e-12
        tensor(True)
    """

    @checked
    def __init__(self, dimension: int = 2, form: Literal["product", "sum"] = "product") -> None:
        check_counts(dimension=dimension)
        check("form", form, form in ("product", "sum"), "'product' or 'sum'")
        self.form = form
        self.domain = Box([0.0] * dimension, [1.0] * dimension)
        self.regions = {"interior": self.domain, "boundary": Faces(self.domain)}
        self.coordinates = tuple("xyz"[:dimension] if dimension <= 3 else [f"x{i + 1}" for i in range(dimension)])

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "boundary":
            return u(points) - self.solution(points)
        eigenvalue = math.pi**2 * (points.shape[1] if self.form == "product" else 1)  # -Δu = f is a multiple of u
        return -laplacian(u, points) - eigenvalue * self.solution(points)

    def solution(self, points: Tensor) -> Tensor:
        return (math.pi * points).sin().prod(1) if self.form == "product" else (math.pi * points).cos().sum(1)


def _line_in_time(low: float, high: float) -> tuple[Box, dict[str, Region]]:
    """The domain and the regions of points (x, t) with x between two ends and t in [0, 1]."""
    domain, initial = Box([low, 0.0], [high, 1.0]), Box([low, 0.0], [high, 0.0])
    return domain, {"interior": domain, "boundary": Faces(domain, coordinates=[0]), "initial": initial}


class Heat(DifferentialEquation):
    """The heat equation u_t = κ u_xx in one dimension, x and t in [0, 1], zero at both ends, u(x, 0) = sin πx.

    Its solution is exp(-κπ²t) sin πx. With κ = ¼ it is an experiment in Dangel, Müller and Zeinhofer (2024).

    Args:
        conductivity: κ > 0.

    Raises:
        MisconfigurationException: a conductivity that is not positive.

    Example:
        >>> equation, points = Heat(), torch.rand(3, 2, dtype=torch.float64)
        >>> equation.residual("interior", equation.solution, points).abs().max() < 1e-12
        tensor(True)
    """

    coordinates = ("x", "t")

    @checked
    def __init__(self, conductivity: float = 0.25) -> None:
        check("conductivity", conductivity, conductivity > 0, "positive")
        self.conductivity = conductivity
        self.domain, self.regions = _line_in_time(0.0, 1.0)

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "boundary":
            return u(points)
        if block == "initial":
            return u(points) - (math.pi * points[:, 0]).sin()
        _, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        return first[1] - self.conductivity * second[0]

    def solution(self, points: Tensor) -> Tensor:
        x, t = points.unbind(1)
        return (-self.conductivity * math.pi**2 * t).exp() * (math.pi * x).sin()


class Burgers(DifferentialEquation):
    """Burgers' equation u_t + u u_x = ν u_xx, x in [-1, 1], t in [0, 1], zero at both ends, u(x, 0) = -sin πx.

    With ν = .01/π, the example of Raissi, Perdikaris and Karniadakis, Physics-informed neural networks (2019), it makes
    a front at x = 0 that is about ν wide.

    The solution is that of Cole and Hopf, u = -2ν φ_x/φ with φ_t = ν φ_xx, as Basdevant et al., Spectral and finite
    difference solutions of the Burgers equation (1986), write it,

        u(x, t) = -∫ sin(π(x - η)) f(x - η) exp(-η²/4νt) dη / ∫ f(x - η) exp(-η²/4νt) dη,  f(y) = exp(-cos(πy)/2πν),

    with both integrals by Gauss-Hermite quadrature in η/√(4νt).

    Args:
        viscosity: ν > 0.

    Raises:
        MisconfigurationException: a viscosity that is not positive.

    Example:
        >>> Burgers().solution(torch.tensor([[-0.5, 0.0], [0.25, 0.5]], dtype=torch.float64))
        tensor([ 1.0000, -...], dtype=torch.float64)
    """

    coordinates = ("x", "t")

    @checked
    def __init__(self, viscosity: float = 0.01 / math.pi) -> None:
        check("viscosity", viscosity, viscosity > 0, "positive")
        self.viscosity = viscosity
        self.domain, self.regions = _line_in_time(-1.0, 1.0)
        roots, weights = np.polynomial.hermite.hermgauss(_QUADRATURE_NODES)
        self._roots, self._log_weights = torch.from_numpy(roots), torch.from_numpy(weights).log()

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "boundary":
            return u(points)
        if block == "initial":
            return u(points) + (math.pi * points[:, 0]).sin()
        values, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        return first[1] + values * first[0] - self.viscosity * second[0]

    def solution(self, points: Tensor) -> Tensor:
        x, t = (column[:, None] for column in points.double().unbind(1))
        y = x - (4 * self.viscosity * t).sqrt() * self._roots.to(points.device)
        # the exponents reach 1/2πν: as a softmax the quotient has no overflow, whatever ν
        exponents = self._log_weights.to(points.device) - (math.pi * y).cos() / (2 * math.pi * self.viscosity)
        return -(exponents.softmax(1) * (math.pi * y).sin()).sum(1).to(points.dtype)
