import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.callbacks import SolutionPlot
from lightning_struct.callbacks.solution_plot import plot_solution
from lightning_struct.data import Ball, Box, Heat, PointsDataModule, Poisson, Product, Sphere, Without
from lightning_struct.models import PhysicsInformedNetwork
from tests.data.test_points import Fitted
from tests.mixins.helpers import make_trainer


def fit(directory, callback, ckpt_path=None, **options):
    data = PointsDataModule(Heat(), {"interior": 6, "boundary": 2, "initial": 2}, steps_per_epoch=2, eval_count=5)
    trainer = make_trainer(directory, callbacks=[callback, *options.pop("callbacks", [])], **options)
    trainer.fit(PhysicsInformedNetwork(Heat(), [4]), datamodule=data, ckpt_path=ckpt_path)
    return callback


def test_picture_shows_the_values_and_the_error():
    equation = Poisson(2)
    _, (values, error) = plot_solution(equation, lambda points: equation.solution(points) + 0.25 * points[:, 1])
    shown = torch.as_tensor(error.collections[0].get_array())
    assert (values.get_xlabel(), values.get_ylabel()) == ("x", "y")
    torch.testing.assert_close(shown[0], torch.linspace(0, 0.25, 201, dtype=torch.float64))  # along y at x = 0
    assert error.collections[0].get_clim() == (-0.25, 0.25)


def test_more_dimensions_are_cut_through_the_middle():
    _, (values, _) = plot_solution(Poisson(3), lambda points: points[:, 2])
    assert (torch.as_tensor(values.collections[0].get_array()) == 0.5).all()
    assert values.get_title() == "u at z = 0.5"


def test_holes_are_blank():
    equation = Poisson(3)
    hole = Product(Ball([0.5, 0.5], 0.2), Box([0.0], [1.0]))
    equation.regions = {"interior": Without(equation.domain, hole), "boundary": Sphere([0.5, 0.5, 0.5], 0.2)}
    _, (values, _) = plot_solution(equation, lambda points: points[:, 0])
    shown = torch.as_tensor(values.collections[0].get_array().filled(torch.nan))
    inside = Ball([0.5, 0.5], 0.2).contains(Box([0.0, 0.0], [1.0, 1.0]).grid(201**2)).reshape(201, 201)
    assert torch.equal(shown.isnan(), inside) and values.collections[0].get_clim() == (-1, 1)


def test_one_dimension_is_a_curve():
    _, (values, error) = plot_solution(Poisson(1), lambda points: points[:, 0])
    assert values.lines[0].get_ydata()[-1] == 1 and len(error.lines) == 1


def test_several_functions_have_a_panel_each():
    equation = Poisson(2)
    equation.solution = lambda points: 2 * points
    _, panels = plot_solution(equation, lambda points: points)
    assert [panel.get_title() for panel in panels] == ["u[0]", "u[1]", "u[0] - solution", "u[1] - solution"]


def test_error_of_every_validation_is_drawn_and_the_picture_written(tmp_path):
    callback = fit(tmp_path, SolutionPlot(), max_epochs=3)
    assert [record["step"] for record in callback.records] == [2, 4, 6]
    assert callback.paths == [tmp_path / "solution.png"] and callback.paths[0].exists()
    *_, curve = callback.plot(PhysicsInformedNetwork(Heat(), [4]))[1]
    assert list(curve.lines[0].get_ydata()) == [record["relative_l2_error"] for record in callback.records]


def test_resumed_run_goes_on_with_the_records(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = fit(tmp_path, SolutionPlot(), max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    resumed = fit(tmp_path, SolutionPlot(), max_epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert resumed.records == whole.records


class Dropping(torch.nn.Module):
    """Half of its values are zero in training, and its batch norm counts the forward passes there."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1), torch.nn.Dropout(0.5))

    def forward(self, points):
        return self.layers(points)[:, 0]


def test_the_network_is_drawn_as_it_is_validated():
    module = PhysicsInformedNetwork(Heat(), network=Dropping())
    _, (values, *_) = SolutionPlot().plot(module)
    norm = module.network.layers[0]
    assert norm.num_batches_tracked == 0 and all(layer.training for layer in module.modules())
    assert (torch.as_tensor(values.collections[0].get_array()) != 0).all()


def test_other_modules_are_refused_at_the_start(tmp_path):
    data = PointsDataModule(Heat(), {"interior": 6, "boundary": 2, "initial": 2}, eval_count=5)
    with pytest.raises(MisconfigurationException, match="Fitted has no equation and no network"):
        make_trainer(tmp_path, callbacks=[SolutionPlot()]).fit(Fitted(), datamodule=data)
