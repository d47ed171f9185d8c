"""Two processes with a share of the batch each take the steps of one process with all of it.

One pair of processes runs everything; what they did is compared here, check by check.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.optim import CG, LSMR, SHF, Kronecker, LevenbergMarquardt
from tests.cases import First, flat, mlp, trainable
from tests.optim.helpers import gaussian
from tests.optim.shf.test_kronecker import Offset
from tests.optim.shf.test_resume import SometimesBorrowing
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow

SIZES = ((5, 7), (9, 3), (1, 14))  # of the two shares in three steps
EVENER = ((5, 7), (7, 5), (8, 9))


def network() -> nn.Module:
    return mlp().double()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)).double()


def recurrent_and_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), First(nn.GRU(2, 3, batch_first=True)), nn.LayerNorm(3), nn.Flatten(), nn.Linear(6, 2)
    ).double()


def offset() -> nn.Module:
    return Offset().double()


@dataclass(frozen=True)
class Scenario:
    options: dict[str, Any]
    loss: str = "mse"
    build: Callable[[], nn.Module] = network
    dtype: torch.dtype = torch.float64
    validation: tuple[int, int] | None = None  # sizes of the two shares
    sizes: tuple[tuple[int, int], ...] = SIZES
    stays: bool = False  # the batch


SCENARIOS = {
    "lsmr_diagonal": Scenario({"preconditioner": "diagonal"}),
    "cg_fisher": Scenario({"solver": "cg", "preconditioner": "fisher"}),
    "lsmr_origin_l2": Scenario(
        {"solver": "lsmr", "damping": LevenbergMarquardt(1.0, drop=0.9, center="origin")}
        | {"l2": 0.1, "preconditioner": "fisher"}
    ),
    "diagonal_sum_on_x": Scenario({"preconditioner": "diagonal_sum", "solver": LSMR(damping_space="x", maxiter=10)}),
    "chunks": Scenario({"chunk_size": 4}, build=convolution),
    "validation": Scenario({"solver": LSMR(maxiter=20)}, loss="cross_entropy", validation=(4, 9)),
    "validation_on_one_process": Scenario({"solver": LSMR(maxiter=20, miniter=5, ftol=1e-3)}, validation=(0, 6)),
    "kronecker_cg_l2": Scenario({"preconditioner": Kronecker(interval=2), "solver": "cg", "l2": 0.1}),
    "kronecker_cross_entropy_chunks": Scenario(
        {"preconditioner": Kronecker(max_size=5), "solver": LSMR(maxiter=20), "chunk_size": 4}, loss="cross_entropy"
    ),
    "kronecker_convolution": Scenario({"preconditioner": "kronecker", "solver": LSMR(maxiter=10)}, build=convolution),
    "kronecker_recurrent": Scenario(
        {"preconditioner": "kronecker", "solver": LSMR(maxiter=8), "backend": "double_backward"},
        build=recurrent_and_norm,
    ),
    "kronecker_parameter": Scenario(
        {"preconditioner": "kronecker", "solver": LSMR(maxiter=8), "backend": "double_backward"},
        build=offset,
    ),
    "curvature_share": Scenario({"preconditioner": "kronecker", "solver": CG(curvature_share=0.8)}, sizes=EVENER),
    "two_arguments": Scenario({"damping": None}, loss="cross_entropy"),
    "chosen_exact": Scenario({"damping": None}, sizes=((14, 9),) * 4, stays=True, validation=(4, 9)),
    "float32": Scenario({"solver": LSMR(maxiter=10)}, dtype=torch.float32),
}


def draw(n: int, seed: int, scenario: Scenario) -> tuple[Tensor, Tensor]:
    inputs = gaussian(n, 4, seed=seed)
    scores = (inputs @ gaussian(4, 2, seed=99)).tanh() + 0.1 * gaussian(n, 2, seed=seed + 1)
    targets = scores.argmax(1) if scenario.loss == "cross_entropy" else scores.to(scenario.dtype)
    return inputs.to(scenario.dtype), targets


def share(data: tuple[Tensor, Tensor], sizes: tuple[int, int], rank: int | None) -> tuple[Tensor, Tensor]:
    """The rows of a process; all of them where ``rank`` is None."""
    rows = slice(None) if rank is None else slice(0, sizes[0]) if rank == 0 else slice(sizes[0], None)
    return data[0][rows], data[1][rows]


def make(scenario: Scenario) -> tuple[nn.Module, SHF]:
    torch.manual_seed(0)
    module = scenario.build().to(scenario.dtype)
    return module, SHF(module, scenario.loss, **{"damping": LevenbergMarquardt(1.0, drop=0.9), **scenario.options})


def train(scenario: Scenario, rank: int | None) -> list[dict[str, Any]]:
    """Weights and report of each step."""
    module, optimizer = make(scenario)
    if scenario.validation is not None:
        data = draw(sum(scenario.validation), 500, scenario)
        optimizer.set_validation([share(data, scenario.validation, rank)])
    steps = []
    for i, sizes in enumerate(scenario.sizes):
        inputs, targets = share(draw(sum(sizes), 100 + 10 * i * (not scenario.stays), scenario), sizes, rank)
        report = asdict(optimizer.step(inputs=inputs, targets=targets))
        del report["seconds"]
        steps.append({"weights": flat(trainable(module)).clone(), "report": report, "damping": optimizer.damping})
    return steps


def refused(rank: int) -> str:
    """The message of a step whose curvature is of samples of rank 0 alone."""
    scenario = Scenario({"solver": CG(curvature_share=0.4)})
    _, optimizer = make(scenario)
    inputs, targets = share(draw(12, 100, scenario), (5, 7), rank)
    with pytest.raises(ValueError) as error:
        optimizer.step(inputs=inputs, targets=targets)
    return str(error.value)


def fail(rank: int, spoil: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The message of a step in which the share of rank 1 is spoilt, and whether the weights stayed."""
    scenario = Scenario({})
    module, optimizer = make(scenario)
    before = flat(trainable(module)).clone()
    data = share(draw(12, 100, scenario), (5, 7), rank)
    inputs, targets = spoil(data) if rank == 1 else data
    message = ""
    try:
        optimizer.step(inputs=inputs, targets=targets)
    except ValueError as error:
        message = str(error)
    unchanged = torch.equal(flat(trainable(module)), before)
    after = optimizer.step(inputs=data[0], targets=data[1])
    return {"message": message, "unchanged": unchanged, "continues": after.loss_after < after.loss_before}


def with_nan(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0].index_fill(0, torch.tensor([2]), math.nan), data[1]


def emptied(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0][:0], data[1][:0]


def overflowing(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0], data[1] * 1e200


FAULTS = {
    "nan": with_nan,
    "empty": emptied,
    "overflow": overflowing,
    "none": lambda data: (None, data[1]),
    "width": lambda data: (torch.cat(data, 1), data[1]),
}


def step_uncovered_on_one(rank: int) -> dict[str, Any]:
    """The state after a step in which the layers of one process do not show the gradients of its samples."""
    torch.manual_seed(0)
    optimizer, inputs = SHF(SometimesBorrowing().double(), "mse"), gaussian(6, 4, seed=rank).abs()
    optimizer.exact_variance = True
    optimizer.step(inputs=inputs if rank else -inputs, targets=torch.zeros(6, 2).double())
    return {"uncovered": optimizer.state_dict()["state"]["shf"].get("uncovered", False)}


def work(rank: int) -> dict[str, Any]:
    return {
        "state": step_uncovered_on_one(rank),
        "steps": {name: train(scenario, rank) for name, scenario in SCENARIOS.items()},
        "refused": refused(rank),
        "faults": {name: fail(rank, spoil) for name, spoil in FAULTS.items()},
    }


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes did."""
    return in_two_processes(work, tmp_path_factory.mktemp("processes"))


def test_layers_that_show_nothing_on_one_process_are_asked_on_none_again(processes: list[dict[str, Any]]) -> None:
    assert [of_one["state"]["uncovered"] for of_one in processes] == [True, True]


@pytest.mark.parametrize("name", SCENARIOS)
def test_steps_are_those_of_one_process_with_the_whole_batch_and_bitwise_alike(
    name: str, processes: list[dict[str, Any]]
) -> None:
    """In float32 a hundred units in the last place are allowed: Krylov methods amplify rounding."""
    exact = SCENARIOS[name].dtype == torch.float64
    for step, other, whole in zip(*(of["steps"][name] for of in processes), train(SCENARIOS[name], None), strict=True):
        assert torch.equal(step["weights"], other["weights"])
        assert (step["report"], step["damping"]) == (other["report"], other["damping"])
        torch.testing.assert_close(step["weights"], whole["weights"], rtol=0, atol=1e-9 if exact else 1e-5)
        for field, value in whole["report"].items() if exact else ():
            is_number = isinstance(value, (int, float, dict))
            if field == "merits":
                assert dict(step["report"][field]) == pytest.approx(dict(value), rel=1e-9)
            else:
                assert step["report"][field] == (pytest.approx(value, rel=1e-9) if is_number else value), field
        assert not exact or step["damping"] == pytest.approx(whole["damping"], rel=1e-12)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "NaN or infinity on rank 1"),
        ("empty", "empty on rank 1"),
        ("overflow", "loss at the current weights is inf"),
        ("none", "none on rank 1"),
        ("width", "columns on rank 1"),
    ],
)
def test_a_fault_on_one_process_is_an_error_on_both_that_changes_nothing(
    fault: str, message: str, processes: list[dict[str, Any]]
) -> None:
    for process in processes:
        outcome = process["faults"][fault]
        assert message in outcome["message"]
        assert outcome["unchanged"] and outcome["continues"]


def test_a_share_that_leaves_a_process_without_samples_is_refused_on_all(processes: list[dict[str, Any]]) -> None:
    for process in processes:
        assert "curvature_share leaves the first 5 of 12 samples, and none on process 1" in process["refused"]
