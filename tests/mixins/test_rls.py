import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import RLS, RLSOptimization
from tests.mixins.helpers import SHFNetwork, draw_loader, make_trainer, regression_data, validation_loader, weights
from tests.mixins.rls_helpers import AutomaticNetwork, ManualNetwork, PaperNetwork, squared_error


def loader(batch_size=10, dtype=torch.float32):
    return DataLoader(regression_data(dtype=dtype), batch_size=batch_size)


def fit(module, tmp_path, batches=None, **options):
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(module, batches or loader(), validation_loader())
    return trainer


def plain_loop(epochs=2, accumulate=1, **options):
    module = AutomaticNetwork()
    optimizer = RLS(module, **options)
    for _ in range(epochs):
        for i, (inputs, targets) in enumerate(loader()):
            (squared_error(module(inputs), targets) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return module


@pytest.mark.parametrize("network", [AutomaticNetwork, ManualNetwork])
def test_training_is_that_of_a_plain_loop(network, tmp_path):
    module = network(momentum=0.5)
    trainer = fit(module, tmp_path)
    assert torch.equal(weights(module), weights(plain_loop(momentum=0.5)))
    assert trainer.global_step == 12


def test_a_module_without_a_training_step_is_trained_by_the_loss_of_the_paper(tmp_path):
    module = PaperNetwork()
    trainer = fit(module, tmp_path)
    assert torch.equal(weights(module), weights(plain_loop(momentum=0.5)))
    assert "train_loss" in trainer.callback_metrics


def test_gradients_accumulate_in_automatic_optimization(tmp_path):
    module = AutomaticNetwork()
    fit(module, tmp_path, accumulate_grad_batches=2)
    assert torch.equal(weights(module), weights(plain_loop(accumulate=2)))


def test_gradients_clipped_by_the_trainer_are_stepped_by(tmp_path):
    module, inside = AutomaticNetwork(torch.float64), AutomaticNetwork(torch.float64, max_grad_norm=0.1)
    batches = loader(dtype=torch.float64)
    for network, options in ((module, {"gradient_clip_val": 0.1}), (inside, {})):
        make_trainer(tmp_path, **options).fit(network, batches)
    torch.testing.assert_close(weights(module), weights(inside), rtol=0, atol=1e-12)


class Own(RLSOptimization, L.LightningModule):
    """Defines the training step in the class that has the mixin."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return {"loss": squared_error(self.layers(batch[0]), batch[1])} if batch_idx else None

    def configure_optimizers(self):
        return RLS(self)


def test_an_own_training_step_is_asked_for_the_loss_and_may_skip(tmp_path):
    module = Own()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, loader())
    assert (module.steps, trainer.global_step) == (6, 5)


class Derived(Own):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class WithoutIndex(RLSOptimization, AutomaticNetwork):
    def training_step(self, batch):
        return super().training_step(batch, 0)


@pytest.mark.parametrize(("base", "derived"), [(Own, Derived), (ManualNetwork, WithoutIndex)])
def test_a_training_step_may_be_extended_below_the_mixin_and_leave_out_the_index(base, derived, tmp_path):
    module, other = base(), derived()
    fit(module, tmp_path)
    fit(other, tmp_path)
    assert getattr(module, "steps", None) == getattr(other, "steps", None)
    torch.testing.assert_close(weights(other), weights(module), rtol=0, atol=1e-5)


def schedulers():
    return {
        "step": lambda optimizer: {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"},
        "every fourth step": lambda optimizer: {
            "scheduler": StepLR(optimizer, 1, 0.5),
            "interval": "step",
            "frequency": 4,
        },
        "epoch": lambda optimizer: StepLR(optimizer, 1, 0.5),
    }


class Rates(L.Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class SkipsTheLast(AutomaticNetwork):
    def training_step(self, batch, batch_idx):
        return None if self.trainer.is_last_batch else super().training_step(batch, batch_idx)


class ManualSkipsTheLast(RLSOptimization, SkipsTheLast):
    pass


@pytest.mark.parametrize("networks", [(AutomaticNetwork, ManualNetwork), (SkipsTheLast, ManualSkipsTheLast)])
@pytest.mark.parametrize("name", list(schedulers()))
def test_schedulers_step_as_in_automatic_optimization(name, networks, tmp_path):
    of_networks = []
    for network in networks:
        rates = Rates()
        fit(network(scheduler=schedulers()[name]), tmp_path, callbacks=[rates], max_epochs=2, limit_val_batches=0)
        of_networks.append(rates.rates)
    assert of_networks[0] == of_networks[1]
    assert len(set(of_networks[0])) > 1


def test_reduction_on_a_plateau_works_in_automatic_and_is_refused_in_manual_optimization(tmp_path):
    def scheduler(optimizer):
        return {"scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0), "monitor": "val_loss"}

    trainer = fit(AutomaticNetwork(scheduler=scheduler), tmp_path, max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 1
    with pytest.raises(MisconfigurationException, match="drops the monitor of ReduceLROnPlateau"):
        fit(ManualNetwork(scheduler=scheduler), tmp_path)


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def test_averages_with_batch_normalisation_are_refused_in_manual_optimization(tmp_path):
    module = ManualNetwork(exclude=["layers.1"], auxiliary=functools.partial(torch.optim.SGD, lr=0.0))
    module.layers = normalised()
    with pytest.raises(MisconfigurationException, match="StochasticWeightAveraging ends with an epoch .* trains on"):
        fit(module, tmp_path, callbacks=[StochasticWeightAveraging(swa_lrs=[1.0, 0.1], swa_epoch_start=1)])


def test_learning_rate_monitor_finds_the_groups(tmp_path):
    module = ManualNetwork(exclude=["layers.2"], auxiliary=functools.partial(torch.optim.Adam, lr=1e-2))
    monitor = LearningRateMonitor()
    trainer = make_trainer(tmp_path, callbacks=[monitor], logger=True)
    trainer.fit(module, loader())
    assert {name: rates[-1] for name, rates in monitor.lrs.items()} == {"lr-RLS/pg1": 1.0, "lr-RLS/pg2": 1e-2}


@pytest.mark.covering(1)
@pytest.mark.parametrize("network", [AutomaticNetwork, ManualNetwork])
@pytest.mark.parametrize("stop", [4, 6])
def test_a_resumed_run_is_bitwise_that_without_a_break(network, stop, tmp_path):
    def make():
        return network(
            torch.float64,
            momentum=0.5,
            scheduler=schedulers()["step"],
            exclude=["layers.2"],
            auxiliary=functools.partial(torch.optim.Adam, lr=1e-2),
        )

    def batches():
        return draw_loader(10, draws=6, dtype=torch.float64)

    whole, stopped, resumed = make(), make(), make()
    checkpoint = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=stop, save_top_k=-1)
    options = {"enable_checkpointing": True, "limit_val_batches": 0}
    make_trainer(tmp_path / "whole", limit_val_batches=0).fit(whole, batches())
    make_trainer(tmp_path, callbacks=[checkpoint], max_steps=stop, **options).fit(stopped, batches())
    make_trainer(tmp_path, limit_val_batches=0).fit(resumed, batches(), ckpt_path=tmp_path / "last.ckpt")
    assert not torch.equal(weights(stopped), weights(whole))
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("network", [AutomaticNetwork, ManualNetwork])
def test_mixed_precision_keeps_p_in_float32(network, tmp_path):
    module, reference = network(), network()
    start = weights(module)
    trainer = fit(module, tmp_path, precision="bf16-mixed")
    fit(reference, tmp_path)
    state = trainer.optimizers[0].state["rls"]["layers.0.weight"]
    assert state["P"].dtype == torch.float32 and state["steps"] == 12
    assert (weights(module) - weights(reference)).norm() <= 0.01 * (weights(reference) - start).norm()


def test_hooks_are_gone_after_fit(tmp_path):
    module = ManualNetwork()
    fit(module, tmp_path)
    assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize("network", [AutomaticNetwork, ManualNetwork])
def test_nan_stops_the_run_before_it_reaches_the_weights(network, tmp_path):
    inputs, targets = regression_data().tensors
    targets = targets.clone()
    targets[25, 0] = float("nan")
    module, batches = network(), DataLoader(TensorDataset(inputs, targets), batch_size=10)
    with pytest.raises(ValueError, match=r"RLS step 3: NaN or infinity in the gradient of layers.0.weight"):
        fit(module, tmp_path, batches)
    reference = network()
    make_trainer(tmp_path, max_steps=2).fit(reference, batches)
    assert torch.equal(weights(module), weights(reference))


class WithoutLoss(ManualNetwork):
    def training_step(self, batch, batch_idx):
        return {"train_loss": torch.ones(())} if batch_idx else {"loss": 1.0}


class WithAdam(ManualNetwork):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Automatic(ManualNetwork):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = True


INPUTS, TARGETS = regression_data().tensors
OF_ANOTHER_SHAPE = DataLoader(TensorDataset(INPUTS, TARGETS[:, :1]), batch_size=10)
NOT_FINITE = DataLoader(TensorDataset(INPUTS / 0, TARGETS), batch_size=10)


@pytest.mark.parametrize(
    ("network", "batches", "options", "error", "message"),
    [
        (ManualNetwork, None, {"precision": "16-true"}, MisconfigurationException, "precision='16-true'"),
        (ManualNetwork, None, {"precision": "bf16-true"}, MisconfigurationException, "precision='bf16-true'"),
        (WithAdam, None, {}, MisconfigurationException, "exactly one RLS from configure_optimizers, but got Adam"),
        (Automatic, None, {}, MisconfigurationException, "sets automatic_optimization=True"),
        (WithoutLoss, None, {}, MisconfigurationException, "WithoutLoss.training_step returned a float, but .*'loss'"),
        (PaperNetwork, DataLoader(torch.rand(8, 3)), {}, MisconfigurationException, "is a Tensor, no pair"),
        (PaperNetwork, OF_ANOTHER_SHAPE, {}, ValueError, r"outputs are \(10, 2\) but targets \(10, 1\)"),
        (ManualNetwork, NOT_FINITE, {}, ValueError, "Training batch 0 of epoch 0: RLS step 1"),
    ],
)
def test_what_cannot_be_trained_is_refused(network, batches, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        fit(network(), tmp_path, batches, **options)


@pytest.mark.parametrize("module", [ManualNetwork, SHFNetwork])
def test_a_training_loader_without_batches_is_refused(module, tmp_path):
    batches = DataLoader(regression_data(samples=8), batch_size=9, drop_last=True)
    make_trainer(tmp_path, limit_train_batches=0).fit(module(), batches)
    with pytest.raises(
        MisconfigurationException, match=f"{module.__name__} was not trained, .* no batches: .* drop_last"
    ):
        make_trainer(tmp_path).fit(module(), batches)


def finetuned(network):
    class Finetuned(network):
        @property
        def backbone(self):
            return self.layers[:2]

    return Finetuned()


@pytest.mark.parametrize("network", [AutomaticNetwork, ManualNetwork])
def test_backbone_finetuning_trains_the_backbone_from_its_epoch_on(network, tmp_path):
    module, start = finetuned(network), finetuned(network)
    trainer = fit(module, tmp_path, max_epochs=3, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2)])
    (head, backbone) = trainer.optimizers[0].param_groups
    assert backbone["params"] == [*module.backbone.parameters()] and backbone["lr"] != head["lr"]
    states = trainer.optimizers[0].state["rls"]
    assert (states["layers.2.weight"]["steps"], states["layers.0.weight"]["steps"]) == (18, 6)
    assert not torch.equal(module.backbone[0].weight, start.backbone[0].weight)


class Unfreezing(BackboneFinetuning):
    """Lightning's own freezes the backbone again when a run is resumed, and leaves it so, whatever the optimizer is."""

    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        for group in trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)
