"""Two processes with half of each batch decide, read and learn what one does with the whole."""

import math

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_struct import GrowingBatchSize
from tests.callbacks.growing_batch_size.projects import MEASURING, arguments
from tests.processes import two_processes

SAMPLES, FIRST, EPOCHS = 48, 8, 3
STOPPED = 4  # steps, in the middle of the first epoch

pytestmark = pytest.mark.slow


class Even(GrowingBatchSize):
    """Decides on sizes that two processes can share."""

    def decide(self, batch_size):
        return 2 * round(super().decide(batch_size) / 2)


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.seen, self.sizes = {}, []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        self.sizes.append(len(inputs))
        self.seen.setdefault(self.current_epoch, []).extend(inputs[:, 0].tolist())
        return F.mse_loss(self.network(inputs), targets)

    def train_dataloader(self):
        # Lightning's own sampler would shuffle
        sampler = DistributedSampler(data(), self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data(), batch_size=FIRST // self.trainer.world_size, sampler=sampler)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Notes(L.Callback):
    """Writes what each process has at the end to a file."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_end(self, trainer, pl_module):
        weights = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        notes = {
            "weights": weights,
            "seen": pl_module.seen,
            "sizes": pl_module.sizes,
            "records": trainer.callbacks[0].records,
        }
        torch.save(notes, self.directory / f"{trainer.global_rank}.pt")


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2] + torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64))


def fit(directory, processes, ckpt_path=None):
    directory.mkdir()
    options = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1, "save_on_train_epoch_end": False}
    growing, checkpoints = Even(**arguments(**MEASURING), scale_lr="linear"), ModelCheckpoint(directory, **options)
    train(processes, growing, Notes(directory), checkpoints, ckpt_path=ckpt_path)


def train(processes, *callbacks, ckpt_path=None):
    options = two_processes() if processes == 2 else {}
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(Regressor(), ckpt_path=ckpt_path)


def test_two_processes_train_as_one_and_resume_bit_for_bit(tmp_path):
    fit(tmp_path / "one", 1)
    fit(tmp_path / "two", 2)
    fit(tmp_path / "resumed", 2, tmp_path / f"two/step={STOPPED}.ckpt")
    one = torch.load(tmp_path / "one/0.pt")
    two, resumed = ([torch.load(tmp_path / run / f"{rank}.pt") for rank in range(2)] for run in ("two", "resumed"))
    sizes = [size // 2 for size in one["sizes"]]
    assert [process["sizes"] for process in two] == [sizes, sizes] and max(sizes) == 8
    for record, of_one in zip(two[1]["records"], one["records"], strict=True):
        assert record == pytest.approx(of_one, rel=1e-9)
    assert (two[0]["weights"] - one["weights"]).abs().max() < 1e-12
    assert torch.equal(two[0]["weights"], two[1]["weights"])
    every = sorted(data().tensors[0][:, 0].tolist())
    assert [sorted(two[0]["seen"][epoch] + two[1]["seen"][epoch]) for epoch in range(EPOCHS)] == [every] * EPOCHS
    read = FIRST // 2 * 3 + sizes[3]
    for again, whole in zip(resumed, two, strict=True):
        assert again["seen"][0] == whole["seen"][0][read:] != []
        assert torch.equal(again["weights"], whole["weights"]) and again["records"] == whole["records"]


class AtOdds(GrowingBatchSize):
    """Decides on another size in each process."""

    def decide(self, batch_size):
        return 12 + 4 * dist.get_rank()


def test_sizes_are_decided_by_the_first_process(tmp_path):
    train(2, AtOdds(theta=math.inf), Notes(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt")["sizes"] for rank in range(2))
    assert first == second and first[:3] == [4, 6, 6]
