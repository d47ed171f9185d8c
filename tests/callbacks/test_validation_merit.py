from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelPruning, WeightAveraging
from lightning.pytorch.strategies import (
    FSDPStrategy,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from lightning_struct import SHF, OperatorMonitor, ValidationMeritStopping
from tests.mixins.helpers import Network, SHFNetwork, draw_loader, make_trainer, regression_data, validation_loader


class ScriptedNetwork(Network):
    """Its one weight and its buffer are the number of steps so far; validation values come from a script."""

    def __init__(self, values=()):
        super().__init__()
        self.layers = torch.nn.Linear(1, 1)
        self.register_buffer("steps", torch.zeros(()))
        self.values = iter(values)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return -self.layers.bias.sum()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 100.0 if self.trainer.sanity_checking else next(self.values))

    def configure_optimizers(self):
        torch.nn.init.zeros_(self.layers.bias)
        return torch.optim.SGD([self.layers.bias], lr=1.0)


def fit(tmp_path, module, callback, ckpt_path=None, callbacks=(), **options):
    """One step and one validation in each epoch."""
    defaults = {"max_epochs": 6, "limit_train_batches": 1, "limit_val_batches": 1}
    trainer = make_trainer(tmp_path, callbacks=[callback, *callbacks], **(defaults | options))
    trainer.fit(module, draw_loader(draws=1), validation_loader(8), ckpt_path=ckpt_path)
    return trainer


def fit_shf(tmp_path, callback=None, module=None, validation=None, **options):
    module = module or SHFNetwork()
    trainer = make_trainer(tmp_path, callbacks=[callback or ValidationMeritStopping()], **({"max_steps": 1} | options))
    trainer.fit(module, draw_loader(), validation_loader() if validation is None else validation)
    return trainer, module


@pytest.fixture
def given(monkeypatch):
    """What SHF was given as validation data, one entry for each time."""
    calls = []
    set_validation = SHF.set_validation

    def remember(self, batches):
        calls.append(batches)
        set_validation(self, batches)

    monkeypatch.setattr(SHF, "set_validation", remember)
    return calls


def inputs_of(batches):
    return torch.cat([inputs for inputs, _ in batches])


# Stopping


class Always(ValidationMeritStopping):
    def improves(self, value):
        return True


@pytest.mark.parametrize(
    ("values", "stopping", "steps"),
    [
        ([3, 2, 4, 3, 5, 1], ValidationMeritStopping(patience=3), 5),
        ([3, 4, 4, 2, 4, 4], ValidationMeritStopping(patience=3), 6),  # an improvement starts the count anew
        ([3, 3, 3, 3], ValidationMeritStopping(patience=2), 3),
        ([3, 2.8, 2.6, 1], ValidationMeritStopping(patience=2, min_delta=0.5), 3),
        ([1, 2, 1, 1, 3], ValidationMeritStopping(patience=2, mode="max"), 4),
        ([1, 2, 3, 4, 5, 6], Always(patience=1), 6),
    ],
)
def test_training_ends_after_so_many_validations_without_improvement(tmp_path, values, stopping, steps):
    assert fit(tmp_path, ScriptedNetwork(values), stopping, num_sanity_val_steps=1).global_step == steps


@pytest.mark.parametrize(
    ("stopping", "epochs", "restored"),
    [({"patience": 2}, 6, 2), ({}, 4, 2), ({"restore_best": False}, 4, 4)],
    ids=["patience ends", "training ends otherwise", "the last weights are kept"],
)
def test_the_best_weights_and_buffers_are_put_back(tmp_path, stopping, epochs, restored):
    module, callback = ScriptedNetwork([3, 1, 2, 2]), ValidationMeritStopping(**stopping)
    fit(tmp_path, module, callback, max_epochs=epochs)
    assert module.layers.bias.item() == module.steps.item() == restored
    assert (callback.best_value, callback.best_step, callback.wait) == (1, 2, 2)


@pytest.mark.parametrize("same", ["nothing", "trainer", "trainer and module"])
def test_another_trainer_or_module_begins_anew(tmp_path, same):
    """As with the next fold of a cross-validation, whose module must not get the weights of the one before."""
    callback, first = ValidationMeritStopping(patience=3), ScriptedNetwork([0.1, 0.5])
    trainer = fit(tmp_path, first, callback, max_epochs=1)
    module = first if same == "trainer and module" else ScriptedNetwork([0.5])
    if same == "nothing":
        trainer = make_trainer(tmp_path, callbacks=[callback], max_epochs=1, limit_val_batches=1)
    else:
        trainer.fit_loop.max_epochs = 2
    trainer.fit(module, draw_loader(draws=1), validation_loader(8))
    expected = (pytest.approx(0.1), 1) if module is first else (0.5, 0)
    assert ((callback.best_value, callback.wait), module.steps.item()) == (expected, 1)


class SeldomLogging(ScriptedNetwork):
    """Logs nothing where its script has None."""

    def validation_step(self, batch, batch_idx):
        value = 100.0 if self.trainer.sanity_checking else next(self.values)
        if value is not None:
            self.log("val_loss", value)


def test_validations_that_do_not_log_the_monitor_do_not_count(tmp_path):
    callback, module = ValidationMeritStopping(patience=2), SeldomLogging([3, None, 4, None, None, 2])
    fit(tmp_path, module, callback)
    assert (callback.best_value, callback.best_step, callback.wait) == (2, 6, 0)


# Weights


def test_weights_that_are_put_back_are_told_of_once(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, ScriptedNetwork([3, 1, 2]), ValidationMeritStopping(), max_epochs=3)
    told = [record.getMessage() for record in caplog.records if "put back" in record.getMessage()]
    assert told == ["The weights of step 2 are put back: val_loss = 1"]


class Pruned(ScriptedNetwork):
    """Its two weights are the number of steps so far, too."""

    def __init__(self, values=()):
        super().__init__(values)
        self.layers = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) - self.layers.weight.sum()

    def configure_optimizers(self):
        torch.nn.init.zeros_(self.layers.weight)
        return torch.optim.SGD(self.layers.parameters(), lr=1.0)


@pytest.mark.parametrize("is_first", [True, False])
def test_best_weights_are_put_back_beside_a_pruning_that_becomes_permanent(tmp_path, recwarn, is_first):
    module, callback = Pruned([3, 1, 2]), ValidationMeritStopping()
    weight = [(module.layers, "weight")]
    pruning = ModelPruning("l1_unstructured", weight, amount=0.5, use_lottery_ticket_hypothesis=False)
    first, second = (callback, pruning) if is_first else (pruning, callback)
    fit(tmp_path, module, first, callbacks=[second], max_epochs=3)
    assert set(module.layers.state_dict()) == {"weight", "bias"}
    assert sorted(module.layers.weight.flatten().tolist()) == [0, 2]
    assert not [warning for warning in recwarn if "ValidationMeritStopping" in str(warning.message)]


def test_a_fit_that_never_validates_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="compared nothing, as the fit has ended before a validation .* 'val_loss'"):
        fit(tmp_path, ScriptedNetwork(), ValidationMeritStopping(), max_epochs=2, check_val_every_n_epoch=3)


def test_a_module_that_has_changed_since_gets_what_fits_with_a_warning(tmp_path):
    class Growing(L.Callback):
        def on_train_end(self, trainer, pl_module):
            pl_module.more = torch.nn.Linear(1, 1)

    module = ScriptedNetwork([3, 1, 2])
    with pytest.warns(UserWarning, match=r"what fits of the best weights \(step 2\)"):
        fit(tmp_path, module, ValidationMeritStopping(), callbacks=[Growing()], max_epochs=3)
    assert module.layers.bias.item() == 2


def test_checkpoints_hold_their_own_weights_and_what_a_resumed_run_needs(tmp_path):
    def saved(name):
        return torch.load(tmp_path / name)["state_dict"]["layers.bias"].item()

    checkpoints = [
        ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1),
        ModelCheckpoint(tmp_path, every_n_epochs=100, save_last=True),  # saves nothing before the end
    ]
    options = {"callbacks": checkpoints, "max_epochs": 3, "enable_checkpointing": True}
    trainer = fit(tmp_path, ScriptedNetwork([3, 1, 2]), ValidationMeritStopping(), **options)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    names = [f"step={n}.ckpt" for n in (1, 2, 3)]
    assert [saved(name) for name in (*names, "last.ckpt", "after.ckpt")] == [1, 2, 3, 2, 2]
    for epochs, steps in ((9, 5), (3, 3)):  # patience goes on; nothing is left to train
        module, stopping = ScriptedNetwork([2] * 9), ValidationMeritStopping(patience=3)
        resumed = fit(tmp_path, module, stopping, tmp_path / "step=3.ckpt", max_epochs=epochs)
        assert (resumed.global_step, module.layers.bias.item()) == (steps, 2)


class TwoMetrics(ScriptedNetwork):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_error", float(-self.global_step))


@pytest.mark.parametrize(("monitors", "step"), [(("val_loss", "val_error"), 3), (("val_error", "val_loss"), 2)])
def test_of_two_the_later_one_puts_its_best_weights_back(tmp_path, monitors, step):
    first, second = (ValidationMeritStopping(monitor, patience=9) for monitor in monitors)
    module = TwoMetrics([3, 1, 2])
    fit(tmp_path, module, first, callbacks=[second], max_epochs=3)
    assert module.layers.bias.item() == step == second.best_step


@pytest.mark.parametrize("step", [2, 4])
def test_a_validation_due_at_a_checkpoint_is_made_up_for(tmp_path, step):
    def two_validations_in_an_epoch(values, ckpt_path=None):
        module, stopping = ScriptedNetwork(values), ValidationMeritStopping()
        checkpoint = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = make_trainer(
            tmp_path,
            callbacks=[stopping, checkpoint],
            val_check_interval=2,
            enable_checkpointing=True,
            limit_val_batches=1,
        )
        trainer.fit(module, draw_loader(draws=4), validation_loader(8), ckpt_path=ckpt_path)
        return stopping

    values = [4, 2, 3, 1]
    whole = two_validations_in_an_epoch(values)
    resumed = two_validations_in_an_epoch(values[step // 2 - 1 :], tmp_path / f"saved/step={step}.ckpt")
    assert resumed.state_dict()["validation"] == whole.state_dict()["validation"]
    assert (resumed.best_value, resumed.best_step, resumed.wait) == (whole.best_value, whole.best_step, whole.wait)


# In any project


class Stream(IterableDataset):
    def __iter__(self):
        yield from regression_data(30, seed=1)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"val_check_interval": 2}, 8),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, 12),
        ({"check_val_every_n_epoch": 2}, 32),
        ({"accumulate_grad_batches": 2}, 8),
        ({"min_epochs": 5}, 20),
    ],
    ids=str,
)
def test_validations_are_counted_whenever_they_are(tmp_path, options, steps):
    module = ScriptedNetwork([3, 2, 4, 4, 4, 4])
    callback = ValidationMeritStopping(patience=2)
    trainer = make_trainer(tmp_path, callbacks=[callback], max_epochs=20, limit_val_batches=1, **options)
    trainer.fit(module, draw_loader(draws=4), validation_loader(8))
    assert (trainer.global_step, module.layers.bias.item()) == (steps, callback.best_step)


@pytest.mark.parametrize(("number", "best"), [(0, 2), (1, 3)])
def test_one_of_several_loaders_can_be_monitored(tmp_path, number, best):
    class Several(ScriptedNetwork):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    module, callback = Several([3, 9, 1, 8, 2, 7]), ValidationMeritStopping(f"val_loss/dataloader_idx_{number}")
    trainer = make_trainer(tmp_path, callbacks=[callback], max_epochs=3, limit_val_batches=1)
    trainer.fit(module, draw_loader(draws=1), [validation_loader(8), validation_loader(8)])
    assert module.layers.bias.item() == best


class Manual(ScriptedNetwork):
    """Two optimizers by hand, both stepped in each batch."""

    automatic_optimization = False

    def __init__(self, values, raw):
        super().__init__(values)
        self.raw = raw

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers(use_pl_optimizer=not self.raw):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        first = super().configure_optimizers()
        return [first, torch.optim.SGD([self.layers.weight], lr=1.0)]


@pytest.mark.parametrize("raw", [False, True], ids=["counted steps", "uncounted steps"])
def test_several_optimizers_can_be_stepped_by_hand(tmp_path, raw):
    module = Manual([3, 1, 2, 2], raw)
    trainer = fit(tmp_path, module, ValidationMeritStopping(patience=2))
    assert (trainer.current_epoch, module.layers.bias.item()) == (4, 2)


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_the_order_of_the_other_callbacks_does_not_matter(tmp_path, first):
    stopping = ValidationMeritStopping(patience=5)
    others = [
        EarlyStopping("val_loss", patience=2),
        ModelCheckpoint(tmp_path, filename="{step}", monitor="val_loss", save_top_k=-1),
    ]
    module = ScriptedNetwork([3, 1, 2, 2])
    callbacks = [stopping, *others] if first else [*others, stopping]
    trainer = make_trainer(tmp_path, callbacks=callbacks, max_epochs=9, limit_val_batches=1, enable_checkpointing=True)
    trainer.fit(module, draw_loader(draws=1), validation_loader(8))
    saved = [torch.load(tmp_path / f"step={n}.ckpt")["callbacks"][stopping.state_key]["wait"] for n in (1, 2, 3, 4)]
    assert (module.layers.bias.item(), trainer.global_step, saved) == (2, 4, [0, 0, 1, 2])


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_averaged_weights_are_kept_where_they_were_validated(tmp_path, first):
    stopping, averaging = ValidationMeritStopping(), WeightAveraging()
    module = ScriptedNetwork([3, 2, 1, 4])
    callbacks = [stopping, averaging] if first else [averaging, stopping]
    trainer = make_trainer(tmp_path, callbacks=callbacks, max_epochs=4, limit_val_batches=1)
    trainer.fit(module, draw_loader(draws=1), validation_loader(8))
    assert module.layers.bias.item() == pytest.approx((1 + 2 + 3) / 3)


def test_a_module_may_leave_weights_out_of_its_state_and_have_some_of_its_own(tmp_path):
    class Partial(ScriptedNetwork):
        strict_loading = False

        def state_dict(self, *args, **kwargs):
            return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "weight" not in name}

        def get_extra_state(self):
            return {"steps": [int(self.steps)]}

        def set_extra_state(self, state):
            self.extra = state

    module = Partial([3, 1, 2])
    fit(tmp_path, module, ValidationMeritStopping(), max_epochs=3)
    assert module.layers.bias.item() == 2 and module.extra == {"steps": [2]}


def test_a_validation_outside_fit_does_not_count(tmp_path):
    callback = ValidationMeritStopping()
    trainer = fit(tmp_path, ScriptedNetwork([3, 2]), callback, max_epochs=2)
    trainer.validate(ScriptedNetwork([1]), validation_loader(8), verbose=False)
    assert (callback.best_value, callback.best_step) == (2, 2)


# The merit for SHF


def test_the_merit_is_the_loss_on_all_validation_data(tmp_path):
    _, module = fit_shf(tmp_path, ValidationMeritStopping(restore_best=False))
    inputs, targets = regression_data(30, seed=1).tensors
    expected = 0.5 * (module(inputs) - targets).square().sum(1).mean()
    assert module.reports[0].merit == pytest.approx(expected.item(), rel=1e-6)


class WithoutLength(Sampler):
    """Yields the first nine samples, and does not say how many there are."""

    def __iter__(self):
        return iter(range(9))


class OddBatches(BatchSampler):
    pass


def odd_batches():
    data = regression_data(30, seed=1)
    return DataLoader(data, batch_sampler=OddBatches(SequentialSampler(data), 8, drop_last=False))


def whole_batches():
    data = regression_data(30, seed=1)
    return DataLoader(data, sampler=BatchSampler(SequentialSampler(data), 8, drop_last=False), batch_size=None)


def stream():
    return DataLoader(Stream(), batch_size=8)


def loader_of(**options):
    return lambda: DataLoader(regression_data(30, seed=1), **({"batch_size": 8} | options))


@pytest.mark.parametrize(
    ("make", "options", "read"),
    [
        (validation_loader, {"limit_val_batches": 2}, range(16)),
        (validation_loader, {"check_val_every_n_epoch": 3, "num_sanity_val_steps": 0}, range(30)),
        (loader_of(sampler=[3, 1, 2]), {}, [3, 1, 2]),
        (lambda: DataLoader(regression_data(30, seed=1), batch_sampler=[[3, 1], [2, 0]]), {}, [3, 1, 2, 0]),
        (loader_of(collate_fn=lambda samples: default_collate(samples[:2])), {}, [0, 1, 8, 9, 16, 17, 24, 25]),
        (loader_of(batch_size=4, sampler=WithoutLength()), {"limit_val_batches": 2}, range(8)),
        (whole_batches, {}, range(30)),
        (odd_batches, {}, range(30)),
        (stream, {}, range(30)),
    ],
)
def test_the_validation_samples_of_any_loader_are_read(tmp_path, given, make, options, read):
    fit_shf(tmp_path, validation=make(), **options)
    assert torch.equal(inputs_of(given[0]), regression_data(30, seed=1).tensors[0][list(read)])


def test_so_many_samples_are_chosen_always_the_same(tmp_path, given):
    for _ in range(2):
        fit_shf(tmp_path, ValidationMeritStopping(merit_samples=11))
    assert len(inputs_of(given[0]).unique(dim=0)) == 11
    assert torch.equal(inputs_of(given[0]), inputs_of(given[2]))


@pytest.mark.parametrize("make", [odd_batches, stream, whole_batches])
def test_no_samples_can_be_chosen_of_such_loaders(tmp_path, make):
    with pytest.raises(MisconfigurationException, match="5 validation samples cannot be chosen from a"):
        fit_shf(tmp_path, ValidationMeritStopping(merit_samples=5), validation=make())


def test_transfer_hooks_know_the_validation_and_its_loader(tmp_path, given):
    class Augmenting(SHFNetwork):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * (0 if self.trainer.training else 1 + dataloader_idx), batch[1]

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val_loss", 1.0)

    callback = ValidationMeritStopping(monitor="val_loss/dataloader_idx_0")
    fit_shf(tmp_path, callback, Augmenting(), [validation_loader(9), validation_loader(5)])
    first, second = (regression_data(samples, seed=1).tensors[0] for samples in (9, 5))
    assert torch.equal(inputs_of(given[0]), torch.cat([first, 2 * second]))


def test_inputs_are_in_the_precision_of_the_trainer(tmp_path, given):
    fit_shf(tmp_path, precision="64-true")
    assert inputs_of(given[0]).dtype == torch.float64


def test_reading_leaves_the_random_state_alone(tmp_path):
    class State(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.state = torch.random.get_rng_state()

    states = []
    for callbacks in ([], [ValidationMeritStopping(merit_samples=5)]):
        state, module = State(), SHFNetwork()
        torch.manual_seed(7)
        trainer = make_trainer(tmp_path, callbacks=[*callbacks, state], max_steps=1)
        trainer.fit(module, draw_loader(), validation_loader())
        states.append(state.state)
    assert torch.equal(*states)


def test_shf_does_without_the_merit_after_fit(tmp_path):
    trainer, _ = fit_shf(tmp_path)
    inputs, targets = regression_data().tensors
    assert trainer.optimizers[0].step(inputs=inputs, targets=targets).merit is None


# Faults


@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 0}], ids=["no loader", "limit of zero"])
def test_no_validation_is_refused(tmp_path, options):
    trainer = make_trainer(tmp_path, callbacks=[ValidationMeritStopping()], **options)
    with pytest.raises(
        MisconfigurationException, match="compares 'val_loss' after each validation, but there is none: give"
    ):
        trainer.fit(SHFNetwork(), draw_loader(), validation_loader() if options else None)


def test_a_trainer_that_keeps_nothing_logged_is_refused(tmp_path):
    trainer = L.Trainer(barebones=True, accelerator="cpu", max_epochs=1, callbacks=[ValidationMeritStopping()])
    with pytest.raises(
        MisconfigurationException, match="barebones=True. keeps nothing that is logged: leave barebones"
    ):
        trainer.fit(ScriptedNetwork([1]), draw_loader(), validation_loader())


@pytest.mark.parametrize("module", [SHFNetwork, lambda: ScriptedNetwork([1])])
def test_an_empty_validation_set_is_refused(module, tmp_path):
    with pytest.raises(MisconfigurationException, match="ValidationMeritStopping: the validation data has no samples"):
        fit_shf(tmp_path, module=module(), validation=DataLoader(Subset(regression_data(), []), batch_size=4))


def test_a_module_that_does_not_read_batches_is_refused_by_name(tmp_path):
    class Manual(Network):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().step(inputs=batch[0], targets=batch[1])

        def configure_optimizers(self):
            return SHF(self, "mse", damping=1.0)

    with pytest.raises(MisconfigurationException, match="Manual has no method inputs_and_targets.*: define"):
        fit_shf(tmp_path, module=Manual())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_ends_training_with_the_best_weights(tmp_path, value):
    module = ScriptedNetwork([3, 1, value])
    with pytest.warns(UserWarning, match=f"monitors 'val_loss', which is {value} after step 3: .* 1 at step 2"):
        fit(tmp_path, module, ValidationMeritStopping())
    assert module.layers.bias.item() == 2
    with pytest.raises(MisconfigurationException, match=f"monitors 'val_loss', which is {value} after step 1"):
        fit(tmp_path, ScriptedNetwork([value]), ValidationMeritStopping())


def test_a_monitor_that_is_not_logged_is_named(tmp_path):
    message = "monitors 'val_error', which is not logged; logged are: val_loss"
    with pytest.raises(MisconfigurationException, match=message):
        fit(tmp_path, ScriptedNetwork([1]), ValidationMeritStopping("val_error"))


@pytest.mark.parametrize("callback", [ValidationMeritStopping, OperatorMonitor])
def test_strategies_that_shard_the_weights_are_refused(callback):
    trainer = SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy))
    with pytest.raises(MisconfigurationException, match=f"{callback.__name__} needs all weights.* FSDPStrategy"):
        callback().on_fit_start(trainer, Network())


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("monitor", "", "the name of a metric"),
        ("patience", 0, "at least 1"),
        ("min_delta", -1.0, "a finite number >= 0"),
        ("merit_samples", 0, "at least 1"),
    ],
)
def test_wrong_arguments_are_named(name, value, takes):
    with pytest.raises(MisconfigurationException, match=f"{name} must be {takes}, but is {value!r}"):
        ValidationMeritStopping(**{name: value})
