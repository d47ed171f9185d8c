"""Differential equations with their conditions: the regions in which they hold, and residuals of a function there."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_struct.data.regions import Box, Faces, Region
from lightning_struct.functional.checks import Points, check_calls, checked
from lightning_struct.functional.jacobian.derivatives import laplacian, partial_derivatives
from lightning_struct.utilities.checks import check, check_counts, is_count
from lightning_struct.utilities.namespaces import MisconfigurationException

# Points (n, d) to values (n,), or (n, k) for k unknown functions, each row by itself.
Field: TypeAlias = Callable[[Tensor], Tensor]

# Half as many integrate the example to rounding; from 400 on NumPy's weights underflow.
_QUADRATURE_NODES = 200


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
        reference: of a solution that another method computed, points (n, d) and the values there, (n,) or (n, k), as on
            a mesh. None by default.

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
    reference: tuple[Tensor, Tensor] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_calls(cls, "residual", "solution")

    @abstractmethod
    def residual(self, block: str, u: Field, points: Points) -> Tensor:
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

    def solution(self, points: Points) -> Tensor:
        """The solution at points (n, d): in the shape of the values of ``u``, mostly (n,).

        Raises:
            NotImplementedError: it is not known.
        """
        raise NotImplementedError(f"{type(self).__name__} has no solution that is known")

    @property
    def is_solved(self) -> bool:
        """Whether :meth:`solution` is known."""
        return type(self).solution is not DifferentialEquation.solution

    def known(self, points: Tensor) -> tuple[Tensor, Tensor] | None:
        """Points with the values of the solution: these points, those of the reference, or None if neither is known."""
        if self.reference is None:
            return (points, self.solution(points)) if self.is_solved else None
        at, values = self.reference
        return at.to(points), values.to(points)


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
    at, values = equation.reference or (torch.zeros(1, dimension), torch.zeros(1))
    fits = at.shape == (len(values), dimension) and bool(at.isfinite().all() and values.isfinite().all())
    shapes = tuple(at.shape), tuple(values.shape)
    check(f"reference of {name}", shapes, fits, f"finite points (n, {dimension}) and values (n,) or (n, k)")
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
        check("dimension", dimension, dimension <= 64, "at most 64")
        check_counts(dimension=dimension)
        check("form", form, form in ("product", "sum"), "'product' or 'sum'")
        self.form = form
        self.domain = Box([0.0] * dimension, [1.0] * dimension)
        self.regions = {"interior": self.domain, "boundary": Faces(self.domain)}
        self.coordinates = tuple("xyz"[:dimension] if dimension <= 3 else [f"x{i + 1}" for i in range(dimension)])

    def residual(self, block: str, u: Field, points: Points) -> Tensor:
        if block == "boundary":
            return u(points) - self.solution(points)
        eigenvalue = math.pi**2 * (points.shape[1] if self.form == "product" else 1)  # -Δu = f is a multiple of u
        return -laplacian(u, points) - eigenvalue * self.solution(points)

    def solution(self, points: Points) -> Tensor:
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
        check("conductivity", conductivity, 0 < conductivity < math.inf, "positive and finite")
        self.conductivity = conductivity
        self.domain, self.regions = _line_in_time(0.0, 1.0)

    def residual(self, block: str, u: Field, points: Points) -> Tensor:
        if block == "boundary":
            return u(points)
        if block == "initial":
            return u(points) - (math.pi * points[:, 0]).sin()
        _, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        return first[1] - self.conductivity * second[0]

    def solution(self, points: Points) -> Tensor:
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
        check("viscosity", viscosity, 0 < viscosity < math.inf, "positive and finite")
        self.viscosity = viscosity
        self.domain, self.regions = _line_in_time(-1.0, 1.0)
        roots, weights = np.polynomial.hermite.hermgauss(_QUADRATURE_NODES)
        self._roots, self._log_weights = torch.from_numpy(roots), torch.from_numpy(weights).log()

    def residual(self, block: str, u: Field, points: Points) -> Tensor:
        if block == "boundary":
            return u(points)
        if block == "initial":
            return u(points) + (math.pi * points[:, 0]).sin()
        values, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        return first[1] + values * first[0] - self.viscosity * second[0]

    def solution(self, points: Points) -> Tensor:
        x, t = (column[:, None] for column in points.double().unbind(1))
        y = x - (4 * self.viscosity * t).sqrt() * self._roots.to(points.device)
        # the exponents reach 1/2πν: as a softmax the quotient has no overflow, whatever ν
        exponents = self._log_weights.to(points.device) - (math.pi * y).cos() / (2 * math.pi * self.viscosity)
        return -(exponents.softmax(1) * (math.pi * y).sin()).sum(1).to(points.dtype)
