"""Names of torch that are not public, and that nothing public stands for: here alone, checked with torch 2.6 to 2.15.

Fields of modules and tensors that all of torch's ecosystem reads (``_parameters``, ``_buffers``, ``_version``) are read
where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "FakeTensor",
    "copy_each_",
    "current_backward",
    "is_functorch_wrapped_tensor",
    "norms_of_each",
    "numbers_of_outputs",
    "subtract_each_",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "writes_in_place",
]


def current_backward() -> int:
    """A number for the backward pass that is going on, rising from one to the next; -1 outside of one."""
    return torch._C._current_graph_task_id()


def writes_in_place(operation: Any) -> bool:
    """Whether what a node of a recorded graph calls is an operation of torch that changes a tensor."""
    return isinstance(operation, OpOverload) and operation._schema.is_mutable


def numbers_of_outputs(node: Any) -> int:
    """How many numbers the outputs of a node of autograd's graph have."""
    return sum(math.prod(output.shape) for output in node._input_metadata)


def copy_each_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy dense tensors into others, all at once."""
    torch._foreach_copy_(list(targets), list(sources))


def subtract_each_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Subtract dense tensors from others, in place, all at once."""
    torch._foreach_sub_(list(tensors), list(others))


def norms_of_each(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The Euclidean norm of each tensor, all at once; computed in ``dtype`` where one is given."""
    return torch._foreach_norm(list(tensors), 2, dtype)
