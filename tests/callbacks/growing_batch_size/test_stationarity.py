import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import GrowingBatchSize
from tests.strategies.helpers import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Regression(L.LightningModule):
    """Linear regression, y = Σx + noise, from the solution or from far away."""

    def __init__(self, rate, start, optimizer=torch.optim.SGD, **options):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64,), float(start)))
        self.optimizer = lambda parameters: optimizer(parameters, lr=rate, **options)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return (inputs @ self.weight - targets).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def fit(tmp_path, module, callback, max_steps, *callbacks, **options):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8192, 64, generator=generator)
    targets = inputs.sum(1) + torch.randn(8192, generator=generator)
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    trainer = make_trainer(
        tmp_path, callbacks=[callback, *callbacks], max_steps=max_steps, max_epochs=-1, enable_checkpointing=True
    )
    trainer.fit(module, loader, **options)
    return trainer


def sizes(callback):
    return [int(record["batch_size"]) for record in callback.records]


@pytest.mark.parametrize(
    "optimizer", [{"rate": 0.05}, {"rate": 0.01, "momentum": 0.9}, {"rate": 0.02, "optimizer": torch.optim.Adam}]
)
def test_the_batch_grows_where_noise_undoes_the_descent(tmp_path, optimizer):
    callback = GrowingBatchSize(every_n_steps=4)
    fit(tmp_path, Regression(start=1.0, **optimizer), callback, max_steps=500)
    assert callback.records[-1]["batch_size"] == 16


class SummedRegression(Regression):
    def training_step(self, batch, batch_idx):
        return len(batch[0]) * super().training_step(batch, batch_idx)


def test_growth_that_enlarges_the_gradient_is_taken_back(tmp_path):
    callback = GrowingBatchSize(every_n_steps=4)
    with pytest.warns(UserWarning, match="back from 16 to 8 samples .* summed over the samples"):
        fit(tmp_path, SummedRegression(0.05 / 8, start=1.0), callback, max_steps=500)
    assert max(sizes(callback)) == 16 and sizes(callback)[-1] == 8


@pytest.mark.parametrize(
    "optimizer", [{"rate": 1e-5}, {"rate": 1e-5, "momentum": 0.9}, {"rate": 1e-4, "optimizer": torch.optim.Adam}]
)
def test_the_batch_stays_while_steps_descend(tmp_path, optimizer):
    callback = GrowingBatchSize(every_n_steps=4)
    fit(tmp_path, Regression(start=3.0, **optimizer), callback, max_steps=500)
    assert set(sizes(callback)) == {8}


def test_waiting_is_no_reason_to_shrink(tmp_path):
    callback = GrowingBatchSize(every_n_steps=4, allow_shrinking=True)
    fit(tmp_path, Regression(1e-5, start=1.2), callback, max_steps=100)
    assert set(sizes(callback)) == {8}


def test_a_theta_that_is_given_does_not_wait(tmp_path):
    callback = GrowingBatchSize(theta=0.5, every_n_steps=4)
    fit(tmp_path, Regression(1e-5, start=1.5), callback, max_steps=100)
    assert callback.records[-1]["batch_size"] > 8


def resumable(tmp_path, **options):
    """A run with checkpoints in a window of the test, among the gradients at its end, and after it."""
    module, callback = Regression(0.05, start=1.0), GrowingBatchSize(every_n_steps=4)
    checkpoints = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=51, save_top_k=-1)
    fit(tmp_path, module, callback, 400, checkpoints, **options)
    return module.weight.detach(), callback.records


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, *resumable(directory)


@pytest.mark.parametrize("step", [153, 306, 357])
def test_a_run_resumes_within_a_window(tmp_path, whole, step):
    directory, weight, records = whole
    resumed, records_of_both = resumable(tmp_path, ckpt_path=directory / f"step={step}.ckpt")
    assert torch.equal(resumed, weight) and records_of_both == records
