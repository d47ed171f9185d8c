"""Ways of calling a module that leave the steps of SHF as they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_struct.optim import LSMR, SHF
from tests.optim.shf.test_shf import batch, network, weights

SHIFT = torch.tensor([0.5, -0.5, 1.0, 0.0], dtype=torch.float64)


class Reading(nn.Module):
    """A network that finds its inputs among its arguments, and returns residuals if measurements are among them."""

    def __init__(self, read: Callable[..., Tensor], of_residuals: bool) -> None:
        super().__init__()
        self.net, self.read, self.of_residuals = (
            nn.Sequential(network(), nn.PReLU(dtype=torch.float64)),
            read,
            of_residuals,
        )

    def forward(self, *args: Any) -> Tensor:
        if not self.of_residuals:
            return self.net(self.read(*args))
        *args, measured = args[0] if len(args) == 1 and isinstance(args[0], list) else args
        return self.net(self.read(*args)) - measured


def in_eager_graphs(step: Callable[[], Any]) -> Any:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    report = torch.compile(step, backend=backend)()
    assert len(graphs) < 5
    return report


def on_meta(step: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return step()


# Name -> reads the inputs of the network from the arguments; makes the arguments; runs a step.
WAYS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any], Callable[[Callable[[], Any]], Any]]] = {
    "plain": (lambda x: x, lambda x: x, lambda step: step()),
    "tuple": (lambda x, y: x - y, lambda x: (x + 1, torch.ones_like(x)), lambda step: step()),
    "list": (lambda x, y: x - y, lambda x: [x + 1, torch.ones_like(x)], lambda step: step()),
    "dict with a shift for all": (
        lambda d: d["x"] - d["shift"],
        lambda x: {"x": x + SHIFT, "shift": SHIFT},
        lambda step: step(),
    ),
    "packed": (lambda s: s.data, lambda x: pack_sequence(list(x[:, None])), lambda step: step()),
    "compiled loop": (lambda x: x, lambda x: x, in_eager_graphs),
    "another default device": (lambda x: x, lambda x: x, on_meta),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "paper": {"damping": 1.0, "solver": LSMR(maxiter=5)},
    "cg": {"damping": 1.0, "solver": "cg", "preconditioner": None},
    "fisher": {"damping": 1.0, "preconditioner": "fisher"},
    "exact residuals": {"solver": "exact"},
    "residuals by lsmr": {"solver": "lsmr"},
}


CALLS = [
    (way, settings)
    for way in list(WAYS)[1:]
    for settings in SETTINGS
    if not (way == "packed" and settings in ("paper", "fisher"))  # whose preconditioners take single samples
    and (way != "compiled loop" or settings == "chosen")  # it takes seconds
]


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
@pytest.mark.parametrize(("way", "settings"), CALLS)
def test_a_way_of_calling_the_module_leaves_its_steps_as_they_are(way: str, settings: str) -> None:
    of_residuals = "residuals" in settings
    reports, found = [], []
    for name in ("plain", way):
        read, arguments, run = WAYS[name]
        module = Reading(read, of_residuals)
        optimizer = SHF(module, "least_squares" if of_residuals else "mse", **SETTINGS[settings])
        for seed in (1, 2):
            x, y = batch(seed=seed)
            inputs = arguments(x)
            data: dict[str, Any] = {"inputs": inputs, "targets": y}
            if of_residuals:
                several = isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence)
                data = {"inputs": (*inputs, y) if several else (inputs, y)}
            reports.append(run(lambda data=data, optimizer=optimizer: optimizer.step(**data)))  # type: ignore[misc]
        found.append(weights(module))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-8)
    for report, expected in zip(reports[2:], reports[:2], strict=True):
        assert report.loss_after == pytest.approx(expected.loss_after, rel=1e-8)
        assert report.gradient_variance == pytest.approx(expected.gradient_variance, rel=1e-6)


CONVOLUTION = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.filterwarnings("ignore:preconditioner='kronecker'. nothing came back")
@pytest.mark.parametrize("preconditioner", ["diagonal", "fisher", "kronecker"])
@pytest.mark.parametrize("build", [network, CONVOLUTION.double], ids=["chain", "convolution"])
@pytest.mark.parametrize("way", ["chunks", "compiled"])
def test_chunks_and_a_compiled_module_take_the_same_steps(
    way: str, build: Callable[[], nn.Module], preconditioner: str
) -> None:
    module = copy.deepcopy(build())
    other = copy.deepcopy(module)
    if way == "compiled":
        other.compile(backend="aot_eager")  # graphs of AOTAutograd have no second derivatives
    options: dict[str, Any] = {"damping": 1.0, "preconditioner": preconditioner, "solver": LSMR(maxiter=5)}
    optimizers = SHF(module, "mse", **options), SHF(other, "mse", chunk_size=5 if way == "chunks" else None, **options)
    for seed in (1, 2):
        inputs, targets = batch(seed=seed)
        reports = [optimizer.step(inputs=inputs, targets=targets) for optimizer in optimizers]
        assert reports[1].gradient_variance == pytest.approx(reports[0].gradient_variance, rel=1e-10)
        torch.testing.assert_close(weights(other), weights(module), rtol=0, atol=1e-11)
