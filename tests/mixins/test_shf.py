import logging
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct import SHF, GrowingBatchSize, SHFOptimization
from lightning_struct.mixins import GradientStatistics
from lightning_struct.optim import LSMR
from lightning_struct.utilities.distributed import refuse_sharded_weights
from tests.mixins.helpers import (
    Network,
    SHFNetwork,
    draw_loader,
    make_trainer,
    regression_data,
    validation_loader,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class AdamNetwork(Network):
    """Written for another optimizer."""

    def training_step(self, batch, batch_idx):
        raise AssertionError("the step of the other optimizer ran")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class AutoencoderLike(Network):
    def inputs_and_targets(self, batch):
        return batch["inputs"], batch["inputs"][:, :2]


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"inputs": torch.full((3,), float(index))}


def returns_shf(self):
    return SHF(self, "mse", damping=1.0, solver=LSMR(maxiter=12))


# What a step does, and what is logged


class Watching(L.Callback):
    """Keeps the statistics before the first step, and the outputs and logged values of each."""

    def __init__(self):
        self.outputs, self.logged = [], []

    def on_train_start(self, trainer, pl_module):
        self.at_start = pl_module.gradient_statistics()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs["loss"].item())
        self.logged.append({name: value.item() for name, value in trainer.logged_metrics.items()})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A run of seven steps: its trainer, module and callback."""
    callback, module = Watching(), SHFNetwork()
    trainer = make_trainer(tmp_path_factory.mktemp("fitted"), max_epochs=-1, max_steps=7, callbacks=[callback])
    trainer.fit(module, draw_loader(draws=7))
    return trainer, module, callback


def test_a_step_is_that_of_the_plain_optimizer(fitted):
    plain = SHFNetwork()
    optimizer = plain.configure_optimizers()
    for inputs, targets in draw_loader(draws=7):
        optimizer.step(inputs=inputs, targets=targets)
    assert torch.equal(weights(fitted[1]), weights(plain))


def test_each_batch_is_one_step_which_the_hook_is_called_with_until_max_steps_ends_training(fitted):
    trainer, module, callback = fitted
    assert trainer.global_step == 7 and [report.batch_size for report in module.reports] == [12] * 7
    assert callback.outputs == pytest.approx([report.loss_before for report in module.reports])


def test_values_of_the_report_are_logged(fitted):
    trainer, module, callback = fitted
    for report, logged in zip(module.reports, callback.logged, strict=True):
        assert logged == pytest.approx(
            {
                "train_loss": report.loss_before,
                "damping": report.damping,
                "reduction_ratio": report.reduction_ratio,
                "solver_iterations": report.solver_iterations,
                "step_length": report.step_length,
                "batch_size": report.batch_size,
                "gradient_variance": report.gradient_variance,
                "batch_size_predicted": report.predicted_batch_size,
            }
        )
    assert set(trainer.progress_bar_metrics) == {"train_loss", "damping", "batch_size", "solver_iterations"}


def test_statistics_are_those_of_the_last_report(fitted):
    _, module, callback = fitted
    report = module.reports[-1]
    expected = GradientStatistics(12, report.gradient_variance, report.gradient_norm**2, None)
    assert callback.at_start is None and module.gradient_statistics() == expected


def test_two_arguments_fit_and_log_how_the_steps_are_measured(tmp_path):
    class TwoArguments(SHFNetwork):
        def configure_optimizers(self):
            return SHF(self, "mse")

    module = TwoArguments()
    trainer = make_trainer(tmp_path, max_epochs=6)
    trainer.fit(module, draw_loader(batch_size=40))
    assert module.reports[-1].loss_after < 0.3 * module.reports[0].loss_before
    assert {"damping", "step_scale", "next_batch_ratio"} <= set(trainer.logged_metrics)


# How a batch is read


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(2, 3), "Tensor"),
        ((torch.zeros(2, 3),), "tuple of Tensor"),
        ([torch.zeros(2)] * 3, "list of Tensor, Tensor, Tensor"),
        ((torch.zeros(2), "label"), "tuple of Tensor, str"),
        ({"inputs": torch.zeros(2)}, "dict"),
    ],
)
def test_other_batches_ask_for_the_method(batch, found):
    with pytest.raises(MisconfigurationException, match=f"is a {found}, no pair of tensors: define inputs_and_targets"):
        SHFNetwork().inputs_and_targets(batch)


def test_a_method_that_returns_no_pair_is_an_error_with_the_remedy(tmp_path):
    class Trained(SHFNetwork):
        def inputs_and_targets(self, batch):
            return torch.zeros(2, 3)

    with pytest.raises(MisconfigurationException, match=r"inputs_and_targets returned a Tensor, not a pair"):
        make_trainer(tmp_path, max_steps=1).fit(Trained(), DataLoader(Pairs(), batch_size=8))


def test_the_method_of_the_module_is_used(tmp_path):
    class Trained(SHFOptimization, AutoencoderLike):
        configure_optimizers = returns_shf

    module = Trained()
    before = weights(module)
    make_trainer(tmp_path, max_steps=1).fit(module, DataLoader(Pairs(), batch_size=8))
    assert not torch.equal(weights(module), before)


# Modules written for another optimizer


class OfItsBase(SHFOptimization, AdamNetwork):
    configure_optimizers = returns_shf


class MixinLast(AdamNetwork, SHFOptimization):
    configure_optimizers = returns_shf


class OfItself(SHFOptimization, Network):
    configure_optimizers = returns_shf

    def training_step(self, batch, batch_idx):
        raise AssertionError("the step of the other optimizer ran")


@pytest.mark.parametrize("trained", [OfItsBase, MixinLast, OfItself])
def test_the_step_of_another_optimizer_is_not_run(tmp_path, caplog, trained):
    trainer = make_trainer(tmp_path, max_epochs=2)
    with caplog.at_level(logging.INFO):
        trainer.fit(trained(), draw_loader(draws=2))
    assert trainer.global_step == 4
    named = caplog.text.count("OfItself.training_step is not run: SHFOptimization takes the step")
    assert named == (trained is OfItself)


def test_hooks_of_the_module_behind_the_mixin_are_called(tmp_path):
    called = []

    class Hooked(AdamNetwork):
        def on_fit_start(self):
            called.append("on_fit_start")

    class Trained(SHFOptimization, Hooked):
        configure_optimizers = returns_shf

    make_trainer(tmp_path, fast_dev_run=1).fit(Trained(), draw_loader(draws=2))
    assert called == ["on_fit_start"]


# Statistics for callbacks


@pytest.mark.parametrize("grows", [False, True])
def test_the_variance_is_exact_where_a_growing_batch_goes_by_it(tmp_path, grows):
    class ByTwoArguments(SHFNetwork):
        def configure_optimizers(self):
            return SHF(self, "mse")

    module = ByTwoArguments()
    callbacks = [GrowingBatchSize()] if grows else []
    make_trainer(tmp_path, max_steps=1, callbacks=callbacks).fit(module, draw_loader())
    assert module.shf.exact_variance == grows


# Faults


@pytest.mark.parametrize("batch", [0, 2])
def test_a_bad_batch_is_named_and_changes_no_weight(tmp_path, batch):
    class Watching(SHFNetwork):
        def on_train_batch_start(self, *arguments):
            self.before = weights(self)

    data, module = regression_data(), Watching()
    data.tensors[0][12 * batch + 5, 0] = float("nan")
    with pytest.raises(ValueError, match=f"Training batch {batch} of epoch 0: the batch holds NaN or infinity"):
        make_trainer(tmp_path).fit(module, DataLoader(data, batch_size=12))
    assert torch.equal(weights(module), module.before)


class BesidesSGD(SHFOptimization, Network):
    def configure_optimizers(self):
        return [returns_shf(self), torch.optim.SGD(self.parameters(), lr=0.1)]


class ByAdam(SHFOptimization, AdamNetwork): ...


@pytest.mark.parametrize(("trained", "names"), [(ByAdam, "Adam"), (BesidesSGD, "SHF, SGD")])
def test_other_optimizers_are_refused_by_name(tmp_path, trained, names):
    message = f"needs exactly one SHF from configure_optimizers, but got {names}"
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(tmp_path).fit(trained(), draw_loader())


def test_automatic_optimization_is_refused(tmp_path):
    module = SHFNetwork()
    module.automatic_optimization = True
    with pytest.raises(
        MisconfigurationException, match="sets automatic_optimization=True, but SHFOptimization is manual"
    ):
        make_trainer(tmp_path).fit(module, draw_loader())


@pytest.mark.parametrize(
    "make",
    [
        LearningRateMonitor,
        LearningRateFinder,
        partial(StochasticWeightAveraging, swa_lrs=0.1, swa_epoch_start=1),
        BackboneFinetuning,
    ],
)
def test_callbacks_that_need_a_learning_rate_are_refused_at_the_start(tmp_path, make):
    module, steps = SHFNetwork(), []
    module.on_shf_step = steps.append
    module.backbone = module.layers
    with pytest.raises(MisconfigurationException, match="needs the learning rate of an optimizer, and SHF has none"):
        make_trainer(tmp_path, callbacks=[make()], max_epochs=3).fit(module, draw_loader())
    assert not steps


def test_the_batch_size_is_found_and_training_begins_anew(tmp_path):
    class Sized(SHFNetwork):
        batch_size = 4

        def train_dataloader(self):
            return DataLoader(regression_data(), batch_size=self.batch_size)

    module = Sized()
    finder = BatchSizeFinder(init_val=4, steps_per_trial=1, max_trials=2)
    trainer = make_trainer(tmp_path, callbacks=[finder], max_epochs=1)
    trainer.fit(module, val_dataloaders=validation_loader())
    assert module.batch_size == 8 and trainer.global_step > 0


# Precision and strategies


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [(lambda: MixedPrecision("16-mixed", "cpu"), "16-mixed"), (HalfPrecision, "16-true"),
     (partial(HalfPrecision, "bf16-true"), "bf16-true")],
    ids=["16-mixed", "16-true", "bf16-true"],
)  # fmt: skip
def test_half_precision_is_refused(tmp_path, plugin, precision):
    message = rf"Trainer\(precision='{precision}'\): .* Use 'bf16-mixed', '32-true' or '64-true'"
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(tmp_path, plugins=plugin()).fit(SHFNetwork(), draw_loader())


@pytest.mark.parametrize(
    ("precision", "dtype", "share"), [("bf16-mixed", torch.float32, 0.5), ("64-true", torch.float64, 0.3)]
)
def test_other_precisions_train_weights_of_their_dtype(tmp_path, precision, dtype, share):
    module = SHFNetwork()
    make_trainer(tmp_path, max_epochs=8, precision=precision).fit(module, draw_loader(batch_size=40))
    assert weights(module).dtype == dtype
    assert module.reports[-1].loss_after < share * module.reports[0].loss_before


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy])
def test_strategies_that_shard_the_weights_are_refused_by_name(strategy):
    trainer = SimpleNamespace(strategy=strategy.__new__(strategy))
    with pytest.raises(MisconfigurationException, match=f"SHF needs all weights, but {strategy.__name__}"):
        refuse_sharded_weights(trainer, "SHF")
