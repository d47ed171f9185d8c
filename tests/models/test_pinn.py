import math
from typing import ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_struct import SHF
from lightning_struct.data import AllenCahn, Box, Burgers, DifferentialEquation, Heat, PointsDataModule, Poisson
from lightning_struct.functional import partial_derivatives
from lightning_struct.models import IntervalNetwork, PhysicsInformedNetwork, SHFPhysicsInformedNetwork
from tests.mixins.helpers import make_trainer
from tests.processes import two_processes

COUNTS = {"interior": 40, "boundary": 20}


def points_of(equation, count=6):
    generator = torch.Generator().manual_seed(0)
    return {block: region.sample(count, generator).float() for block, region in equation.regions.items()}


@pytest.fixture
def data():
    return PointsDataModule(Poisson(2), COUNTS, steps_per_epoch=10, eval_count=30, predict_count=9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("equation", [Poisson(2), Heat(), Burgers()], ids=lambda equation: type(equation).__name__)
def test_residuals_are_those_of_the_function(equation):
    torch.manual_seed(0)
    model, points = PhysicsInformedNetwork(equation, [8, 8]), points_of(equation)
    expected = equation.residuals(lambda x: model.network.layers(x).squeeze(-1), points)  # its derivatives by torch
    torch.testing.assert_close(model(points), expected)


def test_loss_is_half_the_mean_square_of_each_block(data):
    model = PhysicsInformedNetwork(Poisson(2), [8])
    points = points_of(Poisson(2))
    model.log = lambda *_, **__: None
    expected = sum(0.5 * residual.square().mean() for residual in model(points).values())
    torch.testing.assert_close(model.training_step(points, 0), expected)


class TwoConditions(DifferentialEquation):
    domain = Poisson(1).domain
    regions: ClassVar = {"interior": domain}
    coordinates = ("t",)

    def residual(self, block, u, points):
        values, first, _ = partial_derivatives(u, points, once=[0])
        return torch.stack([values, 2 * first[0]], dim=1)


def test_conditions_of_a_point_are_summed():
    model = PhysicsInformedNetwork(TwoConditions(), [4])
    points = points_of(model.equation)
    residuals = model(points)["interior"]
    torch.testing.assert_close(model.block_losses(points)["interior"], 0.5 * residuals.square().sum(1).mean())


def test_validation_logs_the_loss_by_block_and_the_error(data, tmp_path):
    torch.manual_seed(0)
    model, trainer = PhysicsInformedNetwork(Poisson(2), [8]), make_trainer(tmp_path)
    (logged,) = trainer.validate(model, datamodule=data, verbose=False)
    (held_out,) = data.evaluation_dataloader("val")
    losses = {block: loss.item() for block, loss in model.block_losses(held_out).items()}
    assert logged["val_loss_interior"] == pytest.approx(losses["interior"])
    assert logged["val_loss"] == pytest.approx(sum(losses.values()))
    solution = model.equation.solution(held_out["interior"])
    error = (model.network(held_out["interior"]) - solution).norm() / solution.norm()
    assert logged["relative_l2_error"] == pytest.approx(error.item(), rel=1e-5)


def test_training_by_adam_lowers_the_error(data, tmp_path):
    torch.manual_seed(0)
    model = PhysicsInformedNetwork(Poisson(2), [16], optimizer=adam)
    trainer = make_trainer(tmp_path, max_epochs=10, precision="64-true", check_val_every_n_epoch=10)
    (before,) = trainer.validate(model, datamodule=data, verbose=False)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val_loss"] < 0.2 * before["val_loss"]


def test_double_weights_of_a_checkpoint_are_not_rounded(data, tmp_path):
    trained = PhysicsInformedNetwork(Poisson(2), [8]).double()
    trainer = make_trainer(tmp_path, precision="64-true", max_epochs=1, limit_train_batches=1)
    trainer.fit(trained, datamodule=data)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    loaded = PhysicsInformedNetwork(Poisson(2), [8])
    make_trainer(tmp_path, precision="64-true").test(
        loaded, datamodule=data, ckpt_path=tmp_path / "some.ckpt", verbose=False
    )
    assert all(map(torch.equal, trained.parameters(), loaded.parameters()))


def test_predictions_are_coordinates_and_values(data, tmp_path):
    model = PhysicsInformedNetwork(Poisson(2), [8])
    (field,) = make_trainer(tmp_path).predict(model, datamodule=data)
    grid = data.equation.domain.grid(9).float()
    torch.testing.assert_close(field, torch.cat([grid, model.network(grid)[:, None]], dim=1))


def test_network_of_another_kind():
    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.amplitude = nn.Parameter(torch.tensor(1.0))

        def forward(self, points):
            return self.amplitude * (math.pi * points).sin().prod(1)

    model = PhysicsInformedNetwork(Poisson(2), network=Wave())
    residuals = model(points_of(Poisson(2)))
    assert max(residual.abs().max().item() for residual in residuals.values()) < 1e-4


class Rotation(DifferentialEquation):
    """x' = ω y, y' = -ω x, with x = 0 and y = 1 at time 0."""

    domain = Box([0.0], [1.0])
    regions: ClassVar = {"interior": domain, "start": Box([0.0], [0.0])}
    coordinates = ("t",)

    def __init__(self, frequency=2.0):
        self.frequency = frequency

    def residual(self, block, u, points):
        if block == "start":
            return u(points) - torch.tensor([0.0, 1.0])
        (x, dx, _), (y, dy, _) = (partial_derivatives(lambda t, i=i: u(t)[:, i], points, once=[0]) for i in range(2))
        return torch.stack([dx[0] - self.frequency * y, dy[0] + self.frequency * x], dim=1)

    def solution(self, points):
        return torch.cat([(2.0 * points).sin(), (2.0 * points).cos()], dim=1)


class UnknownRotation(Rotation, nn.Module):
    def __init__(self):
        nn.Module.__init__(self)
        super().__init__(nn.Parameter(torch.tensor(1.5)))


def two_functions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))


class Circle(nn.Module):
    def __init__(self):
        super().__init__()
        self.radius = nn.Parameter(torch.tensor(1.1))

    def forward(self, points):
        return self.radius * Rotation().solution(points)


def test_several_functions_are_evaluated_and_predicted(tmp_path):
    model, trainer = PhysicsInformedNetwork(Rotation(), network=Circle()), make_trainer(tmp_path)
    points = PointsDataModule(Rotation(), {"interior": 20, "start": 1}, predict_count=5, eval_count=9)
    (logged,) = trainer.validate(model, datamodule=points, verbose=False)
    assert logged["relative_l2_error"] == pytest.approx(0.1, rel=1e-4)
    assert logged["val_loss_interior"] < 1e-10
    (field,) = trainer.predict(model, datamodule=points)
    torch.testing.assert_close(field, torch.cat([field[:, :1], 1.1 * Rotation().solution(field[:, :1])], dim=1))


def test_a_coefficient_of_an_equation_that_is_a_module_is_trained(tmp_path):
    equation = UnknownRotation()
    points = equation.domain.grid(20)
    model = PhysicsInformedNetwork(equation, network=two_functions()).double()
    optimizer = SHF(model, "least_squares")
    start = {"interior": points, "start": points[:1]}
    assert "equation.frequency" in dict(model.named_parameters())
    optimizer.step(inputs=start)
    assert equation.frequency.item() != 1.5


def test_a_coefficient_that_would_not_be_trained_is_refused():
    equation = Rotation(nn.Parameter(torch.tensor(1.5)))
    with pytest.raises(
        MisconfigurationException,
        match=r"Rotation.frequency would not be trained, .* write class Rotation\(DifferentialEquation, nn.Module\)",
    ):
        PhysicsInformedNetwork(equation, network=two_functions())


def test_solutions_of_another_shape_are_refused(data, tmp_path):
    data.equation.solution = lambda points: points[:, :1]
    with pytest.raises(MisconfigurationException, match=r"solution returns \(30, 1\) .* the network \(30,\)"):
        make_trainer(tmp_path).validate(PhysicsInformedNetwork(data.equation, [4]), datamodule=data, verbose=False)


def test_an_equation_needs_a_domain_and_regions():
    class Bare(DifferentialEquation):
        def residual(self, block, u, points):
            return u(points)

    with pytest.raises(MisconfigurationException, match="Bare has no domain and no regions: set them"):
        PhysicsInformedNetwork(Bare(), [4])


@pytest.mark.parametrize("arguments", [{}, {"hidden_sizes": [4], "network": nn.Linear(2, 1)}, {"hidden_sizes": [4, 0]}])
def test_network_is_given_once(arguments):
    with pytest.raises(MisconfigurationException, match="hidden_sizes, all positive, or a network"):
        PhysicsInformedNetwork(Poisson(2), **arguments)


@pytest.mark.parametrize("equation", ["heat", Heat])
def test_what_is_no_equation_is_refused(equation):
    for make in (lambda: PhysicsInformedNetwork(equation, [4]), lambda: PointsDataModule(equation, {"interior": 9})):
        with pytest.raises(
            MisconfigurationException, match=r"equation must be a DifferentialEquation.*but is .*[hH]eat"
        ):
            make()


@pytest.mark.parametrize("kind", [PhysicsInformedNetwork, SHFPhysicsInformedNetwork])
def test_points_of_another_equation_are_refused(data, tmp_path, kind):
    with pytest.raises(MisconfigurationException, match="those of Poisson, .* interior, boundary, but Heat.*initial"):
        make_trainer(tmp_path, max_epochs=1).fit(kind(Heat(), [4]), datamodule=data)


class Notes(L.Callback):
    """Writes what each process has at the end to a file."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_end(self, trainer, pl_module):
        end = {**pl_module.network.state_dict(), "points": torch.tensor(pl_module.shf.report.batch_size)}
        torch.save(end, self.directory / f"{trainer.world_size}_{trainer.global_rank}.pt")


@pytest.mark.slow
def test_two_processes_draw_the_same_points_and_take_the_step_of_all_of_them(tmp_path):
    for processes in ({}, two_processes()):
        torch.manual_seed(0)
        data = PointsDataModule(
            Poisson(2),
            {"interior": 20, "boundary": 10},
            redraw_every_n_steps=1,
            residual_share=0.4,  # of which the places depend on the weights, and so does the number
            steps_per_epoch=14,
            eval_count=20,
        )
        module = SHFPhysicsInformedNetwork(Poisson(2), hidden_sizes=[6])
        options = {"precision": "64-true", "max_epochs": 1, "callbacks": [Notes(tmp_path)]}
        make_trainer(tmp_path, **options, **processes).fit(module, datamodule=data)
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1_0", "2_0", "2_1"))
    assert one["points"] == first["points"] == 60
    assert all(torch.equal(first[name], second[name]) for name in one)
    torch.testing.assert_close(first, one, rtol=0, atol=1e-7)


class Oscillator(DifferentialEquation):
    """u'' = -u with u = 2 and u' = 0 at time 0."""

    coordinates, time = ("t",), 0

    def __init__(self, end):
        self.domain = Box([0.0], [end])
        self.regions = {"interior": self.domain, "initial": Box([0.0], [0.0])}

    def residual(self, block, u, points):
        values, first, second = partial_derivatives(u, points, once=[0], twice=[0])
        return second[0] + values if block == "interior" else torch.stack([values - 2, first[0]], dim=1)


def in_intervals(equation, intervals, number):
    """A network of different functions in the first intervals, in float64."""
    network = IntervalNetwork(equation, [6], intervals).double()
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        network.advance()
        with torch.no_grad():
            for weights in network.current.parameters():
                weights += torch.randn(weights.shape, generator=generator)
    return network


@pytest.mark.parametrize(
    ("equation", "later", "factor"), [(Oscillator(1.0), 0.25, 16), (AllenCahn(), 0.25, 10), (Oscillator(10.0), 2.5, 10)]
)
def test_points_of_the_domain_stand_for_those_of_an_interval(equation, later, factor):
    network = in_intervals(equation, 4, 1)
    points = {name: at.double() for name, at in points_of(equation).items()}
    inside = points["interior"].clone()
    inside[:, equation.time] = later + inside[:, equation.time] / 4
    residuals = PhysicsInformedNetwork(equation, network=network)({**points})
    expected = equation.residual("interior", lambda x: network(x), inside)  # its derivatives by torch
    torch.testing.assert_close(residuals["interior"], expected)
    start = points["initial"].clone()
    start[:, equation.time] = later
    earlier = in_intervals(equation, 4, 0)
    earlier.current.load_state_dict(network.finished[0].state_dict())
    jump = equation.residual("initial", network, start) - equation.residual("initial", earlier, start)
    torch.testing.assert_close(residuals["initial"], factor * jump)


def test_evaluation_is_over_all_intervals():
    equation = AllenCahn()
    model = PhysicsInformedNetwork(equation, network=in_intervals(equation, 4, 2)).eval()
    points = equation.domain.sample(50, torch.Generator().manual_seed(0))
    residual = model({"interior": points})["interior"]
    torch.testing.assert_close(residual, equation.residual("interior", lambda x: model.network(x), points))
    with pytest.raises(ValueError, match=r"domain of AllenCahn is from .*: the point \[7.0, 0.5\] is outside"):
        model.predict_step(torch.tensor([[1.0, 0.5], [7.0, 0.5]]), 0)


def fit_oscillator(tmp_path, ckpt_path=None, **options):
    torch.manual_seed(0)
    data = PointsDataModule(Oscillator(10.0), {"interior": 20, "initial": 1}, steps_per_epoch=8, eval_count=20)
    model = SHFPhysicsInformedNetwork(Oscillator(10.0), hidden_sizes=[6])
    make_trainer(tmp_path, precision="64-true", **options).fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


def test_intervals_share_the_steps_of_a_fit_that_may_be_resumed(tmp_path):
    keep_all = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)
    model = fit_oscillator(tmp_path, max_epochs=5, callbacks=[keep_all], enable_checkpointing=True)
    assert model.network.number == 9
    number = torch.load(tmp_path / "step=24.ckpt")["state_dict"]["network.number"]
    assert number == 4
    resumed = fit_oscillator(tmp_path, ckpt_path=tmp_path / "step=24.ckpt", max_epochs=5)
    ours, theirs = resumed.state_dict(), model.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_intervals_share_the_time_of_a_fit(tmp_path):
    class Clock(Timer):  # a step takes a second
        def time_elapsed(self, stage="train"):
            return float(self.steps)

        def on_train_batch_start(self, trainer, *_):
            self.steps = trainer.global_step

    clock = Clock(duration={"seconds": 40})
    clock.steps = 0
    assert fit_oscillator(tmp_path, max_epochs=-1, callbacks=[clock]).network.number == 9


def test_intervals_need_the_length_of_the_fit(tmp_path):
    with pytest.raises(MisconfigurationException, match="Oscillator is solved in 10 intervals .* max_steps"):
        fit_oscillator(tmp_path, max_epochs=-1)


def test_an_interval_whose_conditions_are_not_met_is_the_last_one(tmp_path):
    def still(parameters):
        return torch.optim.SGD(parameters, lr=0.0)

    equation = Oscillator(1.0)
    model = PhysicsInformedNetwork(equation, network=IntervalNetwork(equation, [4], intervals=4), optimizer=still)
    data = PointsDataModule(equation, {"interior": 5, "initial": 1}, eval_count=5)
    trainer = make_trainer(tmp_path, max_steps=20)
    with pytest.warns(UserWarning, match="stops in interval 1 of 4, since its conditions initial are not met"):
        trainer.fit(model, datamodule=data)
    assert trainer.global_step == 15 and model.network.number == 0  # two shares of five, at most half of the others


def test_an_interval_takes_longer_to_meet_its_conditions():
    network, equation = in_intervals(Oscillator(1.0), 4, 0), Oscillator(1.0)
    points = {name: at.double() for name, at in points_of(equation).items()}
    assert network.go_on(0.5, equation, points) == [] and network.number == 0
    with torch.no_grad():
        for weights in network.current.parameters():
            weights.zero_()
        network.current.layers[-1].bias.fill_(2.0)  # u = 2
    assert network.go_on(0.5, equation, points) == [] and network.number == 1
    assert network.go_on(0.6, equation, points) == [] and network.number == 1  # a third of the rest is not over
    assert network.go_on(0.7, equation, points) == [] and network.number == 2


class FirstCoordinate(nn.Module):
    def forward(self, points):
        return points[:, 0]


def test_the_error_is_that_at_the_points_of_a_reference(tmp_path):
    equation = Poisson(2)
    points = torch.rand(20, 2)
    equation.reference = points, torch.ones(20)
    data = PointsDataModule(equation, {"interior": 5, "boundary": 4}, eval_count=5)
    trainer = make_trainer(tmp_path)
    trainer.validate(PhysicsInformedNetwork(equation, network=FirstCoordinate()), datamodule=data, verbose=False)
    error = trainer.callback_metrics["relative_l2_error"]
    torch.testing.assert_close(error, (points[:, 0] - 1).norm() / 20**0.5)


def test_a_reference_of_other_points_is_refused():
    equation = Poisson(2)
    equation.reference = torch.rand(20, 3), torch.ones(20)
    with pytest.raises(MisconfigurationException, match=r"reference of Poisson .* \(n, 2\) .* \(\(20, 3\), \(20,\)\)"):
        PhysicsInformedNetwork(equation, [4])


def test_intervals_of_an_equation_without_time_are_refused():
    with pytest.raises(MisconfigurationException, match="Poisson has no time .* set time in the class"):
        IntervalNetwork(Poisson(2), [4])


class Pair(DifferentialEquation):
    """Two functions of the place on a ring of length 6, and of time: u_t = u_xx and v_t = v_xx."""

    domain, coordinates, periodic, unknowns = Box([0.0, 0.0], [6.0, 1.0]), ("x", "t"), (0,), 2
    regions: ClassVar = {"interior": domain, "initial": Box([0.0, 0.0], [6.0, 0.0])}

    def residual(self, block, u, points):
        if block == "initial":
            return u(points) - torch.stack([points[:, 0].cos(), points[:, 0].sin()], dim=1)
        _, first, second = partial_derivatives(u, points, once=[1], twice=[0])
        return first[1] - second[0]


class PairInTime(Pair):
    time = 1


@pytest.mark.parametrize("equation", [Pair(), PairInTime()], ids=["once", "in intervals"])
def test_several_unknowns_are_one_network_with_derivatives_by_torch(equation):
    torch.manual_seed(0)
    network = SHFPhysicsInformedNetwork(equation, [5, 4]).double().network
    ends = torch.tensor([[0.0, 0.3], [6.0, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(network(ends)[0], network(ends)[1])
    points = equation.domain.sample(7, torch.Generator().manual_seed(0))
    expected = equation.residual("interior", lambda x: network(x), points)  # its derivatives by torch
    torch.testing.assert_close(equation.residual("interior", network, points), expected)
    assert network(points).shape == expected.shape == (7, 2)


def test_intervals_of_several_unknowns_are_trained(tmp_path):
    equation = PairInTime()
    model = SHFPhysicsInformedNetwork(equation, network=IntervalNetwork(equation, [6], intervals=2))
    data = PointsDataModule(equation, {"interior": 30, "initial": 20}, steps_per_epoch=6, eval_count=20)
    trainer = make_trainer(tmp_path, max_steps=6, precision="64-true")
    trainer.fit(model, datamodule=data)
    assert model.network.number == 1 and trainer.callback_metrics["val_loss"] < 0.5


def test_a_wrong_number_of_unknowns_is_named():
    class Forgotten(PairInTime):
        unknowns = 1

    with pytest.raises(MisconfigurationException, match="Forgotten cannot be computed with unknowns=1.*in the class"):
        SHFPhysicsInformedNetwork(Forgotten(), [6])
