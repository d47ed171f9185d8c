from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct import LevenbergMarquardtDamping
from tests.strategies.helpers import Network, SHFNetwork, draw_loader, make_trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class DampedSGD(torch.optim.SGD):
    """Reports the reduction ratios of a script, one in each step."""

    def __init__(self, parameters, ratios):
        super().__init__(parameters, lr=0.01)
        self.ratios, self.report, self.damping = iter(ratios), None, 8.0

    def step(self, closure=None):
        super().step(closure)
        self.report = SimpleNamespace(reduction_ratio=next(self.ratios))


class ScriptedNetwork(Network):
    def __init__(self, ratios):
        super().__init__()
        self.ratios, self.dampings = ratios, []

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        return DampedSGD(self.parameters(), self.ratios)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.dampings.append(self.trainer.optimizers[0].damping)


class DropSeen(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.drop = trainer.optimizers[0].drop


def dampings(tmp_path, ratios, callback=None, accumulate=1, **options):
    module = ScriptedNetwork(ratios)
    callback = callback or LevenbergMarquardtDamping(drop=0.5, **options)
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[callback], accumulate_grad_batches=accumulate)
    trainer.fit(module, draw_loader(draws=len(ratios) * accumulate))
    return module.dampings


def test_damping_falls_where_the_model_is_good(tmp_path):
    assert dampings(tmp_path, [0.8, 1.5]) == [4.0, 2.0]


def test_damping_rises_where_the_model_is_bad(tmp_path):
    assert dampings(tmp_path, [0.2, -1.0]) == [16.0, 32.0]


def test_damping_stays_in_between(tmp_path):
    assert dampings(tmp_path, [0.25, 0.75]) == [8.0, 8.0]


def test_damping_is_bounded(tmp_path):
    assert dampings(tmp_path, [0.8, 0.8, 0.2, 0.2], min_damping=3.0, max_damping=10.0) == [4.0, 3.0, 6.0, 10.0]


def test_bounds_for_the_ratio_can_be_set(tmp_path):
    assert dampings(tmp_path, [0.5, 0.7], lower=0.55, upper=0.65) == [16.0, 8.0]


def test_a_batch_without_a_step_changes_nothing(tmp_path):
    assert dampings(tmp_path, [0.8, 0.8], accumulate=2) == [8.0, 4.0, 4.0, 2.0]


def test_another_rule_can_be_put_in_place(tmp_path):
    class Fixed(LevenbergMarquardtDamping):
        def decide(self, damping, reduction_ratio):
            return damping + reduction_ratio

    assert dampings(tmp_path, [0.5, 0.25], callback=Fixed()) == [8.5, 8.75]


def test_shf_trains_as_by_its_own_rule(tmp_path):
    own, called_back = SHFNetwork(drop=0.9), SHFNetwork(drop=0.5)
    make_trainer(tmp_path).fit(own, draw_loader())
    make_trainer(tmp_path, callbacks=[LevenbergMarquardtDamping(drop=0.9)]).fit(called_back, draw_loader())
    assert torch.equal(weights(called_back), weights(own))


def test_the_rule_of_the_optimizer_is_switched_off(tmp_path):
    seen = DropSeen()
    make_trainer(tmp_path, callbacks=[LevenbergMarquardtDamping(), seen]).fit(SHFNetwork(drop=0.5), draw_loader())
    assert seen.drop is None


def test_the_rule_of_the_optimizer_is_put_back_after_fit(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[LevenbergMarquardtDamping()])
    trainer.fit(SHFNetwork(drop=0.5), draw_loader())
    assert trainer.optimizers[0].drop == 0.5


def test_it_takes_over_from_a_run_that_did_without(tmp_path):
    first = make_trainer(tmp_path, max_epochs=1)
    first.fit(SHFNetwork(drop=0.5), draw_loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    seen = DropSeen()
    second = make_trainer(tmp_path, max_epochs=2, callbacks=[LevenbergMarquardtDamping(), seen])
    second.fit(SHFNetwork(drop=0.5), draw_loader(), ckpt_path=tmp_path / "first.ckpt")
    assert seen.drop is None


def test_an_optimizer_without_damping_is_refused_by_name(tmp_path):
    class Undamped(ScriptedNetwork):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with pytest.raises(
        MisconfigurationException, match="needs an optimizer with `damping` .* but got Adam: return SHF"
    ):
        make_trainer(tmp_path, callbacks=[LevenbergMarquardtDamping()]).fit(Undamped([]), draw_loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drop": 0.0}, r"drop must be in \(0, 1\]"),
        ({"drop": 1.1}, r"drop must be in \(0, 1\]"),
        ({"lower": 0.8}, "lower must be <= upper, got 0.8 and 0.75"),
        ({"min_damping": 2.0, "max_damping": 1.0}, "2.0 and 1.0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(MisconfigurationException, match=f"LevenbergMarquardtDamping: .*{message}"):
        LevenbergMarquardtDamping(**arguments)
