"""SHF for modules that return residuals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, vmap

from lightning_struct.functional import LeastSquares
from lightning_struct.optim import SHF
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
    return {"interior": gaussian(30, 1, seed=0), "boundary": torch.tensor([[-1.0], [1.0]], dtype=torch.float64)}


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
        damping=damping,
        drop=None,
        warm_start=gamma,
        warm_start_growth=1.0,
        geodesic_acceleration=False,
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


def test_two_arguments_are_enough_for_a_differential_equation() -> None:
    module, inputs = Equation(), points()
    optimizer = SHF(module, "least_squares")
    losses = [optimizer.step(inputs=inputs).loss_after for _ in range(20)]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < 0.01 * losses[0]


def test_the_report_has_the_loss_of_each_block() -> None:
    module, inputs = Equation(), points()
    with torch.enable_grad():
        expected = {name: 0.5 * block.square().mean().item() for name, block in module(inputs).items()}
    report = SHF(module, LeastSquares({"interior": 1.0, "boundary": 10.0})).step(inputs=inputs)
    assert report.block_losses == pytest.approx(expected, rel=1e-12)
    assert report.loss_before == pytest.approx(expected["interior"] + 10 * expected["boundary"], rel=1e-12)
    assert report.batch_size == 32


# --- what bad input gets ----------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """Returns what it is told, times a weight."""

    def __init__(self, **blocks: Any) -> None:
        super().__init__()
        self.weight, self.blocks = nn.Parameter(torch.ones(())), blocks

    def forward(self, _: Tensor) -> dict[str, Any]:
        return {name: self.weight * block for name, block in self.blocks.items()}


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("blocks", "shares", "message"),
    [
        ({"a": ONES, "b": ONES * math.nan}, None, "block 'b' of the residuals holds NaN or infinity"),
        ({"a": ONES, "b": ONES[:0]}, None, "block 'b' of the residuals is empty"),
        ({"a": ONES, "b": ONES}, {"a": 1.0}, "the block 'b' that LeastSquares.* has no weight for"),
        ({"a": ONES}, {"a": 1.0, "b": 2.0}, "a weight for the block 'b' that the module did not return"),
    ],
    ids=["nan", "empty", "more blocks than weights", "more weights than blocks"],
)
@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_an_error_names_the_block(blocks: dict[str, Tensor], shares: dict[str, float] | None, message: str) -> None:
    module = Returns(**blocks)
    with pytest.raises(ValueError, match=message):
        SHF(module, LeastSquares(shares)).step(inputs=torch.ones(3, 1))
    assert module.weight.item() == 1.0


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_blocks_keep_their_names() -> None:
    module = Returns(a=ONES, b=ONES)
    optimizer = SHF(module, "least_squares")
    optimizer.step(inputs=torch.ones(3, 1))
    module.blocks = {"a": ONES, "c": ONES}
    with pytest.raises(ValueError, match="the blocks 'a', 'c', in the step before 'a', 'b'"):
        optimizer.step(inputs=torch.ones(3, 1))


@pytest.mark.parametrize("returned", [3.0, torch.ones(2, dtype=torch.int64), ()], ids=["number", "integers", "tuple"])
def test_other_things_than_residuals_are_named(returned: Any) -> None:
    module = nn.Linear(1, 1)
    module.forward = lambda _: {"a": returned} if returned != () else ()  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="block 'a'|it returned tuple|returned an empty|returned tuple"):
        SHF(module, "least_squares").step(inputs=torch.ones(1, 1))


def test_targets_are_refused() -> None:
    with pytest.raises(TypeError, match="need no targets"):
        SHF(Fit(), "least_squares").step(inputs=measurements(), targets=torch.zeros(12, 2))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_are_finite_and_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of block 'a' must be finite and > 0"):
        LeastSquares({"a": weight})


@pytest.mark.parametrize(("option", "value"), [("preconditioner", "kronecker"), ("held_out", 0.2), ("l2", 0.1)])
def test_settings_without_meaning_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}=.* has no meaning beside loss='least_squares'"):
        SHF(Fit(), "least_squares", **{option: value})


def test_the_exact_solver_is_for_residuals() -> None:
    with pytest.raises(ValueError, match="solver='exact'.*for loss='least_squares'"):
        SHF(nn.Linear(1, 1), "mse", damping=1.0, solver="exact")
