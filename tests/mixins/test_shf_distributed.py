"""Two processes with a share of each batch do what one does with the whole."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_struct import GrowingBatchSize, LevenbergMarquardtDamping, ValidationMeritStopping, ValidationRule
from lightning_struct.optim import LSMR
from tests.mixins.helpers import SHFNetwork, draw_loader, make_trainer, regression_data, weights
from tests.processes import two_processes


class Notes(L.Callback):
    """Writes what each process has at the end to a file."""

    def __init__(self, directory):
        self.directory = directory

    def on_train_end(self, trainer, pl_module):
        reports = [[r.loss_before, r.loss_after, r.merit, r.gradient_variance, r.damping] for r in pl_module.reports]
        notes = {
            "weights": weights(pl_module),
            "reports": torch.tensor(reports, dtype=torch.float64),
            "sizes": [report.batch_size for report in pl_module.reports],
            "predictions": trainer.callbacks[0].predictions,
            "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
            "best": trainer.callbacks[2].best_value,
        }
        torch.save(notes, self.directory / f"{trainer.world_size}_{trainer.global_rank}.pt")


def fit(directory, **processes):
    callbacks = [
        GrowingBatchSize(validation=ValidationRule(window=2)),
        LevenbergMarquardtDamping(drop=0.9),
        ValidationMeritStopping(),
        Notes(directory),
    ]
    trainer = make_trainer(directory, callbacks=callbacks, **processes)
    validation = DataLoader(regression_data(17, seed=1, dtype=torch.float64), batch_size=4)
    trainer.fit(
        SHFNetwork(torch.float64, solver=LSMR(maxiter=6)), draw_loader(11, draws=5, dtype=torch.float64), validation
    )


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("notes")
    fit(directory)
    fit(directory, **two_processes())
    return {name: torch.load(directory / f"{name}.pt") for name in ("1_0", "2_0", "2_1")}


pytestmark = pytest.mark.slow


def test_weights_are_those_of_one_process(notes):
    assert (notes["2_0"]["weights"] - notes["1_0"]["weights"]).abs().max() < 1e-9


def test_replicas_are_bitwise_equal(notes):
    assert torch.equal(notes["2_0"]["weights"], notes["2_1"]["weights"])


def test_reports_are_those_of_one_process(notes):
    assert torch.allclose(notes["2_1"]["reports"], notes["1_0"]["reports"], rtol=1e-9, atol=1e-9)


def test_batches_grow_as_in_one_process(notes):
    assert notes["2_0"]["sizes"] == notes["2_1"]["sizes"] == notes["1_0"]["sizes"]
    assert notes["1_0"]["sizes"][-1] > 11


def test_predictions_are_those_of_one_process(notes):
    assert notes["2_1"]["predictions"] == notes["1_0"]["predictions"]


def test_logged_values_are_of_the_whole_batch(notes):
    of_steps = {name: value for name, value in notes["1_0"]["logged"].items() if name != "val_loss"}
    assert {name: notes["2_1"]["logged"][name] for name in of_steps} == pytest.approx(of_steps, rel=1e-6)


def test_the_best_value_is_the_same_in_all_processes(notes):
    assert notes["2_0"]["best"] == notes["2_1"]["best"]
