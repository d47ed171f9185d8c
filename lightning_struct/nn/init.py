"""Initial values of weights."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_normal_(weight: Tensor, connections: int, std: float = 1.5) -> Tensor:
    """Fill ``weight`` in place such that every unit has few, strong incoming connections.

    Of the ``in_features`` weights of each unit, ``min(connections, in_features)`` at random places are drawn from
    N(0, std²); the rest is zero. Emirahmetoglu & Stewart, equation (9), after Martens, "Deep learning via Hessian-free
    optimization" (2010). Random numbers come from torch's global generator.

    Args:
        weight: weight of a linear layer, (out_features, in_features), any floating dtype.
        connections: nonzero weights into each unit, m_0 of the paper.
        std: standard deviation of the nonzero weights, sigma of the paper.

    Returns:
        ``weight``.

    Raises:
        ValueError: ``weight`` is not a matrix, or ``connections`` or ``std`` is not positive.

    Example:
        >>> layer = torch.nn.Linear(100, 10)
        >>> (sparse_normal_(layer.weight, connections=15) != 0).sum(1).tolist()
        [15, 15, 15, 15, 15, 15, 15, 15, 15, 15]
    """
    if weight.ndim != 2:
        raise ValueError(f"weight must be (out_features, in_features), but has shape {tuple(weight.shape)}")
    if connections < 1:
        raise ValueError(f"connections must be at least 1, but is {connections}")
    if not std > 0:
        raise ValueError(f"std must be positive, but is {std}")
    in_features = weight.shape[1]
    zeros = max(in_features - connections, 0)
    # sparse_ zeroes ceil(sparsity * rows) entries of each column: half an entry below the count is safe from rounding
    torch.nn.init.sparse_(weight.detach().T, sparsity=(zeros - 0.5) / in_features, std=std)
    return weight
