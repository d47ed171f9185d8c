from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct import LevenbergMarquardtDamping
from lightning_struct.functional.solvers.damping import reduction_ratio_rule
from lightning_struct.optim import LevenbergMarquardt
from tests.mixins.helpers import Network, SHFNetwork, draw_loader, make_trainer, regression_data, weights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class DampedSGD(torch.optim.SGD):
    """Reports the reduction ratios of a script, one in each step."""

    def __init__(self, parameters, ratios):
        super().__init__(parameters, lr=0.01)
        self.ratios, self.report, self.damping = iter(ratios), None, 8.0

    def step(self, closure=None):
        super().step(closure)
        self.report = SimpleNamespace(reduction_ratio=next(self.ratios))


class RetryingSGD(DampedSGD):
    """Reports that it had to make its steps with a damping of 100."""

    def step(self, closure=None):
        super().step(closure)
        self.report.damping = 100.0


class ScriptedNetwork(Network):
    def __init__(self, ratios, make=DampedSGD):
        super().__init__()
        self.ratios, self.make, self.dampings = ratios, make, []

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = self.make(self.parameters(), self.ratios)
        self.damped = optimizer
        return optimizer

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.dampings.append(self.damped.damping)


def dampings(tmp_path, ratios, callback=None, accumulate=1, make=DampedSGD, **options):
    module = ScriptedNetwork(ratios, make)
    callback = callback or LevenbergMarquardtDamping(drop=0.5, **options)
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[callback], accumulate_grad_batches=accumulate)
    trainer.fit(module, draw_loader(draws=len(ratios) * accumulate))
    return module.dampings


@pytest.mark.parametrize(
    ("ratios", "options", "expected"),
    [
        ([0.8, 1.5], {}, [4.0, 2.0]),
        ([0.2, -1.0], {}, [16.0, 32.0]),
        ([0.25, 0.75], {}, [8.0, 8.0]),
        ([0.8, 0.8, 0.2, 0.2], {"min_damping": 3.0, "max_damping": 10.0}, [4.0, 3.0, 6.0, 10.0]),
        ([0.5, 0.7], {"lower": 0.55, "upper": 0.65}, [16.0, 8.0]),
        ([0.8, 0.8], {"accumulate": 2}, [8.0, 4.0, 4.0, 2.0]),
        ([0.8, 0.2], {"make": RetryingSGD}, [50.0, 200.0]),  # the damping that was reported counts
    ],
)
def test_damping_follows_the_ratio(tmp_path, ratios, options, expected):
    assert dampings(tmp_path, ratios, **options) == expected


def test_another_rule_can_be_put_in_place(tmp_path):
    class Fixed(LevenbergMarquardtDamping):
        def decide(self, damping, reduction_ratio):
            return damping + reduction_ratio

    assert dampings(tmp_path, [0.5, 0.25], callback=Fixed()) == [8.5, 8.75]


@pytest.mark.parametrize("value", [None, float("nan"), -1.0])
def test_a_rule_that_returns_no_damping_is_named(tmp_path, value):
    class Failing(LevenbergMarquardtDamping):
        def decide(self, damping, reduction_ratio):
            return value

    with pytest.raises(MisconfigurationException, match=rf"Failing.decide\(\) returned {value!r} .*: it must be a fin"):
        dampings(tmp_path, [0.8], Failing())


def test_a_damping_that_the_optimizer_refuses_is_said_to_be_of_the_rule(tmp_path):
    class Undamped(LevenbergMarquardtDamping):
        def decide(self, damping, reduction_ratio):
            return 0.0

    with pytest.raises(MisconfigurationException, match=r"Undamped.decide\(\) returned 0.0 .*: damping must be finite"):
        make_trainer(tmp_path, max_epochs=1, callbacks=[Undamped()]).fit(SHFNetwork(), draw_loader())


def test_shf_trains_as_by_its_own_rule(tmp_path):
    own, called_back = (SHFNetwork(damping=LevenbergMarquardt(1.0, drop=drop)) for drop in (0.9, 0.5))
    make_trainer(tmp_path).fit(own, draw_loader())
    make_trainer(tmp_path, callbacks=[LevenbergMarquardtDamping(drop=0.9)]).fit(called_back, draw_loader())
    assert torch.equal(weights(called_back), weights(own))


def test_the_rule_of_the_optimizer_does_not_count_and_is_put_back_after_fit(tmp_path):
    module = SHFNetwork(damping=LevenbergMarquardt(1.0, drop=0.5))
    trainer = make_trainer(tmp_path, callbacks=[LevenbergMarquardtDamping(drop=1.0)])
    trainer.fit(module, draw_loader())
    assert {report.damping for report in module.reports} == {1.0}
    inputs, targets = regression_data().tensors
    report = trainer.optimizers[0].step(inputs=inputs, targets=targets)
    assert trainer.optimizers[0].damping == reduction_ratio_rule(report.damping, report.reduction_ratio, drop=0.5)


def test_it_takes_over_from_a_run_that_did_without(tmp_path):
    first = make_trainer(tmp_path, max_epochs=1)
    first.fit(SHFNetwork(damping=LevenbergMarquardt(1.0, drop=0.5)), draw_loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    module = SHFNetwork(damping=LevenbergMarquardt(1.0, drop=0.5))
    second = make_trainer(tmp_path, max_epochs=2, callbacks=[LevenbergMarquardtDamping(drop=1.0)])
    second.fit(module, draw_loader(), ckpt_path=tmp_path / "first.ckpt")
    assert {report.damping for report in module.reports} == {first.optimizers[0].damping}


def test_a_run_resumed_without_it_goes_on_by_the_rule_of_the_optimizer(tmp_path):
    first = make_trainer(tmp_path, max_epochs=1, callbacks=[LevenbergMarquardtDamping()])
    first.fit(SHFNetwork(damping=LevenbergMarquardt(1.0, drop=0.5)), draw_loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    second = make_trainer(tmp_path, max_epochs=2)
    second.fit(SHFNetwork(damping=LevenbergMarquardt(1.0, drop=0.5)), draw_loader(), ckpt_path=tmp_path / "first.ckpt")
    assert second.optimizers[0].drop == 0.5


class Alternating(Network):
    """Two optimizers by hand; the first is stepped in each batch, the second in every other one."""

    automatic_optimization = False

    def __init__(self, raw):
        super().__init__()
        self.raw, self.dampings = raw, []

    def training_step(self, batch, batch_idx):
        for optimizer, due in zip(
            self.optimizers(use_pl_optimizer=not self.raw), (True, batch_idx % 2 == 0), strict=True
        ):
            if due:
                optimizer.zero_grad()
                self.manual_backward(self(batch[0]).square().mean())
                optimizer.step()

    def configure_optimizers(self):
        return [DampedSGD(self.layers[0].parameters(), [0.8] * 4), DampedSGD(self.layers[2].parameters(), [0.2] * 2)]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.dampings.append([getattr(optimizer, "damping", None) for optimizer in self.trainer.optimizers])


@pytest.mark.parametrize("raw", [False, True], ids=["counted steps", "uncounted steps"])
def test_each_of_several_optimizers_follows_its_own_steps(tmp_path, raw):
    module = Alternating(raw)
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[LevenbergMarquardtDamping(drop=0.5)])
    trainer.fit(module, draw_loader(draws=4))
    assert module.dampings == [[4.0, 16.0], [2.0, 16.0], [1.0, 32.0], [0.5, 32.0]]


def test_optimizers_without_damping_are_left_alone(tmp_path):
    class Mixed(Alternating):
        def configure_optimizers(self):
            adam = torch.optim.Adam(self.layers[2].parameters())
            return [DampedSGD(self.layers[0].parameters(), [0.8] * 4), adam]

    module = Mixed(raw=False)
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[LevenbergMarquardtDamping(drop=0.5)])
    trainer.fit(module, draw_loader(draws=4))
    assert [first for first, _ in module.dampings] == [4.0, 2.0, 1.0, 0.5]


@pytest.mark.parametrize("failing", [False, True])
def test_the_optimizer_is_left_alone_after_fit(tmp_path, failing):
    class Failing(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if failing:
                raise KeyError("on purpose")

    module = ScriptedNetwork([0.8, 0.8])
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[LevenbergMarquardtDamping(drop=0.5), Failing()])
    with pytest.raises(KeyError) if failing else nullcontext():
        trainer.fit(module, draw_loader(draws=1))
    trainer.optimizers[0].step()
    assert trainer.optimizers[0].damping == 4.0


@pytest.mark.parametrize(("optimizer", "name"), [(torch.optim.Adam, "Adam"), (lambda parameters: None, "none")])
def test_an_optimizer_without_damping_is_refused_by_name(tmp_path, optimizer, name):
    class Undamped(ScriptedNetwork):
        def configure_optimizers(self):
            return optimizer(self.parameters())

    with pytest.raises(
        MisconfigurationException, match=f"needs an optimizer with `damping` .* but got {name}: return SHF"
    ):
        make_trainer(tmp_path, callbacks=[LevenbergMarquardtDamping()]).fit(Undamped([]), draw_loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drop": 1.1}, r"LevenbergMarquardtDamping: .*drop must be in \(0, 1\]"),
        ({"lower": 0.8}, "lower must be <= upper, got 0.8 and 0.75"),
        ({"upper": float("nan")}, "upper must be a number, but is nan"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        LevenbergMarquardtDamping(**arguments)
