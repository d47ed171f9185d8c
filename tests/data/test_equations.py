import math

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.data import AllenCahn, Box, Burgers, DifferentialEquation, Heat, KortewegDeVries, Poisson
from lightning_struct.data.equations import check_equation

EQUATIONS = {
    "Poisson, product": Poisson(2),
    "Poisson, product, 3d": Poisson(3),
    "Poisson, sum, 5d": Poisson(5, form="sum"),
    "heat": Heat(),
    "Burgers": Burgers(),
    "Burgers, viscous": Burgers(viscosity=0.1),
    "Allen-Cahn": AllenCahn(),
    "KdV": KortewegDeVries(),
}
# Largest residual of a solution: rounding, and the interpolation of those that are integrated. Terms are up to 100.
LARGEST = {"Allen-Cahn": 1e-5, "KdV": 1e-3}


def points_of(equation, count=50):
    generator = torch.Generator().manual_seed(0)
    return {block: region.sample(count, generator) for block, region in equation.regions.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGEST else []) for name in EQUATIONS]
)
def test_solution_has_no_residual_and_something_else_has_one_in_every_block(name):
    equation = EQUATIONS[name]
    points = points_of(equation)
    residuals = equation.residuals(equation.solution, points)
    assert set(residuals) == set(equation.regions)
    assert max(residual.abs().max() for residual in residuals.values()) < LARGEST.get(name, 1e-11)
    for block, at in points.items():
        (residual,) = equation.residuals(lambda x: equation.solution(x) + (x**2 + 1).sum(1), {block: at}).values()
        assert residual.abs().mean() > 0.1
    with pytest.raises(ValueError, match=f"has no block start: its blocks are {', '.join(points)}"):
        equation.residuals(equation.solution, {"start": torch.zeros(1, 2)})


def test_published_values():
    """Of -Δu = 2π² sin πx sin πy, of u_t = u_xx/4, and of the front of Burgers' equation: its slope at x = 0 is
    largest, 152.00516, at t = 1.6037/π (Basdevant et al. 1986, table 3)."""
    poisson, heat = Poisson(2).solution(torch.tensor([[0.5, 0.5]])), Heat().solution(torch.tensor([[0.5, 1.0]]))
    assert poisson.item() == pytest.approx(1) and heat.item() == pytest.approx(math.exp(-(math.pi**2) / 4))
    step = 1e-7
    front = torch.tensor([[-step, 1.6037 / math.pi], [step, 1.6037 / math.pi]], dtype=torch.float64)
    left, right = Burgers().solution(front)
    assert (right - left).item() / (2 * step) == pytest.approx(-152.00516, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0), "dimension must be at least 1, but is 0"),
        (lambda: Poisson(2, form="sine"), "'product' or 'sum', but is 'sine'"),
        (lambda: Heat(0.0), "conductivity must be positive"),
        (lambda: Burgers(-1.0), "viscosity must be positive"),
        (lambda: AllenCahn(diffusion=0.0), "diffusion must be positive"),
        (lambda: KortewegDeVries(0.001), "dispersion must be at least 0.02, but is 0.001"),
    ],
)
def test_arguments_that_make_no_equation(make, message):
    with pytest.raises(MisconfigurationException, match=message):
        make()


def test_solution_outside_of_the_domain_is_refused():
    with pytest.raises(ValueError, match=r"domain of AllenCahn is from .*: the point \[2.0, 0.5\] is outside"):
        AllenCahn().solution(torch.tensor([[0.0, 0.5], [2.0, 0.5]]))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"regions": {"interior": Box([0.0, 0.0], [1.0, 1.0])}}, "time=1, but no block 'initial'"),
        ({"time": 2}, r"time=2 and periodic=\(0,\), which must be different ones of the coordinates 0 to 1"),
        ({"periodic": (1,)}, r"time=1 and periodic=\(1,\)"),
    ],
)
def test_time_and_periods_that_are_none(attributes, message):
    regions = {"interior": Box([0.0, 0.0], [1.0, 1.0]), "initial": Box([0.0, 0.0], [1.0, 0.0])}
    described = {"domain": regions["interior"], "regions": regions, "time": 1, "periodic": (0,), **attributes}
    kind = type(
        "Evolving", (DifferentialEquation,), {**described, "residual": lambda self, block, u, points: u(points)}
    )
    with pytest.raises(MisconfigurationException, match=message):
        check_equation(kind())
