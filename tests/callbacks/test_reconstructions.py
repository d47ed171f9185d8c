from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_struct.callbacks import PredictionWriter, ReconstructionPlot
from lightning_struct.callbacks.reconstructions import plot_reconstructions
from tests.callbacks.growing_batch_size.test_estimators_distributed import two_sharded_processes
from tests.mixins.helpers import make_trainer

IMAGES = torch.rand(12, 16, generator=torch.Generator().manual_seed(0))


class Darken(L.LightningModule):
    """Returns its images, multiplied by a weight that stays at one half."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, images):
        return self.weight * images

    def training_step(self, batch, batch_idx):
        return 0 * self(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return DataLoader(TensorDataset(IMAGES), batch_size=5)

    val_dataloader = predict_dataloader = train_dataloader


class Inverted(Darken):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [1 - images for images in batch]


class LabelsFirst(Darken):
    def inputs_and_targets(self, batch):
        return batch[1], batch[1]

    def training_step(self, batch, batch_idx):
        return 0 * self(batch[1]).sum()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(12), IMAGES), batch_size=5)

    val_dataloader = train_dataloader


def trainer(directory, callback, **arguments):
    return make_trainer(directory, callbacks=[callback], **({"max_epochs": 1} | arguments))


def shown(axes):
    return torch.stack([torch.as_tensor(cell.images[0].get_array()).flatten() for cell in axes])


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    ("module", "validation", "images"),
    [
        (Darken, None, IMAGES),
        (Inverted, None, 1 - IMAGES),  # the batch is that of the validation step
        (LabelsFirst, None, IMAGES),  # the module says where the images are
        (Darken, DataLoader(IMAGES, batch_size=5), IMAGES),  # the batch is the images
    ],
)
def test_picture_has_images_above_their_reconstructions(tmp_path, module, validation, images):
    drawn = []

    class Kept(ReconstructionPlot):
        def plot(self, trainer, pl_module):
            drawn.append(super().plot(trainer, pl_module))
            return drawn[-1]

    callback, module = Kept(count=4), module()
    limits = {} if validation is None else {"limit_train_batches": 0}
    run = trainer(tmp_path, callback, **limits)
    run.fit(module, None, validation)
    _, axes = drawn[-1] if drawn else callback.plot(run, module)
    assert torch.allclose(shown(axes[0]), images[:4]) and torch.allclose(shown(axes[1]), images[:4] / 2)
    if drawn:
        assert callback.paths == [tmp_path / "reconstructions.png"]
        assert callback.paths[0].read_bytes().startswith(b"\x89PNG")


class LeavesItsDevice(SingleDeviceStrategy):
    """Takes the module from a device before ``on_fit_end``, as Lightning does on a GPU."""

    def teardown(self):
        super().teardown()
        self._root_device = torch.device("meta")


def test_the_picture_is_drawn_where_the_module_is_after_the_training(tmp_path):
    callback = ReconstructionPlot()
    trainer(tmp_path, callback, accelerator="auto", strategy=LeavesItsDevice("cpu", CPUAccelerator())).fit(Darken())
    assert callback.paths[0].exists()


@pytest.mark.parametrize("shape", [(16,), (1, 4, 4)])
def test_images_may_have_a_channel_and_loaders_names(tmp_path, shape):
    images = IMAGES.view(12, *shape)
    callback = ReconstructionPlot(count=3)
    loader = DataLoader(TensorDataset(images), batch_size=5)
    trainer(tmp_path, callback).fit(Darken(), loader, {"clean": loader})
    assert callback.paths[0].exists()


def test_plotting_leaves_the_modes_of_all_modules_alone(tmp_path):
    callback = ReconstructionPlot()
    module, run = Darken(), trainer(tmp_path, callback)
    module.frozen = torch.nn.BatchNorm1d(16).eval()
    run.fit(module)
    module.train()
    module.frozen.eval()
    callback.plot(run, module)
    assert module.training and not module.frozen.training


class Pictures(Dataset):
    """Images that a batch has under their name."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"image": IMAGES[index]}


class FromADict(Darken):
    def training_step(self, batch, batch_idx):
        return super().training_step([batch["image"]], batch_idx)

    def train_dataloader(self):
        return DataLoader(Pictures(), batch_size=5)

    val_dataloader = train_dataloader


class InColour(Darken):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(12, 3, 4, 4)), batch_size=5)

    val_dataloader = train_dataloader


class WithLatents(Darken):
    def forward(self, images):
        return super().forward(images), images.mean(1)

    def training_step(self, batch, batch_idx):
        return 0 * self(batch[0])[0].sum()


CANNOT_BE_DRAWN = {
    "got a dict: have FromADict.inputs_and_targets": FromADict,
    "Images of 3 channels cannot be drawn": InColour,
    "WithLatents returns a tuple: return them alone": WithLatents,
}


@pytest.mark.parametrize("message", list(CANNOT_BE_DRAWN))
def test_what_cannot_be_drawn_ends_the_fit_in_the_sanity_check(tmp_path, message):
    run = trainer(tmp_path, ReconstructionPlot(), num_sanity_val_steps=1)
    with pytest.raises(MisconfigurationException, match=message):
        run.fit(CANNOT_BE_DRAWN[message]())
    assert run.global_step == 0


def test_missing_validation_loader_is_refused_before_training(tmp_path):
    with pytest.raises(MisconfigurationException, match="give a validation loader"):
        trainer(tmp_path, ReconstructionPlot(), limit_val_batches=0).fit(Darken())


class Sharded(Darken):
    """Each of its layers is gathered when it is called."""

    def __init__(self):
        super().__init__()
        self.weight = None
        self.network = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Linear(4, 16))

    def configure_model(self):
        for layer in (*self.network, self.network):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def forward(self, images):
        return self.network(images)


@pytest.mark.slow
def test_sharded_weights_are_gathered_by_all_processes(tmp_path):
    trainer(tmp_path, ReconstructionPlot(), **two_sharded_processes()).fit(Sharded())
    assert (tmp_path / "reconstructions.png").exists()


@pytest.mark.parametrize(
    ("images", "reconstructions", "message"),
    [
        (IMAGES, IMAGES[:, :9], "16 pixels, and their reconstructions 9"),
        (torch.zeros(2, 12), torch.zeros(2, 12), r"12 pixels are no image of 3 x 3: give image_size"),
    ],
)
def test_what_makes_no_picture_is_refused(images, reconstructions, message):
    with pytest.raises(MisconfigurationException, match=message):
        plot_reconstructions(images, reconstructions)


def test_images_of_a_given_size_are_drawn_so():
    _, axes = plot_reconstructions(torch.zeros(2, 12), torch.zeros(2, 12), image_size=(3, 4))
    assert axes[0, 0].images[0].get_array().shape == (3, 4)


class FewerAndFewer(Darken):
    def predict_step(self, batch, batch_idx):
        return self(batch[0])[:, batch_idx:]


def test_predictions_that_make_no_rows_are_refused_by_their_shapes(tmp_path):
    message = r"returned the shapes \(2, 14\), \(5, 15\), \(5, 16\): have it return rows"
    with pytest.raises(MisconfigurationException, match=message):
        trainer(tmp_path, PredictionWriter()).predict(FewerAndFewer())


def test_predictions_are_written_with_their_places_and_the_path_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        trainer(tmp_path, PredictionWriter("reconstructions")).predict(Darken())
    written = torch.load(tmp_path / "reconstructions.pt")
    assert torch.equal(written["reconstructions"], IMAGES / 2) and written["indices"].tolist() == list(range(12))
    assert str(tmp_path / "reconstructions.pt") in caplog.text


class Stream(IterableDataset):
    def __iter__(self):
        return iter(IMAGES)


LEFT_OUT = "PredictionWriter leaves 'indices' out"


def test_places_that_are_not_known_are_left_out_with_a_warning(tmp_path):
    loader = DataLoader(Stream(), batch_size=5, collate_fn=lambda rows: [torch.stack(rows)])
    with pytest.warns(UserWarning, match=f"{LEFT_OUT}: 12 rows were predicted, and the places of 0 samples"):
        trainer(tmp_path, PredictionWriter()).predict(Darken(), loader)
    written = torch.load(tmp_path / "predictions.pt")
    assert set(written) == {"predictions"} and torch.equal(written["predictions"], IMAGES / 2)


class Fewer(Darken):
    def predict_step(self, batch, batch_idx):
        return self(batch[0])[:2]


def test_places_of_other_samples_than_the_rows_are_left_out_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=f"{LEFT_OUT}: 6 rows were predicted, and the places of 12 samples"):
        trainer(tmp_path, PredictionWriter()).predict(Fewer())
    assert set(torch.load(tmp_path / "predictions.pt")) == {"predictions"}


@pytest.mark.parametrize("name", ["indices", "a/b", "", None, 5])
def test_a_name_that_is_none_of_a_file_is_refused_before_the_predictions(name):
    with pytest.raises(MisconfigurationException, match=f"name must be the name of a file .*, but is {name!r}"):
        PredictionWriter(name)


def test_fast_dev_run_writes_nothing(tmp_path):
    trainer(tmp_path, ReconstructionPlot(), fast_dev_run=True).fit(Darken())
    trainer(tmp_path, PredictionWriter("reconstructions"), fast_dev_run=True).predict(Darken())
    assert not list(tmp_path.iterdir())


class DarkenInADict(Darken):
    predicted = 0

    def predict_step(self, batch, batch_idx):
        self.predicted += 1
        return {"images": super().predict_step(batch, batch_idx)}


def test_predictions_that_are_no_tensors_are_refused(tmp_path):
    module = DarkenInADict()
    with pytest.raises(
        MisconfigurationException, match="PredictionWriter writes tensors, but predict_step returned dict"
    ):
        trainer(tmp_path, PredictionWriter("reconstructions")).predict(module)
    assert module.predicted == 1  # the other batches would be predicted in vain


def test_predictions_of_several_loaders_are_refused(tmp_path):
    loader = DataLoader(TensorDataset(IMAGES), batch_size=5)
    with pytest.raises(MisconfigurationException, match="predictions of one loader: leave out others"):
        trainer(tmp_path, PredictionWriter()).predict(Darken(), [loader, loader])


def test_paths_of_the_predictions_of_several_processes_are_said(tmp_path, caplog):
    of_second = SimpleNamespace(
        fast_dev_run=False, log_dir=str(tmp_path), world_size=2, global_rank=1, is_global_zero=False
    )
    with caplog.at_level("INFO"):
        PredictionWriter("classes").write_on_epoch_end(of_second, None, [torch.arange(2)], [[[1, 3]]])
    assert [file.name for file in tmp_path.iterdir()] == ["classes_1.pt"]
    assert "classes_0.pt to _1.pt, one for each process" in caplog.text
