"""ContinualClassifier: after its phases it is what it would be if all classes had come together."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct import RecursiveLinear
from lightning_struct.models import ContinualClassifier
from lightning_struct.utilities.namespaces import MisconfigurationException
from tests.cases import gaussian

CLASSES, ROWS = 6, 120


def samples():
    labels = torch.arange(ROWS) % CLASSES
    return TensorDataset(gaussian(ROWS, 8).float() + 3 * nn.functional.one_hot(labels, 8), labels)


def model():
    torch.manual_seed(0)
    return ContinualClassifier(nn.Linear(8, 5), features=5, width=40, num_classes=CLASSES, phases=3)


def fit(trained, epochs, directory, checkpoint=None):
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory,
    )  # fmt: skip
    trainer.fit(trained, DataLoader(samples(), batch_size=32), ckpt_path=checkpoint)
    return trainer


def features(trained):
    with torch.no_grad():
        return trained.random(trained.network(samples().tensors[0])).relu()


def test_weights_are_those_of_all_classes_together_on_a_network_of_the_first_ones(tmp_path):
    trained, start = model(), model()
    trainer = fit(trained, 4, tmp_path)
    together = RecursiveLinear(40, CLASSES)
    together.update(features(trained), samples().tensors[1])
    assert trainer.global_step == 16
    assert not torch.equal(trained.network.weight, start.network.weight)
    found, expected = (each.get_extra_state()["weights"] for each in (trained.output, together))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_outputs_of_classes_that_have_not_come_are_zero():
    outputs = model()(samples().tensors[0])
    assert outputs.shape == (ROWS, CLASSES) and not outputs.any()


def test_a_fit_that_is_stopped_between_phases_and_resumed_ends_alike(tmp_path):
    whole, resumed = model(), model()
    fit(whole, 4, tmp_path)

    class Stop(ContinualClassifier):
        def on_train_epoch_end(self):
            self.trainer.should_stop = self.current_epoch == 2

    stopped = model()
    stopped.__class__ = Stop
    fit(stopped, 4, tmp_path).save_checkpoint(tmp_path / "stopped.ckpt")
    fit(resumed, 4, tmp_path, tmp_path / "stopped.ckpt")
    assert stopped.output.out_features == 4
    for name, tensor in whole.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="phases=4 must divide num_classes=6"):
        ContinualClassifier(nn.Flatten(), features=5, num_classes=6, phases=4)
    with pytest.raises(MisconfigurationException, match=r"1 \+ 3: set Trainer\(max_epochs=4\), not 3"):
        fit(model(), 3, tmp_path)
