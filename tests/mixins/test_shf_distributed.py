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


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path):
    fit(tmp_path)
    fit(tmp_path, **two_processes())
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1_0", "2_0", "2_1"))
    assert (first["weights"] - one["weights"]).abs().max() < 1e-9
    assert torch.equal(first["weights"], second["weights"]) and first["best"] == second["best"]
    assert torch.allclose(second["reports"], one["reports"], rtol=1e-9, atol=1e-9)
    assert first["sizes"] == second["sizes"] == one["sizes"] and one["sizes"][-1] > 11
    assert second["predictions"] == one["predictions"]
    of_steps = {name: value for name, value in one["logged"].items() if name != "val_loss"}
    assert {name: second["logged"][name] for name in of_steps} == pytest.approx(of_steps, rel=1e-6)
