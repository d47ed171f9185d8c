"""Projects that were written without a thought of growing batches train with them all the same."""

import math
from collections import Counter
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import GrowingBatchSize, NoiseEstimator
from lightning_struct.functional import required_batch_size
from tests.callbacks.growing_batch_size.projects import (
    CHECKED_STEPS,
    EPOCHS,
    FIRST,
    GAN,
    MEASURING,
    MOST,
    PROJECTS,
    SAMPLES,
    WARNINGS_OF_PROJECTS,
    Manual,
    Project,
    Reference,
    Regressor,
    all_rows,
    arguments,
    fit,
    regression,
    seed,
    squared_errors,
    variance_ratio,
)
from tests.mixins.helpers import make_trainer

pytestmark = WARNINGS_OF_PROJECTS


@pytest.fixture(autouse=True)
def seeded():
    seed()


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_trains_on_batches_that_grow_as_it_would_without(tmp_path, name):
    run = fit(tmp_path, PROJECTS[name]())
    records, epochs = run.growing.records, run.watch.epochs
    sizes = [record["batch_size"] for record in records]
    assert (sizes[0], max(sizes)) == (2 if "batches of one" in name else FIRST, MOST)
    every = all_rows(run.project.loader)
    assert [Counter(row for batch in epoch for row in batch) for epoch in epochs] == [every] * EPOCHS
    unknown = name in ("stream", "stream shared by workers")
    assert run.watch.lengths == [math.inf if unknown else len(epoch) for epoch in epochs]
    assert name == "barebones" or run.watch.validations == EPOCHS
    schedulers = [config.scheduler for config in run.trainer.lr_scheduler_configs]
    assert name == "stochastic averages" or [scheduler.last_epoch for scheduler in schedulers] == [EPOCHS]
    if run.reference is not None:
        measured = [record["variance_ratio"] for record in records[:CHECKED_STEPS]]
        assert measured == pytest.approx(run.reference.ratios, rel=1e-9)


# --- several optimizers
# ------------------------------------------------------------------------------------------------


class GANReference(L.Callback):
    """As :class:`Reference`, of the optimizer with the larger ratio."""

    def __init__(self):
        self.ratios, self._batch, self._of_batch = [], None, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._batch, self._of_batch = batch, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if len(self.ratios) == CHECKED_STEPS:
            return
        parameters = optimizer.param_groups[0]["params"]
        of_generator = parameters[0] is next(pl_module.generator.parameters())
        losses = (
            pl_module.generator_losses(self._batch)
            if of_generator
            else sum(pl_module.discriminator_losses(self._batch))
        )
        shares = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses / len(losses)]
        self._of_batch.append(
            variance_ratio(torch.stack([torch.cat([g.flatten() for g in share]) for share in shares]))
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self._of_batch:
            self.ratios.append(max(self._of_batch))


def test_of_several_optimizers_the_larger_variance_counts(tmp_path):
    reference = GANReference()
    run = fit(tmp_path, Project(GAN(), options={"callbacks": [reference]}))
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(reference.ratios, rel=1e-9)


class Penalised(GAN):
    """WGAN-GP: a critic whose gradient in its input is penalised, and a generator that learns in every second batch."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        self.begin(critic)
        real, fake = batch[0], self.generator(batch[0][:, :2]).detach()
        between = (0.5 * (real + fake)).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        self.manual_backward(self.discriminator(fake).mean() - self.discriminator(real).mean() + penalty)
        critic.step()
        self.end(critic)
        if batch_idx % 2:
            self.begin(generator)
            self.manual_backward(self.generator_losses(batch).mean())
            generator.step()
            self.end(generator)


def test_a_penalty_on_gradients_leaves_the_decision_to_the_other_optimizer(tmp_path):
    with pytest.warns(UserWarning, match=r"leaves discriminator.0.weight, .* differentiated twice"):
        run = fit(tmp_path, Project(Penalised()))
    assert len(run.growing.records) == len(run.watch.sizes) // 2


# --- what cannot be measured
# -------------------------------------------------------------------------------------------


class WeightDecay(Regressor):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) + 0.1 * self.network[0].weight.square().sum()


class NoisyScale(nn.Module):
    """A parameter outside of all layers, beside dropout."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.scale * self.network(inputs)


def test_one_reason_is_one_warning(tmp_path, recwarn):
    fit(tmp_path, Project(Regressor(NoisyScale())))
    warnings = [str(w.message) for w in recwarn if "leaves" in str(w.message) or "run again" in str(w.message)]
    assert len(warnings) == 1 and "it draws random numbers, as by dropout" in warnings[0]


class OthersOnly(Reference):
    """Goes by all parameters but one."""

    def __init__(self, losses, name):
        super().__init__(losses)
        self.name = name

    def parameters_of(self, module):
        return [p for name, p in module.named_parameters() if name != self.name]


def test_the_others_count_where_a_parameter_is_left_out(tmp_path):
    reference = OthersOnly(squared_errors, "network.0.weight")
    with pytest.warns(UserWarning, match="network.0.weight"):
        run = fit(tmp_path, Project(WeightDecay(), options={"callbacks": [reference]}))
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(reference.ratios, rel=1e-9)


# --- batches of another form
# -------------------------------------------------------------------------------------------


class Samples:
    """Of a batch, as attributes."""

    def __init__(self, samples):
        self.inputs, self.targets = (torch.stack(parts).double() for parts in zip(*samples, strict=True))


class OfObjects(Regressor):
    def training_step(self, batch, batch_idx):
        return self.loss(self(batch.inputs), batch.targets)


class TimeFirst(Regressor):
    """Reads (time, samples, features)."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(3, 5)
        self.network = nn.Linear(5, 2)

    def forward(self, inputs):
        return self.network(self.recurrent(inputs)[0][-1])


def time_first(samples):
    inputs, targets = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return inputs.expand(7, *inputs.shape), targets


FORMS = {
    "objects": lambda: (OfObjects(), DataLoader(regression(42), batch_size=FIRST, collate_fn=Samples)),
    "time first": lambda: (TimeFirst(), DataLoader(regression(42), batch_size=FIRST, collate_fn=time_first)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("mode", ["batch", "accumulate"])
def test_samples_are_counted_in_batches_of_any_form(tmp_path, form, mode):
    module, loader = form()
    growing = GrowingBatchSize(**arguments(**(MEASURING | {"max_batch_size": 8, "theta": 0.05, "mode": mode})))
    make_trainer(tmp_path, callbacks=[growing], max_epochs=1, precision="64-true").fit(module, loader)
    sizes = [record["batch_size"] for record in growing.records]
    assert (sizes[0], sum(sizes), growing.records[-1]["samples"]) == (FIRST, 42, 42)


# --- steps
# -------------------------------------------------------------------------------------------------------------


class AccumulatingByHand(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(self(batch[0]), batch[1]) / 2)
        if batch_idx % 2 or self.trainer.is_last_batch:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_sizes_are_those_of_one_batch_where_a_module_accumulates_by_hand(tmp_path):
    reference = Reference(squared_errors)
    run = fit(tmp_path, Project(AccumulatingByHand(), options={"callbacks": [reference]}))
    first = run.growing.records[0]
    variance = reference.ratios[0] * FIRST  # of a gradient whose squared norm is 1
    expected = required_batch_size(variance, 1.0 - variance / FIRST, SAMPLES, MEASURING["theta"])
    assert (first["batch_size"], first["samples"], first["batch_size_predicted"]) == (FIRST, 2 * FIRST, expected)


@pytest.mark.parametrize("module", [Regressor, Manual])
def test_a_scaled_loss_changes_nothing_and_skipped_steps_do_not_count(tmp_path, module):
    reference = Reference(squared_errors)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1000)
    options = {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "callbacks": [reference]}
    run = fit(tmp_path, Project(module(), DataLoader(regression(80), batch_size=FIRST), options=options))
    skipped = int(math.log2(2.0**18 / scaler.get_scale()))
    assert 0 < skipped == run.trainer.global_step - len(run.growing.records)
    first = run.growing.records[0]
    assert first["variance_ratio"] == pytest.approx(reference.ratios[first["samples"] // FIRST - 1], rel=0.01)


class WithoutLog(Regressor):
    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 2])
def test_a_compiled_lightning_module_is_measured_by_its_backward_passes_alone(tmp_path, batches):
    growing = GrowingBatchSize(max_batch_size=8, estimator=NoiseEstimator(every_n_steps=1))
    trainer = make_trainer(tmp_path, callbacks=[growing], max_epochs=1, accumulate_grad_batches=batches)
    message = r"GrowingBatchSize sees no layers in a compiled module.*accumulate_grad_batches=2\)\. Nothing is measured"
    with pytest.warns(UserWarning, match=message) if batches == 1 else nullcontext():
        trainer.fit(torch.compile(WithoutLog(), backend="eager"), DataLoader(regression(32), batch_size=4))
    assert len(growing.records) == (0 if batches == 1 else 4)


class SequenceFirst(L.LightningModule):
    """Reads (positions, samples, 1)."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8), nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.head(self.lstm(batch[0].transpose(0, 1))[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_as_many_positions_as_samples_are_not_measured_where_positions_may_come_first(tmp_path):
    growing = GrowingBatchSize(max_batch_size=8, estimator=NoiseEstimator(every_n_steps=1))
    trainer = make_trainer(tmp_path, callbacks=[growing], max_epochs=1)
    message = r"which dimension of its tensor of shape \(8, 8, 8\).*Nothing is measured any more"
    with pytest.warns(UserWarning, match=message):
        trainer.fit(SequenceFirst(), DataLoader(TensorDataset(torch.randn(64, 8, 1)), 8))
    assert growing.records == []
