"""The recipe that compresses a network in the middle of its training, on little data."""

from pathlib import Path

import pytest
import torch

from lightning_struct.models import CharacterTransformer
from lightning_struct.nn import StructuredLinear
from lightning_struct.recipes import compress_network

pytestmark = pytest.mark.usefixtures("without_pictures")
QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--data.synthetic=true",
]
LITTLE = ["--data.train_size=16", "--data.val_size=8", "--data.test_size=8", "--data.batch_size=8"]
NARROW = ["--model.network.width=32", "--data.steps=16"]


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def run(subcommand, *arguments):
    return compress_network.main([subcommand, *arguments, *QUIET, *LITTLE])


def test_transformer_is_compressed_trained_on_and_tested_from_its_checkpoint(caplog):
    with caplog.at_level("INFO"):
        cli = run("fit", "--config", "transformer", *NARROW)
    assert size(cli.model) <= 0.25 * size(CharacterTransformer(width=32))
    assert (
        f"Compression at the beginning of epoch 3: {size(CharacterTransformer(width=32)):,} parameters" in caplog.text
    )
    assert any(isinstance(layer, StructuredLinear) for layer in cli.model.modules())
    best = Path(cli.trainer.checkpoint_callback.best_model_path)
    tested = run("test", "--ckpt_path", str(best))
    assert size(tested.model) == size(cli.model)
    loaded = torch.load(best, weights_only=True)["state_dict"]
    assert all(torch.equal(value, loaded[name]) for name, value in tested.model.state_dict().items())


@pytest.mark.slow
def test_resnet_is_compressed():
    cli = run("fit", "--config", "resnet_loss", "--model.network.channels=4", "--trainer.max_epochs=11")
    assert any(isinstance(layer, StructuredLinear) for layer in cli.model.modules())
