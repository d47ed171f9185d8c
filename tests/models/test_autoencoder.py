from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_struct.models import Autoencoder, SHFAutoencoder
from lightning_struct.optim import SHF

SIZES = [16, 8, 3]


@pytest.fixture
def images():
    """Mixtures of two patterns: a code of three can hold them."""
    generator = torch.Generator().manual_seed(0)
    patterns, share = torch.rand(2, 16, generator=generator), torch.rand(24, 1, generator=generator)
    return share * patterns[0] + (1 - share) * patterns[1]


def loaders(images):
    return DataLoader(images, batch_size=12), DataLoader(images, batch_size=10)


def trainer(directory, **arguments):
    defaults = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    defaults |= {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": directory}
    return L.Trainer(**(defaults | arguments))


def error_ratio_of_fit(model, images, run):
    """Validation error after training, as a fraction of the one before."""
    (before,) = run.validate(model, loaders(images)[1], verbose=False)
    run.fit(model, *loaders(images))
    return run.callback_metrics["val_loss"].item() / before["val_loss"]


def test_decoder_mirrors_the_encoder():
    model = Autoencoder(SIZES)
    shapes = [tuple(p.shape) for p in (*model.encoder.parameters(), *model.decoder.parameters()) if p.ndim == 2]
    assert shapes == [(8, 16), (3, 8), (8, 3), (16, 8)]


def test_every_layer_is_logistic(images):
    model = Autoencoder(SIZES)
    values = images
    for layer in [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]:
        values = torch.sigmoid(layer(values))
    assert torch.equal(model(images), values)


def test_sparse_start_connects_each_unit_to_few_and_has_no_biases():
    model = Autoencoder(SIZES, sparse_connections=2)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(((layer.weight != 0).sum(dim=1) == 2).all() and not layer.bias.any() for layer in layers)


@pytest.mark.parametrize("sizes", [[16], [16, 0, 3], []])
def test_sizes_that_make_no_autoencoder_are_refused(sizes):
    with pytest.raises(MisconfigurationException, match="layer_sizes must name the pixels, the code"):
        Autoencoder(sizes)


def test_logged_errors_are_averages_over_samples_in_both_units(tmp_path, images):
    model = Autoencoder(SIZES)
    run = trainer(tmp_path)
    run.test(model, loaders(images)[1], verbose=False)
    squared_error = (model(images) - images).square().sum(dim=1).mean().item()
    assert run.callback_metrics["test_squared_error"].item() == pytest.approx(squared_error, rel=1e-5)
    assert run.callback_metrics["test_loss"].item() == pytest.approx(squared_error / 2, rel=1e-5)


def test_images_that_are_not_flat_are_refused():
    with pytest.raises(MisconfigurationException, match=r"The batch is \(5, 1, 4, 4\), but images must be flat"):
        Autoencoder([16, 2]).training_step([torch.rand(5, 1, 4, 4)], 0)


def test_any_optimizer_trains_it(tmp_path, images):
    torch.manual_seed(0)
    model = Autoencoder(SIZES, optimizer=partial(torch.optim.Adam, lr=0.05))
    assert error_ratio_of_fit(model, images, trainer(tmp_path, max_epochs=12)) < 0.6


def test_scheduler_that_needs_a_metric_gets_the_validation_error(tmp_path, images):
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e9, threshold_mode="abs")
    model = Autoencoder(SIZES, optimizer=partial(torch.optim.SGD, lr=0.1), lr_scheduler=plateau)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(model, *loaders(images))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_training_that_diverges_is_an_error(tmp_path, images):
    model = Autoencoder(SIZES)
    torch.nn.init.constant_(model.encoder[0].bias, float("nan"))
    with pytest.raises(ValueError, match="train_loss is nan in batch 0"):
        trainer(tmp_path, num_sanity_val_steps=0).fit(model, *loaders(images))


def test_predictions_are_reconstructions(tmp_path, images):
    model = Autoencoder(SIZES)
    predictions = trainer(tmp_path).predict(model, loaders(images)[1])
    assert torch.allclose(torch.cat(predictions), model(images), atol=1e-6)


@pytest.mark.parametrize("model_class", [Autoencoder, SHFAutoencoder])
def test_checkpoint_makes_the_same_model_again(tmp_path, images, model_class):
    model = model_class(SIZES, sparse_connections=4)
    trainer(tmp_path, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, save_last=True)]).fit(
        model, *loaders(images)
    )
    again = model_class.load_from_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(again(images), model(images))


def test_shf_trains_the_module_it_is_made_for(tmp_path, images):
    torch.manual_seed(0)
    model = SHFAutoencoder(SIZES, sparse_connections=4, optimizer=partial(SHF, loss="mse", damping=1.0))
    assert error_ratio_of_fit(model, images, trainer(tmp_path, max_epochs=10)) < 0.5


def test_shf_logs_the_loss_in_the_unit_of_the_model(tmp_path, images):
    model = SHFAutoencoder(SIZES, sparse_connections=4)
    run = trainer(tmp_path, num_sanity_val_steps=0, limit_val_batches=0, max_steps=1)
    assert model.configure_optimizers().damping == 10.0  # the usual one of the paper
    expected = 0.5 * (model(images) - images).square().sum(dim=1).mean()
    run.fit(model, DataLoader(images, batch_size=24))
    assert run.callback_metrics["train_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
