"""A device on which memory runs out: what is trained on in parts is what would have been trained on at once."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from tests.callbacks.growing_batch_size.projects import Manual, Regressor, regression
from tests.callbacks.growing_batch_size.readers import checkpoints
from tests.mixins.helpers import make_trainer, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*samples are too many for the memory"),
]


class Exhausting(Regressor):
    """Has memory for so many samples, in the forward pass or in the backward pass; batches are dicts with a text."""

    def __init__(self, most=99, place="forward"):
        torch.manual_seed(0)
        super().__init__()
        self.most, self.place, self.sizes, self.texts = most, place, [], []

    def fail(self, *arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def training_step(self, batch, batch_idx):
        inputs, targets = batch["pair"]
        outputs = self(inputs)
        if len(inputs) > self.most:
            self.fail() if self.place == "forward" else outputs.register_hook(self.fail)
        self.sizes.append(len(inputs))
        self.texts += batch["text"]
        loss = F.mse_loss(outputs, targets)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def pairs(samples):
    pair = tuple(torch.stack(of) for of in zip(*samples, strict=True))
    return {"pair": pair, "text": [str(inputs[0].item()) for inputs, _ in samples], "constant": 1}


def fit(tmp_path, module, limit="auto", ckpt_path=None, callbacks=(), growing=None, **options):
    callback = GrowingBatchSize(**({"schedule": "0:4 12:7 40:16", "max_device_batch_size": limit} | (growing or {})))
    options = {"max_epochs": 2, "precision": "64-true", "enable_checkpointing": bool(callbacks)} | options
    trainer = make_trainer(tmp_path, callbacks=[callback, *callbacks], **options)
    trainer.fit(module, DataLoader(regression(), 4, collate_fn=pairs), ckpt_path=ckpt_path)
    return callback


@pytest.mark.parametrize(
    ("place", "most", "options"),
    [
        ("forward", 1, {}),
        ("backward", 3, {"accumulate_grad_batches": 2}),
        ("forward", 5, {"accumulate_grad_batches": 2}),
        ("backward", 9, {}),
    ],
)
def test_the_weights_are_those_of_a_device_that_has_the_memory(tmp_path, place, most, options):
    large, small = Exhausting(), Exhausting(most, place)
    for module in (large, small):
        fit(tmp_path, module, **options)
    assert max(large.sizes) == 16 or options
    passed = [size for size in small.sizes if size <= most]
    assert max(passed) <= most and {*small.texts} == {*large.texts}
    assert torch.allclose(weights(small), weights(large), rtol=0, atol=1e-14)
    losses = [module.trainer.callback_metrics["train_loss"] for module in (small, large)]
    assert place == "backward" or torch.allclose(*losses, rtol=1e-12)


def test_a_bound_that_is_given_holds_from_the_first_batch(tmp_path):
    whole, parts = Exhausting(), Exhausting(3, "backward")
    for module, limit in ((whole, None), (parts, 3)):
        fit(tmp_path, module, limit)
    assert max(parts.sizes) == 3 and parts.texts == whole.texts
    assert torch.allclose(weights(parts), weights(whole), rtol=0, atol=1e-14)


def test_memory_that_ran_out_is_said_and_the_next_batches_come_in_parts_at_once(tmp_path):
    module = Exhausting(2)
    with pytest.warns(
        UserWarning, match=r"4 samples are too many .*\(OutOfMemoryError: CUDA out of.*parts of 2,"
    ) as told:
        fit(tmp_path, module, growing={"schedule": "0:4"}, max_epochs=1)
    assert module.sizes == 20 * [2] and sum("too many" in str(warning.message) for warning in told) == 1


def test_what_is_measured_is_measured_in_parts_too(tmp_path):
    callbacks = [
        fit(tmp_path, Exhausting(most), growing={"schedule": None, "theta": 0.3, "max_batch_size": 12}, max_epochs=4)
        for most in (3, 99)
    ]
    ratios = [[record["variance_ratio"] for record in of.records] for of in callbacks]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-9) and ratios[0]


def test_a_resumed_run_knows_what_memory_allows(tmp_path):
    whole = Exhausting(3)
    fit(tmp_path, whole, callbacks=[checkpoints(tmp_path)], precision=32)
    resumed = Exhausting(3)
    fit(tmp_path, resumed, ckpt_path=tmp_path / "step=4.ckpt", precision=32)
    assert resumed.sizes == whole.sizes[-len(resumed.sizes) :] and torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("most", [0, 2])
def test_what_cannot_be_split_ends_as_it_would_without(tmp_path, most):
    class Whole(Exhausting):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch if most == 0 else Opaque(batch)

    class Opaque:
        def __init__(self, batch):
            self.batch = batch

        def __getitem__(self, name):
            return self.batch[name]

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        fit(tmp_path, Whole(most))


def test_parts_need_automatic_optimization(tmp_path):
    with pytest.raises(MisconfigurationException, match="trains on parts of a batch, which under manual.*itself: give"):
        fit(tmp_path, Manual())
