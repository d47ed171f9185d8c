"""Two processes with half of each batch do what one does with the whole."""

import functools

import lightning as L
import pytest
import torch

from tests.mixins.helpers import draw_loader, make_trainer, weights
from tests.mixins.rls_helpers import AutomaticNetwork, ManualNetwork
from tests.processes import in_two_processes, two_processes

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


def error_of_unlike_batches(kind, rank):
    module, batch = ManualNetwork(torch.float64), (torch.ones(4, 3 + 2 * rank), torch.ones(4, 2))
    try:
        if rank == 1 and kind == "none":
            module.on_train_batch_end(None, None, 0)  # Lightning takes no training step for None
        else:
            module.training_step(batch, 0)
    except ValueError as error:
        return str(error)


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


@pytest.mark.parametrize(("kind", "found"), [("width", "5 columns on rank 1"), ("none", "none on rank 1")])
def test_unlike_batches_are_named_on_all_processes(kind, found, tmp_path):
    errors = in_two_processes(functools.partial(error_of_unlike_batches, kind), tmp_path)
    assert all(f"3 columns on rank 0, {found}" in error for error in errors)
