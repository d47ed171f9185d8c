"""Gradients as they lie in memory: dense, sparse, or in shards; and whether layers are there to be hooked."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.collective import world_size
from lightning_struct.functional.torch_tools import norms_of_each


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    return (tensor.to_local() if hasattr(tensor, "placements") else tensor).detach()  # a DTensor has placements


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The part of a parameter's gradient that this process holds, dense or coalesced; None without a gradient."""
    if parameter.grad is None:
        return None
    gradient = local(parameter.grad)
    return gradient.coalesce() if gradient.is_sparse else gradient


def share(parameter: nn.Parameter, in_parts: bool = False) -> float:
    """Weight of the part that a process holds, in a sum over all processes: 1/P where each of P holds the whole.

    ``in_parts``: a gradient that is a plain tensor is a part of the whole too.
    """
    gradient: Any = parameter.grad
    if in_parts and not hasattr(gradient, "placements"):
        return 1.0
    placements = getattr(gradient, "placements", ())
    shards = math.prod(gradient.device_mesh.size(i) for i, place in enumerate(placements) if place.is_shard())
    return shards / world_size()


def squared_norm(tensors: Sequence[Tensor], weights: Sequence[float], device: torch.device) -> Tensor:
    """Σ w‖t‖², a scalar on ``device``, see :func:`sum_of_squares`.

    The norms of numbers of 16 bits are taken in float32; sparse tensors are coalesced.
    """
    total = sum_of_squares([], device)
    groups: dict[tuple[float, torch.device, torch.dtype], list[Tensor]] = {}
    for tensor, weight in zip(tensors, weights, strict=True):
        values = tensor.values() if tensor.is_sparse else tensor
        groups.setdefault((weight, values.device, values.dtype), []).append(values)
    for (weight, _, dtype), group in groups.items():
        norms = norms_of_each(group, torch.float32 if dtype.itemsize < 4 else None)
        total += weight * sum_of_squares([torch.stack(norms)], device)
    return total


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A scalar on ``device``, in float64 where that has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.cat([tensor.to(device).reshape(-1) for tensor in tensors]).to(dtype).square().sum()


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` made one function of layers: hooks see none.

    Of a compiled LightningModule, Lightning takes the module itself, with methods that are compiled.
    """
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    methods = (getattr(module, name, None) for name in ("forward", "training_step"))
    return any(hasattr(method, "_torchdynamo_orig_callable") for method in methods)
