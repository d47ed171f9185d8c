"""The learning rate and the schedules of batches that grow."""

import math
from itertools import accumulate

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from lightning_struct.callbacks.growing_batch_size.learning_rate import LearningRateScale, learning_rate_factor
from lightning_struct.mixins import GradientStatistics
from tests.callbacks.growing_batch_size.projects import SizedStream, Stream
from tests.callbacks.growing_batch_size.test_growth import Growing
from tests.mixins.helpers import SHFNetwork, draw_loader, make_trainer

RATE = 0.1

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


class Slope(L.LightningModule):
    """Its weight has gradient -1: what a step adds to it is the rate of the step. The noise scale is 8."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.sizes, self.weights, self.seen = [], [0.0], []

    @property
    def rates(self):
        return [after - before for before, after in zip(self.weights, self.weights[1:], strict=False)]

    def configured(self):
        return self.trainer.optimizers[0].param_groups[0]["lr"]

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch))
        self.seen.append(self.configured())
        return 0 * batch.double().mean() - self.weight

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.configured())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.configured())
        self.weights.append(self.weight.item())

    def gradient_statistics(self):
        return GradientStatistics(self.sizes[-1], 8.0, 1 + 8 / self.sizes[-1], None) if self.sizes else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


class ManualSlope(Slope):
    """Steps two optimizers by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for optimizer, term in zip(self.optimizers(), (loss, -self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(term)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=RATE) for weight in (self.weight, self.other)]


def fit(tmp_path, sizes=(), module=None, data=None, ckpt_path=None, callbacks=(), growing=None, **options):
    module = module or Slope()
    of_growth = [] if sizes is None else [Growing(sizes, **(growing or {}))]
    trainer = make_trainer(tmp_path, callbacks=[*of_growth, *callbacks], **({"max_epochs": 1} | options))
    trainer.fit(module, DataLoader(range(40), batch_size=4) if data is None else data, ckpt_path=ckpt_path)
    return module


# The factor


@pytest.mark.parametrize(
    ("rule", "growth", "noise", "factor"),
    [
        ("sqrt", 9, 1.0, 3),
        ("linear", 9, None, 9),
        ("linear", 9, math.inf, 9),
        ("linear", 9, 4.0, 4),
        ("linear", 9, 0.5, 1),
        ("linear", 0.5, 0.1, 0.5),
    ],
)
def test_factor_of_the_rate(rule, growth, noise, factor):
    assert learning_rate_factor(rule, growth, noise) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize(
    ("batches", "factors"),
    [
        ([(8, 4), (8, 4), (8, 7), (8, 8), (8, 2)], [1, 1, 1.75, 2, 2]),  # workers were asked for smaller ones
        ([(8, 8), (16, 3)], [2, 2]),  # the last batch of an epoch
        ([(8, 8), (6, 3)], [2, 1.5]),
        ([(8.4, 8)], [2.1]),  # rounded to whole samples
    ],
)
def test_the_rate_follows_the_size_that_is_reached(batches, factors):
    scale, found = LearningRateScale("linear"), []
    scale.end_step(4)
    for decided, samples in batches:
        scale.begin_batch(decided, samples)
        found.append(scale.factor)
    assert found == pytest.approx(factors)


# The steps of training


RULES = {"sqrt": [1, math.sqrt(2), 2, 2], "linear": [1, 2, 2, 2]}


@pytest.mark.parametrize("rule", RULES)
def test_a_step_has_the_rate_of_its_batch(tmp_path, rule):
    module = fit(tmp_path, [8, 16], data=DataLoader(range(38), batch_size=4), growing={"scale_lr": rule})
    assert module.sizes == [4, 8, 16, 10]
    assert module.rates == pytest.approx([RATE * factor for factor in RULES[rule]])


def test_accumulated_batches_have_the_rate_of_their_sum(tmp_path):
    data = DataLoader(range(32), batch_size=4)
    module = fit(tmp_path, [8, 16], data=data, growing={"scale_lr": "sqrt", "mode": "accumulate"})
    steps = [rate for rate in module.rates if rate]
    assert steps == pytest.approx([RATE, RATE, math.sqrt(2) * RATE, 2 * RATE])  # of 4, 4, 8 and 16


def test_all_optimizers_have_the_rate(tmp_path):
    module = fit(tmp_path, [16], ManualSlope(), growing={"scale_lr": "sqrt"})
    assert module.other.item() == module.weight.item() == pytest.approx(RATE * (1 + 2 * 3))


def test_the_rate_is_scaled_beside_a_scaled_loss(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    module = fit(tmp_path, [16], growing={"scale_lr": "sqrt"}, plugins=[precision])
    assert module.rates == pytest.approx([RATE, 2 * RATE, 2 * RATE, 2 * RATE])


def test_all_but_the_step_see_the_configured_rate(tmp_path):
    logger = CSVLogger(tmp_path)
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = fit(
        tmp_path,
        [8, 16],
        growing={"scale_lr": "sqrt"},
        callbacks=[LearningRateMonitor(), checkpoint],
        enable_checkpointing=True,
        logger=logger,
        log_every_n_steps=1,
    )
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"][0]["lr"]
    monitored = {row["lr-SGD"] for row in logger.experiment.metrics if "lr-SGD" in row}
    assert {*module.seen, saved} | monitored == {RATE}


def test_after_training_the_optimizer_is_as_it_was(tmp_path):
    module = fit(tmp_path, [16], growing={"scale_lr": "sqrt"})
    before = module.weight.item()
    module.weight.grad = -torch.ones((), dtype=torch.float64)
    module.trainer.optimizers[0].step()
    assert module.weight.item() - before == pytest.approx(RATE)


# Optimizers of all kinds


def doubled(*optimizers):
    """A scale by which the rates of these are doubled."""
    scale = LearningRateScale("linear")
    scale.attach(lambda: optimizers)
    scale.end_step(4)
    scale.begin_batch(8)
    return scale


def parameter():
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    weight.grad = -torch.ones_like(weight)
    return weight


def test_groups_keep_their_own_rates():
    weights = [parameter(), parameter()]
    optimizer = torch.optim.SGD([{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.3}], lr=RATE)
    doubled(optimizer)
    optimizer.step()
    assert [weight.item() for weight in weights] == [2 * RATE, 2 * 0.3]
    assert [group["lr"] for group in optimizer.param_groups] == [RATE, 0.3]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_the_half_life_of_squares_is_as_many_samples(kind):
    optimizer, seen = kind([parameter()], betas=(0.9, 0.99)), []
    doubled(optimizer)
    optimizer.register_step_pre_hook(lambda of, *_: seen.append(of.param_groups[0]["betas"]))  # after all optimizers'
    optimizer.step()
    assert seen == [(0.9, 0.99**2)] and optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_an_optimizer_that_takes_the_place_of_another_is_scaled_too(tmp_path):
    class Replacing(Slope):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=RATE)]

    module = fit(tmp_path, [16], Replacing(), growing={"scale_lr": "sqrt"})
    assert module.rates == pytest.approx([RATE] + [2 * RATE] * (len(module.rates) - 1)) and len(module.rates) == 4


def test_a_rate_that_is_a_tensor_shared_by_groups_is_changed_once_in_place_and_put_back():
    weights, rate = [parameter(), parameter()], torch.tensor(RATE, dtype=torch.float64)
    optimizer = torch.optim.SGD([{"params": [weight], "lr": rate} for weight in weights], lr=1.0)
    doubled(optimizer)
    optimizer.step()
    assert [weight.item() for weight in weights] == [2 * RATE, 2 * RATE]
    assert rate == RATE and all(group["lr"] is rate for group in optimizer.param_groups)


@pytest.mark.parametrize("positional", [True, False])
def test_a_closure_sees_the_configured_rate_each_time(positional):
    weight, seen = parameter(), []
    optimizer = torch.optim.LBFGS([weight], lr=RATE, max_iter=3)

    def closure():
        seen.append(optimizer.param_groups[0]["lr"])
        weight.grad = weight.detach() - 1
        return (weight.detach() - 1) ** 2 / 2

    doubled(optimizer)
    _ = optimizer.step(closure) if positional else optimizer.step(closure=closure)
    assert len(seen) > 1 and {*seen, optimizer.param_groups[0]["lr"]} == {RATE}


class Decaying(torch.optim.SGD):
    """Does something more at its rate, after the step of its base."""

    def step(self, closure=None):
        result = super().step(closure)
        self.after = self.param_groups[0]["lr"]
        return result


def test_the_step_of_a_subclass_is_at_one_rate():
    torch.optim.SGD([parameter()], lr=1.0)  # from now on the step of the base has hooks of its own
    weight = parameter()
    optimizer = Decaying([weight], lr=RATE)
    doubled(optimizer)
    optimizer.step()
    assert (weight.item(), optimizer.after, optimizer.param_groups[0]["lr"]) == (2 * RATE, 2 * RATE, RATE)


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        if closure is not None:
            closure()
        raise ValueError("NaN")


@pytest.mark.parametrize("put_back", [LearningRateScale.detach, lambda scale: scale.begin_batch(8)])
def test_after_a_step_that_failed_the_rate_is_put_back(put_back):
    optimizer = Failing([parameter()], lr=RATE)
    scale = doubled(optimizer)
    with pytest.raises(ValueError, match="NaN"):
        optimizer.step()
    put_back(scale)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert optimizer.param_groups[0]["lr"] == RATE


def test_an_optimizer_without_a_rate_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[GrowingBatchSize(scale_lr="sqrt")])
    with pytest.raises(MisconfigurationException, match="'sqrt'.* no rate to scale, as no group of SHF has an lr"):
        trainer.fit(SHFNetwork(), draw_loader())


# Schedules


def scheduled(make, module=Slope, **config):
    """A module with a scheduler that is stepped with the optimizer."""

    class Scheduled(module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
            self.planned = self.trainer.estimated_stepping_batches
            self.scheduler = make(optimizer)
            self.places = []
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step", **config}]

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.places.append(self.scheduler.last_epoch)

    return Scheduled()


SHAPES = {
    "linear": lambda time: 1 - time,
    "cosine": lambda time: (1 + math.cos(math.pi * time)) / 2,
    "step": lambda time: 0.5 ** int(4 * time),
    "warm-up": lambda time: 0.1 + 3.6 * time if time < 0.25 else 1.2 * (1.0 - time) + 0.1,
}


@pytest.mark.parametrize(
    ("shape", "interval"), [("linear", "step"), ("cosine", "epoch"), ("step", "step"), ("warm-up", "epoch")]
)
def test_when_its_schedule_has_halved_the_rate_the_batch_doubles_and_the_rate_has_fallen_by_the_root(
    tmp_path, shape, interval
):
    def falling(optimizer):
        length = module.planned if interval == "step" else epochs
        return LambdaLR(optimizer, lambda step: SHAPES[shape](step / length))

    module, epochs = scheduled(falling, interval=interval), 2 if interval == "step" else 8
    callback = GrowingBatchSize(schedule="auto")
    fit(tmp_path, None, module, DataLoader(range(320), 4), callbacks=[callback], max_epochs=epochs)
    steps = []
    for top, rate, *step in zip(
        accumulate(module.seen[::3], max), module.seen[::3], module.sizes, module.rates, strict=True
    ):
        size = 4 * 2 ** min(int(math.log2(top / rate) + 1e-9), 4)
        steps.append((size, rate * math.sqrt(size / 4), *step))
    reached = [step for step in steps if step[0] == step[2]]
    assert all(scaled == pytest.approx(rate) for _, scaled, _, rate in reached)
    assert len(steps) - len(reached) <= 2 * epochs  # the ends of epochs
    assert max(module.sizes) >= 16 and len(steps) <= (0.67 if shape == "cosine" else 0.85) * 80 * epochs


def test_a_schedule_that_is_not_there_cannot_be_followed(tmp_path):
    with pytest.warns(UserWarning, match="returns no lr_scheduler: the batch grows only if"):
        module = fit(tmp_path, None, callbacks=[GrowingBatchSize(schedule="auto")])
    assert module.sizes == [4] * 10


def constant(optimizer):
    return LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ([8, 16], [1, 3, 7, 10]),
        ([6], [1, 2, 4, 5, 7, 8, 10]),
        ([40], [1, 10]),
        ([2], [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]),
    ],
)
def test_a_schedule_is_where_it_would_be_after_the_samples(tmp_path, sizes, places):
    assert fit(tmp_path, sizes, scheduled(constant)).places == places


CASES = {
    "last batch dropped": {"data": lambda: DataLoader(range(42), batch_size=4, drop_last=True)},
    "smaller last batch": {"data": lambda: DataLoader(range(42), batch_size=4)},
    "accumulated": {"accumulate_grad_batches": 3, "frequency": 2},
    "accumulated, with a rest": {"accumulate_grad_batches": 4, "frequency": 5},
    "half of the batches": {"limit_train_batches": 0.5},
    "growth by accumulation": {"growing": {"mode": "accumulate"}},
    "stream": {"data": lambda: DataLoader(Stream(range(42)), batch_size=4)},
    "steps and epochs": {"max_steps": 15},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_ends_where_it_does_without_the_callback(tmp_path, case):
    def end(sizes):
        options = dict(CASES[case])
        data, frequency = options.pop("data", lambda: None)(), options.pop("frequency", 1)
        module = fit(tmp_path, sizes, scheduled(constant, frequency=frequency), data, max_epochs=2, **options)
        return module.scheduler.last_epoch, len(module.rates)

    accumulated = CASES[case].get("accumulate_grad_batches", 1)
    (planned, most), (reached, fewer) = end(None), end([accumulated * size for size in (4, 8, 8, 13)])
    assert reached == planned and (fewer < most or case == "growth by accumulation")


class Log(Slope):
    """Remembers each batch with the place in the epoch, and when it is validated."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append((batch.tolist(), self.trainer.is_last_batch, self.trainer.num_training_batches))
        return loss

    def val_dataloader(self):
        return [0]

    def validation_step(self, batch, batch_idx):
        self.seen.append("validation")


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (lambda: DataLoader(Stream(range(22)), batch_size=4, num_workers=3), {}),
        (lambda: DataLoader(SizedStream(range(22)), batch_size=4, num_workers=3), {}),
        (lambda: DataLoader(range(8), batch_sampler=[[0], [1, 2], [3, 4, 5], [6, 7]]), {}),
        (lambda: DataLoader(range(42), batch_size=4, drop_last=True), {"val_check_interval": 2}),
    ],
)
def test_nothing_differs_while_the_batch_stays(tmp_path, data, options):
    def log(sizes):
        growing, module = {"mode": "batch"}, scheduled(constant, Log)
        fit(tmp_path, sizes, module, data(), max_epochs=2, growing=growing, num_sanity_val_steps=0, **options)
        return module.seen, module.places

    assert log([]) == log(None)


def test_a_limit_of_batches_is_one_of_samples_and_ends_epochs_of_streams(tmp_path):
    module, data = scheduled(constant, Log), DataLoader(Stream(range(60)), batch_size=4)
    fit(tmp_path, [8, 16], module, data, max_epochs=2, limit_train_batches=10, num_sanity_val_steps=0)
    assert module.sizes == [4, 8, 16, 12, 16, 16, 8] and module.places[-1] == 20
    assert module.seen.count("validation") == 2


@pytest.mark.parametrize(("limits", "frequency"), [({}, 2), ({"max_steps": 14}, 1)])
def test_a_schedule_follows_an_accumulation_that_is_scheduled(tmp_path, limits, frequency):
    def places(sizes):
        callbacks = [GradientAccumulationScheduler({1: 2, 2: 4})]
        module = scheduled(constant, frequency=frequency)
        return fit(tmp_path, sizes, module, max_epochs=4, callbacks=callbacks, **limits).places

    assert places([]) == places(None)
    assert limits or places([8])[-1] == places(None)[-1]


def test_fractions_of_a_batch_add_up_to_whole_ones(tmp_path):
    module = fit(tmp_path, [1], scheduled(constant), DataLoader(range(20), batch_size=10), max_epochs=2)
    assert len(module.places) == 11 + 20
    assert module.places[11:] == 9 * [2] + 10 * [3] + [4]  # ten times 0.1 is less than 1


def test_a_number_of_steps_is_left_alone(tmp_path):
    module = fit(tmp_path, [8, 16], scheduled(constant), max_steps=6, max_epochs=5)
    assert module.places == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("max_steps", "end"), [(15, 15), (25, 20)])
def test_of_steps_and_epochs_a_schedule_goes_by_what_is_nearer_to_its_end(tmp_path, max_steps, end):
    module = fit(tmp_path, [4, 1], scheduled(constant), max_steps=max_steps, max_epochs=2)
    assert len(module.places) == max_steps and module.places[-1] == end == module.planned
    module = fit(tmp_path, [4, 8, 16], scheduled(constant), max_steps=max_steps, max_epochs=2)
    assert len(module.places) < end and module.places[-1] == end


def test_a_reduction_on_a_plateau_is_left_alone(tmp_path):
    class Plateau(Slope):
        def training_step(self, batch, batch_idx):
            self.log("train_loss", 1.0)
            return super().training_step(batch, batch_idx)

    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, patience=100)

    module = fit(tmp_path, [20, 16], scheduled(plateau, Plateau, monitor="train_loss"))
    assert module.scheduler.last_epoch == len(module.sizes) == 3


def test_a_scheduler_of_epochs_beside_one_of_steps_is_left_alone(tmp_path):
    class Both(Slope):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.of_steps, self.of_epochs = constant(optimizer), constant(optimizer)
            return [optimizer], [{"scheduler": self.of_steps, "interval": "step"}, self.of_epochs]

    module = fit(tmp_path, [8], Both(), max_epochs=2)
    assert (module.of_steps.last_epoch, module.of_epochs.last_epoch) == (20, 2)


def test_lightning_steps_the_scheduler_again_after_training(tmp_path):
    module = fit(tmp_path, [8], scheduled(constant, frequency=2))
    assert module.trainer.lr_scheduler_configs[0].frequency == 2


# Resuming

WAYS = {
    "batch": {},
    "accumulate": {"mode": "accumulate"},
    "auto": {"schedule": "auto"},
}


def run(directory, way, ckpt_path=None, **options):
    def cosine(optimizer):
        if way == "auto":
            return LambdaLR(optimizer, lambda step: 0.5 ** (step // 8))
        return LambdaLR(optimizer, lambda step: math.cos(step / module.planned))

    checkpoint = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    module = scheduled(cosine)
    return fit(
        directory,
        [4, 6, 6, 9, 16],
        module,
        DataLoader(range(42), batch_size=4),
        ckpt_path=ckpt_path,
        callbacks=[checkpoint],
        growing={"scale_lr": "linear", **WAYS[way]},
        max_epochs=2,
        enable_checkpointing=True,
        **options,
    )


@pytest.fixture(scope="module", params=WAYS)
def whole(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, run(directory, request.param)


@pytest.mark.parametrize("step", [2, 8])
def test_a_resumed_run_goes_on_at_the_same_rate(tmp_path, whole, step):
    way, directory, through = whole
    resumed = run(tmp_path, way, directory / f"step={step}.ckpt")
    assert resumed.weights[-1] == through.weights[-1]
    assert resumed.places == through.places[-len(resumed.places) :]
    assert resumed.planned == through.planned == 22  # with batches of the first size


def test_added_in_mid_epoch_the_callback_takes_over_the_schedulers_where_they_are(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(tmp_path, callbacks=[checkpoint], max_epochs=1, enable_checkpointing=True)
    trainer.fit(scheduled(constant), DataLoader(range(40), batch_size=4))
    with pytest.warns(UserWarning, match="after 4 batches of an epoch"):
        module = fit(tmp_path, [4, 8], scheduled(constant), ckpt_path=tmp_path / "step=4.ckpt")
    assert module.places == [5, 6, 8, 10]


def test_a_resumed_run_with_both_limits_goes_on_at_the_same_place(tmp_path):
    through = run(tmp_path, "batch", max_steps=18)
    resumed = run(tmp_path, "batch", tmp_path / "step=6.ckpt", max_steps=18)
    assert resumed.places == through.places[6:] and resumed.places[-1] == 18


def test_a_module_that_steps_schedulers_by_hand_is_warned_once(tmp_path):
    class ByHand(ManualSlope):
        gradient_statistics = None

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.lr_schedulers()[0].step()

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            self.schedulers = [constant(optimizer) for optimizer in optimizers]
            return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in self.schedulers]

    message = "steps LambdaLR itself, with interval='step': .* fewer optimizer steps"
    with pytest.warns(UserWarning, match=message) as warned:
        module = fit(tmp_path, [20, 16], ByHand(), growing={"theta": math.inf})
    assert sum("steps LambdaLR itself" in str(warning.message) for warning in warned) == 1
    assert [scheduler.last_epoch for scheduler in module.schedulers] == [len(module.sizes), 0]
