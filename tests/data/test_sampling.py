from itertools import chain, islice

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from lightning_struct.data import DrawLoader, IndependentDraws


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


def batches_of_a_fit(dataset, tmp_path, ckpt_path=None, limits=None, **checkpointing):
    module = Recorder()
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **checkpointing)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, callbacks=[checkpoint], enable_progress_bar=False, enable_model_summary=False,
        **(limits or {"max_epochs": 3}),
    )  # fmt: skip
    trainer.fit(module, DrawLoader(dataset, IndependentDraws(dataset, 6, 4)), DataLoader(dataset), ckpt_path=ckpt_path)
    return module.batches


def test_a_draw_takes_no_sample_twice(dataset):
    assert all(len(set(draw)) == 15 for draw in IndependentDraws(dataset, 15, 50))


def test_a_draw_takes_samples_of_the_data_set_only(dataset):
    assert {index for draw in IndependentDraws(dataset, 15, 50) for index in draw} == set(range(20))


def test_draws_are_not_passes_through_the_data(dataset):
    first, second = IndependentDraws(dataset, 10, 2)
    assert set(first) & set(second)


def test_every_sample_is_drawn_equally_often(dataset):
    counts = torch.bincount(torch.tensor(list(IndependentDraws(dataset, 5, 2000))).flatten(), minlength=20)
    assert (counts - 500).abs().max() < 4 * (2000 * 0.25 * 0.75) ** 0.5


def test_draws_repeat_with_their_seed(dataset):
    assert list(IndependentDraws(dataset, 6, 3, seed=4)) == list(IndependentDraws(dataset, 6, 3, seed=4))


def test_another_seed_draws_otherwise(dataset):
    assert list(IndependentDraws(dataset, 6, 3, seed=4)) != list(IndependentDraws(dataset, 6, 3, seed=5))


def test_draws_leave_the_global_random_state_alone(dataset):
    state = torch.random.get_rng_state()
    list(IndependentDraws(dataset, 6, 3))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_loader_leaves_the_global_random_state_alone(dataset):
    state = torch.random.get_rng_state()
    list(DrawLoader(dataset, IndependentDraws(dataset, 6, 3)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_length_is_the_number_of_draws(dataset):
    draws = IndependentDraws(dataset, 6, 7)
    assert len(draws) == len(list(draws)) == 7


def test_a_new_size_holds_from_the_next_draw(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    sizes = []
    for draw in draws:
        sizes.append(len(draw))
        draws.batch_size += 2
    assert sizes == [6, 8, 10]


@pytest.mark.parametrize("size", [1, 20])
def test_a_draw_has_from_one_sample_to_all(dataset, size):
    assert [len(draw) for draw in IndependentDraws(dataset, size, draws_per_epoch=1)] == [size]


@pytest.mark.parametrize("size", [0, -1, 21])
def test_sizes_that_cannot_be_drawn_are_refused(dataset, size):
    with pytest.raises(MisconfigurationException, match=f"from 1 to the 20 samples of the data set, .* but is {size}"):
        IndependentDraws(dataset, size, 3)


def test_a_size_that_is_no_integer_is_refused(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    with pytest.raises(TypeError):
        draws.batch_size = 6.5


def test_a_refused_size_leaves_the_old_one(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    with pytest.raises(MisconfigurationException):
        draws.batch_size = 21
    assert draws.batch_size == 6


def test_a_size_that_leaves_a_process_idle_is_refused(dataset):
    with pytest.raises(MisconfigurationException, match="batch_size=2 leaves some of the 3 processes without a sample"):
        IndependentDraws(dataset, 2, 3, num_replicas=3, rank=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draws_per_epoch": 0}, "draws_per_epoch must be at least 1, but is 0"),
        ({"draws_per_epoch": 2.5}, "draws_per_epoch must be a whole number >= 1, but is 2.5"),
        ({"seed": -1}, "seed must be at least 0, but is -1"),
        ({"num_replicas": 2}, "Give num_replicas and rank together, not 2 and None"),
    ],
)
def test_wrong_arguments_are_named(dataset, arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        IndependentDraws(dataset, **({"batch_size": 6, "draws_per_epoch": 3} | arguments))


def test_blocks_of_the_processes_make_the_draw_of_one(dataset):
    shares = [IndependentDraws(dataset, 11, 3, num_replicas=3, rank=rank) for rank in range(3)]
    together = [list(chain.from_iterable(blocks)) for blocks in zip(*shares, strict=True)]
    assert together == list(IndependentDraws(dataset, 11, 3))


def test_blocks_differ_by_one_sample_at_most(dataset):
    shares = [next(iter(IndependentDraws(dataset, 11, 3, num_replicas=3, rank=rank))) for rank in range(3)]
    assert [len(share) for share in shares] == [4, 4, 3]


def test_the_next_epoch_has_new_draws(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    assert list(draws) + list(draws) == list(IndependentDraws(dataset, 6, 6))


def test_an_epoch_left_in_the_middle_is_continued(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    begun = list(islice(draws, 1))
    assert begun + list(draws) == list(IndependentDraws(dataset, 6, 3))


def test_naming_the_present_epoch_changes_nothing(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    begun = list(islice(draws, 1))
    draws.set_epoch(0)
    assert begun + list(draws) == list(IndependentDraws(dataset, 6, 3))


def test_naming_another_epoch_passes_over_the_rest_of_this_one(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    list(islice(draws, 1))
    draws.set_epoch(1)
    assert list(draws) == list(IndependentDraws(dataset, 6, 6))[3:]


def test_the_first_epoch_can_be_any(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    draws.set_epoch(2)
    assert list(draws) == list(IndependentDraws(dataset, 6, 9))[6:]


def test_an_epoch_named_without_a_draw_is_not_passed_over(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    list(draws)
    draws.set_epoch(1)
    draws.set_epoch(2)
    assert list(draws) == list(IndependentDraws(dataset, 6, 6))[3:]


def test_a_second_fit_with_the_same_loader_has_new_draws(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    for epoch in (0, 1, 0):
        draws.set_epoch(epoch)
        last = list(draws)
    assert last == list(IndependentDraws(dataset, 6, 9))[6:]


def test_state_goes_on_with_the_very_next_draw_and_size(dataset):
    draws, again = IndependentDraws(dataset, 6, 4), IndependentDraws(dataset, 3, 4)
    list(islice(draws, 2))
    draws.batch_size = 9
    again.load_state_dict(draws.state_dict())
    assert list(again) == list(draws)


def test_loader_indexes_tensors_once_per_batch(dataset):
    values, labels = next(iter(DrawLoader(dataset, IndependentDraws(dataset, 6, 3))))
    assert labels.tolist() == next(iter(IndependentDraws(dataset, 6, 3))) and torch.equal(values[:, 0], labels.float())


def test_loader_collates_single_samples():
    draws = IndependentDraws(Squares(), 6, 3)
    batch = next(iter(DrawLoader(Squares(), draws)))
    assert batch["square"].tolist() == [index * index for index in draws.draw(0).tolist()]


def test_loader_fetches_samples_at_once_where_it_can():
    draws = IndependentDraws(SquaresAtOnce(), 6, 3)
    batch = next(iter(DrawLoader(SquaresAtOnce(), draws)))
    assert batch["square"].tolist() == [-index for index in draws.draw(0).tolist()]


def test_loader_gives_samples_to_its_collate_fn(dataset):
    draws = IndependentDraws(dataset, 6, 3)
    batch = next(iter(DrawLoader(dataset, draws, collate_fn=lambda samples: [label.item() for _, label in samples])))
    assert batch == draws.draw(0).tolist()


def test_draws_serve_as_batch_sampler(dataset):
    loader = DataLoader(dataset, batch_sampler=IndependentDraws(dataset, 6, 3))
    assert [labels.tolist() for _, labels in loader] == list(IndependentDraws(dataset, 6, 3))


def test_loader_refuses_workers(dataset):
    with pytest.raises(MisconfigurationException, match="DrawLoader needs num_workers=0, but got 2: batches fetched"):
        DrawLoader(dataset, IndependentDraws(dataset, 6, 3), num_workers=2)


def test_loader_refuses_other_samplers(dataset):
    with pytest.raises(MisconfigurationException, match="DrawLoader needs IndependentDraws, but got SequentialSampler"):
        DrawLoader(dataset, SequentialSampler(dataset))


def test_loader_refuses_a_size_of_batches(dataset):
    with pytest.raises(MisconfigurationException, match=r"no batch_size: .* IndependentDraws\(batch_size=\.\.\.\)"):
        DrawLoader(dataset, IndependentDraws(dataset, 6, 3), batch_size=6)


def test_predictions_of_draws_are_refused_with_the_remedy(dataset):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match=r"Trainer\.predict .* predict with an ordinary DataLoader"):
        trainer.predict(Recorder(), DrawLoader(dataset, IndependentDraws(dataset, 6, 3)))


def test_loader_refuses_draws_from_another_data_set(dataset):
    with pytest.raises(MisconfigurationException, match="The draws are from 5 samples, but the data set has 20"):
        DrawLoader(dataset, IndependentDraws(TensorDataset(torch.arange(5)), 2, 3))


def test_trainer_makes_new_draws_in_each_epoch(dataset, tmp_path):
    assert batches_of_a_fit(dataset, tmp_path) == list(IndependentDraws(dataset, 6, 12))


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
def test_trainer_resumes_with_the_very_next_draw(dataset, tmp_path, limits, checkpointing, step):
    whole = batches_of_a_fit(dataset, tmp_path, limits=limits, **checkpointing)
    rest = batches_of_a_fit(dataset, tmp_path / "rest", tmp_path / f"step={step}.ckpt", limits=limits, **checkpointing)
    assert rest == whole[step:]


def test_trainer_that_puts_its_own_sampler_in_is_told_why_not(dataset, tmp_path):
    with pytest.raises(MisconfigurationException, match="If Trainer\\(overfit_batches=...\\) put it there"):
        batches_of_a_fit(dataset, tmp_path, limits={"overfit_batches": 2, "max_epochs": 1})
