"""Whole steps of SHF against the same steps written down with dense matrices (see helpers.py)."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.optim import CG, LSMR, SHF, LevenbergMarquardt, WarmStart
from tests.cases import First, batch_norm_eval, flat, frozen_mlp, mlp, trainable
from tests.optim.helpers import (
    DenseModel,
    RecordingLoss,
    TriangularPreconditioner,
    best_going_back,
    dense_cg_iterates,
    dense_direction,
    dense_model,
    gaussian,
    value_at,
)

DAMPING, DROP, WARM_START, GROWTH, CG_ITERATIONS = 1.5, 0.9, 0.7, 1.01, 6
PRECONDITIONERS = (None, "diagonal", "diagonal_sum", "fisher", "object")
LINEAR = [
    pytest.param(center, space, preconditioner, id=f"{center}-{space}-{preconditioner}")
    for center in ("start", "origin")
    for space in ("y", "x")
    for preconditioner in PRECONDITIONERS
    if (center, space, preconditioner) != ("origin", "y", "object")  # needs C itself, an object has its inverse only
]


def batches(loss: str, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    """Two draws from one distribution: else the last direction may lead uphill on the next batch."""
    teacher = gaussian(4, 2, seed=1)

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        inputs = gaussian(size, 4, seed=seed)
        scores = (inputs @ teacher).tanh() + 0.3 * gaussian(size, 2, seed=seed + 1)
        return inputs, scores.argmax(1) if loss == "cross_entropy" else scores

    return [draw(10), draw(20)]


def triangular(n: int) -> Tensor:
    return gaussian(n, n, seed=30).tril(-1) * 0.1 + torch.diag(gaussian(n, seed=31).abs() + 0.8)


@dataclass(frozen=True)
class Expected:
    weights: Tensor
    report: dict[str, float]
    damping_after: float
    last: Tensor


def preconditioning(choice: str | None, model: DenseModel, damping: float, probe: Tensor) -> Tensor:
    """C as a dense matrix."""
    n = len(model.gradient)
    if choice == "object":
        return triangular(n)
    if choice == "diagonal":
        return torch.diag(1.0 + model.squared_probes(probe).sqrt())
    if choice == "diagonal_sum":
        return torch.diag(1.0 + model.squared_probes(probe) * len(probe))
    if choice == "fisher":
        return torch.diag((model.gradients.square().mean(0) + damping**2) ** 0.375)
    return torch.eye(n, dtype=torch.float64)


def expected_step(
    module: nn.Module,
    loss: str,
    batch: tuple[Tensor, Tensor],
    previous: Tensor | None,
    gamma: float,
    damping: float,
    *,
    solver: str,
    center: str,
    space: str,
    c: Tensor,
    model: DenseModel,
    l2: float,
) -> Expected:
    weights = flat(trainable(module)).clone()
    start = torch.zeros_like(weights) if previous is None else gamma * previous
    identity = torch.eye(len(weights), dtype=weights.dtype)
    gradient = model.gradient + l2 * weights

    def value(direction: Tensor) -> float:
        return value_at(module, loss, *batch, weights + direction, l2)

    if solver == "cg":
        matrix = model.gauss_newton + (damping**2 + l2) * identity
        right = -gradient + (damping**2 * start if center == "start" else 0.0)
        inverse = torch.linalg.inv(c.T @ c)
        iterates = dense_cg_iterates(matrix, right, start, inverse, CG_ITERATIONS)
        direction, last = best_going_back(iterates, value), iterates[-1]
    else:
        pull = c if space == "y" else identity
        direction = dense_direction(model, weights, start, damping=damping, center=center, weight=pull, l2=l2)
        last = direction
    before, slope = value(torch.zeros_like(weights)), gradient @ direction
    curvature = direction @ model.gauss_newton @ direction + l2 * direction @ direction
    ratio = (value(direction) - before) / (slope + 0.5 * curvature).item()
    length = 1.0
    while value(length * direction) > before + 1e-4 * length * slope:
        length /= 2
    after = damping / DROP if ratio < 0.25 else damping * DROP if ratio > 0.75 else damping
    report = {
        "loss_before": before,
        "loss_after": value(length * direction),
        "reduction_ratio": ratio,
        "step_length": length,
        "damping": damping,
        "gradient_norm": gradient.norm().item(),
        "gradient_variance": model.variance,
        "batch_size": len(batch[0]),
        "predicted_batch_size": math.ceil(model.variance / (0.25 * (gradient @ gradient).item())),
    }
    return Expected(weights + length * direction, report, after, last)


def check_steps(
    module: nn.Module,
    loss: str,
    data: list[tuple[Tensor, Tensor]],
    *,
    solver: str = "lsmr",
    center: str = "start",
    space: str | None = None,
    preconditioner: str | None = "diagonal",
    l2: float = 0.0,
) -> None:
    """Weights, report, and the damping after each step on the batches are those of the dense problem."""
    recording = RecordingLoss(loss)
    size = len(flat(trainable(module)))
    given: Any = preconditioner
    if preconditioner == "object":
        given = TriangularPreconditioner(triangular(size), trainable(module))
    chosen: Any = CG(maxiter=CG_ITERATIONS, progress_tolerance=0.0)
    if solver != "cg":
        chosen = LSMR(maxiter=500, atol=0.0, damping_space=space)
    optimizer = SHF(
        module,
        recording,
        damping=LevenbergMarquardt(initial=DAMPING, drop=DROP, center=center),
        solver=chosen,
        preconditioner=given,
        warm_start=WarmStart(initial=WARM_START, growth=GROWTH),
        l2=l2,
    )
    effective_space = space or ("x" if solver == "cg" or l2 else "y")
    damping, previous = DAMPING, None
    for i, batch in enumerate(data):
        reference = copy.deepcopy(module)
        report = optimizer.step(inputs=batch[0], targets=batch[1])
        model = dense_model(reference, loss, *batch)
        expected = expected_step(
            reference,
            loss,
            batch,
            previous,
            WARM_START * GROWTH**i,
            damping,
            solver=solver,
            center=center,
            space=effective_space,
            c=preconditioning(preconditioner, model, damping, recording.probe),
            model=model,
            l2=l2,
        )
        damping, previous = expected.damping_after, expected.last
        torch.testing.assert_close(flat(trainable(module)), expected.weights, rtol=0, atol=1e-9)
        assert {name: getattr(report, name) for name in expected.report} == pytest.approx(expected.report, rel=1e-8)
        assert optimizer.damping == pytest.approx(damping, rel=1e-12)
    assert not isinstance(given, TriangularPreconditioner) or given.updates == len(data)


def network() -> nn.Module:
    torch.manual_seed(0)
    return mlp().double()


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize(("center", "space", "preconditioner"), LINEAR)
def test_two_steps_by_lsmr(loss: str, center: str, space: str, preconditioner: str | None) -> None:
    check_steps(network(), loss, batches(loss), center=center, space=space, preconditioner=preconditioner)


@pytest.mark.covering(2)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("center", ["start", "origin"])
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_two_steps_with_l2(loss: str, center: str, preconditioner: str | None) -> None:
    check_steps(network(), loss, batches(loss), center=center, preconditioner=preconditioner, l2=0.3)


@pytest.mark.covering(2)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("center", ["start", "origin"])
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_two_steps_by_conjugate_gradients(loss: str, center: str, preconditioner: str | None, l2: float) -> None:
    check_steps(network(), loss, batches(loss), solver="cg", center=center, preconditioner=preconditioner, l2=l2)


MODELS = {
    "frozen": frozen_mlp,
    "sequence": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten()
    ),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten()),
    "lstm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), First(nn.LSTM(2, 2, batch_first=True)), nn.Flatten(), nn.Linear(4, 2)
    ),
    "batch_norm_eval": batch_norm_eval,
    "layer_norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "lstm" else n for n in MODELS])
@pytest.mark.parametrize("preconditioner", ["diagonal", "fisher"])
def test_two_steps_of_other_models(name: str, preconditioner: str) -> None:
    torch.manual_seed(0)
    check_steps(MODELS[name]().double(), "mse", batches("mse"), preconditioner=preconditioner)


def test_a_step_that_is_too_long_is_halved_until_armijo_holds() -> None:
    """A saturated unit has a small slope, so the Gauss-Newton step with little damping goes far past the target."""
    module = nn.Sequential(nn.Linear(1, 1), nn.Tanh()).double()
    nn.init.constant_(module[0].weight, 2.0)
    nn.init.constant_(module[0].bias, 1.0)
    x, y = torch.tensor([[1.0], [1.1]], dtype=torch.float64), torch.full((2, 1), 0.5, dtype=torch.float64)
    optimizer = SHF(module, "mse", damping=1e-3, preconditioner=None, solver=LSMR(maxiter=500, atol=0.0))
    reference, weights = copy.deepcopy(module), flat(trainable(module)).clone()
    model = dense_model(reference, "mse", x, y)
    zero, identity = torch.zeros_like(weights), torch.eye(len(weights), dtype=weights.dtype)
    direction = dense_direction(model, weights, zero, damping=1e-3, center="start", weight=identity, l2=0.0)

    report = optimizer.step(inputs=x, targets=y)

    def meets_armijo(length: float) -> bool:
        bound = model.value + 1e-4 * length * (model.gradient @ direction).item()
        return value_at(reference, "mse", x, y, weights + length * direction, 0.0) <= bound

    lengths = [0.5**i for i in range(20)]
    assert report.step_length == next(length for length in lengths if meets_armijo(length)) < 1.0
    torch.testing.assert_close(flat(trainable(module)), weights + report.step_length * direction, rtol=0, atol=1e-9)
