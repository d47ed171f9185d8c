"""Two processes with half of each batch do what one does with the whole."""

import functools

import lightning as L
import pytest
import torch

from tests.mixins.helpers import draw_loader, make_trainer, weights
from tests.mixins.rls_helpers import AutomaticNetwork, ManualNetwork
from tests.processes import two_processes

pytestmark = pytest.mark.slow

NETWORKS = {
    "accumulated": functools.partial(AutomaticNetwork, torch.float64, momentum=0.5, max_grad_norm=0.2),
    "manual": functools.partial(ManualNetwork, torch.float64, l1=1e-4),
}


class Notes(L.Callback):
    """Writes the weights that each process has at the end to a file."""

    def __init__(self, directory, name):
        self.directory, self.name = directory, name

    def on_train_end(self, trainer, pl_module):
        torch.save(
            {"weights": weights(pl_module), "steps": trainer.global_step},
            self.directory / f"{self.name}_{trainer.world_size}_{trainer.global_rank}.pt",
        )


def fit(directory, name, **options):
    options |= {"accumulate_grad_batches": 2} if name == "accumulated" else {}
    trainer = make_trainer(directory, callbacks=[Notes(directory, name)], **options)
    trainer.fit(NETWORKS[name](), draw_loader(12, draws=10, dtype=torch.float64))


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_those_of_one_process(name, tmp_path):
    fit(tmp_path, name)
    fit(tmp_path, name, **two_processes())
    one, first, second = (torch.load(tmp_path / f"{name}_{run}.pt") for run in ("1_0", "2_0", "2_1"))
    assert first["steps"] == one["steps"] > 1
    torch.testing.assert_close(first["weights"], one["weights"], rtol=0, atol=1e-12)
    assert torch.equal(first["weights"], second["weights"])
