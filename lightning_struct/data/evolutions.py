"""Equations of evolution in time, whose solutions are closed forms or are integrated once, when they are first used."""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_struct.data.equations import Box, DifferentialEquation, Faces, Field
from lightning_struct.functional.checks import checked
from lightning_struct.functional.jacobian.derivatives import partial_derivatives
from lightning_struct.utilities.checks import check

# Neighbouring entries of a table that a value between them is interpolated from, along each coordinate.
_STENCIL = 8


class _Integrated(DifferentialEquation):
    """An equation with a solution that is integrated numerically, and interpolated between the entries of a table."""

    @abstractmethod
    def _integrate(self) -> np.ndarray:
        """Values on a regular grid of the domain, ends included, with an axis for each coordinate."""

    @cached_property
    def _table(self) -> Tensor:
        return torch.from_numpy(self._integrate())

    def solution(self, points: Tensor) -> Tensor:
        """The solution at points (n, d) of the domain: (n,).

        Raises:
            ValueError: a point outside of the domain.
        """
        self.domain.check_inside(points, f"The domain of {type(self).__name__}")
        low, high, at = self.domain.low, self.domain.high, points.to("cpu", torch.float64)
        shares = ((at - low) / (high - low)).unbind(1)
        stencils = [_stencil(share * (size - 1), size) for share, size in zip(shares, self._table.shape, strict=True)]
        values = self._table[tuple(_along(axis, len(shares), index) for axis, (index, _) in enumerate(stencils))]
        for axis, (_, weights) in enumerate(stencils):
            values = values * _along(axis, len(shares), weights)
        return values.flatten(1).sum(1).to(points)


class AllenCahn(_Integrated):
    """The Allen-Cahn equation u_t = ε u_xx + ρ (u - u³), u(x, 0) = x² cos πx, periodic in x on [-1, 1], t in [0, 1].

    With ε = 1e-4 and ρ = 5 it is an example of Raissi, Perdikaris & Karniadakis, Physics-informed neural networks
    (2019). The periodic initial value has a kink at x = 1. The solution is integrated with 4,096 Fourier modes and
    steps of 1e-3, see :func:`_runge_kutta`; its relative error is about 1e-7.

    Args:
        diffusion: ε > 0.
        reaction: ρ > 0.

    Raises:
        MisconfigurationException: a coefficient that is not positive.

    Example:
        >>> AllenCahn().solution(torch.tensor([[-0.5, 0.0], [0.0, 1.0]], dtype=torch.float64)).shape
        torch.Size([2])
    """

    coordinates, time, periodic = ("x", "t"), 1, (0,)

    @checked
    def __init__(self, diffusion: float = 1e-4, reaction: float = 5.0) -> None:
        check("diffusion", diffusion, diffusion > 0, "positive")
        check("reaction", reaction, reaction > 0, "positive")
        self.diffusion, self.reaction = diffusion, reaction
        self.domain = Box([-1.0, 0.0], [1.0, 1.0])
        self.regions = {"interior": self.domain, "initial": Box([-1.0, 0.0], [1.0, 0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "initial":
            x = points[:, 0]
            return u(points) - x**2 * (math.pi * x).cos()
        values, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        return first[1] - self.diffusion * second[0] - self.reaction * (values - values**3)

    def _integrate(self) -> np.ndarray:
        x, waves = _places_and_waves(4096)
        rates = self.reaction - self.diffusion * waves**2

        def reaction(modes: np.ndarray) -> np.ndarray:
            return -self.reaction * np.fft.rfft(np.fft.irfft(modes) ** 3)

        modes = _runge_kutta(np.fft.rfft(x**2 * np.cos(np.pi * x)), rates, reaction, 1.0, steps=1000, every=2)
        return _on_grid(modes, 4096)


class KortewegDeVries(_Integrated):
    """The Korteweg-de Vries equation u_t + u u_x + δ² u_xxx = 0, u(x, 0) = cos πx, periodic on [-1, 1], t in [0, 1].

    With δ = .022 it is that of Zabusky & Kruskal, Interaction of "solitons" in a collisionless plasma and the
    recurrence of initial states (1965): the cosine steepens, and ends as a train of solitons. The solution is
    integrated with 512 Fourier modes and steps of 1e-4, see :func:`_runge_kutta`; its relative error is about 1e-9.

    Args:
        dispersion: δ > 0; below .02 its solitons are too narrow for the 512 modes.

    Raises:
        MisconfigurationException: a dispersion below .02.

    Example:
        >>> KortewegDeVries().solution(torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
        tensor([ 1., -1.], dtype=torch.float64)
    """

    coordinates, time, periodic = ("x", "t"), 1, (0,)

    @checked
    def __init__(self, dispersion: float = 0.022) -> None:
        check("dispersion", dispersion, dispersion >= 0.02, "at least 0.02")
        self.dispersion = dispersion
        self.domain = Box([-1.0, 0.0], [1.0, 1.0])
        self.regions = {"interior": self.domain, "initial": Box([-1.0, 0.0], [1.0, 0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "initial":
            return u(points) - (math.pi * points[:, 0]).cos()
        found = partial_derivatives(u, points, once=[1], thrice=[0])
        return found.first[1] + found.values * found.first[0] + self.dispersion**2 * found.third[0]

    def _integrate(self) -> np.ndarray:
        x, waves = _places_and_waves(512)

        def advection(modes: np.ndarray) -> np.ndarray:
            return -0.5j * waves * np.fft.rfft(np.fft.irfft(modes) ** 2)

        rates = 1j * self.dispersion**2 * waves**3
        modes = _runge_kutta(np.fft.rfft(np.cos(np.pi * x)), rates, advection, 1.0, steps=10_000, every=20)
        return _on_grid(modes, 2048)


class Wave(DifferentialEquation):
    """The wave equation u_tt = c² u_xx for x and t in [0, 1], zero at both ends, from rest.

    It begins as sin πx + ½ sin 4πx, and its solution is sin πx cos cπt + ½ sin 4πx cos 4cπt. With c = 2 it is an
    example of Wang, Yu & Perdikaris, When and why PINNs fail to train (2022).

    Args:
        speed: c > 0.

    Raises:
        MisconfigurationException: a speed that is not positive.

    Example:
        >>> equation, points = Wave(), torch.rand(3, 2, dtype=torch.float64)
        >>> equation.residual("interior", equation.solution, points).abs().max() < 1e-10
        tensor(True)
    """

    coordinates, time = ("x", "t"), 1

    @checked
    def __init__(self, speed: float = 2.0) -> None:
        check("speed", speed, speed > 0, "positive")
        self.speed = speed
        self.domain = Box([0.0, 0.0], [1.0, 1.0])
        ends = Faces(self.domain, coordinates=[0])
        self.regions = {"interior": self.domain, "boundary": ends, "initial": Box([0.0, 0.0], [1.0, 0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "boundary":
            return u(points)
        if block == "initial":
            values, first, _ = partial_derivatives(u, points, once=[1])
            x = math.pi * points[:, 0]
            return torch.stack([values - x.sin() - 0.5 * (4 * x).sin(), first[1]], dim=1)
        _, _, second = partial_derivatives(u, points, twice=[0, 1])
        return second[1] - self.speed**2 * second[0]

    def solution(self, points: Tensor) -> Tensor:
        x, t = (math.pi * points).unbind(1)
        return x.sin() * (self.speed * t).cos() + 0.5 * (4 * x).sin() * (4 * self.speed * t).cos()


class Convection(DifferentialEquation):
    """Convection u_t + β u_x = 0, u(x, 0) = sin x, periodic in x on [0, 2π], t in [0, 1]; u(x, t) = sin(x - βt).

    With β = 30 it is an example of Krishnapriyan et al., Characterizing possible failure modes in physics-informed
    neural networks (2021).

    Args:
        speed: β.

    Raises:
        TypeError: a speed that is no number.

    Example:
        >>> equation, points = Convection(), torch.rand(3, 2, dtype=torch.float64)
        >>> equation.residual("interior", equation.solution, points).abs().max() < 1e-12
        tensor(True)
    """

    coordinates, time, periodic = ("x", "t"), 1, (0,)

    @checked
    def __init__(self, speed: float = 30.0) -> None:
        self.speed = speed
        self.domain = Box([0.0, 0.0], [2 * math.pi, 1.0])
        self.regions = {"interior": self.domain, "initial": Box([0.0, 0.0], [2 * math.pi, 0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "initial":
            return u(points) - points[:, 0].sin()
        _, first, _ = partial_derivatives(u, points, once=[0, 1])
        return first[1] + self.speed * first[0]

    def solution(self, points: Tensor) -> Tensor:
        return (points[:, 0] - self.speed * points[:, 1]).sin()


class VanDerPol(_Integrated):
    """Van der Pol's oscillator u'' = μ (1 - u²) u' - u with u = 2 and u' = 0 at t = 0, t in [0, 10].

    The solution is integrated by steps of 5e-4, see :func:`_runge_kutta`; with μ = 5 its error is about 1e-11.

    Args:
        damping: μ, from 0 to 20.

    Raises:
        MisconfigurationException: a damping out of range.

    Example:
        >>> VanDerPol().solution(torch.tensor([[0.0], [10.0]], dtype=torch.float64))
        tensor([ 2.0000, -...], dtype=torch.float64)
    """

    coordinates, time = ("t",), 0

    @checked
    def __init__(self, damping: float = 5.0) -> None:
        check("damping", damping, 0 <= damping <= 20, "from 0 to 20")
        self.damping = damping
        self.domain = Box([0.0], [10.0])
        self.regions = {"interior": self.domain, "initial": Box([0.0], [0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "initial":
            values, first, _ = partial_derivatives(u, points, once=[0])
            return torch.stack([values - 2.0, first[0]], dim=1)
        values, first, second = partial_derivatives(u, points, twice=[0])
        return second[0] - self.damping * (1 - values**2) * first[0] + values

    def _integrate(self) -> np.ndarray:
        def slopes(state: np.ndarray) -> np.ndarray:
            u, v = state
            return np.array([v, self.damping * (1 - u * u) * v - u])

        states = _runge_kutta(np.array([2.0, 0.0]), np.zeros(2), slopes, 10.0, steps=20_000, every=4)
        return states[:, 0].copy()


def _runge_kutta(
    state: np.ndarray,
    rates: np.ndarray,
    slopes: Callable[[np.ndarray], np.ndarray],
    end: float,
    *,
    steps: int,
    every: int,
) -> np.ndarray:
    """States of y' = rates y + slopes(y), from the first to that at the end, each so many steps of one length.

    The classical method of order four for exp(-rates t) y: the linear part is exact.
    """
    h, states = end / steps, [state]
    half = np.exp(rates * h / 2)
    for step in range(1, steps + 1):
        a = h * slopes(state)
        b = h * slopes(half * (state + a / 2))
        c = h * slopes(half * state + b / 2)
        d = h * slopes(half * (half * state + c))
        state = half * (half * (state + a / 6) + (b + c) / 3) + d / 6
        if step % every == 0:
            states.append(state)
    return np.array(states)


def _places_and_waves(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Regular places of the periodic interval [-1, 1], (count,), and the wave numbers of real functions there."""
    return -1 + 2 * np.arange(count) / count, np.pi * np.arange(count // 2 + 1)


def _on_grid(modes: np.ndarray, count: int) -> np.ndarray:
    """Functions (count + 1, times) on regular places, both ends of the period included, from their modes by time."""
    values = np.fft.irfft(modes, count) * (count / (2 * modes.shape[1] - 2))
    return np.concatenate([values, values[:, :1]], axis=1).T


def _stencil(position: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The entries of an axis next to positions (n,), and their weights by Lagrange's polynomials: both (n, 8)."""
    first = (position.floor().long() - _STENCIL // 2 + 1).clamp(0, size - _STENCIL)
    nodes = torch.arange(_STENCIL)
    away = (position - first)[:, None] - nodes
    between = nodes[:, None] - nodes
    factors = torch.where(between == 0, 1.0, away[:, None] / between.where(between != 0, 1))
    return first[:, None] + nodes, factors.prod(-1)


def _along(axis: int, dimension: int, numbers: Tensor) -> Tensor:
    """Numbers (n, 8) of one axis of several, as (n, 1, .., 8, .., 1)."""
    return numbers.reshape(len(numbers), *(_STENCIL if i == axis else 1 for i in range(dimension)))
