"""Runs that are stopped anywhere, in any way, and resumed: every sample is read once, and all is given back."""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from tests.callbacks.growing_batch_size.projects import SizedStream, Stream
from tests.callbacks.growing_batch_size.readers import WARNINGS_OF_READERS, Growing, Windows, numbers
from tests.mixins.helpers import make_trainer

SAMPLES = 24


def generator():
    return torch.Generator().manual_seed(0)


def batch_sampler():
    return BatchSampler(RandomSampler(range(SAMPLES), generator=generator()), 2, False)


class EpochSampler(DistributedSampler):
    """Shuffles by the epoch that Lightning names, as Lightning's own sampler does with several processes."""

    def __init__(self, data):
        super().__init__(data, num_replicas=1, rank=0)


LOADERS = {
    "in order": lambda data: DataLoader(data, 4),
    "shuffled": lambda data: DataLoader(data, 4, shuffle=True, generator=generator()),
    "shuffled by epoch": lambda data: DataLoader(data, 4, sampler=EpochSampler(data)),
    "batch sampler": lambda data: DataLoader(data, batch_sampler=batch_sampler()),
    "stream": lambda data: DataLoader(Stream(data), 4),
    "sized stream": lambda data: DataLoader(SizedStream(data), 4),
    "two loaders": lambda data: {"a": DataLoader(data, 4), "b": DataLoader(range(10), 2)},
}
WAYS = [{"mode": "batch"}, {"mode": "batch", "max_device_batch_size": 5}, {"mode": "accumulate"}]


class Broken(list):
    """Data of which a sample cannot be read."""

    def __getitem__(self, index):
        if index == SAMPLES - 1:
            raise KeyError("broken")
        return super().__getitem__(index)

    def __iter__(self):
        return (self[index] for index in range(len(self)))


class Stopped(Exception):
    pass


class Stop(L.Callback):
    """Saves a checkpoint after so many steps, or when the next one fails, and ends the run."""

    def __init__(self, path, steps, in_step):
        self.path, self.left, self.in_step = path, steps, in_step

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > self.step:  # gradients that were accumulated so far are not saved
            self.step, self.left = trainer.global_step, self.left - 1
        if self.left == 0:
            if not self.in_step:
                trainer.save_checkpoint(self.path)
                raise Stopped
            pl_module.fails = True

    def on_exception(self, trainer, pl_module, exception):
        if self.in_step:
            trainer.save_checkpoint(self.path)


class Failing(Windows):
    fails = False

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise Stopped
        return super().training_step(batch, batch_idx)


class Runs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.trainer, self.checkpoint, self.count, self.read = None, None, 0, []

    @initialize(
        name=st.sampled_from(sorted(LOADERS)),
        way=st.sampled_from(WAYS),
        sizes=st.lists(st.integers(2, 14), max_size=8),
        accumulated=st.sampled_from([1, 1, 2]),
        in_step=st.booleans(),  # of all stops: Lightning itself does not resume exactly after both kinds
    )
    def begin(self, name, way, sizes, accumulated, in_step):
        # Lightning does not save which of several loaders have been at their ends: a smaller size may come after one
        self.in_step, sizes = in_step, sorted(sizes) if name == "two loaders" else sizes
        self.name, self.accumulated = name, accumulated
        self.options = way | {"sizes": sizes, "scale_lr": "sqrt"}
        self.whole, self.callback = self.fit(LOADERS[name](list(range(SAMPLES))))
        if name != "two loaders":
            assert [sorted(numbers(epoch)) for epoch in self.whole.epochs] == 2 * [list(range(SAMPLES))]
        assert self.callback.records[-1]["samples"] == sum(
            sum(map(len, batch)) if self.name == "two loaders" else len(batch) for batch in self.whole.read
        )

    def fit(self, loader, *callbacks, first=()):
        module, growing = Failing(), Growing(**self.options)
        module.epochs.append([])
        self.loader, kind = loader, type(loader)
        self.trainer = make_trainer(
            self.folder.name,
            callbacks=[*first, growing, *callbacks],
            max_epochs=2,
            num_sanity_val_steps=0,
            accumulate_grad_batches=self.accumulated,
        )
        try:
            self.trainer.fit(module, loader, ckpt_path=self.checkpoint)
        except Stopped:
            self.count += 1
        assert type(loader) is kind
        module.epochs = [epoch for epoch in module.epochs if epoch]
        return module, growing

    @precondition(lambda self: self.trainer is not None)
    @rule(steps=st.integers(1, 7), is_first=st.booleans())
    def stop(self, steps, is_first):
        path, stopped = Path(self.folder.name, f"{self.count}.ckpt"), self.count
        callback = [Stop(path, steps, self.in_step)]
        of_first, others = (callback, []) if is_first else ([], callback)
        module, _ = self.fit(LOADERS[self.name](list(range(SAMPLES))), *others, first=of_first)
        if self.count > stopped:
            self.checkpoint = path
            self.read += module.read
            assert self.read == self.whole.read[: len(self.read)]

    @precondition(lambda self: self.trainer is not None and self.name not in ("batch sampler", "two loaders"))
    @rule()
    def fail(self):
        with pytest.raises(KeyError, match="broken"):
            self.fit(LOADERS[self.name](Broken(range(SAMPLES))))

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def finish(self):
        module, growing = self.fit(LOADERS[self.name](list(range(SAMPLES))))
        assert self.read + module.read == self.whole.read
        assert module.windows == self.whole.windows[len(self.whole.windows) - len(module.windows) :]
        assert torch.equal(module.layer.weight, self.whole.layer.weight)
        assert growing.records == self.callback.records

    @invariant()
    def all_is_given_back(self):
        if self.trainer is None:
            return
        loop = self.trainer.fit_loop
        patched = {*vars(self.trainer.strategy), *vars(loop), *vars(loop.epoch_loop.automatic_optimization)}
        assert not {"process_dataloader", "setup_data", "_make_closure"} & patched
        assert self.trainer.accumulate_grad_batches == self.accumulated
        of = self.loader["a"] if self.name == "two loaders" else self.loader
        assert type(of) is DataLoader and len(next(iter(of))) == (2 if self.name == "batch sampler" else 4)
        assert self.trainer.optimizers == [] or self.trainer.optimizers[0].param_groups[0]["lr"] == 1e-6

    def teardown(self):
        if self.trainer is not None:
            self.finish()
            self.all_is_given_back()
        self.folder.cleanup()


Runs.TestCase.settings = settings(max_examples=20, stateful_step_count=4, phases=[Phase.generate])


class TestRuns(Runs.TestCase):
    pytestmark = WARNINGS_OF_READERS


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_that_fails_in_its_first_batch_keeps_its_order(tmp_path):
    def fit(*callbacks, checkpoint=None):
        module, growing = Failing(), Growing([8], mode="batch")
        module.epochs.append([])
        trainer = make_trainer(tmp_path, callbacks=[growing, *callbacks], max_epochs=2, num_sanity_val_steps=0)
        with pytest.raises(Stopped) if callbacks else nullcontext():
            trainer.fit(module, LOADERS["shuffled"](list(range(SAMPLES))), ckpt_path=checkpoint)
        return module.read

    path = tmp_path / "first.ckpt"
    assert fit(Stop(path, 4, in_step=True)) + fit(checkpoint=path) == fit()
