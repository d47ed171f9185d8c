import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import GrowingBatchSize, NoiseEstimator
from lightning_struct.callbacks.growing_batch_size.stationarity import (
    SHORTEST,
    STEPS_PER_GRADIENT,
    StationarityTest,
    window_length,
)
from tests.mixins.helpers import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Regression(L.LightningModule):
    """Linear regression, y = Σx + noise, from the solution or from far away."""

    def __init__(self, rate, start, optimizer=torch.optim.SGD, **options):
        super().__init__()
        self.layer = torch.nn.Linear(64, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, start)
        self.optimizer = lambda parameters: optimizer(parameters, lr=rate, **options)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return (self.layer(inputs).squeeze(1) - targets).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8192, 64, generator=generator)
    targets = inputs.sum(1) + torch.randn(8192, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)


def fit(tmp_path, module, callback, max_steps, *callbacks, **options):
    torch.manual_seed(1)
    trainer = make_trainer(
        tmp_path, callbacks=[callback, *callbacks], max_steps=max_steps, max_epochs=-1, enable_checkpointing=True
    )
    trainer.fit(module, data(), **options)
    return trainer


def every_fourth(**options):
    return GrowingBatchSize(estimator=NoiseEstimator(every_n_steps=4), **options)


def sizes(callback):
    return [int(record["batch_size"]) for record in callback.records]


@pytest.mark.parametrize("optimizer", [{"rate": 0.01, "momentum": 0.9}, {"rate": 0.02, "optimizer": torch.optim.Adam}])
def test_the_batch_grows_where_noise_undoes_the_descent(tmp_path, optimizer):
    callback = every_fourth()
    fit(tmp_path, Regression(start=1.0, **optimizer), callback, max_steps=SHORTEST + 60)
    assert callback.records[-1]["batch_size"] == 16


class SummedRegression(Regression):
    def training_step(self, batch, batch_idx):
        return len(batch[0]) * super().training_step(batch, batch_idx)


def test_growth_that_enlarges_the_gradient_is_taken_back_and_not_tried_again(tmp_path):
    module = SummedRegression(0.05 / 8, start=1.0)
    callback, resumed = (every_fourth(scale_lr="sqrt") for _ in range(2))
    with pytest.warns(UserWarning, match="as a sum .* does, and a contrastive loss, .* back from 16 to 8 samples"):
        trainer = fit(tmp_path, module, callback, max_steps=500)
    assert max(sizes(callback)) == 16 and sizes(callback)[-1] == 8
    trainer.save_checkpoint(tmp_path / "500.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 800
    trainer.fit(module, data())
    fit(tmp_path, SummedRegression(0.05 / 8, start=1.0), resumed, max_steps=800, ckpt_path=tmp_path / "500.ckpt")
    for run in (callback, resumed):
        assert 16 in sizes(run) and set(sizes(run)[-75:]) == {8}  # of the last 300 steps


@pytest.mark.parametrize("optimizer", [{"rate": 1e-5, "momentum": 0.9}, {"rate": 1e-4, "optimizer": torch.optim.Adam}])
def test_the_batch_stays_while_steps_descend(tmp_path, optimizer):
    callback = every_fourth()
    fit(tmp_path, Regression(start=3.0, **optimizer), callback, max_steps=SHORTEST + 60)
    assert set(sizes(callback)) == {8}


def test_a_theta_that_is_given_does_not_wait(tmp_path):
    callback = every_fourth(theta=0.5)
    fit(tmp_path, Regression(1e-5, start=1.5), callback, max_steps=100)
    assert callback.records[-1]["batch_size"] > 8


def test_where_the_rate_grows_too_each_doubling_waits_for_a_window_of_steps(tmp_path):
    callback = every_fourth(scale_lr="sqrt")
    fit(tmp_path, Regression(0.05, start=1.0), callback, max_steps=SHORTEST + 100)
    samples = 8 * SHORTEST
    assert {record["batch_size"] for record in callback.records if record["samples"] <= samples} == {8}
    assert {record["batch_size"] for record in callback.records if record["samples"] > samples + 16} == {16}


def resumable(tmp_path, **options):
    """A run with checkpoints in a window of the test, among the gradients at its end, and after it."""
    module, callback = Regression(0.05, start=1.0), every_fourth()
    checkpoints = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=51, save_top_k=-1)
    fit(tmp_path, module, callback, 400, checkpoints, **options)
    return module.layer.weight.detach(), callback.records


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, *resumable(directory)


@pytest.mark.parametrize("step", [153, 306])
def test_a_run_resumes_within_a_window(tmp_path, whole, step):
    directory, weight, records = whole
    resumed, records_of_both = resumable(tmp_path, ckpt_path=directory / f"step={step}.ckpt")
    assert torch.equal(resumed, weight) and records_of_both == records


# Single windows

GRADIENTS = SHORTEST // STEPS_PER_GRADIENT  # by which the end of the first window is judged


def in_a_row(*weights):
    """The test of an optimizer with the rate 1, and a way to take steps by gradients of this value in all entries."""
    optimizer = torch.optim.SGD(weights, lr=1.0)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    test = StationarityTest(trainer, optimizer)

    def step(values, is_sparse=False):
        for value in values:
            for weight in weights:
                gradient = torch.full_like(weight, value)
                weight.grad = gradient.to_sparse(1) if is_sparse else gradient
            test.before_step()
            optimizer.step()

    return test, step


def parameter():
    return torch.nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("after", "holds"),
    [
        ([-1.246, 0.754], True),  # more than its standard error, 1 / √17
        ([-1.239, 0.761], False),  # less
        ([1.0], False),
        ([-1.0, math.nan, math.inf, -1.0], True),  # steps that a GradScaler skips
    ],
)
def test_the_noise_undoes_the_descent_where_gradients_against_the_move_are_beyond_chance(after, holds):
    test, step = in_a_row(parameter())
    step([1.0] * SHORTEST)
    step((after * GRADIENTS)[:GRADIENTS])
    assert test.holds == holds


def test_a_window_is_judged_by_one_gradient_for_sixteen_of_its_steps():
    test, step = in_a_row(parameter())
    step([1.0] * SHORTEST + [-1.0] * (GRADIENTS - 1))
    assert not test.holds
    step([-1.0])
    assert test.holds


def test_a_window_without_a_finite_gradient_at_its_end_tells_nothing():
    test, step = in_a_row(parameter())
    step([1.0] * SHORTEST + [-1.0] * GRADIENTS)
    step([1.0] * SHORTEST + [math.nan] * GRADIENTS)
    assert not test.holds


def test_a_restart_forgets_the_last_result_and_the_window_under_way():
    test, step = in_a_row(parameter())
    step([1.0] * SHORTEST + [-1.0] * GRADIENTS + [1.0] * 10)
    test.restart()
    assert not test.holds
    step([1.0] * (window_length(SHORTEST + GRADIENTS + 10) - 10) + [-1.0] * GRADIENTS)
    assert not test.holds


def test_sparse_gradients_count_as_dense_ones():
    test, step = in_a_row(parameter())
    step([1.0] * SHORTEST + [-1.0] * GRADIENTS, is_sparse=True)
    assert test.holds


@pytest.mark.parametrize("at", [SHORTEST // 2, SHORTEST + GRADIENTS // 2], ids=["before its end", "at its end"])
def test_a_weight_that_is_frozen_in_a_window_is_left_out(at):
    frozen = parameter()
    test, step = in_a_row(parameter(), frozen)
    values = [1.0] * SHORTEST + [-1.0] * GRADIENTS
    step(values[:at])
    frozen.requires_grad_(False)
    step(values[at:])
    assert test.holds


def test_a_state_is_loaded_where_a_weight_has_been_frozen_since():
    before, step = in_a_row(parameter(), parameter())
    step([1.0] * SHORTEST)
    frozen = parameter().requires_grad_(False)
    test, step = in_a_row(parameter(), frozen)
    test.load_state_dict(before.state_dict())
    step([-1.0] * GRADIENTS)
    assert not test.holds  # since its own weight is still where it began
