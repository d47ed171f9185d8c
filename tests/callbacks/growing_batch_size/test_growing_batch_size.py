import math
import re
import warnings

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset

from lightning_struct import GrowingBatchSize, NoiseEstimator, ValidationMeritStopping, ValidationRule
from lightning_struct.callbacks.growing_batch_size import next_batch_size
from lightning_struct.data import DrawLoader, IndependentDraws
from lightning_struct.functional import required_batch_size
from lightning_struct.mixins import GradientStatistics
from tests.mixins.helpers import Network, SHFNetwork, draw_loader, make_trainer, regression_data, validation_loader

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class ScriptedNetwork(Network):
    """Reports gradient statistics of a script, and remembers the sizes of its batches."""

    def __init__(self, variances=(), squared_norm=1.0, validation_values=(), val_losses=()):
        super().__init__()
        self.variances, self.squared_norm, self.validation_values = variances, squared_norm, validation_values
        self.val_losses = iter(val_losses)
        self.sizes = []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        return self(batch[0]).square().mean()

    def gradient_statistics(self):
        if not self.sizes:
            return None
        step = len(self.sizes) - 1
        value = self.validation_values[step] if self.validation_values else None
        variance = self.variances[step] if self.variances else 0.0
        return GradientStatistics(self.sizes[-1], variance, self.squared_norm, value)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking and (loss := next(self.val_losses)) is not None:
            self.log("val_loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(tmp_path, module, callback, loader=None, validation=None, **options):
    trainer = make_trainer(tmp_path, callbacks=[callback], **({"max_epochs": 1, "num_sanity_val_steps": 0} | options))
    loader = draw_loader(batch_size=10, draws=12) if loader is None else loader
    trainer.fit(module, loader, validation)
    return trainer


# The callback


class Doubling(GrowingBatchSize):
    def decide(self, batch_size):
        return min(2 * batch_size, 40)


PREDICTED, MORE = required_batch_size(7.5, 1.0, 60, 0.5), required_batch_size(7.5, 1.0, 60, 0.3)
STALLS = {"validation_values": [1.0] * 12}


@pytest.mark.parametrize(
    ("script", "growing", "sizes"),
    [
        ({"variances": [7.5] * 12}, GrowingBatchSize(), [10] * 6 + [PREDICTED] * 6),
        ({"variances": [7.5] * 12}, GrowingBatchSize(theta=0.3), [10] * 6 + [MORE] * 6),
        ({"variances": [1.0] * 12, "squared_norm": 0.0}, GrowingBatchSize(), [10] * 6 + [60] * 6),
        ({"variances": [7.5] * 12}, GrowingBatchSize(validation=ValidationRule(window=2)), [10] * 3 + [PREDICTED] * 9),
        (
            STALLS | {"variances": [None] * 12},  # as under batch normalisation
            GrowingBatchSize(theta=math.inf, validation=ValidationRule(growth=1.5)),
            [10] * 6 + [15, 23, 34, 51, 60, 60],
        ),
        (
            STALLS,  # fractions of samples are kept: 10 * 1.02**3 is 10.6, and 10 * 1.02**8 11.7
            GrowingBatchSize(theta=math.inf, validation=ValidationRule(growth=1.02, window=1)),
            [10] * 4 + [11] * 5 + [12] * 3,
        ),
        (STALLS, GrowingBatchSize(validation=ValidationRule(growth=1.1)), [10] * 6 + [11, 12, 13, 15, 16, 18]),
        (STALLS, GrowingBatchSize(1000, validation=ValidationRule(growth=3.0)), [10] * 6 + [30] + [60] * 5),
        (
            STALLS,
            GrowingBatchSize(
                estimator=NoiseEstimator(every_n_steps=3), validation=ValidationRule(window=2, growth=1.1)
            ),
            [10] * 9 + [11, 11, 11],
        ),
        ({}, Doubling(), [10, 20] + [40] * 10),
        ({}, Doubling(max_batch_size=25), [10, 20] + [25] * 10),
    ],
)
def test_sizes_are_those_of_the_rule(tmp_path, script, growing, sizes):
    module = ScriptedNetwork(**script)
    fit(tmp_path, module, growing)
    assert module.sizes == sizes


def test_batches_without_a_step_are_no_checks(tmp_path):
    callback = GrowingBatchSize()
    fit(tmp_path, ScriptedNetwork(variances=[7.5] * 12), callback, accumulate_grad_batches=4)
    assert len(callback.records) == 3


@pytest.mark.parametrize("decided", [math.nan, 0, math.inf, None, "20"])
def test_a_rule_that_decides_on_no_size_is_named(tmp_path, decided):
    class Broken(GrowingBatchSize):
        def decide(self, batch_size):
            return decided

    message = rf"Broken.decide\(\) returned {decided} as the next batch size"
    with pytest.raises(MisconfigurationException, match=message):
        fit(tmp_path, ScriptedNetwork(), Broken(), draw_loader(10, draws=1))


def test_a_monitored_metric_is_checked_once_for_each_validation(tmp_path, caplog):
    module = ScriptedNetwork(val_losses=[1.0] * 10)
    callback = GrowingBatchSize(validation=ValidationRule("val_loss", window=2, growth=2.0))
    with caplog.at_level("INFO"):
        fit(tmp_path, module, callback, draw_loader(10, draws=3), validation_loader(8), max_epochs=5)
    assert module.sizes == [10] * 10 + [20, 20, 20] + [40, 40]
    assert "GrowingBatchSize: batch 10 -> 20 at step 10: the validation value stalls" in caplog.messages


def test_a_monitored_value_that_is_not_finite_is_left_out(tmp_path):
    module = ScriptedNetwork(val_losses=[1.0, 1.0, math.nan, 1.0, 1.0])
    callback = GrowingBatchSize(validation=ValidationRule("val_loss", window=1, growth=1.1))
    with pytest.warns(UserWarning, match="monitors 'val_loss', which is nan after step 3: .* is left out"):
        fit(tmp_path, module, callback, draw_loader(10, draws=1), validation_loader(8), max_epochs=5)
    assert callback.validation_values == [1.0, 1.0] and len(module.sizes) == 5


def test_a_validation_that_logs_nothing_is_none_for_the_validation_rule(tmp_path):
    callback = GrowingBatchSize(validation=ValidationRule("val_loss", window=2))
    module = ScriptedNetwork(val_losses=[3.0, None, 2.0, None])
    fit(tmp_path, module, callback, draw_loader(10, draws=4), validation=validation_loader(8), val_check_interval=1)
    assert callback.validation_values == [3.0, 2.0]


def test_a_first_monitored_value_that_is_not_finite_is_an_error(tmp_path):
    module, callback = ScriptedNetwork(val_losses=[math.inf]), GrowingBatchSize(validation=ValidationRule("val_loss"))
    with pytest.raises(MisconfigurationException, match="monitors 'val_loss', which is inf after step 1"):
        fit(tmp_path, module, callback, draw_loader(10, draws=1), validation_loader(8))


def test_a_monitor_without_validation_is_an_error(tmp_path):
    growing = GrowingBatchSize(validation=ValidationRule("val_loss"))
    with pytest.raises(MisconfigurationException, match="monitor='val_loss'.* there is none"):
        fit(tmp_path, ScriptedNetwork(), growing, draw_loader(10, draws=1))


def test_shf_grows_its_batches_as_algorithm_1_says(tmp_path):
    module = SHFNetwork()
    callbacks = [GrowingBatchSize(max_batch_size=40), ValidationMeritStopping()]
    make_trainer(tmp_path, callbacks=callbacks, max_epochs=3).fit(module, draw_loader(), validation_loader())
    reports = module.reports
    predictions = [required_batch_size(r.gradient_variance, r.gradient_norm**2, 60, 0.5) for r in reports]
    sizes = [12]
    for i in range(len(reports) - 1):
        merits = [r.merit for r in reports[: i + 1]]
        sizes.append(next_batch_size(sizes[-1], predictions[: i + 1], merits, max_batch_size=40))
    assert [r.batch_size for r in reports] == sizes and sizes[-1] == 40


def test_a_variance_that_is_missing_later_ends_no_training(tmp_path):
    module = ScriptedNetwork(variances=[7.5, 7.5, None, 7.5])
    with pytest.warns(
        UserWarning, match="reports no gradient variance for a batch of 10.* decided by the steps before"
    ):
        fit(tmp_path, module, GrowingBatchSize(), draw_loader(10, draws=4))
    assert len(module.sizes) == 4


def test_a_variance_that_is_missing_from_the_start_is_named(tmp_path):
    with pytest.raises(MisconfigurationException, match="reports no gradient variance for a batch of 10.* theta=inf"):
        fit(tmp_path, ScriptedNetwork(variances=[None]), GrowingBatchSize(), draw_loader(10, draws=1))


# What is logged, drawn and saved


def test_sizes_and_variance_are_logged_for_a_module_that_does_not(tmp_path):
    module = ScriptedNetwork(variances=[7.5])
    trainer = fit(tmp_path, module, GrowingBatchSize(), draw_loader(10, draws=1))
    predicted = required_batch_size(7.5, 1.0, 60, 0.5)
    logged = {name: value.item() for name, value in trainer.logged_metrics.items()}
    noise_scale = 7.5 / (1.0 - 7.5 / 10)
    assert logged == {
        "batch_size": 10,
        "batch_size_predicted": predicted,
        "gradient_variance": 7.5,
        "gradient_noise_scale": noise_scale,
    }


def test_records_tell_of_each_check(tmp_path):
    callback = GrowingBatchSize()
    fit(tmp_path, ScriptedNetwork([7.5, 5.0], validation_values=[2.0, 1.0]), callback, draw_loader(10, draws=2))
    assert callback.records[1] == {
        "samples": 20,
        "batch_size": 10,
        "batch_size_predicted": required_batch_size(5.0, 1.0, 60, 0.5),
        "variance_ratio": 0.5,
        "validation_value": 1.0,
    }


def test_records_of_a_long_run_are_thinned_out(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_struct.callbacks.growing_batch_size.callback.MOST_RECORDS", 8)
    callback = GrowingBatchSize()
    fit(tmp_path, ScriptedNetwork(), callback, draw_loader(10, draws=12))
    samples = [record["samples"] for record in callback.records]
    assert len(samples) <= 8 and samples == sorted(samples) and samples[-4:] == [90, 100, 110, 120]


# Faults


def test_batches_larger_than_the_limit_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"Batches of 10 .* GrowingBatchSize\(max_batch_size=8\)"):
        fit(tmp_path, ScriptedNetwork(), GrowingBatchSize(max_batch_size=8))


@pytest.mark.parametrize("theta, sizes", [(0.5, [1, 2, 2]), (None, [1, 1, 1])])
def test_a_batch_of_one_grows_to_two_when_batches_may_grow(tmp_path, theta, sizes):
    module = SHFNetwork()
    fit(tmp_path, module, GrowingBatchSize(max_batch_size=2, theta=theta), draw_loader(1, draws=3))
    assert [report.batch_size for report in module.reports] == sizes


def test_a_stream_without_a_bound_for_its_batches_is_warned_of(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from regression_data()

    with pytest.warns(UserWarning, match="this one has no length: set max_batch_size to the most that memory allows"):
        fit(tmp_path, SHFNetwork(), GrowingBatchSize(), DataLoader(Stream(), 8))


def test_a_monitor_that_is_not_logged_is_named(tmp_path):
    callback = GrowingBatchSize(validation=ValidationRule("val_error"))
    message = r"ValidationRule\(monitor=...\) monitors 'val_error', .* logged are: .*val_loss"
    with pytest.raises(MisconfigurationException, match=message):
        fit(tmp_path, ScriptedNetwork(val_losses=[1.0] * 9), callback, validation=validation_loader(8))


@pytest.mark.parametrize(
    ("of", "name", "values"),
    [
        (GrowingBatchSize, "theta", [0.0, math.nan, "1"]),
        (GrowingBatchSize, "max_batch_size", [0, "64", 64.5, True]),
        (GrowingBatchSize, "max_device_batch_size", [1.5]),
        (GrowingBatchSize, "max_overhead", ["3%", 0, 1.5]),
        (GrowingBatchSize, "scale_lr", ["cubic"]),
        (GrowingBatchSize, "mode", ["both"]),
        (GrowingBatchSize, "estimator", [["layers"], "ranks"]),
        (GrowingBatchSize, "validation", ["val_loss", {"monitor": "val_loss"}]),
        (ValidationRule, "monitor", [1, ""]),
        (ValidationRule, "threshold", ["x", math.nan, math.inf]),
        (ValidationRule, "growth", [0.9, math.inf]),
        (ValidationRule, "window", [0, 2.5, "5"]),
        (NoiseEstimator, "every_n_steps", [0, "5"]),
        (NoiseEstimator, "probes", [0, 2.5]),
    ],
)
def test_wrong_arguments_are_named_with_their_values(of, name, values):
    for value in values:
        with pytest.raises(MisconfigurationException, match=rf"^{name} must be .*, but is {re.escape(repr(value))}$"):
            of(**{name: value})


@pytest.mark.parametrize(
    ("growth", "options", "warned"), [(1.1, {}, True), (1.1, {"theta": 0.5}, True), (1.005, {}, False)]
)
def test_a_factor_without_a_value_that_could_stall_is_warned_of_once(tmp_path, growth, options, warned):
    growing = GrowingBatchSize(max_batch_size=40, validation=ValidationRule(growth=growth), **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(tmp_path, ScriptedNetwork(), growing)
    assert sum("there is none: name a logged metric by monitor" in str(w.message) for w in told) == warned


def test_samples_that_cannot_be_drawn_twice_limit_the_first_batch(tmp_path):
    data = regression_data(20)
    with pytest.raises(MisconfigurationException, match="from 1 to the 20 samples .* but is 21"):
        fit(tmp_path, SHFNetwork(), GrowingBatchSize(), DrawLoader(data, IndependentDraws(data, 21, 3)))
