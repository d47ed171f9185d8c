"""Modules that remember what they read, and how tests train them on growing batches."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from lightning_struct.mixins import GradientStatistics
from tests.mixins.helpers import make_trainer

WARNINGS_OF_READERS = [
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:You requested to overfit"),
    pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled"),
]


class Growing(GrowingBatchSize):
    """Sets the sizes of a script: ``sizes[i]`` after step i of the whole run."""

    def __init__(self, sizes=(), **options):
        super().__init__(**options)
        self.sizes = list(sizes)

    def decide(self, batch_size):
        return self.sizes[self._steps - 1] if self._steps <= len(self.sizes) else batch_size


class Reader(L.LightningModule):
    """Remembers what it reads, and what the Trainer said meanwhile."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, dtype=torch.float64)
        self.read, self.lengths, self.validated_after, self.epochs = [], [], [], []
        self.read_in_step = 0

    def on_train_epoch_start(self):
        self.epochs.append([])

    def training_step(self, batch, batch_idx):
        rows = [part for part in (batch.values() if isinstance(batch, dict) else [batch]) if part is not None]
        self.read.append([part.tolist() for part in rows] if isinstance(batch, dict) else batch.tolist())
        self.lengths.append(self.trainer.num_training_batches)
        if self.epochs:
            self.epochs[-1].append(self.read[-1])
        self.read_in_step += sum(len(part) for part in rows)
        return sum(self.layer(part[:, None].double()).square().mean() for part in rows)

    def on_before_optimizer_step(self, optimizer):
        self.size, self.read_in_step = self.read_in_step, 0

    def gradient_statistics(self):
        return GradientStatistics(self.size, 1.0, 1.0, None) if self.read else None

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking and batch_idx == 0:
            self.validated_after.append(sum(len(batch) for batch in self.epochs[-1]))
        self.log("val_loss", 1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    @property
    def sizes(self):
        return [len(batch) for batch in self.read]


def fit(
    tmp_path, loader, sizes=(), module=None, callbacks=(), validation=None, ckpt_path=None, growing=None, **options
):
    module = module or Reader()
    callbacks = [growing or Growing(sizes), *callbacks]
    trainer = make_trainer(tmp_path, callbacks=callbacks, **({"max_epochs": 1, "num_sanity_val_steps": 0} | options))
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return module


def loader(samples=40, batch_size=4, **options):
    return DataLoader(range(samples), batch_size=batch_size, **options)


def numbers(batches):
    return [number for batch in batches for number in batch]


class Windows(Reader):
    """Remembers the batches of each step, and the factor by which Lightning scaled their losses."""

    def __init__(self):
        super().__init__()
        self.windows, self.window = [], []

    def training_step(self, batch, batch_idx):
        self.window.append((len(batch), self.trainer.accumulate_grad_batches))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.windows.append(self.window)
        self.window = []


class Batches:
    """Not a DataLoader."""

    def __iter__(self):
        yield from torch.arange(32).view(8, 4)

    def __len__(self):
        return 8


def checkpoints(directory, every=1):
    return ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=every)
