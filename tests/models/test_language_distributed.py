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


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("notes")
    fit(directory, devices=1)
    fit(directory, **two_processes())
    return {path.stem: torch.load(path) for path in directory.glob("*.pt")}


def test_weights_are_those_of_one_process(notes):
    assert notes["2_0"]["steps"] == notes["1_0"]["steps"] == 22
    torch.testing.assert_close(notes["2_0"]["weights"], notes["1_0"]["weights"], rtol=0, atol=1e-10)


def test_metrics_are_those_of_one_process(notes):
    for rank in ("2_0", "2_1"):
        torch.testing.assert_close(notes[rank]["metrics"], notes["1_0"]["metrics"], rtol=1e-5, atol=0)


def test_replicas_are_bitwise_equal(notes):
    assert torch.equal(notes["2_0"]["weights"], notes["2_1"]["weights"])
