"""Options of the Trainer that manual optimization does not know: the errors say what to do within it."""

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import RLS, SHF, RLSOptimization, SHFOptimization


class Net(L.LightningModule):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x):
        return self.net(x)

    def test_step(self, batch, batch_idx):
        pass


class ByRLS(RLSOptimization, Net):
    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return RLS(self)


class BySHF(SHFOptimization, Net):
    def configure_optimizers(self):
        return SHF(self, "mse")


def loader():
    return DataLoader(TensorDataset(torch.rand(8, 3), torch.rand(8, 1)), batch_size=4)


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **quiet, **options)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ByRLS, {"gradient_clip_val": 1.0}, r"gradient_clip_val=1.0\): leave it out and clip by RLS\(max_grad_norm="),
        (BySHF, {"gradient_clip_val": 0.5}, r"gradient_clip_val=0.5\): leave it out, a step of SHF is no gradient"),
        (ByRLS, {"accumulate_grad_batches": 4}, r"RLSOptimization .* make the batches 4 times as large"),
        (BySHF, {"accumulate_grad_batches": 2}, r"SHFOptimization .* make the batches 2 times as large"),
    ],
)
def test_options_for_gradients_are_refused_with_what_to_do(module, options, message):
    with pytest.raises(MisconfigurationException, match=message):
        trainer(**options).fit(module(), loader())


@pytest.mark.parametrize("module", [ByRLS, BySHF])
def test_options_for_gradients_have_no_effect_on_a_test(module):
    trainer(gradient_clip_val=1.0, accumulate_grad_batches=4).test(module(), loader())


@pytest.mark.parametrize("kind", [ByRLS, BySHF])
def test_weights_of_a_run_in_float64_are_not_rounded_where_it_goes_on(kind, tmp_path):
    trained, resumed = kind().double(), kind()
    with torch.no_grad():
        trained.net.weight.fill_(1 / 3)
    first = trainer(precision="64-true", limit_train_batches=0)
    first.fit(trained, loader())
    first.save_checkpoint(tmp_path / "some.ckpt")
    trainer(precision="64-true").test(resumed, loader(), ckpt_path=tmp_path / "some.ckpt", verbose=False)
    assert torch.equal(resumed.net.weight, trained.net.weight)


def test_no_optimizer_at_all_is_refused_as_none():
    class Without(BySHF):
        def configure_optimizers(self):
            return None

    with pytest.raises(MisconfigurationException, match="exactly one SHF from configure_optimizers, but got none: "):
        trainer().fit(Without(), loader())
