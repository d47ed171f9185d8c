import math
from itertools import pairwise
from typing import ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.callbacks import GrowingBatchSize
from lightning_struct.data import Box, DifferentialEquation, Heat, PointDraws, PointsDataModule, Poisson
from tests.mixins.helpers import make_trainer

SQUARE = Box([0.0, 0.0], [1.0, 1.0])
REGIONS = {"interior": SQUARE, "initial": Box([0.0, 0.0], [1.0, 0.0])}
COUNTS = {"interior": 12, "initial": 4}


def make_draws(counts=COUNTS, **options):
    return PointDraws(REGIONS, counts, **{"draws_per_epoch": 100, **options})


def same(first, second):
    return set(first) == set(second) and all(torch.equal(first[block], second[block]) for block in first)


def test_points_stay_for_some_steps_and_are_then_drawn_anew():
    draws = make_draws(redraw_every_n_steps=3)
    drawn = [draws.draw(number) for number in range(7)]
    assert [same(*pair) for pair in pairwise(drawn)] == [True, True, False, True, True, False]
    assert {block: tuple(points.shape) for block, points in drawn[0].items()} == {
        "interior": (12, 2),
        "initial": (4, 2),
    }


def test_seed_decides_the_points():
    assert same(make_draws(seed=1).draw(8), make_draws(seed=1).draw(8))
    assert not same(make_draws(seed=1).draw(8), make_draws(seed=2).draw(8))


def test_larger_batch_has_more_points_of_each_region_beside_those_that_were_there():
    draws = make_draws()
    before = draws.draw(0)
    draws.batch_size = 24
    after = draws.draw(1)
    assert {block: len(points) for block, points in after.items()} == {"interior": 18, "initial": 6}
    assert same(before, {block: after[block][: len(points)] for block, points in before.items()})


@pytest.mark.parametrize(
    ("gap", "falls", "sizes"),
    [
        (3.0, 1.0, [16] * 6 + [32] * 5 + [64] * 3),  # new points are worse than old ones, and no draw is better
        (6.0, 1.0, [16] * 3 + [32] * 2 + [64] * 2 + [100] * 7),  # the same, sooner and up to the bound
        (3.0, 0.4, [16] * 14),  # the loss on new points halves from draw to draw
        (1.1, 1.0, [16] * 14),  # it is that on the last points
    ],
)
def test_points_double_where_steps_fit_the_points_rather_than_the_equation(gap, falls, sizes):
    seen = set()

    def residuals(points):
        """Smaller by a factor where the points were asked for before, as those of the draw before."""
        size = falls ** (len(seen) / 2) * (1.0 if points["interior"][0, 0].item() in seen else gap)
        seen.add(points["interior"][0, 0].item())
        return {block: torch.full((len(at), 2), size**0.5) for block, at in points.items()}

    draws = make_draws(redraw_every_n_steps=2, residuals=residuals, max_points=100)
    assert [sum(map(len, draws.draw(2 * number).values())) for number in range(14)] == sizes


def test_shares_of_processes_are_the_draw_of_one():
    shares = [next(iter(make_draws(num_replicas=2, rank=rank))) for rank in (0, 1)]
    joined = {block: torch.cat([share[block] for share in shares]) for block in REGIONS}
    assert same(joined, make_draws().draw(0)) and len(shares[0]["initial"]) == 2


def test_share_of_the_points_is_where_the_residual_is_large():
    asked = []

    def residuals(points):
        asked.append({block: len(at) for block, at in points.items()})
        return {block: (at[:, :1] > 0.9).double().expand(-1, 2) for block, at in points.items()}

    for share in (0.0, 0.25):
        draws = make_draws({"interior": 400, "initial": 40}, residual_share=share, residuals=residuals)
        at_edge = (draws.draw(0)["interior"][:, 0] > 0.9).double().mean().item()
        assert at_edge == pytest.approx(share + (1 - share) * 0.1, abs=0.05)
        assert asked == ([{"interior": 1000, "initial": 100}] if share else [])


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_residuals_that_are_zero_everywhere_draw_evenly_and_nan_is_an_error_that_names_the_block(value):
    def residuals(points):
        return {block: torch.full((len(at),), value if block == "initial" else 0.0) for block, at in points.items()}

    draws = make_draws(residual_share=0.5, residuals=residuals)
    if value == 0:
        assert {block: len(points) for block, points in draws.draw(0).items()} == COUNTS
    else:
        with pytest.raises(ValueError, match="residual of initial is NaN or infinite at the point"):
            draws.draw(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"redraw_every_n_steps": 0}, "redraw_every_n_steps must be at least 1, but is 0"),
        ({"residual_share": 1.0}, r"residual_share must be in \[0, 1\)"),
        ({"residual_share": 0.5}, "needs the residuals of a network"),
        *(({"counts": c}, "of the regions interior, initial") for c in ({"interior": 3}, COUNTS | {"wall": 3}, {})),
        *(({"counts": COUNTS | {"initial": c}}, f"at least 1, but are {{'initial': {c}}}") for c in (0, 3.5)),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        make_draws(**options)


def test_every_process_has_points_of_every_region():
    draws = make_draws(num_replicas=5, rank=0)
    with pytest.raises(MisconfigurationException, match="5 processes without any of initial"):
        next(iter(draws))


class Fitted(L.LightningModule):
    """Returns the residuals of u(x, y) = w x; remembers the points."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.batches = []

    def forward(self, points):
        return {block: self.weight * at[:, 0] for block, at in points.items()}

    def training_step(self, batch, batch_idx):
        self.batches.append({block: points.clone() for block, points in batch.items()})
        return sum(residual.square().mean() for residual in self(batch).values())

    def validation_step(self, batch, batch_idx):
        self.held_out = batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def points_of_heat(**options):
    counts = {"interior": 20, "boundary": 8, "initial": 4}
    return PointsDataModule(Heat(), counts, **{"steps_per_epoch": 4, "eval_count": 10, **options})


def fit(directory, data, module=None, ckpt_path=None, **options):
    module = module or Fitted()
    make_trainer(directory, **{"max_epochs": 3, **options}).fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.batches


def test_batches_are_in_the_dtype_of_the_weights(tmp_path):
    for module in (Fitted(), Fitted().double()):
        batches = fit(tmp_path, points_of_heat(residual_share=0.5), module, max_epochs=1)
        assert {points.dtype for batch in batches for points in batch.values()} == {module.weight.dtype}
        assert module.held_out["interior"].dtype == module.weight.dtype


def test_held_out_points_are_none_of_training_and_stay(tmp_path):
    module, data = Fitted(), points_of_heat()
    batches = fit(tmp_path, data, module)
    held_out = set(module.held_out["interior"][:, 0].tolist())
    trained_on = {x for batch in batches for x in batch["interior"][:, 0].tolist()}
    assert len(held_out) == 10 and not held_out & trained_on
    (again,) = data.evaluation_dataloader("val")
    assert same(again, module.held_out)
    (tested,) = data.evaluation_dataloader("test")
    assert not held_out & set(tested["interior"][:, 0].tolist())


class Uneven(Fitted):
    """Its loss is another one in each draw, and does not fall."""

    def forward(self, points):
        return {block: self.weight * (6 * at[:, 0].mean()).exp().expand(len(at)) for block, at in points.items()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


UNEVEN = {"residual_share": 0.1, "redraw_every_n_steps": 2, "steps_per_epoch": 10, "max_points": 70}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The batches of a run whose points and their number depend on the loss, and the folder of its checkpoints."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    keep = ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    return fit(directory, points_of_heat(**UNEVEN), Uneven(), callbacks=[keep], enable_checkpointing=True), directory


@pytest.mark.parametrize("step", [20, 23])  # after an epoch; and within one, between two steps with the same points
def test_resumed_run_sees_the_points_of_the_uninterrupted_one(tmp_path, uninterrupted, step):
    whole, directory = uninterrupted
    resumed = fit(tmp_path, points_of_heat(**UNEVEN), Uneven(), ckpt_path=directory / f"step={step}.ckpt")
    assert len(whole) == 30 and len(whole[0]["interior"]) == 20 and len(whole[-1]["interior"]) == 40
    assert all(same(*pair) for pair in zip(whole[step:], resumed, strict=True))


def test_batches_grow(tmp_path):
    growing = GrowingBatchSize(max_batch_size=48, schedule="0:32 100:48")
    sizes = [
        {block: len(points) for block, points in batch.items()}
        for batch in fit(tmp_path, points_of_heat(), callbacks=[growing])
    ]
    assert sizes[0] == {"interior": 20, "boundary": 8, "initial": 4}
    assert sizes[-1] == {"interior": 30, "boundary": 12, "initial": 6}


def test_train_set_of_an_evaluation_has_the_points_of_the_last_step(tmp_path):
    data = points_of_heat()
    last = fit(tmp_path, data)[-1]
    (evaluated,) = data.evaluation_dataloader("train")
    assert same({block: points.float() for block, points in evaluated.items()}, last)


def test_predictions_are_of_a_grid():
    data = PointsDataModule(Poisson(2), {"interior": 1, "boundary": 1}, predict_count=100)
    (grid,) = next(iter(data.predict_dataloader()))
    assert torch.equal(grid, Poisson(2).domain.grid(100).float())


class Values(Fitted):
    """Returns no residuals."""

    def forward(self, points):
        return {block: at[:, 0] for block, at in points.items() if block != "initial"}


def test_module_that_returns_no_residuals_is_told_the_remedy(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"Values called with points .* set residual_share=0"):
        fit(tmp_path, points_of_heat(), Values())


class Decay(DifferentialEquation):
    """u' = -u, of functions that are 1 at zero by themselves."""

    domain = Box([0.0], [1.0])
    regions: ClassVar = {"interior": domain}

    def residual(self, block, u, points):
        raise NotImplementedError


class Residual(Fitted):
    """Returns the residuals of the only region as they are."""

    def forward(self, points):
        return self.weight * (points["interior"] > 0.9)

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return self(batch).square().mean()


def test_residual_share_needs_a_trainer():
    with pytest.raises(MisconfigurationException, match="train with a Trainer"):
        points_of_heat(residual_share=0.5).train_dataloader()


def test_a_process_that_made_no_step_evaluates_on_uniform_points():
    data = PointsDataModule(Poisson(), {"interior": 8, "boundary": 4}, residual_share=0.5)
    (points,) = data.evaluation_dataloader("train")
    assert {block: len(of_block) for block, of_block in points.items()} == {"interior": 8, "boundary": 4}


def test_processes_that_share_a_model_draw_the_same_points():
    data = points_of_heat(residual_share=0)
    replicas = {"num_replicas": 2, "rank": 1}  # of two processes each
    data.trainer = type("Trainer", (), {"world_size": 4, "global_rank": 3, "distributed_sampler_kwargs": replicas})()
    draws = data.train_dataloader().sampler
    assert (draws.num_replicas, draws.rank) == (2, 1)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_is_answered_with_points_that_stay(tmp_path):
    remedy = "--trainer.limit_train_batches=2 --data.redraw_every_n_steps=null"
    with pytest.raises(MisconfigurationException, match=f"overfit_batches=.*{remedy}") as error:
        fit(tmp_path, points_of_heat(), overfit_batches=2)
    assert "draws=" not in str(error.value)
    batches = fit(tmp_path, points_of_heat(redraw_every_n_steps=None), limit_train_batches=2)
    assert len(batches) == 6 and all(same(*pair) for pair in pairwise(batches))
