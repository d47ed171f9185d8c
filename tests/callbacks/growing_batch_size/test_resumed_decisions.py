"""What a run has found out about its own measuring: a resumed run goes by it, as the uninterrupted one does."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from tests.callbacks.growing_batch_size.projects import arguments, regression
from tests.mixins.helpers import make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:GrowingBatchSize"),
]


def records_of_whole_and_resumed(tmp_path, make, stopped, loader=None, **options):
    """What an uninterrupted run has recorded, and one that is resumed from its checkpoint after ``stopped`` batches."""
    growing = {"theta": 0.3, "max_batch_size": 8, "window": 20, "every_n_steps": 1} | options.pop("growing", {})
    records = []
    loader = DataLoader(regression(), batch_size=4) if loader is None else loader
    for ckpt_path in (None, tmp_path / f"{stopped}.ckpt"):
        callback = GrowingBatchSize(**arguments(**growing))
        trainer = make_trainer(
            tmp_path, callbacks=[callback, *([] if ckpt_path else [Saves(tmp_path, stopped)])], max_epochs=1, **options
        )
        trainer.fit(make(), loader, ckpt_path=ckpt_path)
        records.append(callback.records)
    return records


class Saves(L.Callback):
    """Saves a checkpoint after so many batches."""

    def __init__(self, directory, batches):
        self.directory, self.batches = directory, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.directory / f"{self.batches}.ckpt")


class Penalised(L.LightningModule):
    """A weight is penalised, a little, in the loss of one batch: its gradient is not all from the samples."""

    def __init__(self, batch):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.batch = batch

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.network(batch[0]), batch[1])
        return loss + 0.1 * self.network[0].weight.square().sum() * (batch_idx == self.batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class RawAt(L.LightningModule):
    """Steps its optimizer past Lightning in some batches, of which callbacks are not told."""

    def __init__(self, *batches):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.layer, self.batches = nn.Linear(3, 2), batches

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=batch_idx not in self.batches)
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self.layer(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


RESUMED = {
    "a parameter that was left out stays so": (lambda: Penalised(batch=1), 4, 10),
    "batches are not checked anew": (lambda: Penalised(batch=5), 4, 10),
    "what was given up is not measured again": (lambda: RawAt(0), 3, 0),
    "a step past Lightning does not end what has been measured": (lambda: RawAt(4), 4, 9),
}


@pytest.mark.parametrize(("make", "stopped", "records"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_goes_by_what_was_found_out(tmp_path, make, stopped, records):
    whole, resumed = records_of_whole_and_resumed(tmp_path, make, stopped, growing={"estimator": "layers"})
    assert len(whole) == records and resumed == whole


def joined(graphs):
    nodes = torch.stack([inputs for inputs, _ in graphs]).repeat_interleave(5, 0)
    return nodes, torch.stack([targets for _, targets in graphs]).repeat_interleave(5, 0)
