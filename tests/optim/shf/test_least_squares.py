"""SHF for modules that return residuals."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, vmap
from torch.nn import functional as F

from lightning_struct.data import Poisson
from lightning_struct.functional import LeastSquares
from lightning_struct.models import PhysicsInformedNetwork
from lightning_struct.optim import SHF, LevenbergMarquardt, WarmStart
from tests.cases import First, flat, gaussian, trainable


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


def points(count: int = 30) -> dict[str, Tensor]:
    return {
        "interior": torch.linspace(-1, 1, count, dtype=torch.float64)[:, None],
        "boundary": torch.tensor([[-1.0], [1.0]], dtype=torch.float64),
    }


def measurements(count: int = 12) -> tuple[Tensor, Tensor]:
    x = gaussian(count, 2, seed=0)
    return x, torch.stack([x.sum(1).sin(), x.prod(1)], dim=1)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, float] | None]] = {
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
    module, damping, gamma = build(), 3.0, 0.6
    optimizer = SHF(
        module,
        "least_squares" if shares is None else LeastSquares(shares),
        solver="exact",
        damping=LevenbergMarquardt(initial=damping, drop=None, acceleration=False),
        warm_start=WarmStart(initial=gamma, growth=1.0),
    )
    previous = torch.zeros(len(weights(module)))
    for inputs in (batch(), batch(), batch(20), batch(20), batch()):
        function, before = scaled_residuals(module, inputs, shares), weights(module)
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
@pytest.mark.parametrize("acceleration", [False, True])
def test_lsmr_takes_the_exact_step_up_to_its_tolerance(name: str, acceleration: bool) -> None:
    build, batch, shares = MODULES[name]
    rule = LevenbergMarquardt(initial=0.3, drop=None, acceleration=acceleration)
    options: dict[str, Any] = {"damping": rule, "warm_start": 0.5}
    reports = []
    for solver in ("exact", "lsmr"):
        optimizer = SHF(build(), LeastSquares(shares), solver=solver, **options)
        reports.append([optimizer.step(inputs=batch()) for _ in range(3)])
    for exact, other in zip(*reports, strict=True):
        assert other.loss_after == pytest.approx(exact.loss_after, rel=1e-4)
        assert other.reduction_ratio == pytest.approx(exact.reduction_ratio, rel=1e-3)
        assert other.gradient_norm == pytest.approx(exact.gradient_norm, rel=1e-3)
        assert exact.solver_iterations == 0 < other.solver_iterations


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


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 1.0), (1e6, 1e-3)], ids=["much", "little, of large residuals"])
def test_what_a_module_holds_may_change_from_step_to_step(factor: float, shift: float) -> None:
    """The record of a single row is made anew where its values are no longer those of the module."""
    module: Any = Fit()
    module.shift = 0.0
    module.forward = lambda x, measured: module.net(x) - measured + module.shift
    optimizer = SHF(module, "least_squares", damping=LevenbergMarquardt(initial=factor, drop=None))
    x, measured = measurements()
    optimizer.step(inputs=(x, factor * measured))
    module.shift = shift
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
def test_buffers_that_a_forward_writes_are_updated_once_a_step() -> None:
    module = Fit()
    module.net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    optimizer = SHF(module, "least_squares")
    for _ in range(4):
        optimizer.step(inputs=measurements())
    assert module.net[1].num_batches_tracked == 4


def test_rows_that_depend_on_each_other_are_warned_of_once() -> None:
    optimizer = SHF(Coupled(), "least_squares")
    with pytest.warns(UserWarning, match="rows of J for the residuals 'interior'.*depend on more than one row") as seen:
        optimizer.step(inputs=points())
    assert seen[0].filename == __file__
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
        self.square = square
        self.factors = nn.Parameter(torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64))

    def forward(self, measured: Tensor) -> Tensor:
        x = torch.linspace(0, 1, 1000, dtype=torch.float64)
        series = (self.factors[0] * (self.factors[1] * x).sin() + self.square(self.factors[2] * x)).cumsum(0) / 1000
        return series - measured


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
@pytest.mark.parametrize("square", [torch.square, HiddenSecondDerivative.apply, NoSecondDerivative.apply])
def test_many_coupled_residuals_of_few_parameters_take_the_dense_step(square: Any) -> None:
    module, measured = ManyMeasurements(square), torch.zeros(1000, dtype=torch.float64)
    before = module.factors.detach().clone()
    J = torch.func.jacrev(lambda w: functional_call(ManyMeasurements(torch.square), {"factors": w}, measured))(before)
    r = module(measured).detach()
    options = {"damping": LevenbergMarquardt(initial=0.3, drop=None, acceleration=False)}
    SHF(module, "least_squares", solver="exact", **options).step(inputs=measured)
    expected = torch.linalg.solve(J.T @ J / 1000 + 0.09 * torch.eye(3, dtype=torch.float64), -J.T @ r / 1000)
    torch.testing.assert_close(module.factors.detach() - before, expected)


class Series(nn.Module):
    def __init__(self, cells: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = cells, nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.cells(x.repeat(1, 1, 4))) - y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "build",
    [
        lambda: First(nn.LSTM(4, 4, batch_first=True)),
        lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval(),
    ],
)
def test_the_rows_of_series_are_told_apart_whatever_kernels_the_layers_have(
    build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    module, x = Series(build()).to(dtype), gaussian(5, 2, 1, seed=0).to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="SHF")
        report = SHF(module, "least_squares").step(inputs=(x, x.cumsum(1)))
    assert report.loss_after < report.loss_before


def returning(function: Callable[..., Any], module: nn.Module | None = None) -> nn.Module:
    """The module with a forward of its own, which has the module as its first argument."""
    module = nn.Linear(2, 1, dtype=torch.float64) if module is None else module
    module.forward = partial(function, module)  # type: ignore[method-assign]
    return module


def series(module: Any, x: Tensor) -> Tensor:
    return module.weight[0, 0] ** torch.arange(9) - x[:, 0]


def of_batches(module: Any, x: Tensor) -> Tensor:
    if len(x) == 1:
        raise AssertionError
    return module.weight * x


X = gaussian(9, 2, seed=0)
WARNED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "constant": (
        lambda module, x: x.detach() + 1,
        "is zero: it is at a minimum, or no residual depends on the weights",
    ),
    "zeros": (lambda module, x: 0 * module.weight * x, "the gradient of this batch is zero; no step is taken"),
    "all differences": (
        lambda module, x: module.weight[:, :1] * x[:, :1] - x[:, 0],
        r"\(9, 1\) minus one of \(9,\) is a table \(9, 9\)",
    ),
    "series": (series, "one row of the inputs gives 9 of them, and a row of the batch has 1"),
    "no message": (of_batches, "a single row cannot be recorded .AssertionError"),
}


@pytest.mark.parametrize(("function", "message"), WARNED.values(), ids=WARNED)
def test_what_makes_residuals_slow_or_useless_is_warned_of(function: Callable[..., Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        SHF(returning(function), "least_squares").step(inputs=X)


def test_rows_that_autocast_rounds_are_not_said_to_depend_on_each_other() -> None:
    module, (x, measured) = Fit().float(), measurements()
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="or autocast rounds them too coarsely"):
        SHF(module, "least_squares").step(inputs=(x.float(), measured.float()))


@pytest.mark.parametrize("where", [2, 3], ids=["in a call with a row", "in the record of one"])
def test_short_memory_is_an_error_and_no_reason_to_tell_no_rows_apart(where: int) -> None:
    calls = itertools.count(1)

    def short(module: Any, x: Tensor) -> Tensor:
        if next(calls) == where:
            raise torch.OutOfMemoryError
        return module.weight * x - 1

    optimizer = SHF(returning(short), "least_squares")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step(inputs=X)
        optimizer.step(inputs=X)


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
def test_a_block_may_be_a_single_number_or_of_one_row(solver: str) -> None:
    def forward(module: Any, x: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        u = F.linear(x, module.weight, module.bias)
        return {"value": u - x.prod(1, keepdim=True), "integral": (u.mean() - 0.25).view(shape)}

    losses = []
    for shape in ((), (1,), (1, 1)):
        torch.manual_seed(0)
        optimizer = SHF(returning(partial(forward, shape=shape)), "least_squares", solver=solver)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses.append([optimizer.step(inputs=X).block_losses for _ in range(2)])
    assert losses[0] == losses[1] == losses[2] and losses[0][-1]["value"] < losses[0][0]["value"]


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


def test_a_fixed_damping_is_kept_while_it_lowers_the_loss_and_raised_for_a_step_alone() -> None:
    module: Any = returning(lambda module, x, y: module.net(x)[:, 0] - y, Fit())
    fixed = LevenbergMarquardt(0.03, drop=None, acceleration=False)
    optimizer = SHF(module, "least_squares", solver="exact", damping=fixed, warm_start=WarmStart(0.9, growth=1.0))
    samples = [gaussian(40, 2, seed=seed) for seed in range(20)]
    dampings = [optimizer.step(inputs=(x, x.sum(1).sin() + 0.3 * x[:, 0].roll(1))).damping for x in samples]
    assert min(dampings) == optimizer.damping == 0.03 < max(dampings)


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


def tangent(x: Tensor) -> Tensor:
    """Zeros with the derivative of x."""
    return x - x.detach()


BOTH, TOO_LARGE = {"a": 1.0, "b": 2.0}, "too large for torch.float64.* Divide the residuals by"
# Name -> what a module returns; the weights of the blocks, if any; the message.
REFUSED_RESIDUALS: dict[str, tuple[Callable[[Tensor, Tensor], Any], dict[str, float] | None, str]] = {
    "nan": (lambda x, w: {"a": x * w, "b": x * w * math.nan}, None, "block 'b' .* NaN or infinity"),
    "empty": (lambda x, w: {"a": x * w, "b": x[:0] * w}, None, "block 'b' .* is empty"),
    "no numbers": (lambda x, w: {"a": x * w, "b": x[:, :0] * w}, None, "block 'b' .* is empty"),
    "no weight": (lambda x, w: {"a": x * w, "b": x * w}, {"a": 1.0}, "the block 'b' that LeastS.* has no weight for"),
    "no block": (lambda x, w: {"a": x * w}, BOTH, "a weight for the block 'b' that the module did not return"),
    "large residuals": (lambda x, w: 1e200 + tangent(x * w), None, f"squares of the residuals.* {TOO_LARGE}"),
    "large derivatives": (lambda x, w: 1.0 + 1e160 * tangent(x * w), None, f"products of the deriv.* {TOO_LARGE}"),
    "number": (lambda x, w: {"a": 3.0}, None, "block 'a'"),
    "integers": (lambda x, w: {"a": x.long()}, None, "block 'a'"),
    "tuple": (lambda x, w: (x,), None, "It returned tuple"),
    "nothing": (lambda x, w: {}, None, "It returned an empty mapping"),
    "name": (lambda x, w: {0: x}, None, "names of blocks of residuals are strings, .* got 0"),
    "complex": (lambda x, w: {"a": x + 1j}, None, "block 'a' .* torch.complex128. Return .* torch.view_as_real"),
    "loss": (lambda x, w: (x * w).square().mean(), None, "leave out the sum or average of their sq"),
    "changed inputs": (lambda x, w: x.mul_(0.5) * w, None, "changes its inputs in place"),
}


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
@pytest.mark.parametrize(("returned", "shares", "message"), REFUSED_RESIDUALS.values(), ids=REFUSED_RESIDUALS)
def test_residuals_that_cannot_be_trained_on_are_named_and_change_nothing(
    returned: Callable[[Tensor, Tensor], Any], shares: dict[str, float] | None, message: str
) -> None:
    module = Returning(returned)
    optimizer = SHF(module, LeastSquares(shares), solver="exact")
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step(inputs=torch.ones(3, 1).double())
    assert module.weight.item() == 1.0


def predictions() -> None:
    SHF(nn.Linear(2, 1), "least_squares").step(inputs=(torch.ones(3, 2), torch.ones(3, 1)))


def with_targets() -> None:
    SHF(Fit(), "least_squares").step(inputs=measurements(), targets=torch.zeros(12, 2))


def complex_weights() -> None:
    SHF(nn.Linear(2, 1, dtype=torch.complex128), "least_squares")


FINITE = "the weight of block 'a' must be finite and > 0"
REFUSED_CALLS: list[tuple[Callable[[], Any], str]] = [
    (complex_weights, "these are complex: weight, bias. Hold .* torch.view_as_complex"),
    (predictions, r"Linear.forward\(input.* cannot take the 2 inputs .* `return self.net\(x\) - y`"),
    (with_targets, "need no targets"),
    (lambda: SHF(Fit(), "least_squares").step(), r"step\(inputs=...\).*put SHFOptimization before the LightningModule"),
    (lambda: SHF(Fit(), "least_squares").summary(), "only preconditioner='kronecker' has a summary"),
    (lambda: SHF(Fit(), "least_squares").set_validation([]), "takes no validation data: its solvers need no merit"),
    (lambda: LeastSquares({"a": 0.0}), FINITE),
    (lambda: LeastSquares({"a": math.nan}), FINITE),
    (lambda: LeastSquares({"a": math.inf}), FINITE),
    (lambda: LeastSquares({"a": torch.ones(3)}), "must be one number, got Tensor. To weight rows, multiply"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("call", "message"), REFUSED_CALLS, ids=[message for _, message in REFUSED_CALLS])
def test_calls_that_mean_nothing_beside_residuals_are_named_with_the_remedy(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_blocks_keep_their_names() -> None:
    module = Returning(lambda x, w: {"a": x * w, "b": x * w})
    optimizer = SHF(module, "least_squares")
    optimizer.step(inputs=torch.ones(3, 1).double())
    module.returned = lambda x, w: {"a": x * w, "c": x * w}
    with pytest.raises(ValueError, match="the blocks 'a', 'c', in the step before 'a', 'b'"):
        optimizer.step(inputs=torch.ones(3, 1).double())


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


@pytest.mark.parametrize("solver", ["exact", "lsmr"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_residuals_in_half_precision_are_fitted_with_the_precision_of_the_weights(solver: str, autocast: bool) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        residuals = module.net(x) - x.sin()
        return residuals if autocast else (300.0 * residuals).half()  # whose squares it cannot hold

    module: Any = returning(forward, Fit().float())
    x = gaussian(20, 2, seed=0).float()
    optimizer = SHF(module, "least_squares", solver=solver)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = 0.5 * module(x).detach().double().square().sum().item() / 20
        reports = [optimizer.step(inputs=x) for _ in range(4)]
    assert reports[0].loss_before == pytest.approx(expected, rel=1e-2 if autocast else 1e-6)
    assert reports[-1].loss_after < 0.5 * reports[0].loss_before


def test_a_solver_that_is_not_named_fits_into_memory_and_is_kept_in_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, resumed_module = Equation(), Equation()
    plentiful, short, resumed = (SHF(of, "least_squares") for of in (Equation(), module, resumed_module))
    assert plentiful.step(inputs=points()).stop_reason == "exact"
    with monkeypatch.context() as context:
        context.setattr("lightning_struct.optim.memory.available_memory", lambda _: 1000)
        assert short.step(inputs=points()).solver_iterations > 0
        assert plentiful.step(inputs=points()).stop_reason == "exact"  # others may take memory later
    resumed_module.load_state_dict(module.state_dict())
    resumed.load_state_dict(short.state_dict())
    assert resumed.step(inputs=points()).stop_reason != "exact"


def test_matrices_that_do_not_fit_are_an_error_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_struct.optim.memory.available_memory", lambda _: 1000)
    message = r"for 32 residuals and 19 parameters take .* KiB, but 1.0 KiB are free.*solver='lsmr'"
    with pytest.raises(MemoryError, match=message):
        SHF(Equation(), "least_squares", solver="exact").step(inputs=points())
    assert SHF(Equation(), "least_squares", solver="lsmr").step(inputs=points()).step_length == 1.0
