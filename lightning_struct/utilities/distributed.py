"""Lightning's strategies: the processes that read different batches, and the strategies that shard the weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import distributed, nn

from lightning_struct.utilities import namespaces as L
from lightning_struct.utilities.namespaces import MisconfigurationException, lightning_classes


def data_parallel_size(trainer: L.Trainer) -> int:
    """Number of processes that read different batches: the replicas for which Lightning makes a distributed sampler.

    Under tensor parallelism several processes read the same batch.
    """
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)


def data_parallel_rank(trainer: L.Trainer) -> int:
    """The number of this process among them."""
    return (trainer.distributed_sampler_kwargs or {}).get("rank", trainer.global_rank)


def data_parallel_replicas(trainer: L.Trainer | None) -> dict[str, int]:
    """Both as the arguments of a distributed sampler; none without a Trainer."""
    if trainer is None:
        return {}
    return {"num_replicas": data_parallel_size(trainer), "rank": data_parallel_rank(trainer)}


def refuse_sharded_weights(trainer: L.Trainer, name: str) -> None:
    """Raise for a strategy that shards the weights, naming ``name`` as what needs them whole.

    Raises:
        MisconfigurationException: the strategy is FSDP, DeepSpeed, model parallel, or another that shards models.
    """
    if shards_weights(trainer):
        raise MisconfigurationException(
            f"{name} needs all weights on each process, but {type(trainer.strategy).__name__} shards them. Use one "
            f"device or strategy='ddp'"
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
