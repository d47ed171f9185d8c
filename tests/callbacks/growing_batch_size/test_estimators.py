"""The noise of the gradients, from pairs of steps, from the backward passes of a step, and from layers."""

import itertools
import math
import re

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import GrowingBatchSize, ValidationRule
from lightning_struct.callbacks.growing_batch_size.noise import statistics_of_parts
from tests.callbacks.growing_batch_size.projects import GAN, PROJECTS, Regressor, arguments, regression, seed
from tests.mixins.helpers import make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before `optimizer.step"),
]


@pytest.fixture(autouse=True)
def seeded():
    seed()


def fit(tmp_path, module, loader=None, *, validation=None, callbacks=(), ckpt_path=None, growing=None, **options):
    """The callback, after a fit in float64 that keeps the size of batches."""
    loader = DataLoader(regression(), batch_size=4) if loader is None else loader
    growing = GrowingBatchSize(**arguments(**({"max_batch_size": loader.batch_size, "window": 2} | (growing or {}))))
    defaults = {"max_epochs": 1, "precision": "64-true", "enable_checkpointing": bool(callbacks)}
    trainer = make_trainer(tmp_path, callbacks=[growing, *callbacks], **(defaults | options))
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return growing


def ratios(growing):
    return [record["variance_ratio"] for record in growing.records]


class Still(Regressor):
    """Its weights stay."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def gradients_of_batches(module, size=4):
    """(batches, parameters), by autograd."""
    module = module.double()
    losses = [module.loss(module(x.double()), y.double()) for x, y in DataLoader(regression(), batch_size=size)]
    return torch.stack([flat(torch.autograd.grad(loss, list(module.parameters()))) for loss in losses])


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


# --- what pairs and parts estimate
# -------------------------------------------------------------------------------------


def test_the_mean_over_all_batches_of_three_parts_is_that_of_the_samples():
    g = torch.randn(4, 3, dtype=torch.float64)
    of_parts = []
    for parts in itertools.product(g, repeat=3):
        parts = torch.stack(parts)
        of_parts.append(
            statistics_of_parts(parts.square().sum(1).mean().item(), parts.mean(0).square().sum().item(), 3, 3)
        )
    variance = sum(s.variance for s in of_parts) / len(of_parts)
    squared_norm = sum(s.gradient_squared_norm - s.variance / 3 for s in of_parts) / len(of_parts)
    assert variance == pytest.approx(g.var(0, correction=0).sum().item())
    assert squared_norm == pytest.approx(g.mean(0).square().sum().item())


def test_backward_passes_are_compared_with_their_mean(tmp_path):
    module = Still()
    expected = []
    for g in gradients_of_batches(module, size=2)[:18].split(3):
        whole = g.mean(0).square().sum().item()
        statistics = statistics_of_parts(g.square().sum(1).mean().item(), whole, 3, 6)
        expected.append(statistics.variance / (6 * whole))
    growing = fit(
        tmp_path,
        module,
        DataLoader(regression(), batch_size=2),
        growing={"estimator": "parts", "every_n_steps": 1, "max_batch_size": 6},
        accumulate_grad_batches=3,
        limit_train_batches=18,
    )
    assert ratios(growing) == pytest.approx(expected, rel=1e-9)


def test_a_scaled_loss_changes_no_estimate(tmp_path):
    growing = {"estimator": "parts", "every_n_steps": 1, "max_batch_size": 8}
    options = {"growing": growing, "accumulate_grad_batches": 2}
    expected = ratios(fit(tmp_path, Still(), **options))
    seed()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    scaled = ratios(fit(tmp_path, Still(), precision=None, plugins=[plugin], **options))
    assert scaler.get_scale() > 2.0**6 and scaled == pytest.approx(expected, rel=0.02)


class Words(L.LightningModule):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 4, sparse=sparse)
        self.head = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.embedding(batch[0]).mean(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_are_measured_as_dense_ones(tmp_path):
    words = TensorDataset(torch.randint(0, 50, (40, 3)), torch.randint(0, 2, (40,)))
    growing = {"estimator": "parts", "every_n_steps": 1, "max_batch_size": 8}
    sparse, dense = (
        ratios(fit(tmp_path, Words(kind), DataLoader(words, 4), growing=growing, accumulate_grad_batches=2))
        for kind in (True, False)
    )
    assert sparse == pytest.approx(dense, rel=1e-9) and len(dense) > 3


# --- which one, and how often
# ------------------------------------------------------------------------------------------


def said(caplog):
    return [message for message in caplog.messages if message.startswith("GrowingBatchSize ")]


@pytest.mark.parametrize("options, name", [({}, "layers"), ({"accumulate_grad_batches": 2}, "parts")])
def test_one_line_says_what_was_chosen(tmp_path, caplog, options, name):
    with caplog.at_level("INFO"):
        fit(tmp_path, Regressor(), growing={"max_batch_size": 8}, **options)
    (line,) = said(caplog)
    assert f"estimator='{name}' every" in line and "max_overhead=0.03" in line and "theta=1" in line
    assert "stalls" not in line  # nothing is watched


@pytest.mark.parametrize(
    "growing, words",
    [
        ({"schedule": "0:4"}, ["goes by schedule='0:4'"]),
        ({"mode": "measure"}, ["estimator='layers' every", "theta=1, and leaves the batch as it is"]),
        ({"scale_lr": "sqrt"}, ["theta=1, and grows after 300 steps at the earliest"]),
        ({"theta": math.inf}, ["measures nothing"]),
        ({"validation": ValidationRule("val_loss")}, ["theta=1", "growth=1.005 where 'val_loss' stalls"]),
    ],
)
def test_the_line_says_what_else_decides(tmp_path, caplog, growing, words):
    with caplog.at_level("INFO"):
        fit(tmp_path, Regressor(), validation=DataLoader(regression(), 4), growing=growing)
    (line,) = said(caplog)
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("growing", "lines"),
    [
        (
            {"schedule": "0:4 12:8", "max_batch_size": 8},
            ["4 -> 8 at step 3: schedule='0:4 12:8'", "4 -> 8, by schedule='0:4 12:8'"],
        ),
        ({"theta": 1e-3, "max_batch_size": 8}, [r"4 -> 8 at step 3: noise scale \d", r"4 -> 8; noise scale \d"]),
        ({"mode": "measure", "theta": 0.1}, [r"4 all along; noise scale \d"]),
        ({"mode": "measure"}, [r"4 all along; noise scale [\d.]+. The run was too short to test whether noise"]),
        (
            {"schedule": "0:4 12:99", "mode": "accumulate", "max_batch_size": 99},
            ["4 -> 40 at step 3: schedule", "4 -> 40, by schedule"],
        ),
    ],
)
def test_each_growth_and_the_end_are_one_line(tmp_path, caplog, growing, lines):
    with caplog.at_level("INFO"):
        fit(tmp_path, Regressor(), growing=growing | ({} if "schedule" in growing else {"every_n_steps": 1}))
    found = [message for message in caplog.messages if message.startswith("GrowingBatchSize: batch")]
    assert len(found) == len(lines)
    assert all(re.search(f"batch {line}", of) for line, of in zip(lines, found, strict=True))


@pytest.mark.parametrize("logged", [(), ("batch_size",)])
def test_names_that_are_not_to_be_logged_are_not(tmp_path, logged):
    callback = GrowingBatchSize(schedule="0:4", scale_lr="sqrt")
    callback.logged = logged
    trainer = make_trainer(tmp_path, callbacks=[callback], max_epochs=1)
    trainer.fit(Regressor(), DataLoader(regression(), 4))
    assert {"batch_size", "learning_rate_scale"} & set(trainer.callback_metrics) == set(logged)


@pytest.mark.parametrize("module", [Regressor, GAN])
def test_parts_are_refused_where_a_step_has_no_parts(tmp_path, module):
    with pytest.raises(MisconfigurationException, match="estimator='parts'.*estimator='layers'"):
        fit(tmp_path, module(), growing={"estimator": "parts"})


def measured_every(tmp_path, caplog, module, max_overhead=0.03, batches=2):
    growing = {"max_overhead": max_overhead, "max_batch_size": 16}
    with caplog.at_level("INFO"):
        fit(tmp_path, module, growing=growing, max_steps=1, accumulate_grad_batches=batches)
    return int(said(caplog)[-1].split("every ")[1].split()[0])


def test_the_overhead_the_passes_and_the_layers_say_how_often_is_measured(tmp_path, caplog):
    def every(*arguments, **options):
        return measured_every(tmp_path, caplog, *arguments, **options)

    def wide():
        return nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 2))

    assert abs(every(Still(wide()), 0.05) - 2 * every(Still(wide()), 0.1)) <= 1
    assert every(Still(wide()), batches=2) == 25 and every(Still(wide()), batches=4) == 42
    layers = nn.Linear(3, 3), nn.Conv1d(1, 1, 3, padding=1)
    networks = [nn.Sequential(nn.Unflatten(1, (1, 3)), layer, nn.Flatten(), nn.Linear(3, 2)) for layer in layers]
    of_linear, of_convolutional = (every(Still(network), batches=1) for network in networks)
    assert of_linear < of_convolutional


# --- what cannot be measured by layers
# ---------------------------------------------------------------------------------


class Windows(Regressor):
    """Draws windows of its own of each batch, as neuralforecast does."""

    def training_step(self, batch, batch_idx):
        drawn = torch.randint(0, len(batch[0]), (7,))
        return self.loss(self(batch[0][drawn]), batch[1][drawn])


def test_a_module_that_draws_its_own_samples_is_not_measured(tmp_path):
    with pytest.warns(UserWarning, match=r"no dimension is that of 4 samples.*Nothing is measured any more"):
        growing = fit(tmp_path, Windows(), growing={"estimator": "layers", "every_n_steps": 1})
    assert growing.records == []


class Decayed(Regressor):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) + 100 * self.network[0].weight.square().sum()


def test_a_small_part_of_the_gradient_does_not_decide(tmp_path):
    with pytest.warns(UserWarning, match="a small part, of the gradient of SGD.*Nothing is measured any more"):
        growing = fit(tmp_path, Decayed(), growing={"estimator": "layers", "every_n_steps": 1})
    assert growing.records == []


class Weighted(Regressor):
    """Learns the weight of its loss, which is outside of all layers."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.log_variance = torch.nn.Parameter(torch.tensor(-2.0))

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * (-self.log_variance).exp() + 100 * self.log_variance


def test_the_weight_of_a_loss_does_not_keep_layers_from_being_measured(tmp_path, recwarn):
    growing = fit(tmp_path, Weighted(), growing={"estimator": "layers", "every_n_steps": 1})
    assert growing.records and not [w for w in recwarn if "Nothing is measured" in str(w.message)]


def test_key_biases_are_not_warned_about(tmp_path, recwarn):
    module = PROJECTS["transformer"]()
    module.module.model.train()
    fit(tmp_path, module.module, module.loader, growing={"estimator": "layers", "every_n_steps": 1}, precision=32)
    assert not [w for w in recwarn if "leaves" in str(w.message)]
