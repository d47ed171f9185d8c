"""Processes that read different batches: under tensor parallelism several read the same one."""

from __future__ import annotations

from lightning_struct.utilities import namespaces as L


def data_parallel_size(trainer: L.Trainer) -> int:
    """Number of processes that read different batches: the replicas for which Lightning makes a distributed sampler."""
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)


def data_parallel_rank(trainer: L.Trainer) -> int:
    """The number of this process among them."""
    return (trainer.distributed_sampler_kwargs or {}).get("rank", trainer.global_rank)


def data_parallel_replicas(trainer: L.Trainer | None) -> dict[str, int]:
    """Both as the arguments of a distributed sampler; none without a Trainer."""
    if trainer is None:
        return {}
    return {"num_replicas": data_parallel_size(trainer), "rank": data_parallel_rank(trainer)}
