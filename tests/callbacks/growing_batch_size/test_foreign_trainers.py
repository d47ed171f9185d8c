"""Several loaders, limits, progress bars, checkpoints and tuners work beside growing batches."""

from collections import defaultdict

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize
from tests.callbacks.growing_batch_size.projects import (
    CHECKED_STEPS,
    WARNINGS_OF_PROJECTS,
    Project,
    Regressor,
    Stream,
    fit,
    perceptron,
    regression,
    seed,
    squared_errors,
)
from tests.mixins.helpers import make_trainer

pytestmark = WARNINGS_OF_PROJECTS


@pytest.fixture(autouse=True)
def seeded():
    seed()


# --- several loaders
# ---------------------------------------------------------------------------------------------------


class TwoTasks(Regressor):
    """Each of two loaders has its own network; notes what it reads of them."""

    def __init__(self):
        super().__init__()
        self.other = perceptron()
        self.read = defaultdict(lambda: ([], []))

    def training_step(self, batch, batch_idx):
        losses = []
        for i, (network, name) in enumerate([(self.network, "labels"), (self.other, "pairs")]):
            if batch[name] is not None:
                self.read[self.current_epoch][i].append(len(batch[name][0]))
                losses.append(self.loss(network(batch[name][0]), batch[name][1]))
        return sum(losses)


def two_loaders(mode, sizes=(40, 12)):
    labels = DataLoader(regression(sizes[0]), batch_size=4, shuffle=True)
    return CombinedLoader({"labels": labels, "pairs": DataLoader(regression(sizes[1], seed=1), batch_size=2)}, mode)


def loaders_of_one_size(data=regression):
    loaders = {name: DataLoader(data(n), batch_size=4) for name, n in {"labels": 40, "pairs": 12}.items()}
    return CombinedLoader(loaders, "max_size")


@pytest.mark.parametrize(
    "mode, data",
    [
        pytest.param("batch", regression, id="batch"),
        pytest.param("batch", lambda samples: Stream(regression(samples)), id="batch of a stream"),
        pytest.param("accumulate", regression, id="accumulate"),
    ],
)
def test_a_loader_at_its_end_is_not_counted_with_the_batches_of_another(tmp_path, mode, data):
    growing = GrowingBatchSize(schedule="0:8", mode=mode)
    make_trainer(tmp_path, callbacks=[growing], max_epochs=1).fit(TwoTasks(), loaders_of_one_size(data))
    assert [record["batch_size"] for record in growing.records] == 3 * [8] + 7 * [4]


def test_accumulated_batches_of_a_loader_that_begins_again_are_counted_with_its_last_ones(tmp_path):
    loaders = {name: DataLoader(regression(n), batch_size=4) for name, n in {"labels": 40, "pairs": 9}.items()}
    growing = GrowingBatchSize(schedule="0:8", mode="accumulate")
    run = make_trainer(tmp_path, callbacks=[growing], max_epochs=1)
    run.fit(TwoTasks(), CombinedLoader(loaders, "max_size_cycle"))
    assert [record["batch_size"] for record in growing.records] == 3 * [8, 8, 5] + [8]


def test_a_loader_at_its_end_is_not_read_again_after_an_exception(tmp_path):
    class Interrupted(TwoTasks):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    resumed, run = TwoTasks(), make_trainer(tmp_path, callbacks=[GrowingBatchSize()])
    with pytest.raises(SystemExit):
        run.fit(Interrupted(), loaders_of_one_size())
    run.save_checkpoint(tmp_path / "interrupted.ckpt")
    run = make_trainer(tmp_path, callbacks=[GrowingBatchSize()])
    run.fit(resumed, loaders_of_one_size(), ckpt_path=tmp_path / "interrupted.ckpt")
    assert resumed.read[0] == (5 * [4], [])


def both_losses(module, batch):
    """(n,), of the samples of both loaders, scaled so that their mean is half of the sum of the two means."""
    losses = [squared_errors(module, batch[name]) for name in ("labels", "pairs")]
    n = sum(map(len, losses))
    return torch.cat([of_loader * n / (2 * len(of_loader)) for of_loader in losses])


def test_a_network_may_see_batches_of_different_sizes(tmp_path):
    class Shared(Regressor):
        def training_step(self, batch, batch_idx):
            return sum(self.loss(self(inputs), targets) for inputs, targets in batch.values())

    run = fit(tmp_path, Project(Shared(), two_loaders("min_size"), both_losses), validation=False)
    measured = [record["variance_ratio"] for record in run.growing.records[:CHECKED_STEPS]]
    assert measured == pytest.approx(run.reference.ratios, rel=1e-9)


# --- limits
# ------------------------------------------------------------------------------------------------------------


def sizes_of(run):
    return [[len(batch) for batch in epoch] for epoch in run.watch.epochs]


def test_growth_leaves_no_batch_over_that_is_smaller_than_the_first(tmp_path):
    network = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    )  # which refuses a single sample
    run = fit(tmp_path, Project(Regressor(network), growing={"theta": 0.05, "max_batch_size": 13}))
    assert sizes_of(run) == [[4, 4, 4, 8, 13, 7], [13, 13, 7, 7]]


# --- the rest of a project
# ---------------------------------------------------------------------------------------------
