from itertools import chain, islice
from math import inf

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from lightning_struct import GrowingBatchSize
from lightning_struct.data import BatchedTensorDataset, DrawLoader, IndependentDraws, InMemoryDataModule
from lightning_struct.data.in_memory import Splits


@pytest.fixture
def dataset():
    return TensorDataset(torch.arange(20.0).unsqueeze(1), torch.arange(20))


class Squares(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"square": index * index}


class SquaresAtOnce(Squares):
    def __getitems__(self, indices):
        return [{"square": -index} for index in indices]


class Recorder(L.LightningModule):
    """Remembers the samples of every batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = []

    def forward(self, batch):
        return batch

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[1].tolist())
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Passes(InMemoryDataModule):
    def load_splits(self):
        return Splits(*3 * [BatchedTensorDataset(torch.zeros(20), torch.arange(20))])


def batches_of_a_fit(dataset, tmp_path, ckpt_path=None, limits=None, passes=False, growing=False, **checkpointing):
    module = Recorder()
    callbacks = [GrowingBatchSize(theta=inf)] if growing else []
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **checkpointing)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, callbacks=[checkpoint, *callbacks], enable_progress_bar=False,
        enable_model_summary=False, **(limits or {"max_epochs": 3}),
    )  # fmt: skip
    if passes:
        trainer.fit(module, datamodule=Passes(5, "epoch"), ckpt_path=ckpt_path)
    else:
        draws = DrawLoader(dataset, IndependentDraws(dataset, 6, 4))
        trainer.fit(module, draws, DataLoader(dataset), ckpt_path=ckpt_path)
    return module.batches


def test_a_draw_takes_no_sample_twice_and_all_samples_equally_often(dataset):
    draws = list(IndependentDraws(dataset, 5, 2000))
    assert len(draws) == 2000 and all(len(set(draw)) == 5 for draw in draws)
    counts = torch.bincount(torch.tensor(draws).flatten())
    assert len(counts) == 20 and (counts - 500).abs().max() < 4 * (2000 * 0.25 * 0.75) ** 0.5


def test_draws_follow_their_seed(dataset):
    first, again, other = (list(IndependentDraws(dataset, 6, 3, seed=seed)) for seed in (4, 4, 5))
    assert first == again != other


def test_neither_draws_nor_loader_touch_the_global_random_state(dataset):
    state = torch.random.get_rng_state()
    list(DrawLoader(dataset, IndependentDraws(dataset, 6, 3)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_new_size_holds_from_the_next_draw(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    sizes = []
    for draw in draws:
        sizes.append(len(draw))
        draws.batch_size += 2
    assert sizes == [6, 8, 10]


@pytest.mark.parametrize(
    ("size", "error"), [(0, MisconfigurationException), (21, MisconfigurationException), (6.5, TypeError)]
)
def test_a_refused_size_leaves_the_old_one(dataset, size, error):
    draws = IndependentDraws(dataset, 6, 3)
    with pytest.raises(error, match="from 1 to the 20 samples of the data set|must be a whole number"):
        draws.batch_size = size
    assert draws.batch_size == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draws_per_epoch": 0}, "draws_per_epoch must be at least 1, but is 0"),
        ({"draws_per_epoch": 2.5}, "draws_per_epoch must be a whole number >= 1, but is 2.5"),
        ({"seed": -1}, "seed must be at least 0, but is -1"),
        ({"batch_size": -1}, "from 1 to the 20 samples of the data set.* but is -1"),
        (
            {"batch_size": 2, "num_replicas": 3, "rank": 0},
            "batch_size=2 leaves some of the 3 processes without a sample",
        ),
    ],
)
def test_wrong_arguments_are_named(dataset, arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        IndependentDraws(dataset, **({"batch_size": 6, "draws_per_epoch": 3} | arguments))


def test_blocks_of_the_processes_are_alike_and_make_the_draw_of_one(dataset):
    shares = [IndependentDraws(dataset, 11, 3, num_replicas=3, rank=rank) for rank in range(3)]
    draws = list(zip(*shares, strict=True))
    assert [list(chain.from_iterable(blocks)) for blocks in draws] == list(IndependentDraws(dataset, 11, 3))
    assert all([len(block) for block in blocks] == [4, 4, 3] for blocks in draws)


# What is done in turn, an epoch that is named or a number of draws that are taken, and the draw that comes then.
@pytest.mark.parametrize(
    ("done", "first"),
    [
        ([("take", 3)], 3),  # the next epoch has new draws
        ([("take", 1)], 1),  # an epoch that is left in the middle is continued
        ([("take", 1), ("name", 0)], 1),  # naming the present epoch changes nothing
        ([("take", 1), ("name", 1)], 3),  # naming another one passes over the rest of this one
        ([("name", 2)], 6),  # the first epoch can be any
        ([("take", 3), ("name", 1), ("name", 2)], 3),  # an epoch that is named without a draw is not passed over
        ([("name", 0), ("take", 3), ("name", 1), ("take", 3), ("name", 0)], 6),  # as in a second fit
    ],
)
def test_numbers_of_draws_go_on_from_epoch_to_epoch(dataset, done, first):
    draws = IndependentDraws(dataset, 6, 3)
    for action, number in done:
        if action == "name":
            draws.set_epoch(number)
        else:
            list(islice(draws, number))
    assert list(draws) == list(IndependentDraws(dataset, 6, 12))[first : first + 3 - first % 3]


def test_state_goes_on_with_the_very_next_draw_and_size(dataset):
    draws, again = IndependentDraws(dataset, 6, 4), IndependentDraws(dataset, 3, 4)
    list(islice(draws, 2))
    draws.batch_size = 9
    again.load_state_dict(draws.state_dict())
    assert list(again) == list(draws)


def test_loader_indexes_tensors_once_per_batch(dataset):
    values, labels = next(iter(DrawLoader(dataset, IndependentDraws(dataset, 6, 3))))
    assert labels.tolist() == next(iter(IndependentDraws(dataset, 6, 3))) and torch.equal(values[:, 0], labels.float())


@pytest.mark.parametrize(("data", "sign"), [(Squares(), 1), (SquaresAtOnce(), -1)])
def test_loader_collates_samples_which_it_fetches_at_once_where_it_can(data, sign):
    draws = IndependentDraws(data, 6, 3)
    expected = [index * index if sign > 0 else -index for index in draws.draw(0).tolist()]
    assert next(iter(DrawLoader(data, draws)))["square"].tolist() == expected


def test_draws_serve_as_batch_sampler(dataset):
    loader = DataLoader(dataset, batch_sampler=IndependentDraws(dataset, 6, 3))
    assert [labels.tolist() for _, labels in loader] == list(IndependentDraws(dataset, 6, 3))


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (None, {"num_workers": 2}, "DrawLoader needs num_workers=0, but got 2: batches fetched"),
        (SequentialSampler(range(20)), {}, "DrawLoader needs IndependentDraws, but got SequentialSampler"),
        (None, {"batch_size": 6}, r"no batch_size: .* IndependentDraws\(batch_size=\.\.\.\)"),
        (IndependentDraws(range(5), 2, 3), {}, "The draws are from 5 samples, but the data set has 20"),
    ],
)
def test_loader_refuses_what_it_cannot_read(dataset, sampler, options, message):
    with pytest.raises(MisconfigurationException, match=message):
        DrawLoader(dataset, sampler or IndependentDraws(dataset, 6, 3), **options)


def test_predictions_of_draws_are_refused_with_the_remedy(dataset):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match=r"Trainer\.predict .* predict with an ordinary DataLoader"):
        trainer.predict(Recorder(), DrawLoader(dataset, IndependentDraws(dataset, 6, 3)))


def test_trainer_makes_new_draws_in_each_epoch(dataset, tmp_path):
    assert batches_of_a_fit(dataset, tmp_path) == list(IndependentDraws(dataset, 6, 12))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "limits",
    [{"max_epochs": 3}, {"max_steps": 12}, {"max_epochs": 6, "limit_train_batches": 2}],
    ids=["epochs", "steps", "short epochs"],
)
@pytest.mark.parametrize(
    ("checkpointing", "step"),
    [
        ({"every_n_train_steps": 1}, 6),
        ({"every_n_train_steps": 1}, 8),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, 8),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, 8),
    ],
    ids=["within an epoch", "after its last batch", "after validation", "after the epoch"],
)
@pytest.mark.parametrize("passes", [{}, {"passes": True}, {"passes": True, "growing": True}])
def test_trainer_resumes_with_the_very_next_samples(dataset, tmp_path, limits, checkpointing, step, passes):
    options = {"limits": limits, **passes, **checkpointing}
    whole = batches_of_a_fit(dataset, tmp_path, **options)
    rest = batches_of_a_fit(dataset, tmp_path / "rest", tmp_path / f"step={step}.ckpt", **options)
    assert rest == whole[step:]


def test_trainer_that_puts_its_own_sampler_in_is_told_why_not(dataset, tmp_path):
    with pytest.raises(MisconfigurationException, match="If Trainer\\(overfit_batches=...\\) put it there"):
        batches_of_a_fit(dataset, tmp_path, limits={"overfit_batches": 2, "max_epochs": 1})
