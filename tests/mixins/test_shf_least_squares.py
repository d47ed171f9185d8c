"""SHFOptimization on modules that return residuals."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import SHF, GrowingBatchSize, SHFOptimization
from tests.mixins.helpers import make_trainer, regression_data, weights


class Fit(SHFOptimization, L.LightningModule):
    """Its forward is called with inputs and targets, and returns residuals in two blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.reports = []

    def forward(self, inputs, targets):
        return {
            "fit": self.layers(inputs) - targets,
            "decay": 0.1 * torch.cat([p.flatten() for p in self.parameters()]),
        }

    def configure_optimizers(self):
        return SHF(self, "least_squares")

    def on_shf_step(self, report):
        self.reports.append(report)


class NamedFit(Fit):
    """Its batches are dicts, which are its only argument."""

    def forward(self, batch):
        return super().forward(batch["inputs"], batch["targets"])


def loader():
    return DataLoader(regression_data(dtype=torch.float64), batch_size=30)


def named_batches():
    return [{"inputs": inputs, "targets": targets} for inputs, targets in loader()]


@pytest.mark.filterwarnings("ignore:SHF. the rows of J", "ignore:The `srun` command", "ignore:The 'train_dataloader'")
def test_lists_are_arguments_and_dicts_are_one(tmp_path):
    plain, trained, named = Fit(), Fit(), NamedFit()
    optimizer = plain.configure_optimizers()
    for batch in loader():
        optimizer.step(inputs=tuple(batch))
    make_trainer(tmp_path, max_epochs=1).fit(trained, loader())
    make_trainer(tmp_path, max_epochs=1).fit(named, DataLoader(named_batches(), batch_size=None))
    assert torch.equal(weights(trained), weights(plain))
    assert torch.equal(weights(named), weights(plain))


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_the_loss_of_each_block_is_logged(tmp_path):
    module = Fit()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, loader())
    report, logged = module.reports[-1], trainer.logged_metrics
    assert logged["train_loss_fit"].item() == pytest.approx(report.block_losses["fit"], rel=1e-6)
    assert logged["train_loss_decay"].item() == pytest.approx(report.block_losses["decay"], rel=1e-6)
    assert logged["train_loss"].item() == pytest.approx(sum(report.block_losses.values()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:SHF. the rows of J")
def test_a_batch_of_measurements_grows(tmp_path):
    data = TensorDataset(*regression_data(600, dtype=torch.float64).tensors)
    module = Fit()
    growing = GrowingBatchSize(max_batch_size=200)
    make_trainer(tmp_path, max_epochs=4, callbacks=[growing]).fit(module, DataLoader(data, batch_size=10, shuffle=True))
    assert module.reports[-1].batch_size > module.reports[0].batch_size
