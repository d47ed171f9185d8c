import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct import OperatorMonitor, ReconstructionPlot, TrainingCurves
from lightning_struct.callbacks.operator_monitor import plot_layer
from lightning_struct.callbacks.reconstructions import plot_reconstructions
from lightning_struct.nn import LowRank

EXTRA = r"needs matplotlib, .*Remedy: pip install 'lightning-struct\[recipes\]'"


class Network(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = LowRank(4, 4, 1)
        self.began = False

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch, batch_idx):
        self.began = True
        return self(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.began = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.parametrize("callback", [OperatorMonitor, ReconstructionPlot, TrainingCurves])
def test_a_callback_that_draws_fails_before_the_first_step(tmp_path, callback):
    module, loader = Network(), DataLoader(torch.zeros(4, 4))
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[callback()]
    )
    with pytest.raises(MisconfigurationException, match=f"^{callback.__name__} {EXTRA}"):
        trainer.fit(module, loader, loader)
    assert not module.began


PLOTS = {
    "layer": lambda: plot_layer(LowRank(4, 4, 1)),
    "reconstructions": lambda: plot_reconstructions(torch.zeros(1, 4), torch.zeros(1, 4)),
    "training curves": lambda: TrainingCurves().plot(),
}


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
def test_a_plot_names_the_extra(plot):
    with pytest.raises(MisconfigurationException, match=EXTRA):
        plot()
