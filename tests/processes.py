"""How tests start processes: forked from a server that has loaded the libraries once, which takes each process seconds."""

import datetime
import multiprocessing

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

# Lightning refuses to fork where tests may have begun to use a GPU.
START_METHOD = "spawn" if torch.cuda.is_available() else "forkserver"

multiprocessing.set_forkserver_preload(["lightning.pytorch", "torch.distributed", "torch._dynamo", "torchmetrics"])


def in_two_processes(work, directory):
    """What ``work(rank)`` returns in each of two processes that are a group; tensors in lists and dicts."""
    torch.multiprocessing.start_processes(_save_results, (work, directory), nprocs=2, start_method=START_METHOD)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def _save_results(rank, work, directory):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=timeout)
    torch.save(work(rank), directory / f"{rank}.pt")
    dist.barrier()  # and no more: to destroy the group blocks now and then in torch 2.6, and the process ends anyway


class ForkedDDP(DDPStrategy):
    """DDP whose processes have their weights for themselves: Lightning parts the memory of spawned ones only."""

    def __init__(self):
        super().__init__(start_method=START_METHOD)

    def setup(self, trainer):
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.clone()
        super().setup(trainer)


def two_processes():
    """Options of a Trainer."""
    return {"strategy": ForkedDDP(), "devices": 2}
