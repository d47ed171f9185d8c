"""AdapterCheckpoint and Compression in one Trainer, in both orders: what a checkpoint lacks comes back on load."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import AdapterCheckpoint, Compression
from lightning_struct.nn import ToeplitzLike, add_adapters, apply_structure, layer_structure

pytestmark = pytest.mark.parametrize("pl", ["lightning.pytorch", "pytorch_lightning"], indirect=True)


@pytest.fixture
def trainer(pl):
    """Makes a Trainer with both callbacks, in one order in each namespace, for a number of epochs."""

    def make(epochs, include=("net.2",), budget=0.7):
        both = [AdapterCheckpoint(), Compression(budget, epoch=1, samples=16, include=include)]
        return pl.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            callbacks=both if pl.__name__ == "pytorch_lightning" else both[::-1],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )

    return make


def module(pl, train):
    """A module whose base is always the same, with adapters beside its first layer."""

    class Adapted(pl.LightningModule):
        def __init__(self):
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                first, second, last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 3)
                self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
            self.net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
            add_adapters(self, partial(ToeplitzLike, rank=1), include="net.0", train=train)

        def forward(self, x):
            x = x[:, None]
            return self.net(self.attention(x, x, x, need_weights=False)[0].squeeze(1))

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

    return Adapted()


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 12, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (32,), generator=generator)), 8)


def assert_same_weights(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def test_frozen_weights_come_back_before_the_compression(pl, trainer, tmp_path):
    model, again = module(pl, "net.2"), module(pl, "net.2")
    run = trainer(1)
    run.fit(model, loader(), loader())
    run.save_checkpoint(tmp_path / "one.ckpt")
    assert "net.4.weight" not in torch.load(tmp_path / "one.ckpt", weights_only=False)["state_dict"]
    trainer(2).validate(again, loader(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert_same_weights(model, again)


COMPRESSED = {
    "a trained layer": ("net.2", ["net.2"], 0.7),
    "a frozen layer": ("net.4", ["net.2"], 0.7),
    "the base of an adapter": ("net.2", ["net.0.base"], 0.9),
    "a projection of frozen attention": ("net.2", ["attention.out_proj"], 0.97),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(("train", "include", "budget"), COMPRESSED.values(), ids=COMPRESSED)
def test_weights_of_a_compressed_module_come_back(pl, trainer, tmp_path, train, include, budget):
    torch.manual_seed(0)
    model, again = module(pl, train), module(pl, train)
    run = trainer(2, include, budget)
    run.fit(model, loader(), loader())
    run.save_checkpoint(tmp_path / "two.ckpt")
    assert set(include) < layer_structure(model).keys()
    trainer(2, include, budget).validate(again, loader(), ckpt_path=tmp_path / "two.ckpt", verbose=False)
    assert_same_weights(model, again)


def test_resumed_run_is_the_uninterrupted_one(pl, trainer, tmp_path):
    torch.manual_seed(0)
    first = module(pl, "net.4")
    models = []
    for epochs in (2, 3):
        models.append(module(pl, "net.4"))
        models[-1].load_state_dict(first.state_dict())
        torch.manual_seed(0)
        run = trainer(epochs)
        run.fit(models[-1], loader(), loader())
        run.save_checkpoint(tmp_path / f"{epochs}.ckpt")
    resumed = module(pl, "net.4")
    trainer(3).fit(resumed, loader(), loader(), ckpt_path=tmp_path / "2.ckpt")
    assert_same_weights(models[-1], resumed)


def test_weights_alone_come_back(pl, trainer, tmp_path):
    """Saved in the run: after it no callback is asked."""
    path = tmp_path / "weights.ckpt"

    class Save(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            trainer.save_checkpoint(path, weights_only=True)

    model, again = module(pl, "net.4"), module(pl, "net.4")
    run = trainer(2)
    run.callbacks.append(Save())
    run.fit(model, loader(), loader())
    checkpoint = torch.load(path, weights_only=True)
    assert "net.0.base.weight" not in checkpoint["state_dict"]
    apply_structure(again, checkpoint["layer_structure"]).load_state_dict(checkpoint["state_dict"], strict=False)
    assert_same_weights(model, again)


def test_module_has_its_own_hooks_again_after_each_run(pl, trainer):
    model = module(pl, "net.2")
    for epochs in (1, 2):
        trainer(epochs).fit(model, loader(), loader())
        assert not {"on_save_checkpoint", "on_load_checkpoint"} & vars(model).keys()
