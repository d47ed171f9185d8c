import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Subset, random_split

from lightning_struct.data import (
    BatchedTensorDataset,
    CurvesDataModule,
    DrawLoader,
    IndependentDraws,
    MNISTDataModule,
    keep_batch,
)
from lightning_struct.data.in_memory import image_dataset, official_parts, split_at_random
from lightning_struct.models import Autoencoder


@pytest.fixture
def dataset():
    return BatchedTensorDataset(torch.arange(10.0).unsqueeze(1), torch.arange(10))


def small_curves(**arguments):
    datamodule = CurvesDataModule(**({"train_size": 40, "val_size": 12, "test_size": 7} | arguments))
    datamodule.setup("fit")
    return datamodule


def test_batches_come_whole_from_a_subset(dataset):
    (_, labels), *_ = DataLoader(Subset(dataset, [7, 8, 9]), batch_size=2, collate_fn=keep_batch)
    assert labels.tolist() == [7, 8]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_samples_are_collated_by_default_as_of_a_tensor_dataset(dataset, workers):
    for data in (dataset, Subset(dataset, [7, 8, 1]), random_split(dataset, [0.5, 0.5])[1], dataset + dataset):
        batches = list(DataLoader(data, batch_size=2, num_workers=workers))
        assert all(isinstance(batch, list) for batch in batches)
        for column in (0, 1):
            expected = torch.stack([data[index][column] for index in range(len(data))])
            assert torch.equal(torch.cat([batch[column] for batch in batches]), expected)


def test_own_collate_fn_gets_the_samples(dataset):
    def labels(samples):
        return [int(label) for _, label in samples], len(samples), [int(label) for _, label in samples[1:]]

    assert next(iter(DataLoader(dataset, batch_size=3, collate_fn=labels))) == ([0, 1, 2], 3, [1, 2])
    draws = IndependentDraws(dataset, 3, 1)
    assert next(iter(DrawLoader(dataset, draws, collate_fn=labels)))[1] == 3


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.tensor([[0.5, float("nan")]]), r"Pixels of Noise must lie in \[0, 1\], but go from nan"),
        (torch.tensor([[0.5, -0.1]]), r"must lie in \[0, 1\]"),
        (torch.tensor([[0.5, 1.1]]), r"must lie in \[0, 1\]"),
        (torch.zeros(0, 4), "Noise has no images"),
    ],
)
def test_images_that_are_none_are_refused(images, message):
    with pytest.raises(MisconfigurationException, match=message):
        image_dataset("Noise", images)


def test_random_parts_are_disjoint_and_repeat_with_the_seed():
    sizes = {"train_size": 60, "val_size": 30}
    first, second = split_at_random(100, sizes, of="noise", seed=3)
    assert len(set(first.tolist()) | set(second.tolist())) == 90
    assert torch.equal(first, split_at_random(100, sizes, of="noise", seed=3)[0])


def test_parts_larger_than_the_whole_are_refused():
    with pytest.raises(MisconfigurationException) as error:
        split_at_random(100, {"train_size": 60, "val_size": 50}, of="some noise")
    assert str(error.value) == (
        "Cannot take train_size=60 and val_size=50 from the 100 samples of some noise: choose smaller sizes "
        "(--data.train_size, --data.val_size)."
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("val", r"train_size=20 and val_size=9 from the 25 samples of the training part of IMDB.*\(--data.train_size,"),
        ("test", r"test_size=9 from the 8 samples of the test part of IMDB: choose smaller sizes \(--data.test_size\)"),
    ],
)
def test_sizes_beyond_the_official_parts_are_named_by_their_options(part, message):
    sizes = {"train": 20, "val": 5, "test": 8}
    assert [len(numbers) for numbers in official_parts("IMDB", 25, 8, sizes)] == [20, 5, 8]
    with pytest.raises(MisconfigurationException, match=message):
        official_parts("IMDB", 25, 8, sizes | {part: 9})


def test_independent_draws_are_fresh_and_without_replacement():
    loader = small_curves(batch_size=30, draws_per_epoch=4).train_dataloader()
    batches = [images for (images,) in loader]
    assert isinstance(loader, DrawLoader) and len(batches) == 4
    assert all(images.shape == (30, 784) and len(images.unique(dim=0)) == 30 for images in batches)
    assert not torch.equal(batches[0], batches[1])


def test_an_epoch_passes_through_every_training_image_once():
    datamodule = small_curves(batch_size=16, draws="epoch")
    images = torch.cat([images for (images,) in datamodule.train_dataloader()])
    assert torch.equal(images.unique(dim=0), datamodule.splits.train.tensors[0].unique(dim=0)) and len(images) == 40


def small_mnist(**arguments):
    sizes = {"train_size": 40, "val_size": 12, "test_size": 7, "draws": "epoch", "synthetic": True}
    datamodule = MNISTDataModule(**(sizes | arguments))
    datamodule.setup("fit")
    return datamodule


def test_what_does_not_fill_a_batch_is_dropped_if_asked_for():
    def sizes(drop_last):
        return [len(images) for images, _ in small_mnist(batch_size=15, drop_last=drop_last).train_dataloader()]

    assert sizes(False) == [15, 15, 10] and sizes(True) == [15, 15]


def test_passes_are_shuffled_anew_each_epoch():
    loader = small_curves(batch_size=40, draws="epoch").train_dataloader()
    (first,) = next(iter(loader))
    loader.sampler.set_epoch(1)
    (second,) = next(iter(loader))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("loader", "part"), [("val", "val"), ("test", "test"), ("predict", "test"), ("", "train")])
def test_evaluation_loaders_give_their_set_in_order(loader, part):
    datamodule = small_curves(eval_batch_size=5)
    batches = getattr(datamodule, f"{loader}_dataloader")() if loader else datamodule.evaluation_dataloader("train")
    assert torch.equal(torch.cat([images for (images,) in batches]), getattr(datamodule.splits, part).tensors[0])


def test_loader_before_setup_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Call setup\(\) of CurvesDataModule"):
        CurvesDataModule().val_dataloader()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draws": "sometimes"}, "draws must be 'independent' or 'epoch', but is 'sometimes'"),
        ({"batch_size": 0}, "batch_size must be at least 1, but is 0"),
        ({"draws_per_epoch": 0}, "draws_per_epoch must be at least 1, but is 0"),
        ({"seed": -1}, "seed must be at least 0, but is -1"),
        ({"test_size": 0}, "test_size must be at least 1, but is 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        CurvesDataModule(**arguments)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_a_few_batches_needs_passes(tmp_path):
    datamodule = small_curves(batch_size=10)
    trainer = L.Trainer(overfit_batches=1, max_epochs=1, logger=False, accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(MisconfigurationException, match=r"overfit_batches=.* put it there.*--data.draws=epoch"):
        trainer.fit(Autoencoder([784, 4]), datamodule=datamodule)


def trainer_of(processes, number, **replicas):
    attributes = {"world_size": processes, "global_rank": number, "distributed_sampler_kwargs": replicas}
    return type("Trainer", (), attributes)()


def test_batch_that_the_processes_cannot_share_is_refused():
    datamodule = small_curves(batch_size=15, draws="epoch")
    datamodule.trainer = trainer_of(2, 0)
    with pytest.raises(MisconfigurationException, match="batch_size=15 cannot be shared by 2 processes"):
        datamodule.train_dataloader()


def test_batch_size_of_passes_is_over_all_processes():
    datamodule = small_curves(batch_size=10, draws="epoch")
    datamodule.trainer = trainer_of(2, 1)
    batches = [images for (images,) in datamodule.train_dataloader()]
    assert [len(images) for images in batches] == [5, 5, 5, 5]


@pytest.mark.parametrize("draws", ["epoch", "independent"])
def test_processes_that_share_a_model_read_the_same_batches(draws):
    datamodule = small_curves(batch_size=10, draws=draws, draws_per_epoch=4)
    read = []
    for rank in (2, 3):  # of two replicas of two processes each
        datamodule.trainer = trainer_of(4, rank, num_replicas=2, rank=rank // 2)
        read.append(torch.cat([images for (images,) in datamodule.train_dataloader()]))
    assert len(read[0]) == 20
    torch.testing.assert_close(*read)
