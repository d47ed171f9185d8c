"""Runs of SHF in all its forms that are interrupted, saved, copied and resumed."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_struct.optim import CG, LSMR, SHF, Kronecker, LevenbergMarquardt, StepReport, WarmStart
from tests.cases import gaussian, mlp
from tests.optim.shf.test_shf import Borrowing, batch, batch_normalised, take, weights, with_dropout, without_seconds


class SometimesBorrowing(Borrowing):
    """Uses a weight outside of the layer that owns it where the first input is positive; returns two outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) if x[0, 0] > 0 else self.layer(x).tanh())[:, :2]


class Fit(nn.Module):
    """Residuals of measurements, coupled where there are few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, measured: Tensor) -> Tensor:
        residuals = self.net(x) - measured
        return residuals - residuals.mean() / 2 if 1 < len(x) < 10 else residuals


@dataclass(frozen=True)
class Form:
    """SHF with some options for some network; the batches have these sizes."""

    options: dict[str, Any] = field(default_factory=dict)
    build: Callable[[], nn.Module] = mlp
    loss: str = "mse"
    sizes: tuple[int, ...] = (6, 9, 9, 14, 10, 16, 12)
    dtype: torch.dtype = torch.float64
    exact_variance: bool | None = None
    stays: bool = False  # the batch

    def make(self) -> tuple[nn.Module, SHF]:
        torch.manual_seed(0)
        module = self.build().to(self.dtype)
        optimizer = SHF(module, self.loss, **self.options)
        if self.exact_variance is not None:
            optimizer.exact_variance = self.exact_variance
        return module, optimizer

    def run(self, optimizer: SHF, first: int, last: int) -> list[StepReport]:
        reports = []
        for i in range(first, last):
            inputs, targets = batch(self.sizes[i], seed=100 + i * (not self.stays), dtype=self.dtype)
            if self.loss == "least_squares":
                reports.append(optimizer.step(inputs=(inputs, targets)))
            else:
                reports.append(take(optimizer, (inputs, targets)))
        return list(map(without_seconds, reports))


RULE = LevenbergMarquardt(initial=0.5, drop=0.9)
FORMS = {
    "chosen": Form(),
    "chosen in float32": Form(dtype=torch.float32),
    "chosen exact": Form(sizes=(40,) * 7, stays=True),
    "exact": Form({"solver": "exact"}, dtype=torch.float32),
    "lsmr": Form({"damping": RULE, "solver": LSMR(maxiter=7)}),
    "lsmr in float32": Form({"damping": RULE, "solver": LSMR(maxiter=7)}, dtype=torch.float32),
    "cg": Form({"damping": RULE, "solver": CG(maxiter=7), "l2": 0.1, "preconditioner": "fisher"}),
    "factors": Form({"damping": RULE, "solver": CG(maxiter=7), "preconditioner": Kronecker(interval=1)}),
    "factors for three steps": Form({"solver": LSMR(maxiter=7), "preconditioner": Kronecker(interval=3)}),
    "dropout": Form({"damping": 1.0, "solver": LSMR(maxiter=5)}, with_dropout),
    "batch normalisation": Form({}, batch_normalised),
    "variance by halves and layers": Form({}, SometimesBorrowing, exact_variance=True),
    "exact residuals": Form({"solver": "exact", "warm_start": 0.5}, Fit, "least_squares"),
    "residuals by lsmr": Form({"solver": LSMR(maxiter=9)}, Fit, "least_squares", (20, 20, 25, 20, 20, 20, 20)),
    "spring": Form(
        {"damping": LevenbergMarquardt(1.0, drop=None), "warm_start": WarmStart(0.9, growth=1.0)}, Fit, "least_squares"
    ),
}

# What a way returns gives the module and the optimizer from which the run goes on.
Restore = Callable[[], tuple[nn.Module, SHF]]


def by_checkpoint(form: Form, module: nn.Module, optimizer: SHF, older: bool = False) -> Restore:
    file, state = io.BytesIO(), optimizer.state_dict()
    if older and "shf" in state["state"]:  # as 0.3.0 wrote it
        state["state"]["shf"] = {**state["state"]["shf"], "loss_after": 1.0}
    torch.save({"model": module.state_dict(), "optimizer": state}, file)

    def restore() -> tuple[nn.Module, SHF]:
        file.seek(0)
        checkpoint = torch.load(file, weights_only=True)
        other, resumed = form.make()
        form.run(resumed, 5, 6)  # what it remembers of another run does not count
        other.load_state_dict(checkpoint["model"])
        resumed.load_state_dict(checkpoint["optimizer"])
        return other, resumed

    return restore


def by_snapshot(form: Form, module: nn.Module, optimizer: SHF) -> Restore:
    model, state = copy.deepcopy(module.state_dict()), optimizer.state_dict()

    def restore() -> tuple[nn.Module, SHF]:
        module.load_state_dict(model)
        optimizer.load_state_dict(state)
        return module, optimizer

    return restore


def by_copy(form: Form, module: nn.Module, optimizer: SHF) -> Restore:
    pair = copy.deepcopy((module, optimizer))
    return lambda: pair


def by_pickle(form: Form, module: nn.Module, optimizer: SHF) -> Restore:
    pickled = pickle.dumps((module, optimizer))
    return lambda: pickle.loads(pickled)


WAYS: dict[str, Callable[[Form, nn.Module, SHF], Restore]] = {
    "checkpoint": by_checkpoint,
    "checkpoint of 0.3.0": lambda *given: by_checkpoint(*given, older=True),
    "snapshot": by_snapshot,
    "copy": by_copy,
    "pickle": by_pickle,
}


@pytest.mark.filterwarnings("ignore:SHF. the rows of J", "ignore:SHF takes the variance from the gradients")
@pytest.mark.covering(2)
@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMS)
def test_a_run_that_is_resumed_is_the_uninterrupted_one(name: str, way: str, done: int) -> None:
    form = FORMS[name]
    module, optimizer = form.make()
    form.run(optimizer, 0, done)
    restore = WAYS[way](form, module, optimizer)
    expected, settings = form.run(optimizer, done, done + 3), optimizer.settings
    at_the_end = weights(module)
    torch.rand(7)  # the global generator is somewhere else
    other, resumed = restore()
    assert form.run(resumed, done, done + 3) == expected
    assert torch.equal(weights(other), at_the_end)
    assert resumed.settings == settings


@pytest.mark.parametrize("name", ["lsmr", "factors", "factors for three steps", "exact residuals"])
@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_state_continues_in_a_module_of_another_dtype(name: str, saved: torch.dtype, loaded: torch.dtype) -> None:
    form = FORMS[name]
    module, optimizer = Form(form.options, form.build, form.loss, dtype=saved).make()
    data = gaussian(12, 4, seed=1), gaussian(12, 2, seed=2)

    def step(optimizer: SHF, dtype: torch.dtype) -> StepReport:
        x, y = (t.to(dtype) for t in data)
        return optimizer.step(inputs=(x, y)) if form.loss == "least_squares" else take(optimizer, (x, y))

    step(optimizer, saved)
    other, resumed = Form(form.options, form.build, form.loss, dtype=loaded).make()
    other.load_state_dict(module.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    report = step(resumed, loaded)
    memory = resumed.state["shf"]
    assert report.loss_after < report.loss_before
    kept = [memory["direction"], *(t for block in (memory["factors"] or {}).values() for t in block.values())]
    assert {t.dtype for t in kept} == {loaded}
