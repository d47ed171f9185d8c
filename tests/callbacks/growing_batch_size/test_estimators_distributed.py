"""Estimators in two processes, with sharded weights, and of compiled networks."""

import datetime
import math

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from lightning_struct import GrowingBatchSize, NoiseEstimator
from lightning_struct.callbacks.growing_batch_size.estimators import parts
from lightning_struct.callbacks.growing_batch_size.noise import statistics_of_parts
from tests.callbacks.growing_batch_size.projects import regression
from tests.processes import START_METHOD, _EndingLauncher, two_processes

pytestmark = pytest.mark.slow


class Network(L.LightningModule):
    """Reads the samples in their order, of each batch each process its half."""

    def __init__(self, rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.rate = rate

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.network[0], self.network[2], self.network):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.network(batch[0]), batch[1])

    def train_dataloader(self):
        processes = self.trainer.world_size
        sampler = DistributedSampler(regression(), processes, self.trainer.global_rank, shuffle=False)
        return DataLoader(regression(), batch_size=4 // processes, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Keep(L.Callback):
    def __init__(self, directory):
        self.directory = directory

    def on_train_end(self, trainer, pl_module):
        torch.save(trainer.callbacks[0].records, self.directory / f"{trainer.global_rank}.pt")


def records(directory, estimator, module, growing=None, **options):
    most = None if "max_steps" in options else 4 * options.get("accumulate_grad_batches", 1)
    directory.mkdir(exist_ok=True)
    growing = GrowingBatchSize(estimator=NoiseEstimator(estimator, 1), **(growing or {"max_batch_size": most}))
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[growing, Keep(directory)],
        **({"max_epochs": 1} | options),
    )
    trainer.fit(module)
    return [torch.load(path) for path in sorted(directory.glob("*.pt"))]


def ratios(of_process):
    return [record["variance_ratio"] for record in of_process]


def test_processes_are_compared_with_their_mean(tmp_path):
    network = Network()
    inputs, targets = regression().tensors
    expected = []
    for first in range(0, 40, 4):
        halves = [
            torch.autograd.grad(
                network.training_step((inputs[first + i : first + 4 : 2], targets[first + i : first + 4 : 2]), 0),
                list(network.parameters()),
            )
            for i in range(2)
        ]
        g = torch.stack([torch.cat([part.flatten() for part in half]) for half in halves])
        whole = g.mean(0).square().sum().item()
        expected.append(statistics_of_parts(g.square().sum(1).mean().item(), whole, 2, 4).variance / (4 * whole))
    measured = records(tmp_path, "auto", network, **two_processes())
    assert ratios(measured[0]) == pytest.approx(expected, rel=1e-4)
    assert measured[0] == measured[1]


class LeavingWeights(_EndingLauncher):
    """Leaves the sharded weights to the processes."""

    def _recover_results_in_main_process(self, worker_output, trainer): ...


class ShardedInTwoProcesses(ModelParallelStrategy):
    """In processes as :mod:`tests.processes` makes them."""

    def __init__(self, data_parallel_size=2):
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=2 // data_parallel_size,
            process_group_backend="gloo",
            timeout=datetime.timedelta(seconds=60),
        )

    def _configure_launcher(self):
        self._launcher = LeavingWeights(self, start_method=START_METHOD)


def two_sharded_processes(data_parallel_size=2):
    strategy = ShardedInTwoProcesses(data_parallel_size)
    return {"strategy": strategy, "devices": 2, "plugins": [LightningEnvironment()]}


def test_sharded_processes_are_compared_as_whole_ones(tmp_path):
    batches = 2
    of_whole = records(
        tmp_path / "whole", "parts", Network(rate=0.05), accumulate_grad_batches=batches, **two_processes()
    )
    options = two_sharded_processes() | {"accumulate_grad_batches": batches}
    sharded = records(tmp_path / "parts", "auto", Network(rate=0.05), **options)
    assert ratios(sharded[0]) == pytest.approx(ratios(of_whole[0]), rel=1e-4)
    assert sharded[0] == sharded[1] and len(sharded[0]) == 10 // batches


class FailsInOneProcess(Network):
    """What an estimator calls fails in the second process, in one step."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 4:
            self.replaced, parts.at_least_float32 = parts.at_least_float32, unforeseen
        elif self.trainer.global_rank == 1 and batch_idx == 5:
            parts.at_least_float32 = self.replaced


def unforeseen(*args, **kwargs):
    raise OSError("unforeseen")


def test_an_error_in_one_process_ends_the_measuring_in_all(tmp_path):
    of_processes = records(tmp_path, "parts", FailsInOneProcess(rate=0.05), **two_processes())
    assert of_processes[0] == of_processes[1] and len(of_processes[0]) == 4


class Unfreezing(Network):
    def __init__(self):
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.network[0].requires_grad_(batch_idx >= 4)


class TensorParallel(Network):
    """Both processes read the same batches."""

    def configure_model(self):
        for parameter in self.parameters():  # forked processes share their memory
            parameter.data = parameter.data.clone()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)

    def train_dataloader(self):
        return DataLoader(regression(), batch_size=4)


def test_processes_that_share_a_batch_count_its_samples_once(tmp_path):
    parallel = records(tmp_path, "auto", TensorParallel(rate=0.05), {"theta": math.inf}, **two_sharded_processes(1))
    assert [[record["batch_size"] for record in of_process] for of_process in parallel] == [[4] * 10] * 2


class Compiled(Network):
    def configure_model(self):
        for layer in (self.network[0], self.network[2]):
            layer.compile(backend="aot_eager")
        super().configure_model()


def test_a_compiled_network_is_measured_as_any_other(tmp_path):
    plain, compiled = (
        records(tmp_path, "auto", network, devices=1, accumulate_grad_batches=2)[0]
        for network in (Network(rate=0.05), Compiled(rate=0.05))
    )
    assert ratios(compiled) == pytest.approx(ratios(plain), rel=1e-4) and len(plain) > 4


class Noisy(Network):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0], torch.randn_like(batch[1])), batch_idx)


def test_processes_agree_beyond_a_window_of_the_stationarity_test(tmp_path):
    first, second = records(tmp_path, "auto", Noisy(rate=0.3), max_epochs=-1, max_steps=400, **two_processes())
    assert first == second and len(first) == 400
