"""Number of processes that read different batches."""

from __future__ import annotations

from lightning_struct.utilities import namespaces as L


def data_parallel_size(trainer: L.Trainer) -> int:
    """Number of processes that read different batches; under tensor parallelism several read the same one.

    It is the number of replicas for which Lightning makes a distributed sampler.
    """
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
