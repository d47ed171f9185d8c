"""Periodic equations of evolution in time, whose solutions are integrated once, when they are first used."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lightning_struct.data.equations import Box, DifferentialEquation, Field, Region
from lightning_struct.functional.checks import Points, checked
from lightning_struct.functional.jacobian.derivatives import partial_derivatives
from lightning_struct.utilities.checks import check

# Neighbouring entries of a table that a value between them is interpolated from, along each coordinate.
_STENCIL = 8


class _Integrated(DifferentialEquation):
    """An equation of x in [-1, 1], periodic, and t in [0, 1], with a solution that is interpolated in a table."""

    coordinates, time, periodic = ("x", "t"), 1, (0,)
    domain = Box([-1.0, 0.0], [1.0, 1.0])
    regions: Mapping[str, Region] = {"interior": domain, "initial": Box([-1.0, 0.0], [1.0, 0.0])}

    @abstractmethod
    def _table(self) -> Tensor:
        """Values (places, times) on a regular grid of the domain, ends included."""

    def solution(self, points: Points) -> Tensor:
        """The solution at points (n, 2) of the domain: (n,).

        Raises:
            ValueError: a point outside of the domain.
        """
        self.domain.check_inside(points, f"The domain of {type(self).__name__}")
        x, t = points.to("cpu", torch.float64).unbind(1)
        table = self._table()
        places, of_x = _stencil((x + 1) / 2, table.shape[0])
        times, of_t = _stencil(t, table.shape[1])
        values = table[places[:, :, None], times[:, None]] * of_x[:, :, None] * of_t[:, None]
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

    @checked
    def __init__(self, diffusion: float = 1e-4, reaction: float = 5.0) -> None:
        check("diffusion", diffusion, 0 < diffusion < math.inf, "positive and finite")
        check("reaction", reaction, 0 < reaction < math.inf, "positive and finite")
        self.diffusion, self.reaction = diffusion, reaction

    def residual(self, block: str, u: Field, points: Points) -> Tensor:
        if block == "initial":
            x = points[:, 0]
            return u(points) - x**2 * (math.pi * x).cos()
        values, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        return first[1] - self.diffusion * second[0] - self.reaction * (values - values**3)

    def _table(self) -> Tensor:
        return _allen_cahn(self.diffusion, self.reaction)


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

    @checked
    def __init__(self, dispersion: float = 0.022) -> None:
        check("dispersion", dispersion, 0.02 <= dispersion < math.inf, "at least 0.02")
        self.dispersion = dispersion

    def residual(self, block: str, u: Field, points: Points) -> Tensor:
        if block == "initial":
            return u(points) - (math.pi * points[:, 0]).cos()
        found = partial_derivatives(u, points, once=[1], thrice=[0])
        return found.first[1] + found.values * found.first[0] + self.dispersion**2 * found.third[0]

    def _table(self) -> Tensor:
        return _korteweg_de_vries(self.dispersion)


@cache
def _allen_cahn(diffusion: float, reaction: float) -> Tensor:
    x, waves = _places_and_waves(4096)

    def slopes(modes: np.ndarray) -> np.ndarray:
        return -reaction * np.fft.rfft(np.fft.irfft(modes) ** 3)

    start, rates = np.fft.rfft(x**2 * np.cos(np.pi * x)), reaction - diffusion * waves**2
    return _on_grid(_runge_kutta(start, rates, slopes, steps=1000, every=2), 4096)


@cache
def _korteweg_de_vries(dispersion: float) -> Tensor:
    x, waves = _places_and_waves(512)

    def slopes(modes: np.ndarray) -> np.ndarray:
        return -0.5j * waves * np.fft.rfft(np.fft.irfft(modes) ** 2)

    start, rates = np.fft.rfft(np.cos(np.pi * x)), 1j * dispersion**2 * waves**3
    return _on_grid(_runge_kutta(start, rates, slopes, steps=10_000, every=20), 2048)


def _runge_kutta(
    state: np.ndarray, rates: np.ndarray, slopes: Callable[[np.ndarray], np.ndarray], *, steps: int, every: int
) -> np.ndarray:
    """States of y' = rates y + slopes(y) for t from 0 to 1, those after each so many steps of one length.

    The classical method of order four for exp(-rates t) y: the linear part is exact.
    """
    h, states = 1 / steps, [state]
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


def _on_grid(modes: np.ndarray, count: int) -> Tensor:
    """Functions (count + 1, times) on regular places, both ends of the period included, from their modes by time."""
    values = np.fft.irfft(modes, count) * (count / (2 * modes.shape[1] - 2))
    return torch.from_numpy(np.concatenate([values, values[:, :1]], axis=1).T)


def _stencil(share: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The entries of an axis next to shares (n,) of its length, and their weights by Lagrange's polynomials: (n, 8)."""
    position = share * (size - 1)
    first = (position.floor().long() - _STENCIL // 2 + 1).clamp(0, size - _STENCIL)
    nodes = torch.arange(_STENCIL)
    away = (position - first)[:, None] - nodes
    between = nodes[:, None] - nodes
    factors = torch.where(between == 0, 1.0, away[:, None] / between.where(between != 0, 1))
    return first[:, None] + nodes, factors.prod(-1)
