"""Lightning's strategies: the processes that read different batches, and the strategies that shard the weights."""

from collections.abc import Iterator
from typing import Any

from torch import distributed, nn

from lightning_struct.collective import gather_numbers
from lightning_struct.functional.torch_tools import tree_leaves
from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.checks import known_length
from lightning_struct.utilities.namespaces import Callback, MisconfigurationException, lightning_classes


def data_parallel_size(trainer: L.Trainer) -> int:
    """Number of processes that read different batches: the replicas for which Lightning makes a distributed sampler.

    Under tensor parallelism several processes read the same batch.
    """
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)


def data_parallel_replicas(trainer: L.Trainer | None) -> dict[str, int]:
    """Arguments of a distributed sampler: that number, and this process's own among them; none without a Trainer."""
    if trainer is None:
        return {}
    rank = (trainer.distributed_sampler_kwargs or {}).get("rank", trainer.global_rank)
    return {"num_replicas": data_parallel_size(trainer), "rank": rank}


class EqualBatches(Callback):
    """Refuses ranks that read different numbers of training batches, before one waits for another that has ended.

    Ranks tell each other the lengths of their loaders when training starts. If a length is not known, as of iterable
    data, they tell each other after each batch whether there is another one, by one small collective.

    Raises:
        MisconfigurationException: at the start of training, or around a batch; the numbers differ.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_known = None not in map(known_length, tree_leaves(trainer.train_dataloader))
        lengths = _compared_batches(trainer, int(trainer.num_training_batches) if is_known else -1)
        self._lengths_are_unknown = -1 in lengths

    # Lightning has a collective of its own at the start of each batch, which a rank that has ended takes no part in.

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch_and_index: Any) -> None:
        if self._lengths_are_unknown and batch_and_index[-1] == 0:
            _compared_batches(trainer, 0, continues=True)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._lengths_are_unknown:
            _compared_batches(trainer, batch_idx + 1, continues=not trainer.is_last_batch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._lengths_are_unknown and trainer.fit_loop.batch_idx < 0:
            _compared_batches(trainer, 0)


def compare_batches(trainer: Any) -> None:
    """Let the processes of a Trainer compare their numbers of batches."""
    if trainer.world_size > 1 and not any(isinstance(callback, EqualBatches) for callback in trainer.callbacks):
        trainer.callbacks.append(EqualBatches())


def _compared_batches(trainer: L.Trainer, batches: int, *, continues: bool = False) -> list[int]:
    """The numbers of batches of all ranks; -1: unknown."""
    numbers = gather_numbers([batches, continues], trainer.strategy.root_device)
    if any(of_rank != numbers[0] for of_rank in numbers):
        found = (f"rank {r} {'more than ' * more}{'?' if n < 0 else n}" for r, (n, more) in enumerate(numbers))
        raise MisconfigurationException(
            f"the ranks read different numbers of training batches in an epoch: {', '.join(found)}. They would wait "
            "for each other without end: give each as many, by a DistributedSampler or by leaving out the rest"
        )
    return [n for n, _ in numbers]


def refuse_sharded_weights(trainer: L.Trainer, name: str) -> None:
    """Raise for a strategy that shards the weights, naming ``name`` as the part that needs them whole.

    Raises:
        MisconfigurationException: the strategy is FSDP, DeepSpeed, model parallel, or another that shards models.
    """
    if shards_weights(trainer):
        raise MisconfigurationException(
            f"{name} needs all weights, but {type(trainer.strategy).__name__} shards them: use strategy='ddp'"
        )


def shards_weights(trainer: L.Trainer) -> bool:
    """Whether a process may hold parts of the weights only."""
    strategy = type(trainer.strategy)
    whole = [base.model_sharded_context for base in lightning_classes("strategies.Strategy")]
    return strategy.model_sharded_context not in whole or issubclass(
        strategy, lightning_classes("strategies.ModelParallelStrategy")
    )


def gathers_parameters(trainer: L.Trainer) -> bool:
    """Whether the weights that are sharded are gathered for each forward pass as they were before: by FSDP2."""
    return isinstance(trainer.strategy, lightning_classes("strategies.ModelParallelStrategy"))


def gathering_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that ``fully_shard`` was applied to, with their names. In their forward pass parameters are whole."""
    if not distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    yield from ((name, part) for name, part in module.named_modules() if issubclass(type(part), FSDPModule))
