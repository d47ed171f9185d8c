"""Compression within a fit: with both namespaces, and a run that is resumed as one that was not stopped."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import (
    SHF,
    Compression,
    GrowingBatchSize,
    LevenbergMarquardtDamping,
    SHFOptimization,
    ValidationMeritStopping,
)
from lightning_struct.data import DrawLoader, IndependentDraws
from lightning_struct.nn import StructuredLinear, apply_structure
from lightning_struct.utilities.namespaces import MisconfigurationException

both_names = pytest.mark.parametrize("pl", ["lightning.pytorch", "pytorch_lightning"], indirect=True)


def module(pl):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
            self.sizes = []

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            self.sizes.append(size(self))
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Module()


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 12, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (32,), generator=generator)), 8)


def fit(pl, folder, epochs, path=None, callback=None):
    torch.manual_seed(3)
    checkpoints = pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_top_k=1)
    callback = callback or Compression(budget=0.5, epoch=1, samples=16)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[callback, checkpoints], **silent)
    model = module(pl)
    trainer.fit(model, loader(), loader(), ckpt_path=path)
    return trainer, model


@both_names
def test_module_is_compressed_at_its_epoch_and_trained_on(pl, tmp_path):
    trainer, model = fit(pl, tmp_path, 3)
    whole = size(module(pl))
    assert model.sizes[:4] == [whole] * 4 and all(now <= 0.5 * whole for now in model.sizes[4:])
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()} and trainer.global_step == 12
    best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    again = apply_structure(module(pl), best["layer_structure"])
    again.load_state_dict(best["state_dict"])
    assert any(isinstance(layer, StructuredLinear) for layer in again.modules())


@both_names
def test_resumed_run_is_the_uninterrupted_one(pl, tmp_path):
    whole, expected = fit(pl, tmp_path / "whole", 3)
    stopped, _ = fit(pl, tmp_path / "stopped", 2)
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    resumed, model = fit(pl, tmp_path / "resumed", 3, tmp_path / "two.ckpt")
    assert resumed.global_step == whole.global_step
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    (result,) = resumed.validate(module(pl), loader(), ckpt_path=tmp_path / "two.ckpt", verbose=False)
    assert result["val_loss"] > 0


def test_run_that_is_resumed_after_the_last_batch_before_it_is_the_uninterrupted_one(pl, tmp_path):
    models = []
    for path in (None, tmp_path / "step=4.ckpt"):
        steps = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        models.append(module(pl))
        callbacks = [Compression(budget=0.5, epoch=1, samples=16), steps]
        silent_trainer(pl, 2, *callbacks, checkpointing=True).fit(models[-1], loader(), loader(), ckpt_path=path)
    expected, resumed = (model.state_dict() for model in models)
    assert size(models[0]) <= 0.5 * size(module(pl))
    assert expected.keys() == resumed.keys() and all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_goal_out_of_reach_is_named(pl, tmp_path):
    with pytest.raises(MisconfigurationException, match="Compression: budget=10 allows 10 parameters"):
        fit(pl, tmp_path, 1, callback=Compression(budget=10, epoch=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Compression.*needs one goal, but neither is given"),
        ({"budget": 0.5, "max_loss_increase": 0.1}, "Compression.*needs one goal, but both are given"),
        ({"budget": 0}, "Compression.*budget must be positive and finite, .*, but is 0"),
        ({"budget": "0.5"}, "Compression.*budget must be positive and finite, .*, but is '0.5'"),
        ({"max_loss_increase": -1}, "Compression.*max_loss_increase must be a number that is not negative, but is -1"),
        ({"budget": 0.5, "epoch": -1}, "epoch must be at least 0, but is -1"),
        ({"budget": 0.5, "epoch": "2"}, "epoch must be a whole number >= 0, but is '2'"),
        ({"budget": 0.5, "epoch": 1.5}, "epoch must be a whole number >= 0, but is 1.5"),
        ({"budget": 0.5, "samples": 0}, "samples must be at least 1, but is 0"),
        ({"budget": 0.5, "samples": "3"}, "samples must be a whole number >= 1, but is '3'"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_the_fit(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        Compression(**options)


def silent_trainer(pl, epochs, *callbacks, checkpointing=False):
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return pl.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[*callbacks], enable_checkpointing=checkpointing, **silent
    )


def test_training_batches_that_are_measured_on_are_trained_on_all_the_same(pl):
    data = loader().dataset
    batches = []

    class Recorder(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batches[-1].append((trainer.current_epoch, batch[1].tolist()))

    for callbacks in ([], [Compression(budget=0.5, epoch=1, samples=16)]):
        batches.append([])
        draws = DrawLoader(data, IndependentDraws(data, batch_size=8, draws_per_epoch=4))
        silent_trainer(pl, 3, Recorder(), *callbacks).fit(module(pl), draws)
    assert batches[0] == batches[1] and len(batches[0]) == 12


def named_loaders():
    return {"seen": loader(), "drawn": DataLoader(loader().dataset, 8)}


@pytest.mark.parametrize("loaders", [named_loaders(), list(named_loaders().values())], ids=["dict", "list"])
def test_several_training_loaders_without_validation_are_named(pl, loaders):
    kind = type(loaders).__name__
    with pytest.raises(MisconfigurationException, match=rf"2 loaders in a {kind}: give a validation loader, or loss="):
        silent_trainer(pl, 2, Compression(budget=0.5, epoch=0, samples=16)).fit(module(pl), loaders)


def test_batches_of_several_training_loaders_are_measured_as_the_training_step_gets_them(pl):
    seen, trained = [], []
    model = module(pl)
    whole = size(model)

    def loss(model, batch):
        seen.append({name: labels.tolist() for name, (_, labels) in batch.items()})
        return sum(nn.functional.cross_entropy(model(x), labels) for x, labels in batch.values())

    def training_step(batch, batch_idx):
        trained.append({name: labels.tolist() for name, (_, labels) in batch.items()})
        return loss(model, batch)

    model.training_step = training_step
    callback = Compression(budget=0.5, epoch=0, samples=16, loss=loss)
    silent_trainer(pl, 1, callback).fit(model, named_loaders())
    assert size(model) <= 0.5 * whole and seen[:2] == trained[:2] and len(trained) == 4


def test_persistent_workers_train_on_what_they_were_measured_on(pl):
    trained = []
    model = module(pl)
    model.on_train_batch_start = lambda batch, _: trained.append(batch[1].tolist())
    workers = DataLoader(loader().dataset, 8, num_workers=1, persistent_workers=True)
    silent_trainer(pl, 1, Compression(budget=0.5, epoch=0, samples=16)).fit(model, workers)
    assert trained == [labels.tolist() for _, labels in loader()]


def test_an_object_compresses_each_module_that_it_is_in_the_fit_of(pl):
    callback, models = Compression(budget=0.5, epoch=1, samples=16), [module(pl), module(pl)]
    for model in models:
        silent_trainer(pl, 2, callback).fit(model, loader())
    sizes = [size(model) for model in models]
    assert sizes[0] == sizes[1] <= 0.5 * size(module(pl))
    silent_trainer(pl, 2, callback).fit(models[1], loader())
    assert size(models[1]) == sizes[1]  # once


def test_an_object_can_be_copied_after_a_fit(pl):
    compression = Compression(budget=0.5, epoch=0, samples=16)
    silent_trainer(pl, 1, compression).fit(module(pl), loader())
    assert copy.deepcopy(compression).state_dict() == {"is_done": True}


def test_training_that_ends_before_the_epoch_is_warned_of(pl):
    with pytest.warns(UserWarning, match="has compressed nothing: the training has ended before epoch 5"):
        silent_trainer(pl, 2, Compression(budget=0.5, epoch=5)).fit(module(pl), loader())


def test_fit_goes_on_though_the_larger_model_was_better(pl):
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=1)
    trainer = silent_trainer(pl, 8, Compression(budget=0.2, epoch=5), stopping)
    trainer.fit(module(pl), loader(), loader())
    assert trainer.current_epoch == 8


def test_best_weights_are_those_of_the_compressed_module(pl):
    stopping, model = ValidationMeritStopping("val_loss", patience=5), module(pl)
    silent_trainer(pl, 7, Compression(budget=0.2, epoch=5), stopping).fit(model, loader(), loader())
    assert stopping.best_step > 5 * 4 and size(model) <= 0.2 * size(module(pl))


def trained_by(optimizer, pl):
    class Module(SHFOptimization, type(module(pl))):
        def inputs_and_targets(self, batch):
            return batch

        def configure_optimizers(self):
            return optimizer(self, "cross_entropy", damping=1.0)

    return Module()


def test_merit_is_given_to_the_optimizer_of_the_compressed_module(pl):
    given = []

    class RecordingSHF(SHF):
        def set_validation(self, batches):
            super().set_validation(batches)
            if batches is not None:
                given.append(self)

    trainer = silent_trainer(pl, 2, Compression(budget=0.5, epoch=1), ValidationMeritStopping("val_loss"))
    trainer.fit(trained_by(RecordingSHF, pl), loader(), loader())
    assert len(given) == 2 and given[1] is trainer.optimizers[0]


def test_damping_of_the_compressed_module_is_adapted(pl):
    class Halving(LevenbergMarquardtDamping):
        def decide(self, damping, reduction_ratio):
            return damping / 2

    trainer = silent_trainer(pl, 3, Compression(budget=0.5, epoch=1), Halving())
    trainer.fit(trained_by(SHF, pl), loader())
    assert trainer.optimizers[0].damping == 2.0**-8  # of two epochs


def test_schedule_of_the_compressed_module_keeps_its_place_where_batches_grow(pl):
    class Module(type(module(pl))):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def steps(*callbacks):
        trainer = silent_trainer(pl, 3, Compression(budget=0.5, epoch=1), *callbacks)
        trainer.fit(Module(), loader())
        return trainer.lr_scheduler_configs[0].scheduler.last_epoch, trainer.global_step

    assert steps() == (8, 12)
    assert steps(GrowingBatchSize(schedule="0:8 64:16")) == (8, 10)


@pytest.mark.parametrize("averaging", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_averages_of_weights_that_would_be_gone_are_refused(pl, averaging):
    if not hasattr(pl.callbacks, averaging):
        pytest.skip("this Lightning has no such callback")
    averages = getattr(pl.callbacks, averaging)(**({"swa_lrs": 0.1} if averaging.startswith("S") else {}))
    with pytest.raises(MisconfigurationException, match=f"{averaging} averages weights that Compression"):
        silent_trainer(pl, 2, Compression(budget=0.5), averages).fit(module(pl), loader(), loader())
