from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_struct.callbacks import OperatorMonitor, ReconstructionPlot
from lightning_struct.callbacks.operator_monitor import plot_layer
from lightning_struct.nn import LDRSubdiagonal, LDRTridiagonal, LowRank
from tests.mixins.helpers import make_trainer


class Network(L.LightningModule):
    def __init__(self, layer):
        super().__init__()
        self.hidden = layer
        self.head = nn.Linear(layer.out_features, 1)
        self.logged_at = []

    def training_step(self, batch, batch_idx):
        return self.head(torch.tanh(self.hidden(batch[0]))).square().mean()

    def log_dict(self, dictionary, *arguments, **options):
        self.logged_at.append(self.global_step)
        super().log_dict(dictionary, *arguments, **options)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step(module, batch):
    return module.training_step(batch, 0)


def fit(tmp_path, layer, monitor, steps=6, **options):
    loader = DataLoader(TensorDataset(torch.randn(4 * steps, layer.in_features)), batch_size=4)
    options = {"logger": CSVLogger(tmp_path, name="", version=""), "log_every_n_steps": 1} | options
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[monitor], **options)
    trainer.fit(Network(layer), loader)
    return trainer


def test_ranges_are_logged_under_stable_names(tmp_path):
    layer = LDRSubdiagonal(16, 16, 2)
    metrics = fit(tmp_path, layer, OperatorMonitor(every_n_steps=2)).callback_metrics
    names = {f"operators/hidden/{x}_{what}" for x in "ab" for what in ("min", "max", "log_range")}
    assert set(metrics) == names | {"operators/hidden/method"}
    assert metrics["operators/hidden/b_min"] == min(layer.subdiagonal_b.min(), layer.corner_b)
    assert metrics["operators/hidden/a_max"] == layer.subdiagonal_a.max()
    assert metrics["operators/hidden/a_log_range"] > 0


def test_tridiagonal_operators_are_logged_too(tmp_path):
    layer = LDRTridiagonal(16, 12, 2)
    metrics = fit(tmp_path, layer, OperatorMonitor(every_n_steps=1)).callback_metrics
    assert set(metrics) == {f"operators/hidden/{x}_{what}" for x in "ab" for what in ("min", "max")}
    assert metrics["operators/hidden/a_min"] == layer.operator_entries()[0].min()


def test_log_range_is_of_the_products_less_their_trend(tmp_path):
    layer = LDRSubdiagonal(9, 9)
    with torch.no_grad():
        layer.subdiagonal_a.fill_(0.9)
        layer.subdiagonal_b.copy_(torch.tensor([2.0, 2.0, 2.0, 2.0, 0.5, 0.5, 0.5, 0.5]))
    metrics = fit(tmp_path, layer, OperatorMonitor(1), steps=1, max_steps=1).callback_metrics
    assert metrics["operators/hidden/a_log_range"] < 0.5  # one step of SGD away from 0
    assert metrics["operators/hidden/b_log_range"] == pytest.approx(4 * torch.tensor(2.0).log().item(), rel=0.2)


def test_every_n_steps_of_each_trainer(tmp_path):
    monitor = OperatorMonitor(every_n_steps=2)
    for _ in range(2):
        trainer = fit(tmp_path, LDRSubdiagonal(16, 16), monitor, steps=5)
        assert trainer.lightning_module.logged_at == [2, 4]


@pytest.mark.usefixtures("pictures")
def test_pictures_are_written_at_the_end(tmp_path):
    monitor = OperatorMonitor()
    trainer = fit(tmp_path, LDRSubdiagonal(16, 12), monitor)
    assert [path.name for path in monitor.paths] == ["operators_hidden.png"]
    assert monitor.paths[0].read_bytes()[:4] == b"\x89PNG" and monitor.paths[0].parent == Path(trainer.log_dir)


def test_plot_shows_the_matrix_and_the_subdiagonal_as_an_image(tmp_path):
    layer = LDRSubdiagonal(16, 12)
    monitor = OperatorMonitor()
    fit(tmp_path, layer, monitor)
    for argument in ("hidden", layer):
        figure, (matrix, image) = monitor.plot(argument)
        shown = torch.from_numpy(matrix.images[0].get_array().filled(0)).float()
        torch.testing.assert_close(shown, layer.to_dense().detach())
        pixels = image.images[0].get_array()
        assert pixels.shape == (4, 4) and pixels.mask[0, 0]
        torch.testing.assert_close(
            torch.from_numpy(pixels.flatten()[1:].filled(0)).float(), layer.subdiagonal_b.detach()
        )
        assert figure.axes[0] is matrix


def test_zero_is_the_middle_of_the_colours_of_a_matrix():
    low, high = plot_layer(LowRank(16, 12, 2))[1][0].images[0].get_clim()
    assert low == -high < 0


def test_entries_of_one_sign_use_all_colours():
    layer = LDRSubdiagonal(16, 16)
    with torch.no_grad():
        layer.subdiagonal_b.uniform_(0.9, 1.1)
    (_, axes) = plot_layer(layer)[1]
    assert axes.images[0].get_clim() == pytest.approx(
        (layer.subdiagonal_b.min().item(), layer.subdiagonal_b.max().item())
    )


def test_an_extreme_entry_does_not_pale_the_others(monkeypatch):
    layer, matrix = LowRank(64, 64, 2), torch.randn(64, 64)
    matrix[0, 0] = 1000
    monkeypatch.setattr(layer, "to_dense", lambda: matrix)
    assert plot_layer(layer)[1][0].images[0].get_clim()[1] < 10


@pytest.mark.parametrize(("size", "image_size", "images"), [(12, None, 0), (12, (3, 4), 1), (16, (2, 8), 1)])
def test_shape_of_the_image(size, image_size, images):
    _, (_, axes) = plot_layer(LDRTridiagonal(size, size), image_size)
    assert len(axes.images) == images
    if image_size:
        assert axes.images[0].get_array().shape == image_size


def test_layer_without_learned_operators_shows_its_matrix(tmp_path):
    monitor = OperatorMonitor(every_n_steps=1)
    assert not fit(tmp_path, LowRank(16, 12, 2), monitor).callback_metrics
    assert len(monitor.plot("hidden")[1]) == 1 and len(monitor.paths) == 1


def test_module_without_structured_layers_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="Network has none"):
        fit(tmp_path, nn.Linear(16, 12), OperatorMonitor())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(OperatorMonitor, 0), "every_n_steps must be at least 1, but is 0"),
        (partial(OperatorMonitor().plot, "hidden"), "no structured layer 'hidden'; there are: none, before training"),
        (partial(OperatorMonitor(image_size=(3, 5)).plot, LDRSubdiagonal(16, 16)), "16 inputs are no image of 3 x 5"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(MisconfigurationException, match=message):
        call()


def test_the_image_size_is_that_of_the_layers_that_read_images(tmp_path):
    monitor = OperatorMonitor(image_size=(2, 8))
    hidden = nn.Sequential(LDRSubdiagonal(16, 12), LDRSubdiagonal(12, 12))
    hidden.in_features, hidden.out_features = 16, 12
    fit(tmp_path, hidden, monitor)
    assert [path.name for path in monitor.paths] == ["operators_hidden.0.png", "operators_hidden.1.png"]


@pytest.mark.parametrize("callback", [OperatorMonitor, ReconstructionPlot])
@pytest.mark.parametrize("image_size", [5, (3,), (4, -4)])
def test_an_image_size_that_is_no_pair_of_numbers_is_refused_before_the_fit(callback, image_size):
    with pytest.raises(MisconfigurationException, match=r"image_size must be \(height, width\) .*, but is "):
        callback(image_size=image_size)
