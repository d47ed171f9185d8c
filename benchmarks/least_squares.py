"""Errors of physics-informed networks over CPU time, by SHF and by what others use.

    OMP_NUM_THREADS=1 python benchmarks/least_squares.py [--problems poisson2d ...] [--seconds 60]
        [--seeds 0 1 2] [--methods ...]

Each run trains one network on one problem, in ``--dtype``, for ``--seconds`` of CPU time; measuring the error is not
counted. The error is the relative L2 error on 10,000 points of the domain, against the known solution. All methods
start from the same weights. The points are fixed and the same for all, but for Burgers' equation. There they are drawn
anew as ``PointsDataModule`` does by default, a fifth of them where the residual of the method's network is large, and
in a number that grows to at most ten for each parameter: every 5 steps of SHF and of torch-levenberg-marquardt, every
100 of Adam and SOAP, every 200 of SSBroyden, and every 10 of L-BFGS with up to 20 iterations each. Adam has the rate
1e-3, SOAP its default, 3e-3. L-BFGS has the line search by the strong Wolfe conditions and a history of 50. SSBroyden,
a Broyden update of the whole inverse Hessian matrix that scales itself, has the same line search; "Adam, then ..." has
half of the time each. SHF has two arguments, ``SHF(module, "least_squares")``; "SHF, exact" is with the exact solver
where SHF would choose LSMR, and "SHF, no corrections" takes the solutions of the linear problems as they are. Equations
that have a time are solved in ten intervals of time by an ``IntervalNetwork``, by all methods: from the third step on
the intervals share the seconds, and the first has two shares. A rival that is not installed is said to be so:

    torch-levenberg-marquardt    pip install torch-levenberg-marquardt
    SOAP                         pip install pytorch-optimizer

SHF's solutions are drawn beside the runs. Printed is the error after parts of the time, the median over seeds with the
lowest and the highest. Where points are drawn anew the error moves up and down from step to step; there it is that of
the weights with the lowest loss so far on points that are not trained on, which are those that
``ModelCheckpoint(monitor="val_loss")`` keeps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn
from torch.optim.lbfgs import _strong_wolfe

import harness
from lightning_struct.callbacks.solution_plot import plot_solution
from lightning_struct.data import AllenCahn, Box, Faces, KortewegDeVries
from lightning_struct.data.equations import Burgers, DifferentialEquation, Field, Heat, Poisson
from lightning_struct.data.points import PointDraws
from lightning_struct.functional import LeastSquares, partial_derivatives
from lightning_struct.models.pinn import IntervalNetwork, make_network
from lightning_struct.optim import SHF, LevenbergMarquardt

TIMES = (10, 30, 60, 100, 120, 150, 200, 300, 600, 1000)
RESIDUAL_SHARE = 0.2  # the default of PointsDataModule


class Wave(DifferentialEquation):
    """u_tt = 4 u_xx for x and t in [0, 1], zero at both ends, from rest (Wang, Yu & Perdikaris 2022)."""

    coordinates, time, domain = ("x", "t"), 1, Box([0.0, 0.0], [1.0, 1.0])

    def __init__(self) -> None:
        ends, start = Faces(self.domain, coordinates=[0]), Box([0.0, 0.0], [1.0, 0.0])
        self.regions = {"interior": self.domain, "boundary": ends, "initial": start}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "boundary":
            return u(points)
        if block == "initial":
            values, first, _ = partial_derivatives(u, points, once=[1])
            x = math.pi * points[:, 0]
            return torch.stack([values - x.sin() - 0.5 * (4 * x).sin(), first[1]], dim=1)
        _, _, second = partial_derivatives(u, points, twice=[0, 1])
        return second[1] - 4.0 * second[0]

    def solution(self, points: Tensor) -> Tensor:
        x, t = (math.pi * points).unbind(1)
        return x.sin() * (2 * t).cos() + 0.5 * (4 * x).sin() * (8 * t).cos()


class Convection(DifferentialEquation):
    """u_t + 30 u_x = 0, u(x, 0) = sin x, periodic in x on [0, 2π], t in [0, 1] (Krishnapriyan et al. 2021)."""

    coordinates, time, periodic, domain = ("x", "t"), 1, (0,), Box([0.0, 0.0], [2 * math.pi, 1.0])

    def __init__(self) -> None:
        self.regions = {"interior": self.domain, "initial": Box([0.0, 0.0], [2 * math.pi, 0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "initial":
            return u(points) - points[:, 0].sin()
        _, first, _ = partial_derivatives(u, points, once=[0, 1])
        return first[1] + 30.0 * first[0]

    def solution(self, points: Tensor) -> Tensor:
        return (points[:, 0] - 30.0 * points[:, 1]).sin()


class VanDerPol(DifferentialEquation):
    """u'' = 5 (1 - u²) u' - u with u = 2 and u' = 0 at t = 0, t in [0, 10]; integrated by SciPy to 1e-11."""

    coordinates, time, domain = ("t",), 0, Box([0.0], [10.0])

    def __init__(self) -> None:
        self.regions = {"interior": self.domain, "initial": Box([0.0], [0.0])}

    def residual(self, block: str, u: Field, points: Tensor) -> Tensor:
        if block == "initial":
            values, first, _ = partial_derivatives(u, points, once=[0])
            return torch.stack([values - 2.0, first[0]], dim=1)
        values, first, second = partial_derivatives(u, points, twice=[0])
        return second[0] - 5.0 * (1 - values**2) * first[0] + values

    def solution(self, points: Tensor) -> Tensor:
        at, places = points[:, 0].sort()
        found = solve_ivp(
            lambda t, y: (y[1], 5.0 * (1 - y[0] ** 2) * y[1] - y[0]), (0.0, 10.0), (2.0, 0.0), "DOP853",
            t_eval=at.numpy(), rtol=1e-13, atol=1e-13, max_step=0.005,
        )  # fmt: skip
        return torch.empty_like(at).index_copy_(0, places, torch.from_numpy(found.y[0]))


@dataclass(frozen=True)
class Problem:
    """A differential equation, the network that solves it, and the number of points of each block.

    Attributes:
        title: as it is printed.
        equation: makes the equation.
        hidden_sizes: of the network.
        counts: points of each block.
        redrawn: whether points are drawn anew.
    """

    title: str
    equation: Callable[[], DifferentialEquation]
    hidden_sizes: Sequence[int]
    counts: dict[str, int]
    redrawn: bool = False


SQUARE, CUBE = {"interior": 900, "boundary": 120}, {"interior": 3000, "boundary": 500}
STRIP = {"interior": 2540, "boundary": 80, "initial": 160}
HEATED = {"interior": 900, "boundary": 60, "initial": 60}
STARTED, BOUNDED = {"interior": 600, "initial": 100}, {"interior": 600, "boundary": 100, "initial": 100}
PROBLEMS = {
    "poisson2d": Problem("Poisson 2d, 257 parameters", lambda: Poisson(2), [64], SQUARE),
    "poisson2d_deep": Problem("Poisson 2d, 9,873 parameters", lambda: Poisson(2), [64, 64, 48, 48], SQUARE),
    "poisson2d_many": Problem(
        "Poisson 2d, 9,873 parameters, 3,060 points",
        lambda: Poisson(2),
        [64, 64, 48, 48],
        {name: 3 * count for name, count in SQUARE.items()},
    ),
    "poisson2d_wide": Problem("Poisson 2d, 116,097 parameters", lambda: Poisson(2), [256, 256, 128, 128], SQUARE),
    "heat1d": Problem("heat 1d, 257 parameters", Heat, [64], HEATED),
    "heat1d_deep": Problem("heat 1d, 9,873 parameters", Heat, [64, 64, 48, 48], HEATED),
    "poisson5d": Problem("Poisson 5d, 449 parameters", lambda: Poisson(5, "sum"), [64], CUBE),
    "burgers": Problem("Burgers, 921 parameters", Burgers, [20, 20, 20], STRIP, redrawn=True),
    "burgers_smooth": Problem(
        "Burgers with ν = .01, 921 parameters", lambda: Burgers(0.01), [20, 20, 20], STRIP, redrawn=True
    ),
    "allen_cahn": Problem("Allen-Cahn, ten times 449 parameters", AllenCahn, [16, 16], STARTED, redrawn=True),
    "kdv": Problem(
        "KdV, ten times 449 parameters", KortewegDeVries, [16, 16], {"interior": 800, "initial": 100}, redrawn=True
    ),
    "wave": Problem("wave, ten times 337 parameters", Wave, [16, 16], BOUNDED, redrawn=True),
    "convection": Problem("convection, ten times 449 parameters", Convection, [16, 16], STARTED, redrawn=True),
    "van_der_pol": Problem(
        "Van der Pol, ten times 321 parameters", VanDerPol, [16, 16], {"interior": 200, "initial": 1}, redrawn=True
    ),
}


class Residuals(nn.Module):
    """Residuals of a network at points, by block."""

    def __init__(self, equation: DifferentialEquation, network: nn.Module) -> None:
        super().__init__()
        self.equation, self.network = equation, network

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(self.network, IntervalNetwork):
            return self.network.residuals(self.equation, points)
        return self.equation.residuals(self.network, points)


class ScaledRows(nn.Module):
    """The same for points of all blocks in one tensor: coordinates, then per block 1/√n_b at its points, else 0."""

    def __init__(self, residuals: Residuals, blocks: Sequence[str]) -> None:
        super().__init__()
        self.residuals, self.blocks = residuals, blocks

    def forward(self, rows: Tensor) -> Tensor:
        points, shares = rows.split([rows.shape[1] - len(self.blocks), len(self.blocks)], dim=1)
        of_blocks = self.residuals(dict.fromkeys(self.blocks, points))
        return (torch.stack([of_blocks[block] for block in self.blocks], dim=1) * shares).sum(1, keepdim=True)


# --- methods: each yields after every step ----------------------------------------------------------------------------

Points = dict[str, Tensor]


def half_mean_square(residuals: dict[str, Tensor]) -> Tensor:
    return sum(0.5 * block.square().mean() for block in residuals.values())  # type: ignore[return-value]


def by_shf(module: Residuals, draw: Callable[[int], Points], **settings: Any) -> Iterator[None]:
    optimizer, step = SHF(module, LeastSquares(), **settings), 0
    while True:
        optimizer.step(inputs=draw(step // 5))
        step += 1
        yield


def by_gradients(
    module: Residuals, draw: Callable[[int], Points], make: Callable[..., torch.optim.Optimizer]
) -> Iterator[None]:
    optimizer, step = make(module.parameters()), 0
    while True:
        optimizer.zero_grad()
        half_mean_square(module(draw(step // 100))).backward()
        optimizer.step()
        step += 1
        yield


by_adam = partial(by_gradients, make=partial(torch.optim.Adam, lr=1e-3))


def by_soap(module: Residuals, draw: Callable[[int], Points]) -> Iterator[None]:
    from pytorch_optimizer import SOAP

    return by_gradients(module, draw, SOAP)


def by_ssbroyden(module: Residuals, draw: Callable[[int], Points]) -> Iterator[None]:
    """SSBroyden2 of Urbán, Stefanou & Pons (https://doi.org/10.1016/j.jcp.2024.113656), formulas (13) to (23)."""
    parameters, step = list(module.parameters()), 0
    w = nn.utils.parameters_to_vector(parameters).detach()
    n, points = len(w), draw(0)
    inverse, size = torch.eye(n), 0.0

    def at(w: Tensor) -> tuple[float, Tensor]:
        nn.utils.vector_to_parameters(w, parameters)
        loss = half_mean_square(module(points))
        return loss.item(), torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])

    value, g = at(w)
    while True:
        if (anew := draw(step // 200)) is not points:
            points = anew
            value, g = at(w)
        d = -inverse @ g
        if not d @ g < 0:
            inverse, size, d = torch.eye(n), 0.0, -g
        slope = (d @ g).item()
        start = min(1.0, 2.0 * float(size) or 1.0 / g.abs().sum().item())
        value, new, size, _ = _strong_wolfe(lambda w, t, d: at(w + t * d), w, start, d, value, g, slope)
        s, y, b_s = float(size) * d, new - g, -float(size) * g  # B s = -t g
        w, g = w + s, new
        nn.utils.vector_to_parameters(w, parameters)
        if (curvature := (s @ y).item()) > 0:
            h_y = inverse @ y
            y_h_y = (y @ h_y).item()
            b, h = (s @ b_s).item() / curvature, y_h_y / curvature
            a = max(b * h - 1.0, 1e-15)
            rho = min(1.0, h * (1.0 - math.sqrt(a / (1.0 + a))))
            theta = max((rho - 1.0) / a, min(1.0 / rho, (1.0 - b) / b))
            sigma = 1.0 + theta * a
            if step == 0:
                tau = h / sigma
            else:
                root = abs(sigma) ** (1.0 / (1.0 - n))
                tau = min(1.0, 1.0 / b) * min(root, 1.0 / theta) if theta > 0 else min(min(1.0, 1.0 / b) * root, sigma)
            v, phi = s / curvature - h_y / y_h_y, (1.0 - theta) / sigma
            inverse = (inverse - torch.outer(h_y, h_y / y_h_y) + torch.outer(phi * y_h_y * v, v)) / tau
            inverse += torch.outer(s, s / curvature)
        step += 1
        yield


def by_lbfgs(module: Residuals, draw: Callable[[int], Points]) -> Iterator[None]:
    def fresh() -> torch.optim.LBFGS:
        return torch.optim.LBFGS(module.parameters(), history_size=50, line_search_fn="strong_wolfe")

    optimizer, step, points = fresh(), 0, draw(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = half_mean_square(module(points))
        loss.backward()
        return loss

    while True:
        if (anew := draw(step // 10)) is not points:
            points, optimizer = anew, fresh()  # its history is of another function
        optimizer.step(closure)
        step += 1
        yield


def by_levenberg_marquardt(module: Residuals, draw: Callable[[int], Points]) -> Iterator[None]:
    from torch_levenberg_marquardt.training import LevenbergMarquardtModule

    step = 0
    rows: Tensor | None = None
    known: Points | None = None
    trainer: Any = None
    while True:
        if (points := draw(step // 5)) is not known:
            known = points
            shares = torch.eye(len(points))
            rows = torch.cat(
                [
                    torch.cat([at, shares[i].expand(len(at), -1) / len(at) ** 0.5], dim=1)
                    for i, at in enumerate(points.values())
                ]
            )
            trainer = trainer or LevenbergMarquardtModule(ScaledRows(module, list(points)))
        trainer.training_step(rows, torch.zeros(len(rows), 1))  # type: ignore[arg-type]
        step += 1
        yield


EXACT, LINEAR = "SHF, exact", "SHF, no corrections"
METHODS: dict[str, Callable[..., Iterator[None]]] = {
    "SHF": by_shf,
    EXACT: partial(by_shf, solver="exact"),
    LINEAR: partial(by_shf, damping=LevenbergMarquardt(acceleration=False)),
    "Adam": by_adam,
    "L-BFGS": by_lbfgs,
    "SSBroyden": by_ssbroyden,
    "SOAP": by_soap,
    "Adam, then L-BFGS": by_adam,
    "Adam, then SSBroyden": by_adam,
    "torch-levenberg-marquardt": by_levenberg_marquardt,
}


def train(
    problem: str,
    seed: int,
    method: str,
    seconds: float,
    problems: Mapping[str, Problem] = PROBLEMS,
    picture: Path | None = None,
    dtype: torch.dtype = torch.float64,
) -> harness.Run:
    """One run: CPU seconds, steps, error and loss at growing times; the solution at the end is drawn."""
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    setting = problems[problem]
    equation = setting.equation()
    torch.manual_seed(seed)
    module = Residuals(equation, make_network(equation, setting.hidden_sizes))

    def rounded(points: Points) -> Points:
        return {name: at.to(dtype) for name, at in points.items()}

    draws = PointDraws(
        equation.regions, setting.counts, draws_per_epoch=1, redraw_every_n_steps=1, seed=seed,
        residual_share=RESIDUAL_SHARE if setting.redrawn else 0.0, residuals=lambda points: module(rounded(points)),
        max_points=10 * sum(p.numel() for p in module.parameters()) if setting.redrawn else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(10**6 + seed)
    fresh = rounded({name: equation.regions[name].sample(n, generator) for name, n in setting.counts.items()})
    last: dict[int, Points] = {}

    def draw(number: int) -> Points:
        number = number if setting.redrawn else 0
        if number not in last:
            last.clear()
            last[number] = rounded(draws.draw(number))
        return last[number]

    inside = equation.regions["interior"].sample(10_000, torch.Generator().manual_seed(12345))
    at, solution = equation.known(inside)  # type: ignore[misc]

    def error() -> float:
        with torch.no_grad():
            return ((module.network(at.to(dtype)) - solution).norm() / solution.norm()).item()

    steps, curve = METHODS[method](module, draw), []
    begin, count, uncounted, due, switched, second = time.process_time(), 0, 0.0, 0.5, False, 0.0
    while True:
        next(steps)
        count += 1
        spent = time.process_time() - begin - uncounted
        if spent >= due or spent >= seconds:
            since = time.process_time()
            with torch.enable_grad():
                loss = half_mean_square(module(fresh)).item()  # on points that are not trained on
            curve.append({"seconds": spent, "steps": count, "error": error(), "fresh_loss": loss})
            due = spent * 1.05
            uncounted += time.process_time() - since
        if spent >= seconds:
            break
        if isinstance(module.network, IntervalNetwork) and count > 1:
            second = second or spent  # the first two steps record the module
            if module.network.go_on((spent - second) / (seconds - second), equation, fresh):
                break
        if method.startswith("Adam, then ") and not switched and spent >= seconds / 2:
            steps, switched = METHODS[method.removeprefix("Adam, then ")](module, draw), True
    if picture is not None:
        plot_solution(equation, module.network.double())[0].savefig(picture, dpi=100)
    return {"problem": problem, "method": method, "seed": seed, "curve": curve}


def error_at(run: harness.Run, seconds: float, problem: Problem) -> float | None:
    """The error when the time had come, or of the weights kept by then; None where the run is shorter."""
    curve = run["curve"]
    end = next((i for i, point in enumerate(curve) if point["seconds"] >= 0.999 * seconds), None)
    if end is None:
        return None
    is_kept = problem.redrawn and problem.equation().time is None  # the loss is that of an interval
    kept = min(curve[: end + 1], key=lambda point: point["fresh_loss"]) if is_kept else curve[end]
    return kept["error"]


def print_tables(runs: Sequence[harness.Run], problems: Mapping[str, Problem]) -> None:
    for name, problem in problems.items():
        of_problem = [run for run in runs if run["problem"] == name]
        longest = max((run["curve"][-1]["seconds"] for run in of_problem), default=0.0)
        times = [t for t in TIMES if t <= longest]
        if not of_problem:
            continue
        harness.print_header(problem.title, *(f"{t} s" for t in times), "steps", "seeds")
        for method in METHODS:
            of_method = [run for run in of_problem if run["method"] == method]
            if not of_method:
                continue
            cells = []
            for t in times:
                errors = [found for run in of_method if (found := error_at(run, t, problem)) is not None]
                cells.append(harness.spread(errors, "{:.1e}") if errors else "")
            steps = harness.spread([run["curve"][-1]["steps"] for run in of_method], "{:,.0f}")
            harness.print_row(method, *cells, steps, len(of_method))


def run_problems(
    documentation: str | None, name: str, problems: Mapping[str, Problem], methods: Sequence[str], seconds: float
) -> None:
    """Run what the command line asks for, and print the tables."""
    parser, first = harness.make_parser(documentation), next(iter(problems))
    parser.add_argument("--problems", nargs="+", choices=problems, default=[first])
    parser.add_argument("--seconds", type=float, default=seconds)
    harness.add_run_options(parser, name)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(methods))
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="of weights and points")
    arguments = parser.parse_args()
    directory, seconds, wanted = harness.make_directory(arguments.output), arguments.seconds, {}
    for problem, seed, method in product(arguments.problems, arguments.seeds, arguments.methods):
        run = harness.run_name(problem, seed, method, f"{seconds:g}", arguments.dtype)
        picture = directory / f"{run}.png" if method == "SHF" else None
        wanted[run] = partial(train, problem, seed, method, seconds, problems, picture, getattr(torch, arguments.dtype))
    runs = harness.run_all(arguments.output, wanted, arguments.report)
    harness.print_machines(runs)
    print_tables(runs, problems)


def main() -> None:
    methods = [name for name in METHODS if name not in (EXACT, LINEAR)]
    run_problems(__doc__, "least_squares", PROBLEMS, methods, seconds=60.0)


if __name__ == "__main__":
    main()
