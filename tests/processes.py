"""How tests start processes, and how these end.

They are forked from a server that has loaded the libraries once, which takes each process seconds.

They end by ``os._exit``, when their results are written. To finalise the interpreter while gloo's threads live aborts
it now and then: a thread that gives up the last reference to a tensor asks for a GIL that is no more
(pytorch/pytorch#179291). To destroy the process group before is no way out in torch 2.6 and 2.7: that waits for these
threads, and holds the GIL while it does (pytorch/pytorch#154976).
"""

import datetime
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

# Lightning refuses to fork where tests may have begun to use a GPU.
START_METHOD = "spawn" if torch.cuda.is_available() else "forkserver"

LIBRARIES = ["lightning.pytorch", "torch.distributed", "torch._dynamo", "torchmetrics", "pytest", "hypothesis"]
multiprocessing.set_forkserver_preload(
    [*LIBRARIES, "lightning_struct.optim", "lightning_struct.callbacks", "lightning_struct.models", "tests.cases"]
)


def in_two_processes(work, directory):
    """Results of ``work(rank)`` in two processes that are a group: tensors in lists and dicts."""
    torch.multiprocessing.start_processes(_save_results, (work, directory), nprocs=2, start_method=START_METHOD)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def in_own_process(work):
    """The result of ``work()`` in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(START_METHOD)) as process:
        return process.submit(work).result()


def _save_results(rank, work, directory):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=timeout)
    torch.save(work(rank), directory / f"{rank}.pt")
    _end_process()


def _end_process():
    """End this process successfully, as soon as all others of its group are here."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _EndingLauncher(_MultiProcessingLauncher):
    """Lightning's own launcher; its processes end by :func:`_end_process` after the first one has sent the results."""

    def _wrapping_function(self, *args, **kwargs):
        super()._wrapping_function(*args, **kwargs)
        _end_process()


class TwoProcesses(DDPStrategy):
    """DDP in processes as above, which have their weights for themselves: Lightning does so for spawned ones only."""

    def __init__(self):
        super().__init__(start_method=START_METHOD)

    def _configure_launcher(self):
        self._launcher = _EndingLauncher(self, start_method=self._start_method)

    def setup(self, trainer):
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.clone()
        super().setup(trainer)


def two_processes():
    """Options of a Trainer."""
    return {"strategy": TwoProcesses(), "devices": 2}
