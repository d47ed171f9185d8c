"""PINA and DeepXDE: their physics-informed networks, trained by SHF on the residuals they have."""

import os
from itertools import accumulate, pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_struct import SHF, SHFOptimization


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_pina() -> None:
    pytest.importorskip("pina")
    from pina import LabelTensor, Trainer
    from pina.model import FeedForward
    from pina.problem.zoo import Poisson2DSquareProblem
    from pina.solver import PINN

    class Residuals(nn.Module):
        def __init__(self, solver: PINN) -> None:
            super().__init__()
            self.model = solver.model
            self.residual = lambda name, x: solver.problem.conditions[name].evaluate({"input": x}, solver)
            self.labels = solver.problem.input_variables

        def forward(self, points: dict[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: self.residual(name, LabelTensor(x.clone(), self.labels).requires_grad_()).as_subclass(Tensor)
                for name, x in points.items()
            }

    class LeastSquaresPINN(SHFOptimization, PINN):
        optimizers = L.LightningModule.optimizers  # PINN has another attribute of this name

        def inputs_and_targets(self, batch: Any) -> tuple[Any, None]:
            return {name: data["input"].as_subclass(Tensor) for name, data in batch}, None

        def configure_optimizers(self) -> SHF:
            return SHF(Residuals(self), "least_squares", solver="exact")

    torch.manual_seed(0)
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(64, "random")
    solver = LeastSquaresPINN(problem, FeedForward(input_dimensions=2, output_dimensions=1, layers=[10]))
    trainer = Trainer(
        solver, max_epochs=40, precision="64-true", accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.global_step == 40
    at = problem.domains["D"].sample(1000, "random").to(torch.float64)
    solution = problem.solution(at).as_subclass(Tensor)
    assert (solver(at).as_subclass(Tensor) - solution).norm() < 1e-2 * solution.norm()


def test_deepxde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DDE_BACKEND", "pytorch")
    dde = pytest.importorskip("deepxde")
    before = torch.get_default_dtype()
    dde.config.set_default_float("float64")
    try:
        geometry = dde.geometry.Rectangle([0, 0], [1, 1])

        def equation(x: Tensor, u: Tensor) -> Tensor:
            source = 2 * np.pi**2 * torch.sin(np.pi * x[:, :1]) * torch.sin(np.pi * x[:, 1:])
            return -dde.grad.hessian(u, x, i=0, j=0) - dde.grad.hessian(u, x, i=1, j=1) - source

        zero = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on_boundary: on_boundary)
        data = dde.data.PDE(geometry, equation, zero, num_domain=120, num_boundary=30)
        dde.config.set_random_seed(0)
        model = dde.Model(data, dde.nn.FNN([2, 10, 1], "tanh", "Glorot uniform"))

        class Residuals(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = model.net

            def forward(self, interior: Tensor, boundary: Tensor) -> dict[str, Tensor]:
                dde.grad.clear()
                interior.requires_grad_()
                blocks = {"equation": data.pde(interior, self.net(interior))}
                values, limits = self.net(boundary), pairwise(accumulate(data.num_bcs, initial=0))
                for number, (condition, (first, last)) in enumerate(zip(data.bcs, limits, strict=True)):
                    blocks[f"condition {number}"] = condition.error(data.train_x, boundary, values, first, last)
                return blocks

        optimizer = SHF(Residuals(), "least_squares")
        for step in range(40):
            if step % 5 == 0:
                data.resample_train_points()
            optimizer.step(inputs=(torch.as_tensor(data.train_x_all), torch.as_tensor(data.train_x_bc)))
        points = geometry.random_points(1000)
        solution = np.sin(np.pi * points[:, :1]) * np.sin(np.pi * points[:, 1:])
        assert dde.metrics.l2_relative_error(solution, model.net(torch.as_tensor(points)).detach().numpy()) < 1e-2
    finally:
        torch.set_default_dtype(before)
