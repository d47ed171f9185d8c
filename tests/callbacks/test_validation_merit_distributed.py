"""Two processes with a share of the validation data each decide what one does with all of it."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import ValidationMeritStopping
from tests.mixins.helpers import SHFNetwork, make_trainer, regression_data
from tests.processes import two_processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")]

SHARDS = [
    [4.0, 1.0, 3.0, 5.0, 5.0],
    [2.0, 3.0, 2.0, 0.0, 5.0],
]  # what each process finds; the means are 3, 2, 2.5, 2.5, 5


class Scripted(L.LightningModule):
    """Its weight is the number of steps so far; validation samples are the values to log in the epochs."""

    def __init__(self, first_only):
        super().__init__()
        self.first_only = first_only
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return -self.weight

    def validation_step(self, batch, batch_idx):
        if self.global_rank == 0 or not self.first_only:
            self.log("val_loss", batch[0][:, self.current_epoch].mean(), rank_zero_only=self.first_only)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Notes(L.Callback):
    def __init__(self, directory):
        self.directory = directory

    def on_fit_end(self, trainer, pl_module):
        stopping = trainer.callbacks[0]
        found = [stopping.best_value, stopping.best_step, stopping.wait, trainer.global_step, pl_module.weight.item()]
        torch.save(found, self.directory / f"{trainer.world_size}_{trainer.global_rank}.pt")


def fit(directory, first_only, **processes):
    callbacks = [ValidationMeritStopping(patience=2), Notes(directory)]
    trainer = make_trainer(directory, callbacks=callbacks, max_epochs=5, num_sanity_val_steps=0, **processes)
    training = DataLoader(TensorDataset(torch.zeros(2, 1)), batch_size=2 // trainer.world_size)
    validation = DataLoader(TensorDataset(torch.tensor(SHARDS)), batch_size=2 // trainer.world_size)
    trainer.fit(Scripted(first_only), training, validation)


def notes(directory):
    return {path.stem: torch.load(path) for path in sorted(directory.glob("*.pt"))}


def test_values_that_are_not_synchronised_are_averaged(tmp_path):
    fit(tmp_path, False)
    fit(tmp_path, False, **two_processes())
    found = notes(tmp_path)
    assert found["1_0"] == [2.0, 2, 2, 4, 2.0]
    assert found["2_0"] == found["2_1"] == found["1_0"]


def test_a_value_that_one_process_logs_counts_for_all(tmp_path):
    fit(tmp_path, True, **two_processes())
    assert notes(tmp_path) == {name: [1.0, 2, 2, 4, 2.0] for name in ("2_0", "2_1")}


class OwnShare(torch.utils.data.Sampler):
    """Every other sample, by the rank of the process: a sampler that Lightning does not know as distributed."""

    def __iter__(self):
        return iter(range(torch.distributed.get_rank(), 30, 2))

    def __len__(self):
        return 15


class Merits(L.Callback):
    """Notes the merit after a step, and the loss on all validation data."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        inputs, targets = regression_data(30).tensors
        loss = 0.5 * (pl_module(inputs) - targets).square().sum(1).mean()
        torch.save([pl_module.shf.report.merit, loss.item()], self.directory / f"{trainer.global_rank}.pt")


def test_the_share_that_a_loader_gives_by_itself_is_not_shared_again(tmp_path):
    options = {"max_steps": 1, "use_distributed_sampler": False, **two_processes()}
    trainer = make_trainer(tmp_path, callbacks=[ValidationMeritStopping(), Merits(tmp_path)], **options)
    validation = DataLoader(regression_data(30), batch_size=4, sampler=OwnShare())
    trainer.fit(SHFNetwork(), DataLoader(regression_data(8), batch_size=4), validation)
    for merit, loss in notes(tmp_path).values():
        assert merit == pytest.approx(loss, rel=1e-6)
