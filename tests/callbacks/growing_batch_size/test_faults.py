"""What goes wrong in other people's projects: it is named where it happens, or the run goes on where it was."""

import os
import signal

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from lightning_struct import GradientStatistics, GrowingBatchSize, NoiseEstimator, ValidationRule
from lightning_struct.callbacks.growing_batch_size.estimators import samples_in
from lightning_struct.callbacks.growing_batch_size.estimators.layers import SampleGradients
from tests.callbacks.growing_batch_size.projects import MEASURING, Stream, arguments, regression
from tests.mixins.helpers import make_trainer, weights

EPOCHS = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:A batch of one has no gradient variance"),
    pytest.mark.filterwarnings("ignore:Total length of"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*dataloader_iter"),
]


class Regressor(L.LightningModule):
    """Notes the samples that it is trained on; ``at_step`` is called with the number of the step to be."""

    def __init__(self, at_step=lambda step: None):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.at_step, self.seen, self.sizes = at_step, [], []

    def loss(self, batch):
        return F.mse_loss(self.network(batch[0]), batch[1])

    def note(self, inputs):
        self.sizes.append(len(inputs))
        self.seen += inputs[:, 0].tolist()

    def training_step(self, batch, batch_idx):
        self.note(batch[0])
        factor = self.at_step(self.trainer.global_step)
        return self.loss(batch) * (1.0 if factor is None else factor)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Manual(Regressor):
    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TwoTasks(Regressor):
    """Each of two loaders has its own network."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        losses = []
        for network, part in zip((self.network, self.other), batch, strict=True):
            if part is not None:
                self.note(part[0])
                losses.append(F.mse_loss(network(part[0]), part[1]))
        return sum(losses)


def trainer_for(tmp_path, *callbacks, **options):
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults = {"num_sanity_val_steps": 0, "enable_checkpointing": checkpointing, "max_epochs": EPOCHS}
    return make_trainer(tmp_path, callbacks=list(callbacks), **(defaults | options))


def growing(**options):
    return GrowingBatchSize(**arguments(**(MEASURING | {"max_batch_size": 12, "probes": 8} | options)))


# --- gradients that are not numbers
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "value"), [(Regressor, float("nan")), (Manual, float("inf"))])
def test_a_gradient_that_is_no_number_is_named_with_its_batch_and_the_training_goes_on(tmp_path, module, value):
    poisoned, callback = module(lambda step: value if step >= 5 else None), growing()
    message = r"The gradient of batch 5 in epoch 0 is NaN or infinite.* Trainer\(detect_anomaly=True\)"
    with pytest.warns(UserWarning, match=message) as told:
        trainer_for(tmp_path, callback, max_epochs=2).fit(poisoned, DataLoader(regression(), batch_size=4))
    assert sum(poisoned.sizes) == 80 and len(callback.records) == 5
    assert sum("NaN or infinite" in str(warning.message) for warning in told) == 1


class DropsBefore(Regressor):
    """Drops a step whose gradients are NaN, by a hook that comes after those of callbacks."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0.0)


@pytest.mark.filterwarnings("ignore:The gradient of batch .* is NaN or infinite")
def test_a_project_that_mends_such_gradients_trains_and_grows(tmp_path):
    mending, callback = DropsBefore(lambda step: float("nan") if step == 5 else None), growing(estimator="parts")
    trainer_for(tmp_path, callback, accumulate_grad_batches=2).fit(mending, DataLoader(regression(), batch_size=4))
    assert weights(mending).isfinite().all() and callback.state_dict()["batch_size"] == 12


def test_statistics_of_a_module_that_are_no_numbers_are_left_out(tmp_path):
    class Own(Regressor):
        def gradient_statistics(self):
            variance = float("nan") if self.trainer.global_step == 3 else 1.0
            return GradientStatistics(4, variance, 1.0, None)

    callback = growing()
    with pytest.warns(UserWarning, match="The gradient of batch 2 in epoch 0 is NaN or infinite"):
        trainer_for(tmp_path, callback, max_epochs=1).fit(Own(), DataLoader(regression(), batch_size=4))
    assert callback.records and all(record["variance_ratio"] == 0.25 for record in callback.records)


# --- layers that cannot be measured
# ------------------------------------------------------------------------------------


class Scripted(Regressor):
    def __init__(self):
        super().__init__()
        self.network = torch.jit.script(self.network)


def given_up(tmp_path, module, **options):
    """The warning, after a fit in which nothing was measured."""
    callback = growing(**options)
    message = r"Nothing is measured any more.*register_layer.*accumulate_grad_batches=2.*schedule="
    with pytest.warns(UserWarning, match=message) as warned:
        trainer_for(tmp_path, callback).fit(module, DataLoader(regression(), batch_size=4))
    (text,) = [str(warning.message) for warning in warned if "GrowingBatchSize" in str(warning.message)]
    assert callback.records == [] and set(module.sizes) == {4} and len(module.sizes) == EPOCHS * 10
    return text


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_layers_that_cannot_be_measured_leave_the_size_as_it_is(tmp_path):
    text = given_up(tmp_path, Scripted())
    assert "ScriptModules" in text and "network.0.weight" in text


@pytest.mark.parametrize("method", ["begin_batch", "statistics"])
def test_an_estimator_that_fails_leaves_the_size_as_it_is(tmp_path, monkeypatch, method):
    def fail(*arguments):
        raise OSError("unforeseen\nin detail")

    monkeypatch.setattr(SampleGradients, method, fail)
    assert "estimator='layers') fails (OSError: unforeseen)" in given_up(tmp_path, Regressor())


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_samples_of_nested_tensors_are_counted(layout):
    batch = torch.nested.nested_tensor([torch.ones(n, 3) for n in (2, 1, 4)], layout=layout)
    assert samples_in([batch, torch.ones(3, 5)], [3, 5]) == 3 and samples_in(batch, []) == 3


# --- optimizers that come and go
# ---------------------------------------------------------------------------------------


class Changing(Manual):
    """Has as many optimizers as ``numbers`` says, epoch after epoch, each time new ones."""

    def __init__(self, *numbers):
        super().__init__()
        self.other, self.numbers = nn.Linear(3, 2), numbers

    def on_train_epoch_start(self):
        networks = (self.network, self.other)[: self.numbers[self.current_epoch]]
        if self.current_epoch:
            self.trainer.optimizers = [torch.optim.SGD(network.parameters(), lr=0.02) for network in networks]

    def training_step(self, batch, batch_idx):
        self.note(batch[0])
        self.manual_backward(sum(F.mse_loss(network(batch[0]), batch[1]) for network in (self.network, self.other)))
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
        self.zero_grad()


@pytest.mark.parametrize(("numbers", "theta"), [((1, 2, 2), 0.02), ((1, 2, 1), None)])
def test_optimizers_may_come_and_go(tmp_path, numbers, theta):
    module, callback = Changing(*numbers), growing(theta=theta)
    trainer_for(tmp_path, callback).fit(module, DataLoader(regression(), batch_size=4))
    state = callback.state_dict()["measurement"]
    assert sum(module.sizes) == EPOCHS * 40 and len(state["noise"]) == numbers[-1]
    assert len(state["stationarity"] or []) == (numbers[-1] if theta is None else 0)


class Outgrown(Regressor):
    """Has a larger network from its second epoch on."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
            self.trainer.strategy.setup_optimizers(self.trainer)


def test_layers_may_come_and_go(tmp_path):
    callback = GrowingBatchSize(estimator=NoiseEstimator("layers", 2))
    trainer_for(tmp_path, callback).fit(Outgrown(), DataLoader(regression(), batch_size=4))
    assert callback.records[-1]["samples"] > (EPOCHS * 40) - 9


class Raw(Manual):
    """Steps an optimizer of which Lightning does not know."""

    def optimizers(self):
        return super().optimizers(use_pl_optimizer=False)


class Unwrapping(Regressor):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.optimizer.step(optimizer_closure)


def test_sizes_set_by_hand_do_not_need_to_know_of_steps(tmp_path):
    modules = [Manual(), Raw()]
    for module in modules:
        callback = GrowingBatchSize(schedule="0:4 12:8 100:12", scale_lr="sqrt")
        trainer_for(tmp_path, callback).fit(module, DataLoader(regression(), batch_size=4))
    assert modules[0].sizes == modules[1].sizes and max(modules[1].sizes) == 12
    assert torch.equal(weights(modules[0]), weights(modules[1]))


@pytest.mark.parametrize("module", [Raw, Unwrapping])
def test_steps_that_cannot_be_measured_are_told_of_with_the_remedy(tmp_path, module):
    raw, callback = module(), growing()
    with pytest.warns(UserWarning, match=rf"steps of {module.__name__}.*step what self.optimizers\(\) returns") as told:
        trainer_for(tmp_path, callback).fit(raw, DataLoader(regression(), batch_size=4))
    assert set(raw.sizes) == {4} and sum("GrowingBatchSize" in str(warning.message) for warning in told) == 1


# --- little data
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "batch_size", "sizes"), [(40, 1, [1, 2] + [2] * 5), (1, 1, [1, 1]), (1, 4, [1, 1]), (3, 4, [3, 3])]
)
def test_little_data_is_trained_on_and_batches_of_one_grow(tmp_path, samples, batch_size, sizes):
    module = Regressor()
    trainer_for(tmp_path, growing(mode="batch"), max_epochs=2).fit(module, DataLoader(regression(samples), batch_size))
    assert module.sizes[:2] == sizes[:2] and (len(sizes) == len(module.sizes) or max(module.sizes) == 12)


@pytest.mark.parametrize("samples", [0, 3])
def test_nothing_is_trained_on_where_no_batch_is_filled(tmp_path, samples):
    data = regression(4)
    data.tensors = tuple(tensor[:samples] for tensor in data.tensors)
    module, loader = Regressor(), DataLoader(data, sampler=range(samples), batch_size=4, drop_last=True)
    trainer_for(tmp_path, growing(), max_epochs=2).fit(module, loader)
    assert module.sizes == []


# --- workers that fail
# -------------------------------------------------------------------------------------------------


class Deadly(TensorDataset):
    def __getitem__(self, index):
        if index == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_after_a_worker_died_the_trainer_is_as_it_was_and_another_fit_works(tmp_path):
    module, callback = Regressor(), growing()
    loader, trainer = DataLoader(regression(kind=Deadly), batch_size=4, num_workers=1), trainer_for(tmp_path, callback)
    with pytest.raises((RuntimeError, OSError, EOFError)):  # by who notices first
        trainer.fit(module, loader)
    hooks = [hook for layer in module.modules() for hook in layer._forward_hooks]
    patched = {"process_dataloader", "setup_data"} & {*vars(trainer.strategy), *vars(trainer.fit_loop)}
    assert (type(loader), type(loader.batch_sampler), hooks, patched) == (DataLoader, BatchSampler, [], set())
    module = Regressor()
    trainer_for(tmp_path, callback, max_epochs=1).fit(module, DataLoader(regression(), batch_size=4))
    assert sorted(module.seen) == sorted(regression().tensors[0][:, 0].tolist())


# --- what is refused
# ---------------------------------------------------------------------------------------------------


class Batches:
    """An iterable over batches, with a length."""

    def __len__(self):
        return 10

    def __iter__(self):
        return iter(DataLoader(regression(), batch_size=4))


class WithState(DataLoader):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Counted(DataLoader):
    """A stream whose length the loader knows."""

    def __len__(self):
        return 10


def counted():
    return Counted(Stream(regression()), batch_size=4)


def batched():
    return TensorDataset(*(tensor.view(10, 4, -1) for tensor in regression().tensors))


REFUSED = [
    pytest.param(Batches, "a Batches, which is not a torch DataLoader", id="not a DataLoader"),
    pytest.param(lambda: DataLoader(batched(), batch_size=None), "a DataLoader with batch_size=None", id="unbatched"),
    pytest.param(counted, "a Counted, whose class counts its batches itself", id="counted"),
    pytest.param(lambda: WithState(regression()), "a WithState, which keeps its own position", id="stateful"),
    pytest.param(
        lambda: DataLoader(regression(), num_workers=1, in_order=False),
        "a DataLoader with in_order=False",
        id="unordered",
    ),
]


@pytest.mark.parametrize("loader, message", REFUSED)
def test_a_loader_that_cannot_be_resized_is_refused_where_larger_batches_are_asked_for(tmp_path, loader, message):
    with pytest.raises(MisconfigurationException, match=rf"{message}.*GrowingBatchSize\(mode='accumulate'\)"):
        trainer_for(tmp_path, growing(mode="batch")).fit(Regressor(), loader())


@pytest.mark.parametrize("loader, message", REFUSED[:3])
def test_batches_that_cannot_be_resized_are_accumulated(tmp_path, loader, message):
    callback, module, asked = growing(), Regressor(), Regressor()
    with pytest.warns(
        UserWarning, match=f"{message}.*accumulates gradients over more of them instead.*For larger batches"
    ):
        trainer_for(tmp_path, callback).fit(module, loader())
    trainer_for(tmp_path, growing(mode="accumulate")).fit(asked, loader())
    assert callback.records[0]["batch_size"] == 4 and max(r["batch_size"] for r in callback.records) == 12
    assert torch.equal(weights(module), weights(asked))


def test_a_loader_that_counts_its_batches_is_validated_after_as_many(tmp_path):
    def validations(*callbacks):
        steps = []
        noting = LambdaCallback(on_validation_end=lambda trainer, module: steps.append(trainer.global_step))
        trainer = trainer_for(tmp_path, *callbacks, noting, val_check_interval=0.5)
        trainer.fit(Regressor(), counted(), DataLoader(regression(), batch_size=40))
        return len(steps)

    with pytest.warns(UserWarning, match="a Counted, whose class counts its batches itself"):
        assert validations(growing()) == validations()


@pytest.mark.parametrize("place", [0, 1])
def test_one_loader_that_cannot_be_resized_leaves_the_others_as_they_are(tmp_path, place):
    resizable, module, loaders = DataLoader(regression(), batch_size=4), TwoTasks(), [Batches()]
    loaders.insert(1 - place, resizable)
    trainer = trainer_for(tmp_path, GrowingBatchSize(schedule="0:4 20:8"), max_epochs=1)
    with pytest.warns(UserWarning, match="a Batches, which is not a torch DataLoader.*accumulates"):
        trainer.fit(module, CombinedLoader(loaders, "min_size"))
    assert type(resizable) is DataLoader and set(module.sizes) == {4}
    assert trainer.global_step < len(module.sizes) / 2  # of both loaders each batch is noted


def test_an_accumulating_run_is_resumed_without_being_asked_for(tmp_path):
    def run(directory, **options):
        module, keep = Regressor(), ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
        with pytest.warns(UserWarning, match="accumulates gradients over more of them instead"):
            trainer_for(tmp_path, growing(), keep, enable_checkpointing=True).fit(module, Batches(), **options)
        return module

    whole, resumed = run(tmp_path / "whole"), run(tmp_path / "resumed", ckpt_path=tmp_path / "whole" / "epoch=1.ckpt")
    assert torch.equal(weights(resumed), weights(whole)) and len(resumed.sizes) < len(whole.sizes)


@pytest.mark.parametrize("schedule", [None, "0:8"])
def test_batches_that_can_neither_be_resized_nor_accumulated_stay_or_are_refused(tmp_path, schedule):
    message = (
        r"a Batches, which is not a torch DataLoader. .*Manual.training_step does itself: give Trainer.fit a DataLoader"
    )
    module, callback = Manual(), growing() if schedule is None else GrowingBatchSize(schedule=schedule)
    refused = pytest.raises(MisconfigurationException, match=message)
    with refused if schedule else pytest.warns(UserWarning, match=f"{message}.*leaves the batch as it is"):
        trainer_for(tmp_path, callback).fit(module, Batches())
    assert set(module.sizes) == (set() if schedule else {4})


class Fetching(Regressor):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize("mode", ["batch", "auto"])
def test_a_step_that_fetches_its_batches_accumulates_them_or_is_refused(tmp_path, mode):
    callback, module = growing(mode=mode), Fetching()
    message = r"Fetching.training_step\(dataloader_iter\), which fetches them itself"
    refused = pytest.raises(MisconfigurationException, match=message)
    with refused if mode == "batch" else pytest.warns(UserWarning, match=f"{message}.*instead"):
        trainer_for(tmp_path, callback).fit(module, DataLoader(regression(), batch_size=4))
    assert mode == "batch" or max(record["batch_size"] for record in callback.records) == 12
    assert set(module.sizes) <= {4}


def test_gradients_clipped_after_a_plain_backward_are_named(tmp_path):
    class Clipping(Manual):
        def manual_backward(self, loss):
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    message = r"none, or a small part, of the gradient of Adam; network.0.weight, .*network.2.bias: .*"
    message += r" self.manual_backward\(loss\)"
    with pytest.warns(UserWarning, match=message) as told:
        trainer_for(tmp_path, growing()).fit(Clipping(), DataLoader(regression(), batch_size=4))
    assert not any("out of the variance" in str(warning.message) for warning in told)


# --- interrupted and resumed
# -------------------------------------------------------------------------------------------


def generator():
    return torch.Generator().manual_seed(7)


LOADERS = {
    "ordered": lambda: DataLoader(regression(), batch_size=4),
    "shuffled": lambda: DataLoader(regression(), batch_size=4, shuffle=True, generator=generator()),
    "workers": lambda: DataLoader(regression(), batch_size=4, shuffle=True, generator=generator(), num_workers=2),
    "stream": lambda: DataLoader(Stream(regression()), batch_size=4),
    "stream with workers": lambda: DataLoader(Stream(regression()), batch_size=4, num_workers=2),
}


def train(tmp_path, module, loader, validation=None, ckpt_path=None, callback=None, **options):
    """With a checkpoint after each step."""
    checkpoints = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    callback = growing() if callback is None else callback
    trainer = trainer_for(tmp_path, callback, checkpoints, **options)
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return trainer, module, callback


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run of each loader, trained once, and where its checkpoints are."""
    runs = {}

    def run(name):
        if name not in runs:
            directory = tmp_path_factory.mktemp("whole")
            runs[name] = (directory, *train(directory, Regressor(), LOADERS[name]()))
        return runs[name]

    return run


def test_a_run_stopped_in_a_validation_within_the_epoch_can_be_resumed(tmp_path):
    def validation():
        return DataLoader(regression(8, seed=3), batch_size=4)

    class Stopping(Regressor):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if self.trainer.global_step >= 3 and batch_idx == 1:
                raise KeyboardInterrupt

    options = {"val_check_interval": 0.5}
    callbacks = [growing(validation=ValidationRule("val_loss")) for _ in range(3)]
    _, uninterrupted, _ = train(
        tmp_path / "whole", Regressor(), LOADERS["shuffled"](), validation(), callback=callbacks[0], **options
    )
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(tmp_path, Stopping(), LOADERS["shuffled"](), validation(), callback=callbacks[1], **options)
    last = max(tmp_path.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    _, resumed, _ = train(
        tmp_path, Regressor(), LOADERS["shuffled"](), validation(), last, callback=callbacks[2], **options
    )
    assert resumed.seen == uninterrupted.seen[-len(resumed.seen) :]
    assert torch.equal(weights(resumed), weights(uninterrupted))
    assert callbacks[2].records == callbacks[0].records


# --- resumed with something else
# ---------------------------------------------------------------------------------------


def test_other_workers_of_a_stream_are_refused_within_an_epoch(tmp_path, whole):
    directory, *_ = whole("stream with workers")
    with pytest.raises(MisconfigurationException, match=r"num_workers=2, but the loader has 0.* end of an epoch"):
        train(tmp_path, Regressor(), LOADERS["stream"](), ckpt_path=directory / "step=2.ckpt")


def test_other_workers_of_a_stream_are_taken_at_the_end_of_an_epoch(tmp_path, whole):
    directory, _, uninterrupted, _ = whole("stream with workers")
    ended = uninterrupted.sizes.index(12)  # the first epoch is read ahead with the first size
    assert sum(uninterrupted.sizes[:ended]) == 40
    _, resumed, _ = train(tmp_path, Regressor(), LOADERS["stream"](), ckpt_path=directory / f"step={ended}.ckpt")
    assert len(resumed.seen) == 2 * 40


def test_other_workers_of_a_map_style_data_set_are_taken_anywhere(tmp_path, whole):
    directory, _, uninterrupted, _ = whole("workers")
    _, resumed, _ = train(tmp_path, Regressor(), LOADERS["shuffled"](), ckpt_path=directory / "step=2.ckpt")
    assert sorted(resumed.seen[:32]) == sorted(uninterrupted.seen[8:40])


def test_other_processes_are_refused_within_an_epoch(tmp_path, whole):
    directory, *_ = whole("ordered")
    checkpoint = torch.load(directory / "step=2.ckpt", weights_only=True)
    positions = checkpoint["callbacks"]["GrowingBatchSize"]["growth"]["positions"]
    positions.append(positions[0])
    torch.save(checkpoint, tmp_path / "two.ckpt")
    with pytest.raises(MisconfigurationException, match="by 2 processes, and now there are 1"):
        train(tmp_path, Regressor(), LOADERS["ordered"](), ckpt_path=tmp_path / "two.ckpt")


def test_a_state_of_version_0_2_is_refused_with_the_remedy():
    state = {
        name: value for name, value in GrowingBatchSize().state_dict().items() if name not in ("looks_at", "schedule")
    }
    with pytest.raises(MisconfigurationException, match=r"lightning_struct 0\.2\.0 or older.*finish the run with the"):
        GrowingBatchSize().load_state_dict(state)
