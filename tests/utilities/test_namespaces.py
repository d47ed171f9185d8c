"""Projects on lightning.pytorch and on pytorch_lightning: both imported here, each alone in a process of its own."""

import subprocess
import sys
from types import SimpleNamespace

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_struct import SHF, GrowingBatchSize, NoiseEstimator, PredictionWriter, SHFOptimization, ValidationRule
from lightning_struct.utilities.distributed import refuse_sharded_weights
from lightning_struct.utilities.namespaces import MisconfigurationException

BOTH = pytest.mark.parametrize("pl", [lightning.pytorch, pytorch_lightning], ids=lambda pl: pl.__name__)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


DATA = TensorDataset(torch.randn(90, 3, generator=torch.Generator().manual_seed(0)))
LOADERS = {
    "map-style": lambda: DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
}


def network(pl, *mixins):
    class Network(*mixins, pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 2)
            self.sizes = []

        def forward(self, inputs):
            return self.layer(inputs)

        def inputs_and_targets(self, batch):
            return batch[0], batch[0][:, :2].sin()

        def training_step(self, batch, batch_idx):
            inputs, targets = self.inputs_and_targets(batch)
            return torch.nn.functional.mse_loss(self(inputs), targets)

        def on_train_batch_start(self, batch, batch_idx):
            self.sizes.append(len(batch[0]))

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

        def configure_optimizers(self):
            return SHF(self, "mse", damping=1.0) if mixins else torch.optim.SGD(self.parameters(), lr=0.1)

    return Network()


def make_trainer(pl, *callbacks, epochs=3, **options):
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    return pl.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), **{**quiet, **options})


def growing():
    estimator, rule = NoiseEstimator("layers", every_n_steps=1), ValidationRule(window=1)
    return GrowingBatchSize(32, theta=0.5, estimator=estimator, validation=rule)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mixins", [(), (SHFOptimization,)], ids=["automatic", "SHF"])
@pytest.mark.parametrize("loader", LOADERS)
def test_batches_and_weights_are_the_same_in_both(loader, mixins):
    sizes, weights = [], []
    for pl in (lightning.pytorch, pytorch_lightning):
        module = network(pl, *mixins)
        make_trainer(pl, growing()).fit(module, LOADERS[loader]())
        sizes.append(module.sizes)
        weights.append(module.layer.weight)
    assert max(sizes[0]) > 4, "the batch has grown"
    assert sizes[0] == sizes[1] and torch.equal(*weights)


def test_one_callback_serves_trainers_of_both():
    callback = growing()
    make_trainer(lightning.pytorch, callback, epochs=1).fit(network(lightning.pytorch), LOADERS["map-style"]())
    module = network(pytorch_lightning)
    make_trainer(pytorch_lightning, callback, epochs=1).fit(module, LOADERS["map-style"]())
    assert module.sizes[0] == 4 < max(module.sizes), "it begins anew with another Trainer"


@BOTH
def test_predictions_are_written_in_both(pl, tmp_path):
    trainer = make_trainer(pl, PredictionWriter(), default_root_dir=tmp_path)
    trainer.predict(network(pl), DataLoader(DATA, batch_size=32))
    assert torch.load(tmp_path / "predictions.pt")["predictions"].shape == (90, 2)


@BOTH
def test_a_project_catches_the_exception_of_its_namespace(pl):
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException):
        GrowingBatchSize(max_batch_size=0)


@BOTH
def test_sharded_weights_are_refused_in_both_and_whole_ones_not(pl):
    for name in ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"):
        strategy = object.__new__(getattr(pl.strategies, name))
        with pytest.raises(MisconfigurationException, match=f"needs all weights, but {name}"):
            refuse_sharded_weights(SimpleNamespace(strategy=strategy), "SHF")
    for strategy in (pl.strategies.DDPStrategy(), pl.strategies.SingleDeviceStrategy()):
        refuse_sharded_weights(SimpleNamespace(strategy=strategy), "SHF")


PROJECT = """
import sys
from lightning_struct import GrowingBatchSize, SHFOptimization

callback = GrowingBatchSize(max_batch_size=16)
import pytorch_lightning as pl
from pytorch_lightning.cli import LightningArgumentParser

parser = LightningArgumentParser()
parser.add_subclass_arguments(pl.Callback, "callback")
parser.add_subclass_arguments(pl.LightningDataModule, "data")
parsed = parser.parse_args([
    "--callback=lightning_struct.GrowingBatchSize",
    "--callback.max_batch_size=8",
    "--data=lightning_struct.data.CurvesDataModule",
])
print(parser.instantiate_classes(parsed).callback.max_batch_size)


class Network(SHFOptimization, pl.LightningModule): ...


print(Network().automatic_optimization)
print(pl.Trainer(callbacks=[callback], accelerator="cpu", logger=False).callbacks[0] is callback)
print("lightning" in sys.modules)
"""


@pytest.mark.slow
def test_a_project_of_pytorch_lightning_does_not_load_the_other_namespace():
    run = subprocess.run([sys.executable, "-c", PROJECT], check=False, capture_output=True, text=True)
    assert run.stdout.split() == ["8", "False", "True", "False"], run.stderr
