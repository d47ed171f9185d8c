"""Two processes with half of the columns of a text each do what one does with all of them."""

from functools import partial

import lightning as L
import pytest
import torch

from lightning_struct.data import TextCorpusDataModule
from lightning_struct.models import LanguageModel
from lightning_struct.nn import LDRSubdiagonal
from tests.processes import two_processes

pytestmark = pytest.mark.slow


class Notes(L.Callback):
    """Writes the weights and metrics that each process has at the end to a file."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_end(self, trainer, pl_module):
        notes = {
            "weights": torch.cat([weight.detach().flatten() for weight in pl_module.parameters()]),
            "metrics": {name: value.double() for name, value in trainer.callback_metrics.items() if "val" in name},
            "steps": trainer.global_step,
        }
        torch.save(notes, self.directory / f"{trainer.world_size}_{trainer.global_rank}.pt")


def fit(directory, **options):
    torch.manual_seed(0)
    model = LanguageModel(
        30, 6, 5, partial(LDRSubdiagonal, rank=2), dropout=0.0, optimizer=partial(torch.optim.SGD, lr=2.0)
    )
    data = TextCorpusDataModule(
        batch_size=4,
        eval_batch_size=2,
        steps=9,
        train_size=400,
        val_size=120,
        test_size=120,
        synthetic=True,
        synthetic_vocabulary=30,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        precision="64-true",
        gradient_clip_val=0.25,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Notes(directory)],
        **options,
    )
    trainer.fit(model, datamodule=data)


def test_weights_and_metrics_are_those_of_one_process(tmp_path):
    fit(tmp_path, devices=1)
    fit(tmp_path, **two_processes())
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1_0", "2_0", "2_1"))
    assert first["steps"] == one["steps"] == 22
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-10)
    assert torch.equal(first["weights"], second["weights"])
    for process in (first, second):
        torch.testing.assert_close(process["metrics"], one["metrics"], rtol=1e-5, atol=0)
