"""Counting of the samples in a batch of any form."""

from typing import Any

from torch import Tensor

from lightning_struct.functional.torch_tools import tree_leaves


def samples_in(batch: Any, expected_sizes: list[int]) -> int:
    """Number of samples in a batch of this process.

    It is the sum over the loaders that take part in the batch: in ``"max_size"`` mode some are at their end.
    """
    if len(expected_sizes) == 1:
        return expected_sizes[0]
    first, second = leading_sizes(batch)
    for sizes in (first, second):
        read = sum(size for size in expected_sizes if size in sizes)
        if read:
            return read
    return sum(expected_sizes) or max(first, default=1)


def leading_sizes(batch: Any) -> tuple[set[int], set[int]]:
    """Sizes of the first and of the second dimensions of the tensors in a batch."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    # the second of a nested tensor is ragged
    return {t.size(0) for t in tensors if t.ndim}, {t.size(1) for t in tensors if t.ndim > 1 and not t.is_nested}
