"""The recipes of physics-informed networks, on few points."""

from typing import ClassVar

import lightning as L
import pytest
import torch

from lightning_struct.data import Box, DifferentialEquation, Faces, Poisson
from lightning_struct.recipes import heat_pinn, poisson_pinn
from tests.recipes.little import LITTLE, QUIET, run


@pytest.fixture(scope="module")
def finished(finish):
    points = ["--data.counts={interior: 60, boundary: 30}", "--data.eval_count=200", "--data.steps_per_epoch=20"]
    arguments = ["fit", *points, "--model.hidden_sizes=[10]", "--trainer.max_epochs=2", *QUIET]
    return finish(poisson_pinn.main, arguments)


def test_fit_reports_the_error_and_draws_the_solution(finished):
    printed = finished.printed
    assert "relative L² error" in printed and "solution.png" in printed and "training_curves.png" in printed
    assert (finished.directory / "results/poisson_pinn/version_0/solution.png").exists()


class Unsolved(DifferentialEquation):
    """An equation of a user, whose solution is not known."""

    domain = Box([0.0], [1.0])
    regions: ClassVar = {"interior": domain, "boundary": Faces(domain)}
    coordinates = ("x",)

    def residual(self, block, u, points):
        return u(points) - 1


def test_fit_of_an_equation_without_a_known_solution_reports_the_loss(capsys):
    run("poisson_pinn", "fit", "--config", "adam", f"--data.equation={__name__}.Unsolved", "--trainer.max_epochs=1")
    printed = capsys.readouterr().out
    assert "Σ ½ mean r²" in printed and "relative L² error" not in printed and "best checkpoint" in printed


def test_few_steps_of_shf_solve_the_equation(finished):
    assert finished.cli.trainer.callback_metrics["relative_l2_error"] < 0.05


def test_predict_writes_the_field(finished, monkeypatch):
    monkeypatch.chdir(finished.directory)
    checkpoint = next(finished.directory.rglob("last.ckpt"))
    cli = poisson_pinn.main(["predict", "--ckpt_path", str(checkpoint), "--data.predict_count=25", *QUIET])
    (written,) = finished.directory.rglob("field.pt")
    field = torch.load(written)["field"]
    assert field.shape == (25, 3)  # x, y, u
    torch.testing.assert_close(field[:, 2], cli.model.network(field[:, :2]).detach())
    assert (field[:, 2] - Poisson(2).solution(field[:, :2])).abs().max() < 0.2


class SmallValue(L.Callback):
    """Shows a value in the progress bar that is as small as the losses of these recipes."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.log("small", torch.tensor(1.25e-8, dtype=torch.float64), prog_bar=True)


def test_lines_of_a_fit_show_small_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    callback = f"--trainer.callbacks+={__name__}.SmallValue"
    heat_pinn.main(["fit", "--config", "adam", "--trainer.fast_dev_run=2", callback, *LITTLE["heat_pinn"]])
    assert "small 1.25e-08" in capsys.readouterr().out
