"""SHF for modules that return residuals."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, vmap
from torch.nn.utils.parametrizations import spectral_norm

from lightning_struct.data import Poisson
from lightning_struct.functional import LeastSquares
from lightning_struct.functional.torch_tools import is_recorded
from lightning_struct.models import PhysicsInformedNetwork
from lightning_struct.optim import SHF, LevenbergMarquardt, WarmStart
from tests.cases import flat, gaussian, trainable


class Equation(nn.Module):
    """u'' + u u' = 1 in the interior and u = 0 on the boundary, with derivatives by autograd."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"interior": self.equation(points["interior"]), "boundary": 2 * self.net(points["boundary"])[:, 0]}

    def equation(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (curvature + u * slope - 1)[:, 0]


class FunctionalEquation(Equation):
    """The same by torch.func."""

    def equation(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def u(x: Tensor) -> Tensor:
            return functional_call(self.net, weights, (x,))[0]

        slope, curvature = vmap(torch.func.grad(u))(x), vmap(hessian(u))(x)[:, 0]
        return (curvature + self.net(x) * slope - 1)[:, 0]


class Coupled(Equation):
    """Its residuals depend on all points together."""

    def equation(self, x: Tensor) -> Tensor:
        residuals = super().equation(x)
        return residuals - 0.5 * residuals.mean()


class Fit(nn.Module):
    """Two measurements of each point."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    def forward(self, x: Tensor, measured: Tensor) -> Tensor:
        return self.net(x) - measured


def points() -> dict[str, Tensor]:
    return {
        "interior": torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None],
        "boundary": torch.tensor([[-1.0], [1.0]], dtype=torch.float64),
    }


def measurements() -> tuple[Tensor, Tensor]:
    x = gaussian(12, 2, seed=0)
    return x, torch.stack([x.sum(1).sin(), x.prod(1)], dim=1)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, float] | None]] = {
    "autograd": (Equation, points, {"interior": 1.0, "boundary": 10.0}),
    "torch.func": (FunctionalEquation, points, {"interior": 1.0, "boundary": 10.0}),
    "coupled": (Coupled, points, {"interior": 1.0, "boundary": 10.0}),
    "two outputs": (Fit, measurements, None),
}


def scaled_residuals(module: nn.Module, inputs: Any, shares: dict[str, float] | None) -> Callable[[Tensor], Tensor]:
    """w -> r(w), the rows scaled by √(w_b/n_b)."""
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    names, sizes = zip(*((name, p.shape) for name, p in module.named_parameters()), strict=True)

    def residuals(w: Tensor) -> Tensor:
        parts = w.split([size.numel() for size in sizes])
        returned = functional_call(module, {n: p.view(s) for n, p, s in zip(names, parts, sizes, strict=True)}, args)
        blocks = returned if isinstance(returned, dict) else {"residual": returned}
        return torch.cat(
            [b.reshape(-1) * ((shares or {}).get(name, 1.0) / len(b)) ** 0.5 for name, b in blocks.items()]
        )

    return residuals


def weights(module: nn.Module) -> Tensor:
    return flat(trainable(module)).detach().clone()


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
@pytest.mark.parametrize("name", MODULES)
def test_steps_solve_the_damped_problem_around_a_part_of_the_last_step(name: str) -> None:
    """(JᵀJ + λ²) d = -Jᵀr + λ² γ d_prev: SPRING; with γ = 0, as in the first step, MinSR."""
    build, batch, shares = MODULES[name]
    module, inputs, damping, gamma = build(), batch(), 3.0, 0.6
    optimizer = SHF(
        module,
        "least_squares" if shares is None else LeastSquares(shares),
        solver="exact",
        damping=LevenbergMarquardt(initial=damping, drop=None, acceleration=False),
        warm_start=WarmStart(initial=gamma, growth=1.0),
    )
    function, previous = scaled_residuals(module, inputs, shares), torch.zeros(len(weights(module)))
    for _ in range(3):
        before = weights(module)
        jacobian = torch.autograd.functional.jacobian(function, before)
        residuals = function(before).detach()
        matrix = jacobian.mT @ jacobian + damping**2 * torch.eye(len(before))
        previous = torch.linalg.solve(matrix, -jacobian.mT @ residuals + damping**2 * gamma * previous)
        report = optimizer.step(inputs=inputs)
        torch.testing.assert_close(weights(module) - before, previous, rtol=1e-10, atol=1e-10)
        assert report.loss_before == pytest.approx(0.5 * residuals.square().sum().item(), rel=1e-12)
        assert report.loss_after == pytest.approx(0.5 * function(weights(module)).square().sum().item(), rel=1e-10)
        assert report.damping == damping


def test_steps_are_corrected_for_the_curvature_of_the_residuals() -> None:
    """They come close to Jᵀ r(w + d) + λ² d = 0, the minimum of ½‖r(w + d)‖² + ½λ²‖d‖² if J stays as it is."""
    module, damping = Equation(), 0.01
    optimizer = SHF(module, "least_squares")
    for _ in range(8):
        optimizer.step(inputs=points())
    function, before = scaled_residuals(module, points(), None), weights(module)
    jacobian = torch.autograd.functional.jacobian(function, before)
    matrix = jacobian.mT @ jacobian + damping**2 * torch.eye(len(before))
    linear = corrected = torch.linalg.solve(matrix, -jacobian.mT @ function(before).detach())
    for _ in range(200):
        residuals = function(before + corrected).detach()
        corrected = torch.linalg.solve(matrix, jacobian.mT @ (jacobian @ corrected - residuals))
    SHF(module, "least_squares", damping=LevenbergMarquardt(initial=damping, drop=None)).step(inputs=points())
    assert (weights(module) - before - corrected).norm() < 0.25 * (linear - corrected).norm()


def test_a_small_damping_costs_no_digits() -> None:
    """JᵀJ would lose what is damped by less than √ε of the largest singular value."""
    rows, solution = gaussian(12, 5, seed=0), gaussian(5, seed=1)
    left, _, right = torch.linalg.svd(rows, full_matrices=False)
    rows = left * torch.logspace(0, -7, 5, dtype=torch.float64) @ right

    class Fit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))

        def forward(self, rows: Tensor) -> Tensor:
            return rows @ self.weight - rows @ solution

    module = Fit()
    SHF(module, "least_squares", solver="exact", damping=LevenbergMarquardt(initial=1e-9, drop=None)).step(inputs=rows)
    assert (module.weight - solution).norm() < 1e-3


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 0.0), (WarmStart(0.2, growth=1.0), 0.2), (0.97, 0.97), (0.5, 0.5 * 1.002**3)],
    ids=["none", "no growth", "above its maximum", "the paper's growth"],
)
def test_the_warm_start_is_the_given_one_grown(given: WarmStart | float | None, expected: float) -> None:
    optimizer = SHF(Equation(), "least_squares", warm_start=given)
    for number in range(3):
        optimizer.step(inputs={**points(), "interior": points()["interior"][number:]})
    assert optimizer.param_groups[0]["warm_start"] == pytest.approx(expected, rel=1e-12)


def test_two_arguments_are_enough_for_a_differential_equation() -> None:
    module, inputs = Equation(), points()
    optimizer = SHF(module, "least_squares")
    losses = [optimizer.step(inputs=inputs).loss_after for _ in range(20)]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < 1e-4 * losses[0]


def test_the_report_has_the_loss_of_each_block() -> None:
    module, inputs = Equation(), points()
    with torch.enable_grad():
        expected = {name: 0.5 * block.square().mean().item() for name, block in module(inputs).items()}
    report = SHF(module, LeastSquares({"interior": 1.0, "boundary": 10.0})).step(inputs=inputs)
    assert report.block_losses == pytest.approx(expected, rel=1e-12)
    assert report.loss_before == pytest.approx(expected["interior"] + 10 * expected["boundary"], rel=1e-12)
    assert report.batch_size == 32


@pytest.mark.parametrize("name", ["autograd", "two outputs"])
def test_lsmr_takes_the_exact_step_up_to_its_tolerance(name: str) -> None:
    build, batch, shares = MODULES[name]
    options: dict[str, Any] = {
        "damping": LevenbergMarquardt(initial=0.3, drop=None, acceleration=False),
        "warm_start": 0.5,
    }
    reports = []
    for solver in ("exact", "lsmr"):
        optimizer = SHF(build(), LeastSquares(shares), solver=solver, **options)
        reports.append([optimizer.step(inputs=batch()) for _ in range(3)])
    for exact, other in zip(*reports, strict=True):
        assert other.loss_after == pytest.approx(exact.loss_after, rel=1e-4)
        assert other.reduction_ratio == pytest.approx(exact.reduction_ratio, rel=1e-3)
        assert other.gradient_norm == pytest.approx(exact.gradient_norm, rel=1e-3)
        assert exact.solver_iterations == 0 < other.solver_iterations


def test_lsmr_accelerates_as_the_exact_solver() -> None:
    build, batch, shares = MODULES["autograd"]
    exact, other = (
        SHF(build(), LeastSquares(shares), solver=solver, damping=LevenbergMarquardt(initial=0.3, drop=None)).step(
            inputs=batch()
        )
        for solver in ("exact", "lsmr")
    )
    assert other.loss_after == pytest.approx(exact.loss_after, rel=1e-4)


@pytest.mark.parametrize("name", ["autograd", "two outputs"])
def test_the_variance_is_that_of_the_gradient(name: str) -> None:
    """N times the sum over blocks of the variance of their mean, from gradients of single rows."""
    build, batch, shares = MODULES[name]
    module, inputs = build(), batch()
    parameters = list(module.parameters())
    blocks = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    blocks = blocks if isinstance(blocks, dict) else {"residual": blocks}
    total, rows = 0.0, sum(map(len, blocks.values()))
    for block, residuals in blocks.items():
        gradients = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
                for loss in (shares or {}).get(block, 1.0) * 0.5 * residuals.square().reshape(len(residuals), -1).sum(1)
            ]
        )
        total += gradients.var(0).sum().item() / len(residuals)
    for solver in ("exact", "lsmr"):
        report = SHF(build(), LeastSquares(shares), damping=1.0, solver=solver).step(inputs=inputs)
        assert report.gradient_variance == pytest.approx(rows * total, rel=1e-9)
        assert report.predicted_batch_size == math.ceil(rows * total / (0.5 * report.gradient_norm) ** 2)


def test_where_rows_cannot_be_told_apart_lsmr_estimates_the_variance_from_parts_of_the_batch() -> None:
    report = SHF(Coupled(), LeastSquares({"interior": 1.0, "boundary": 10.0}), solver="lsmr").step(inputs=points())
    assert report.gradient_variance is not None and report.gradient_variance > 0.0


def test_a_wide_network_takes_the_step_of_the_dense_problem() -> None:
    """Its J is kept as outer products."""
    torch.manual_seed(0)
    equation, generator = Poisson(2), torch.Generator().manual_seed(0)
    module = PhysicsInformedNetwork(equation, [48, 40]).double()
    inputs = {
        name: equation.regions[name].sample(n, generator).double() for name, n in (("interior", 20), ("boundary", 8))
    }
    function, before, damping = scaled_residuals(module, inputs, None), weights(module), 0.5
    jacobian, residuals = torch.autograd.functional.jacobian(function, before), function(before)
    step = -jacobian.mT @ torch.linalg.solve(jacobian @ jacobian.mT + damping**2 * torch.eye(28), residuals)
    optimizer = SHF(module, "least_squares", damping=LevenbergMarquardt(initial=damping, drop=None, acceleration=False))
    report = optimizer.step(inputs=inputs)
    torch.testing.assert_close(weights(module) - before, step, rtol=1e-9, atol=1e-9)
    assert report.stop_reason == "exact"


class Counted(Equation):
    """It counts its calls, and may refuse to be recorded as a whole."""

    calls, is_recordable = 0, True

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        self.calls += 1
        if not self.is_recordable and is_recorded() and 1 not in map(len, points.values()):
            raise AssertionError
        return super().forward(points)


class SometimesCoupled(Equation):
    """Its residuals depend on all points together where these are few."""

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        x = points["interior"]
        residuals = self.equation(x)
        if 1 < len(x) < 10:
            residuals = residuals - 0.5 * residuals.mean()
        return {"interior": residuals}


def resumed_from(module: nn.Module, optimizer: SHF) -> tuple[nn.Module, SHF]:
    other = type(module)()
    other.load_state_dict(module.state_dict())
    resumed = SHF(other, "least_squares")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, resumed


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_rows_that_were_not_told_apart_are_not_told_apart_in_a_resumed_run() -> None:
    optimizer = SHF(module := SometimesCoupled(), "least_squares")
    optimizer.step(inputs={"interior": points()["interior"][:5]})
    with pytest.warns(UserWarning, match="the rows of J for the residuals 'interior'"):
        resumed_from(module, optimizer)[1].step(inputs=points())


def test_batches_that_were_not_recorded_are_not_recorded_in_a_resumed_run() -> None:
    module, calls = Counted(), []
    optimizer = SHF(module, "least_squares")
    module.is_recordable = False
    for _ in range(2):
        optimizer.step(inputs=points())
    other, resumed = resumed_from(module, optimizer)
    for shf, of_calls in ((optimizer, module), (resumed, other)):
        shf.step(inputs=points())  # in which a single row is recorded anew
        of_calls.is_recordable, of_calls.calls = True, 0
        shf.step(inputs=points())
        calls.append(of_calls.calls)
    assert calls[1] == calls[0]


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_a_batch_whose_rows_cannot_be_told_apart_is_not_recorded() -> None:
    module, recorded = Coupled(), []
    module.register_forward_hook(lambda *_: recorded.append(is_recorded()))
    optimizer = SHF(module, "least_squares")
    optimizer.step(inputs=points())  # finds this out
    recorded.clear()
    optimizer.step(inputs=points())
    assert recorded and not any(recorded)


def test_a_resumed_run_keeps_the_solver_that_short_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SHF(module := Equation(), "least_squares")
    with monkeypatch.context() as short:
        short.setattr("lightning_struct.optim.memory.available_memory", lambda _: 1000)
        optimizer.step(inputs=points())
    assert resumed_from(module, optimizer)[1].step(inputs=points()).stop_reason != "exact"


def test_memory_that_others_take_later_changes_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SHF(Equation(), "least_squares")
    optimizer.step(inputs=points())
    monkeypatch.setattr("lightning_struct.optim.memory.available_memory", lambda _: 1000)
    assert optimizer.step(inputs=points()).stop_reason == "exact"


def test_what_a_module_holds_may_change_from_step_to_step() -> None:
    """The record of a single row is made anew where its values are no longer those of the module."""
    module = Fit()
    module.shift = 0.0  # type: ignore[assignment]
    module.forward = lambda x, measured: module.net(x) - measured + module.shift  # type: ignore[method-assign]
    optimizer = SHF(module, "least_squares")
    for shift in (0.0, 1.0):
        module.shift = shift  # type: ignore[assignment]
        report = optimizer.step(inputs=measurements())
        after = 0.5 * module(*measurements()).square().sum().item() / 12
        assert report.loss_after == pytest.approx(after, rel=1e-12)


def test_a_small_change_of_what_a_module_holds_is_noticed_after_large_residuals() -> None:
    module = Fit()
    module.shift = 0.0  # type: ignore[assignment]
    module.forward = lambda x, measured: module.net(x) - measured + module.shift  # type: ignore[method-assign]
    optimizer, (x, measured) = (
        SHF(module, "least_squares", damping=LevenbergMarquardt(initial=1e6, drop=None)),
        measurements(),
    )
    optimizer.step(inputs=(x, 1e6 * measured))
    module.shift = 1e-3  # type: ignore[assignment]
    few = x[:5], module.net(x).detach()[:5]
    report = optimizer.step(inputs=few)
    assert report.loss_after == pytest.approx(0.5 * module(*few).square().sum().item() / 5, rel=1e-6)


class NearItsSolution(Equation):
    """Its terms are far larger than its residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.solution = copy.deepcopy(self.net).requires_grad_(False)
        with torch.no_grad():
            for p in self.net.parameters():
                p += 1e-10

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        x = points["interior"]
        net, residuals = self.net, self.equation(x)
        self.net = self.solution
        residuals = residuals - self.equation(x)
        self.net = net
        return {"interior": residuals}


def test_rows_are_told_apart_where_a_run_begins_near_the_solution() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SHF(NearItsSolution(), "least_squares").step(inputs=points())


def test_the_module_is_called_once_in_a_step_on_as_many_points_as_in_the_steps_before() -> None:
    module, calls = Counted(), []
    optimizer = SHF(module, LeastSquares())
    for _ in range(4):
        before = module.calls
        optimizer.step(inputs=points())
        calls.append(module.calls - before)
    assert calls[2:] == [1, 1]


class Noisy(Fit):
    """It drops other inputs in each step."""

    def forward(self, x: Tensor, measured: Tensor) -> Tensor:
        self.dropped = nn.functional.dropout(torch.ones_like(x), 0.5)
        return super().forward(x * self.dropped, measured)


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_random_numbers_of_a_step_stay_the_same(solver: str) -> None:
    module, (x, measured) = Noisy(), measurements()
    optimizer = SHF(module, LeastSquares(), solver=solver)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows that cannot be told apart
            report = optimizer.step(inputs=(x, measured))
        loss = 0.5 * (module.net(x * module.dropped) - measured).square().sum().item() / len(x)
        assert report.loss_after == pytest.approx(loss, rel=1e-12)


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
@pytest.mark.parametrize("name", ["batch norm", "spectral norm"])
def test_buffers_that_a_forward_writes_are_updated_once_a_step(name: str) -> None:
    module = Fit()
    first = spectral_norm(nn.Linear(2, 6)) if name == "spectral norm" else nn.Linear(2, 6)
    between: list[nn.Module] = [nn.BatchNorm1d(6)] if name == "batch norm" else []
    module.net = nn.Sequential(first, *between, nn.Tanh(), nn.Linear(6, 2))
    module.double()
    optimizer = SHF(module, "least_squares")
    for _ in range(12):
        optimizer.step(inputs=measurements())
    if name == "batch norm":
        assert module.net[1].num_batches_tracked == 12
    else:
        module.eval()
        assert torch.linalg.matrix_norm(first.weight, 2).item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_a_constant_buffer_costs_no_forward_of_residuals() -> None:
    class WithTable(Fit):
        forwards, writes = 0, False

        def forward(self, x: Tensor, measured: Tensor) -> Tensor:
            self.forwards += 1
            if self.writes:
                self.table += 1
            return super().forward(x, measured)

    counts = []
    for with_buffer in (False, True):
        module = WithTable()
        if with_buffer:
            module.register_buffer("table", torch.zeros(3))
        optimizer = SHF(module, "least_squares")
        for _ in range(3):
            module.forwards = 0
            optimizer.step(inputs=measurements())
        counts.append(module.forwards)
    assert counts[0] == counts[1]
    module.writes = True
    for step in range(2):
        optimizer.step(inputs=measurements())
        assert (module.table == step + 1).all()


def test_rows_that_depend_on_each_other_are_warned_of_once() -> None:
    optimizer = SHF(Coupled(), "least_squares")
    with pytest.warns(UserWarning, match="rows of J for the residuals 'interior'.*depend on more than one row"):
        optimizer.step(inputs=points())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(inputs=points())


class HiddenSecondDerivative(torch.autograd.Function):
    """x², whose derivative is itself taken for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient.detach()


class NoSecondDerivative(HiddenSecondDerivative):
    """x², whose derivative cannot be differentiated."""

    backward = torch.autograd.function.once_differentiable(HiddenSecondDerivative.backward)  # type: ignore[assignment]


class ManyMeasurements(nn.Module):
    """A series of 1,000 values in which each follows from all before, with three parameters."""

    def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.square, self.passes = square, 0
        self.factors = nn.Parameter(torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64))

    def forward(self, measured: Tensor) -> Tensor:
        x = torch.linspace(0, 1, 1000, dtype=torch.float64)
        series = (self.factors[0] * (self.factors[1] * x).sin() + self.square(self.factors[2] * x)).cumsum(0) / 1000
        if series.requires_grad:
            series.register_hook(self.count)
        return series - measured

    def count(self, _: Tensor) -> None:
        self.passes += 1


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
@pytest.mark.parametrize("square", [torch.square, HiddenSecondDerivative.apply, NoSecondDerivative.apply])
def test_many_coupled_residuals_of_few_parameters_take_a_pass_for_each_parameter(square: Any) -> None:
    module, measured = ManyMeasurements(square), torch.zeros(1000, dtype=torch.float64)
    before = module.factors.detach().clone()
    J = torch.func.jacrev(lambda w: functional_call(ManyMeasurements(torch.square), {"factors": w}, measured))(before)
    r = module(measured).detach()
    options = {"damping": LevenbergMarquardt(initial=0.3, drop=None, acceleration=False)}
    SHF(module, "least_squares", solver="exact", **options).step(inputs=measured)
    expected = torch.linalg.solve(J.T @ J / 1000 + 0.09 * torch.eye(3, dtype=torch.float64), -J.T @ r / 1000)
    torch.testing.assert_close(module.factors.detach() - before, expected)
    assert module.passes < 8 or square is not torch.square


def test_a_series_in_time_whose_rows_cannot_be_told_apart_is_not_recorded() -> None:
    class Growth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

        def forward(self, measured: Tensor) -> Tensor:
            recorded.append(is_recorded())
            return (1 + self.rate) ** torch.arange(10) - measured

    recorded: list[bool] = []
    optimizer = SHF(Growth(), "least_squares")
    with pytest.warns(UserWarning, match="one row of the inputs gives 10 of them, and a row of the batch has 1"):
        optimizer.step(inputs=torch.ones(10, dtype=torch.float64))
    assert recorded and not any(recorded)


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.cells(x)[0]) - y


def test_the_rows_of_series_through_a_recurrent_layer_are_told_apart() -> None:
    module, x = Series().double(), gaussian(5, 2, 1, seed=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="SHF")
        report = SHF(module, "least_squares").step(inputs=(x, x.cumsum(1)))
    assert report.loss_after < report.loss_before


def test_residuals_that_do_not_depend_on_the_weights_are_warned_of() -> None:
    module = nn.Linear(1, 1)
    module.forward = lambda x: x.detach() + 1  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="is zero: it is at a minimum, or no residual depends on the weights"):
        SHF(module, "least_squares").step(inputs=torch.ones(3, 1))


def test_residuals_of_zero_are_not_said_to_be_independent_of_the_weights() -> None:
    module = nn.Linear(1, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    with pytest.warns(UserWarning, match="the gradient of this batch is zero; no step is taken"):
        SHF(module, "least_squares").step(inputs=torch.ones(3, 1))


def test_rows_that_autocast_rounds_are_not_said_to_depend_on_each_other() -> None:
    module, (x, measured) = Fit().float(), measurements()
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="or autocast rounds them too coarsely"):
        SHF(module, "least_squares").step(inputs=(x.float(), measured.float()))


def test_a_table_of_all_differences_is_warned_of() -> None:
    module, x = Fit(), gaussian(5, 2, seed=0)
    module.net = nn.Linear(2, 1, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"\(5, 1\) minus one of \(5,\) is a table \(5, 5\)"):
        SHF(module, "least_squares").step(inputs=(x, x[:, 0]))


def test_a_warning_points_at_the_line_that_called_the_step() -> None:
    with pytest.warns(UserWarning, match="rows of J") as caught:
        SHF(Coupled(), "least_squares").step(inputs=points())
    assert caught[0].filename == __file__


class ShortOfMemory(Fit):
    """Memory is short once: in a call with a row, in its record, or where the derivative of the batch is compared."""

    calls = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor, measured: Tensor) -> Tensor:
        self.calls += 1
        residuals = super().forward(x, measured)
        if self.calls == {"row": 2, "record": 3}.get(self.where):
            raise torch.OutOfMemoryError
        if self.where == "derivative" and self.calls == 4:
            residuals.register_hook(self.short)
        return residuals

    def short(self, _: Tensor) -> None:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("where", ["row", "record", "derivative"])
def test_short_memory_is_an_error_and_no_reason_to_tell_no_rows_apart(where: str) -> None:
    optimizer = SHF(ShortOfMemory(where), "least_squares")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step(inputs=measurements())
        optimizer.step(inputs=measurements())


def test_an_error_without_a_message_is_named_by_its_kind() -> None:
    class OfBatches(Fit):
        def forward(self, x: Tensor, measured: Tensor) -> Tensor:
            if len(x) == 1:
                raise AssertionError
            return super().forward(x, measured)

    with pytest.warns(UserWarning, match="a single row cannot be recorded .AssertionError"):
        SHF(OfBatches(), "least_squares").step(inputs=measurements())


def test_a_block_of_a_single_row_is_not_warned_of() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1, dtype=torch.float64)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            u = self.net(x)
            return {"value": u - x.prod(1, keepdim=True), "integral": u.mean(0, keepdim=True) - 0.25}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = SHF(Normalised(), "least_squares").step(inputs=torch.rand(9, 2, dtype=torch.float64))
    assert report.loss_after < report.loss_before


class Calibration(Fit):
    """A line through measurements, and what is known about its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor, measured: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"measured": self.net(x) - measured, "known": self.prior(self.net.weight[0, 0] - 2.0)}

    def prior(self, difference: Tensor) -> Tensor:
        return difference


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_a_block_may_be_a_single_number(solver: str) -> None:
    class OfOneRow(Calibration):
        def prior(self, difference: Tensor) -> Tensor:
            return difference[None]

    losses = []
    for module in (Calibration(), OfOneRow()):
        optimizer = SHF(module, "least_squares", solver=solver)
        losses.append([optimizer.step(inputs=measurements()).block_losses for _ in range(2)])
    assert losses[0] == losses[1] and losses[0][-1]["known"] < losses[0][0]["known"]


def test_the_log_recommends_float64_where_float32_ends() -> None:
    module, inputs = Fit(), tuple(x.float() for x in measurements())
    module.net = nn.Sequential(nn.Linear(2, 2))
    optimizer = SHF(module, "least_squares")

    def train_to_the_end() -> None:
        for _ in range(50):
            if optimizer.step(inputs=inputs).stop_reason == "line_search":
                break

    with pytest.warns(UserWarning, match="float32 ends here; go on in float64"):
        train_to_the_end()


class NoisyFit(nn.Module):
    """The residuals of a curve, of samples with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.network(x) - y


def test_a_fixed_damping_is_raised_for_a_step_alone() -> None:
    torch.manual_seed(0)
    optimizer = SHF(
        NoisyFit().double(),
        "least_squares",
        solver="exact",
        damping=LevenbergMarquardt(0.03, drop=None, acceleration=False),
        warm_start=WarmStart(0.9, growth=1.0),
    )
    samples = [gaussian(40, 2, seed=seed) for seed in range(20)]
    dampings = [optimizer.step(inputs=(x, x.sum(1).sin() + 0.3 * x[:, 0].roll(1))).damping for x in samples]
    assert max(dampings) > 0.03 and optimizer.damping == 0.03


def test_a_fixed_damping_is_kept_while_it_lowers_the_loss() -> None:
    optimizer = SHF(Equation(), "least_squares", damping=LevenbergMarquardt(initial=2.0, drop=None))
    assert [optimizer.step(inputs=points()).damping for _ in range(3)] == [2.0] * 3


@pytest.mark.filterwarnings("ignore:SHF. no step lowers the loss")
def test_other_measurements_are_fitted_after_many_steps_at_a_minimum() -> None:
    module, x = Fit(), gaussian(20, 1, seed=0)
    module.net = line = nn.Linear(1, 1, dtype=torch.float64)
    optimizer = SHF(module, "least_squares")
    for _ in range(25):
        optimizer.step(inputs=(x, x.sin()))
    for _ in range(5):
        optimizer.step(inputs=(x, 3 * x.sin() - 1))
    exact = torch.linalg.lstsq(torch.cat([x, torch.ones_like(x)], dim=1), 3 * x.sin() - 1).solution
    torch.testing.assert_close(torch.stack([line.weight[0], line.bias]), exact, atol=1e-6, rtol=0)


# --- what bad input gets ----------------------------------------------------------------------------------------------


class Returning(nn.Module):
    """Returns a function of its inputs and of a weight."""

    def __init__(self, returned: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.returned = nn.Parameter(torch.ones(1).double()), returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(x, self.weight)


def step(returned: Callable[[Tensor, Tensor], Any], shares: Any = None, **options: Any) -> None:
    module = Returning(returned)
    try:
        SHF(module, LeastSquares(shares), **options).step(inputs=torch.ones(3, 1).double())
    finally:
        assert module.weight.item() == 1.0


def tangent(x: Tensor) -> Tensor:
    """Zeros with the derivative of x."""
    return x - x.detach()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nan": (lambda: step(lambda x, w: {"a": x * w, "b": x * w * math.nan}), ValueError, "block 'b' .* NaN or infinity"),
    "empty": (lambda: step(lambda x, w: {"a": x * w, "b": x[:0] * w}), ValueError, "block 'b' .* is empty"),
    "no numbers": (lambda: step(lambda x, w: {"a": x * w, "b": x[:, :0] * w}), ValueError, "block 'b' .* is empty"),
    "no weight": (
        lambda: step(lambda x, w: {"a": x * w, "b": x * w}, {"a": 1.0}),
        ValueError,
        "the block 'b' that LeastSquares.* has no weight for",
    ),
    "no block": (
        lambda: step(lambda x, w: {"a": x * w}, {"a": 1.0, "b": 2.0}),
        ValueError,
        "a weight for the block 'b' that the module did not return",
    ),
    "large residuals": (
        lambda: step(lambda x, w: 1e200 + tangent(x * w)),
        ValueError,
        "squares of the residuals of 'residual' are too large for torch.float64.* Divide the residuals by their usual",
    ),
    "large derivatives": (
        lambda: step(lambda x, w: 1.0 + 1e160 * tangent(x * w), solver="exact"),
        ValueError,
        "products of the derivatives of the residuals are too large for torch.float64.* Divide the residuals by",
    ),
    "number": (lambda: step(lambda x, w: {"a": 3.0}), TypeError, "block 'a'"),
    "integers": (lambda: step(lambda x, w: {"a": x.long()}), TypeError, "block 'a'"),
    "tuple": (lambda: step(lambda x, w: (x,)), TypeError, "It returned tuple"),
    "nothing": (lambda: step(lambda x, w: {}), TypeError, "It returned an empty mapping"),
    "name": (lambda: step(lambda x, w: {0: x}), TypeError, "names of blocks of residuals are strings, .* got 0"),
    "complex": (
        lambda: step(lambda x, w: {"a": x + 1j}),
        TypeError,
        r"block 'a' .* got a tensor of torch.complex128. Return .* torch.view_as_real",
    ),
    "loss": (lambda: step(lambda x, w: (x * w).square().mean()), TypeError, "leave out the sum or average of their sq"),
    "changed inputs": (lambda: step(lambda x, w: x.mul_(0.5) * w), ValueError, "changes its inputs in place"),
    "complex weights": (
        lambda: SHF(nn.Linear(2, 1, dtype=torch.complex128), "least_squares"),
        ValueError,
        "these are complex: weight, bias. Hold .* torch.view_as_complex",
    ),
    "predictions": (
        lambda: SHF(nn.Linear(2, 1), "least_squares").step(inputs=(torch.ones(3, 2), torch.ones(3, 1))),
        TypeError,
        r"Linear.forward\(input.* cannot take the 2 inputs .* `return self.net\(x\) - y`",
    ),
    "no points": (
        lambda: SHF(Fit(), "least_squares").step(),
        TypeError,
        r"step\(inputs=...\).*put SHFOptimization before the LightningModule",
    ),
    "targets": (
        lambda: SHF(Fit(), "least_squares").step(inputs=measurements(), targets=torch.zeros(12, 2)),
        TypeError,
        "need no targets",
    ),
    "summary": (
        lambda: SHF(Fit(), "least_squares").summary(),
        ValueError,
        "only preconditioner='kronecker' has a summary",
    ),
    "validation data": (
        lambda: SHF(Fit(), "least_squares").set_validation([]),
        ValueError,
        "takes no validation data: its solvers need no merit",
    ),
    **{
        f"weight {weight}": (
            lambda weight=weight: LeastSquares({"a": weight}),  # type: ignore[misc]
            ValueError,
            "the weight of block 'a' must be finite and > 0",
        )
        for weight in (0.0, -1.0, math.nan, math.inf)
    },
    "list of weights": (
        lambda: LeastSquares([1.0, 2.0]),  # type: ignore[arg-type]
        TypeError,
        r"weights must be a Mapping or None, got \[1.0, 2.0\]",
    ),
    "text as a weight": (
        lambda: LeastSquares({"a": "2"}),  # type: ignore[dict-item]
        TypeError,
        "weight of block 'a' must be one number, got str",
    ),
    "weights of rows": (
        lambda: LeastSquares({"a": torch.ones(3)}),  # type: ignore[dict-item]
        TypeError,
        "weight of block 'a' must be one number, got Tensor. To weight rows, multiply",
    ),
}


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_on_is_named_with_the_remedy(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_blocks_keep_their_names() -> None:
    module = Returning(lambda x, w: {"a": x * w, "b": x * w})
    optimizer = SHF(module, "least_squares")
    optimizer.step(inputs=torch.ones(3, 1).double())
    module.returned = lambda x, w: {"a": x * w, "c": x * w}
    with pytest.raises(ValueError, match="the blocks 'a', 'c', in the step before 'a', 'b'"):
        optimizer.step(inputs=torch.ones(3, 1).double())


class RoundedFit(nn.Module):
    """Residuals in half precision, whose squares it cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (300.0 * self.net(x)).half()


def test_the_loss_of_residuals_in_half_precision_has_the_precision_of_the_weights() -> None:
    module, x = RoundedFit(), gaussian(2000, 2, seed=0).float()
    expected = 0.5 * module(x).detach().double().square().mean().item()
    report = SHF(module, "least_squares", solver="lsmr").step(inputs=x)
    assert report.loss_before == pytest.approx(expected, rel=1e-6)
    assert report.loss_after < 0.01 * expected


class FullPrecisionFit(nn.Module):
    """Residuals that do without autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.net(x) - x.sin()


class MixedPrecisionFit(FullPrecisionFit):
    """The same with a network that autocast computes in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - x.sin()


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_autocast_is_for_the_module_and_not_for_the_solver(solver: str) -> None:
    x, weights = gaussian(20, 1, seed=0).float(), []
    for enabled in (False, True):
        module = FullPrecisionFit()
        optimizer = SHF(module, "least_squares", solver=solver)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for _ in range(3):
                optimizer.step(inputs=x)
        weights.append(flat(trainable(module)).clone())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)  # not the last bits: bfloat16 has errors of a hundredth


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_a_module_under_autocast_is_trained(solver: str) -> None:
    module, x = MixedPrecisionFit(), gaussian(20, 1, seed=0).float()
    optimizer = SHF(module, "least_squares", solver=solver)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reports = [optimizer.step(inputs=x) for _ in range(4)]
        expected = 0.5 * module(x).float().square().mean().item()
    assert reports[-1].loss_after == pytest.approx(expected, rel=0.01)
    assert expected < 0.1 * reports[0].loss_before


def test_matrices_that_do_not_fit_are_an_error_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_struct.optim.memory.available_memory", lambda _: 1000)
    message = r"for 32 residuals and 19 parameters take .* KiB, but 1.0 KiB are free.*solver='lsmr'"
    with pytest.raises(MemoryError, match=message):
        SHF(Equation(), "least_squares", solver="exact").step(inputs=points())
    assert SHF(Equation(), "least_squares", solver="lsmr").step(inputs=points()).step_length == 1.0


def test_matrices_that_do_not_fit_on_another_process_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_struct.optim.shf.residuals.solvers._everywhere", lambda *_: False)
    with pytest.raises(MemoryError, match=r"for 32 residuals .* than is free on another process.*solver='lsmr'"):
        SHF(Equation(), "least_squares", solver="exact").step(inputs=points())


def test_a_solver_that_is_not_named_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHF(Equation(), "least_squares").step(inputs=points()).stop_reason == "exact"
    monkeypatch.setattr("lightning_struct.optim.memory.available_memory", lambda _: 1000)
    assert SHF(Equation(), "least_squares").step(inputs=points()).solver_iterations > 0


class Curve(nn.Module):
    """Measurements of a curve, by a network of 1,401 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 35), nn.Tanh(), nn.Linear(35, 35), nn.Tanh(), nn.Linear(35, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - x.sin()


@pytest.mark.parametrize(("samples", "is_exact"), [(100, True), (700, False)])
def test_the_solver_is_exact_where_a_factorisation_takes_less_than_the_iterations(samples: int, is_exact: bool) -> None:
    report = SHF(Curve(), "least_squares").step(inputs=torch.linspace(-1, 1, samples, dtype=torch.float64)[:, None])
    assert (report.solver_iterations == 0) == is_exact


def test_a_fixed_damping_of_a_wide_network_is_used_however_small() -> None:
    """Where Cholesky factors of J Jᵀ would not do."""
    torch.manual_seed(0)
    equation, generator = Poisson(2), torch.Generator().manual_seed(0)
    module = PhysicsInformedNetwork(equation, [48, 40]).double()
    points = {"interior": equation.regions["interior"].sample(20, generator).double()}
    adaptive = SHF(module, "least_squares")
    for _ in range(20):  # near a minimum, where so small a damping gives a step that lowers the loss
        adaptive.step(inputs=points)
    report = SHF(module, "least_squares", damping=LevenbergMarquardt(initial=1e-7, drop=None)).step(inputs=points)
    assert report.damping == 1e-7
