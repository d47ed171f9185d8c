"""Ranks with different numbers of training batches: found before one waits for another, with the numbers by rank."""

import os
import tempfile
import time

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_struct import GrowingBatchSize, ValidationMeritStopping
from lightning_struct.utilities.namespaces import MisconfigurationException
from tests.mixins.helpers import Network, SHFNetwork, make_trainer, regression_data, validation_loader
from tests.mixins.rls_helpers import ManualNetwork
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow


class Stream(IterableDataset):
    """So many samples, without a length."""

    def __init__(self, samples):
        self.data = regression_data(samples)

    def __iter__(self):
        return iter(self.data)


class Automatic(Network):
    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


# What is trained, with which callbacks, on how many samples of each rank, in batches of four, and what is found.
CASES = {
    "SHF": (SHFNetwork, [], (20, 16), "rank 0 5, rank 1 4"),
    "SHF, a stream": (SHFNetwork, [], (Stream(20), Stream(16)), "rank 0 more than 4, rank 1 4"),
    "RLS, a stream": (ManualNetwork, [], (Stream(8), Stream(20)), "rank 0 2, rank 1 more than 2"),
    "RLS, an empty stream": (ManualNetwork, [], (Stream(20), Stream(0)), "rank 0 more than 0, rank 1 0"),
    "GrowingBatchSize, a stream": (Automatic, [GrowingBatchSize], (Stream(20), Stream(12)), "0 more than 3, rank 1 3"),
    "GrowingBatchSize": (Automatic, [GrowingBatchSize], (20, 12), "rank 0 5, rank 1 3"),
    "ValidationMeritStopping": (Automatic, [ValidationMeritStopping], (12, 16), "rank 0 3, rank 1 4"),
    "equal streams": (SHFNetwork, [GrowingBatchSize], (Stream(16), Stream(16)), "8 steps"),
}  # fmt: skip


def findings(rank):
    """What each case ends with on this rank, and the seconds that it takes."""
    elastic = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in elastic.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "tests"}
    found = {}
    for case, (network, callbacks, data, _) in CASES.items():
        mine = Subset(regression_data(20), range(data[rank])) if isinstance(data[rank], int) else data[rank]
        options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
        began = time.monotonic()
        trainer = make_trainer(tempfile.gettempdir(), callbacks=[make() for make in callbacks], **options)
        try:
            trainer.fit(network(), DataLoader(mine, batch_size=4), validation_loader())
            end = f"{trainer.global_step} steps"
        except (ValueError, RuntimeError, MisconfigurationException) as error:
            end = str(error)
        found[case] = [end, time.monotonic() - began]
        print(rank, case, end, flush=True)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return in_two_processes(findings, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_name_the_numbers_of_batches_in_seconds(case, found):
    for end, seconds in (of_rank[case] for of_rank in found):
        assert CASES[case][-1] in end
        assert seconds < 10
