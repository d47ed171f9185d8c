"""A small regression problem and how the tests train on it."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct.data import DrawLoader, IndependentDraws
from lightning_struct.mixins import SHFOptimization
from lightning_struct.optim import LSMR, SHF


def regression_data(samples=60, seed=0, dtype=torch.float32):
    """Inputs (samples, 3) and noisy targets (samples, 2)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator, dtype=dtype)
    noise = torch.randn(samples, 2, generator=generator, dtype=dtype)
    targets = torch.stack([inputs[:, 0] * inputs[:, 1], inputs.sum(1).sin()], dim=1) + 0.1 * noise
    return TensorDataset(inputs, targets)


class Network(L.LightningModule):
    """A network with a validation step, and no way of training it."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)

    def forward(self, inputs):
        return self.layers(inputs)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = 0.5 * (self(inputs) - targets).square().sum(1).mean()
        self.log("val_loss", loss, batch_size=len(inputs), sync_dist=True)


class SHFNetwork(SHFOptimization, Network):
    """The network trained by SHF, with what the tests look at."""

    def __init__(self, dtype=torch.float32, seed=0, **options):
        super().__init__(dtype, seed)
        self.options = {"damping": 1.0, "solver": LSMR(maxiter=12)} | options
        self.reports = []

    def configure_optimizers(self):
        return SHF(self, "mse", **self.options)

    def on_shf_step(self, report):
        self.reports.append(report)
        self.weights_after_step = weights(self)


def draw_loader(batch_size=12, draws=5, seed=0, dtype=torch.float32):
    data = regression_data(dtype=dtype)
    return DrawLoader(data, IndependentDraws(data, batch_size, draws, seed=seed))


def validation_loader(samples=30, batch_size=8, dtype=torch.float32):
    return DataLoader(regression_data(samples, seed=1, dtype=dtype), batch_size=batch_size)


def make_trainer(tmp_path, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    defaults = {"accelerator": "cpu", "logger": False, "max_epochs": 2, "default_root_dir": tmp_path}
    return L.Trainer(**(quiet | defaults | options))


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
