"""Two processes with a share of each block take the steps of one process with all of it."""

from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.functional import LeastSquares
from lightning_struct.optim import LSMR, SHF, LevenbergMarquardt
from tests.cases import flat, gaussian, trainable
from tests.optim.shf.test_least_squares import Equation
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow

# Of the interior and of the boundary: rows of the two shares. The module has 19 weights.
SIZES = {
    "tall": ((30, 25), (3, 4)),
    "one tall": ((5, 40), (4, 1)),
    "wide": ((5, 3), (2, 1)),
    "outer products": ((5, 3), (2, 1)),
    "flattened": ((20, 16), (5, 1)),
    "many weights": ((110, 100), (3, 4)),
}
SOLVERS: dict[str, dict[str, Any]] = {
    "exact": {"solver": "exact", "warm_start": 0.5},
    "lightly damped": {"solver": "exact", "damping": LevenbergMarquardt(initial=1e-7, drop=None)},
    "lsmr": {"solver": LSMR(maxiter=19)},
}
# Each form of J by the exact solver; the others where they take another way.
CASES = [("exact", name) for name in SIZES] + [
    *(("lightly damped", name) for name in ("tall", "wide", "many weights")),
    *(("lsmr", name) for name in ("tall", "flattened")),
]


class WideEquation(Equation):
    """Its J is kept as outer products."""

    sizes: tuple[int, ...] = (1, 64, 320, 1)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for pair in pairwise(self.sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
        self.net = nn.Sequential(*layers[:-1]).double()


class ManyWeights(WideEquation):
    """A second Gram matrix is formed of its J if λ is small."""

    sizes = (1, 12, 12, 1)


class Flattened(Equation):
    """Two residuals for each point in one row: LSMR estimates the variance from parts of the batch."""

    def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = super().forward(points).items()
        return {name: torch.stack([block, block.square()], -1).flatten() for name, block in blocks}


MODULES = {"outer products": WideEquation, "flattened": Flattened, "many weights": ManyWeights}


def points(sizes: tuple[tuple[int, int], tuple[int, int]], rank: int | None) -> dict[str, Tensor]:
    blocks = {}
    for seed, (name, size) in enumerate(zip(("interior", "boundary"), sizes, strict=True)):
        whole = gaussian(sum(size), 1, seed=seed).tanh()
        blocks[name] = whole if rank is None else whole.split(size)[rank]
    return blocks


def train(rank: int | None) -> list[list[dict[str, Any]]]:
    """For each case, weights and report of two steps."""
    runs = []
    for solver, name in CASES:
        module, steps = MODULES.get(name, Equation)(), []
        optimizer = SHF(module, LeastSquares({"interior": 1.0, "boundary": 10.0}), **SOLVERS[solver])
        for _ in range(2):
            report = asdict(optimizer.step(inputs=points(SIZES[name], rank)))
            del report["seconds"], report["merits"]
            report = {field: value for field, value in report.items() if value is not None}
            steps.append({"weights": flat(trainable(module)).clone(), "report": report})
        runs.append(steps)
    return runs


def error_of_second_step(rank: int, changed: Callable[[str, Tensor], tuple[str, Tensor]]) -> str:
    """The message of a step in which the blocks on rank 1 are others than in the step before."""
    module, inputs = Equation(), points(SIZES["tall"], rank)
    optimizer, forward = SHF(module, "least_squares"), module.forward
    optimizer.step(inputs=inputs)
    if rank == 1:
        module.forward = lambda points: dict(changed(*block) for block in forward(points).items())  # type: ignore[method-assign]
    with pytest.raises(ValueError) as error:
        optimizer.step(inputs=inputs)
    return str(error.value)


FAULTS: dict[str, Callable[[str, Tensor], tuple[str, Tensor]]] = {
    "block 'interior' of the residuals holds NaN or infinity at the current weights on rank 1": (
        lambda name, block: (name, block * torch.nan)
    ),
    "here, and others on another process": lambda name, block: (f"{name}_2", block),
}


def work(rank: int) -> dict[str, Any]:
    return {"steps": train(rank), "messages": [error_of_second_step(rank, changed) for changed in FAULTS.values()]}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_two_processes(work, tmp_path_factory.mktemp("processes"))


def test_the_steps_are_those_of_one_process_with_all_points_and_bitwise_alike(processes: list[dict[str, Any]]) -> None:
    for case, runs in zip(
        CASES, zip(*(process["steps"] for process in processes), train(None), strict=True), strict=True
    ):
        atol = 1e-7 if case[0] == "lightly damped" else 1e-8
        for first, second, whole in zip(*runs, strict=True):
            assert torch.equal(first["weights"], second["weights"]) and first["report"] == second["report"], case
            torch.testing.assert_close(first["weights"], whole["weights"], rtol=0, atol=atol, msg=str(case))
            report, expected = first["report"], whole["report"]
            assert report.keys() == expected.keys(), case
            for field, value in report.items():
                right = expected[field]
                assert value == (right if isinstance(right, str) else pytest.approx(right, rel=1e-6)), (case, field)


def test_a_fault_of_a_block_on_one_process_is_an_error_on_both(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        assert all(part in message for part, message in zip(FAULTS, process["messages"], strict=True))
