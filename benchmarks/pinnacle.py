"""Errors on problems of PINNacle over CPU time, by SHF and by what others use.

    OMP_NUM_THREADS=1 python benchmarks/pinnacle.py [--problems poisson_holes ...] [--seconds 120]
        [--seeds 0 1 2] [--methods ...]

The problems are those of Hao et al., PINNacle: a comprehensive benchmark of physics-informed neural networks for
solving PDEs (2024). Runs, methods, points and what is printed are those of ``least_squares.py``, points drawn anew
included. The error is taken at the points of the reference, if a problem has one. Two references of PINNacle must be in
``data/pinnacle``: ``poisson1_cg_data.dat.gz`` and ``lid_driven_a4.dat.gz``, tables of coordinates and values. That of
the Kuramoto-Sivashinsky equation is made here, by a Fourier method with 512 points and 20,000 steps in time.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from least_squares import Problem, Wave, run_problems
from lightning_struct.data import Ball, Box, Faces, Product, Segment, Sphere, Union, Without
from lightning_struct.data.equations import DifferentialEquation, Field
from lightning_struct.functional import laplacian, partial_derivatives

ALPHA, BETA, GAMMA = 100 / 16, 100 / 16**2, 100 / 16**4  # of the Kuramoto-Sivashinsky equation
METHODS = ("SHF", "Adam", "Adam, then L-BFGS", "SSBroyden")


def table(name: str) -> tuple[Tensor, Tensor]:
    """Points (n, 2) and values (n,) or (n, k) of a file of PINNacle."""
    rows = torch.from_numpy(np.loadtxt(Path("data/pinnacle") / name, comments="%"))
    return rows[:, :2], rows[:, 2:].squeeze(1)


class PoissonWithHoles(DifferentialEquation):
    """Δu = 0 in a square without four discs, u = 1 on the square's sides and 0 on the circles."""

    coordinates, domain = ("x", "y"), Box([-0.5, -0.5], [0.5, 0.5])

    def __init__(self) -> None:
        centers = list(product((-0.3, 0.3), repeat=2))
        self.regions = {
            "interior": Without(self.domain, *(Ball(center, 0.1) for center in centers)),
            "sides": Faces(self.domain),
            "circles": Union(*(Sphere(center, 0.1) for center in centers)),
        }
        self.reference = table("poisson1_cg_data.dat.gz")

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        return laplacian(u, points) if block == "interior" else u(points) - float(block == "sides")


class WaveAtOnce(Wave):
    """The wave equation, all times together."""

    time = None


class Cavity(DifferentialEquation):
    """The stationary flow u, v with the pressure p in a square whose lid moves with the speed 4x(1 - x), ν = .01."""

    coordinates, unknowns, domain = ("x", "y"), 3, Box([0.0, 0.0], [1.0, 1.0])

    def __init__(self) -> None:
        walls = (Segment([0.0, 1.0], [0.0, 0.0]), Segment([0.0, 0.0], [1.0, 0.0]), Segment([1.0, 0.0], [1.0, 1.0]))
        lid, origin = Segment([0.0, 1.0], [1.0, 1.0]), Box([0.0, 0.0], [0.0, 0.0])
        self.regions = {"interior": self.domain, "lid": lid, "walls": Union(*walls), "origin": origin}
        self.reference = table("lid_driven_a4.dat.gz")

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "origin":
            return u(points)[:, 2]
        if block != "interior":
            x = points[:, 0]
            speed = 4 * x * (1 - x) * (block == "lid")
            return u(points)[:, :2] - torch.stack([speed, 0 * x], dim=1)
        values, first, second = partial_derivatives(u, points, twice=[0, 1])
        u_x, u_y = first[0], first[1]
        flow = values[:, :1] * u_x + values[:, 1:2] * u_y - 0.01 * (second[0] + second[1])
        momentum = flow[:, :2] + torch.stack([u_x[:, 2], u_y[:, 2]], dim=1)
        return torch.cat([momentum, u_x[:, :1] + u_y[:, 1:2]], dim=1)


class HeatInBall(DifferentialEquation):
    """u_t = Δu/5 + f in the unit ball in five dimensions; the solution is exp(‖x‖²/2 + t)."""

    coordinates, domain = (*(f"x{i}" for i in range(1, 6)), "t"), Box([-1.0] * 5 + [0.0], [1.0] * 6)

    def __init__(self) -> None:
        ball, times = Ball([0.0] * 5, 1.0), Box([0.0], [1.0])
        sphere, start = Product(Sphere([0.0] * 5, 1.0), times), Product(ball, Box([0.0], [0.0]))
        self.regions = {"interior": Product(ball, times), "boundary": sphere, "initial": start}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        x, t = points[:, :5], points[:, 5]
        if block == "initial":
            return u(points) - self.solution(points)
        if block == "boundary":
            _, first, _ = partial_derivatives(u, points, once=range(5))
            return sum(x[:, i] * first[i] for i in range(5)) - (0.5 + t).exp()
        _, first, second = partial_derivatives(u, points, once=[5], twice=range(5))
        return first[5] - sum(second.values()) / 5 + x.square().sum(1) / 5 * self.solution(points)

    def solution(self, points: Tensor) -> Tensor:
        return (points[:, :5].square().sum(1) / 2 + points[:, 5]).exp()


class PoissonInCube(DifferentialEquation):
    """Δu = -π²/4 Σ sin(πx_i/2) in five dimensions, with the values of the solution on the faces."""

    coordinates, domain = tuple(f"x{i}" for i in range(1, 6)), Box([0.0] * 5, [1.0] * 5)

    def __init__(self) -> None:
        self.regions = {"interior": self.domain, "boundary": Faces(self.domain)}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        solution = self.solution(points)
        return u(points) - solution if block == "boundary" else laplacian(u, points) + math.pi**2 / 4 * solution

    def solution(self, points: Tensor) -> Tensor:
        return (math.pi / 2 * points).sin().sum(1)


class KuramotoSivashinsky(DifferentialEquation):
    """u_t + α u u_x + β u_xx + γ u_xxxx = 0 on a circle, u = cos x (1 + sin x) at t = 0, to t = .5.

    α = 100/16, β = 100/16², γ = 100/16⁴.
    """

    coordinates, time, periodic = ("x", "t"), 1, (0,)
    domain = Box([0.0, 0.0], [2 * math.pi, 0.5])

    def __init__(self) -> None:
        self.regions = {"interior": self.domain, "initial": Box([0.0, 0.0], [2 * math.pi, 0.0])}
        self.reference = integrated_kuramoto_sivashinsky()

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "initial":
            x = points[:, 0]
            return u(points) - x.cos() * (1 + x.sin())

        def third(at: Tensor) -> Tensor:
            return partial_derivatives(u, at, thrice=[0]).third[0]

        values, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        fourth = partial_derivatives(third, points, once=[0]).first[0]
        return first[1] + ALPHA * values * first[0] + BETA * second[0] + GAMMA * fourth


@cache
def integrated_kuramoto_sivashinsky(count: int = 512, steps: int = 20_000) -> tuple[Tensor, Tensor]:
    """Points and values on a mesh of 128 places and 51 times, by the classical method of order four.

    It integrates exp(-L t) u, L the linear part, in Fourier modes.
    """
    x, waves, h = 2 * np.pi * np.arange(count) / count, np.arange(count // 2 + 1), 0.5 / steps
    half = np.exp((BETA * waves**2 - GAMMA * waves**4) * h / 2)
    is_kept = waves <= count // 3

    def slopes(modes: np.ndarray) -> np.ndarray:
        return -0.5j * h * ALPHA * waves * is_kept * np.fft.rfft(np.fft.irfft(modes) ** 2)

    state = np.fft.rfft(np.cos(x) * (1 + np.sin(x)))
    states = [state]
    for step in range(1, steps + 1):
        a = slopes(state)
        b = slopes(half * (state + a / 2))
        c = slopes(half * state + b / 2)
        d = slopes(half * (half * state + c))
        state = half * (half * (state + a / 6) + (b + c) / 3) + d / 6
        if step % (steps // 50) == 0:
            states.append(state)
    values = torch.from_numpy(np.fft.irfft(np.array(states))[:, :: count // 128])
    times = torch.linspace(0, 0.5, 51, dtype=torch.float64)
    places = torch.from_numpy(x[:: count // 128])
    return torch.cartesian_prod(places, times), values.T.reshape(-1)


FLOW, HEATED = {"interior": 1600, "lid": 200, "walls": 400, "origin": 1}, {"interior": 1200, "boundary": 400}
HOLES, STRIP = {"interior": 1000, "sides": 200, "circles": 200}, {"interior": 1000, "boundary": 200, "initial": 200}
PROBLEMS = {
    "poisson_holes": Problem("Poisson with holes", PoissonWithHoles, [24] * 3, HOLES, redrawn=True),
    "wave": Problem("wave", WaveAtOnce, [24] * 3, STRIP, redrawn=True),
    "cavity": Problem("cavity", Cavity, [20] * 3, FLOW, redrawn=True),
    "heat_nd": Problem("heat 5d", HeatInBall, [20, 20], {**HEATED, "initial": 400}, redrawn=True),
    "poisson_nd": Problem("Poisson 5d", PoissonInCube, [64], HEATED, redrawn=True),
    "kuramoto_sivashinsky": Problem(
        "Kuramoto-Sivashinsky", KuramotoSivashinsky, [24, 24], {"interior": 1200, "initial": 120}, redrawn=True
    ),
}


def main() -> None:
    run_problems(__doc__, "pinnacle", PROBLEMS, METHODS, seconds=120.0)


if __name__ == "__main__":
    main()
