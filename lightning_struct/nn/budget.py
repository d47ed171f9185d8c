"""The choice of one option for each layer of a model, within a budget or within a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_SIZES = 2000  # steps of the budget in the search
_BISECTIONS = 10


@dataclass(frozen=True)
class Option:
    """One way to store a layer.

    Attributes:
        layer: what stands in its place; None: it stays.
        parameters: numbers in its weight.
        loss_increase: of the whole model on the data, when this layer alone is replaced; 0 where the loss falls.
    """

    layer: nn.Module | None
    parameters: int
    loss_increase: float


def least_increase(options: Sequence[Sequence[Option]], allowed: int) -> list[int]:
    """The option of each layer such that the sum of the increases of the loss is least within ``allowed`` parameters.

    The multiple-choice knapsack problem, solved by dynamic programming with sizes rounded up: the choice is within
    the budget, and the best but for what rounding leaves unused.

    Args:
        options: of each layer.
        allowed: at least the sum of the smallest options.
    """
    step = max(1, math.ceil(allowed / _SIZES))
    room = allowed // step
    best = torch.zeros(room + 1, dtype=torch.float64)  # by the room that may be used
    taken: list[torch.Tensor] = []
    for of_layer in options:
        least = torch.full_like(best, math.inf)
        index = torch.zeros(room + 1, dtype=torch.int64)
        for number, option in enumerate(of_layer):
            size = math.ceil(option.parameters / step)
            if size <= room:
                with_it = torch.full_like(best, math.inf)
                with_it[size:] = best[: room + 1 - size] + option.loss_increase
                index = torch.where(with_it < least, number, index)
                least = torch.minimum(with_it, least)
        best = least
        taken.append(index)
    if math.isinf(best[room]):  # rounding leaves no room: the smallest have it
        return [_smallest(of_layer) for of_layer in options]
    choice: list[int] = []
    for of_layer, index in zip(reversed(options), reversed(taken), strict=True):
        choice.append(int(index[room]))
        room -= math.ceil(of_layer[choice[-1]].parameters / step)
    return choice[::-1]


def smallest_within(
    options: Sequence[Sequence[Option]], allowed: float, increase: Callable[[Sequence[int]], float]
) -> list[int]:
    """The smallest choice whose increase of the loss is at most ``allowed``, by bisection of the number of parameters.

    Args:
        options: of each layer, the first of them as it is.
        allowed: not negative.
        increase: measures a choice.

    Returns:
        The option of each layer. All layers as they are where no smaller choice that is tried is within ``allowed``.
    """
    best = [0] * len(options)
    low = sum(of[_smallest(of)].parameters for of in options)
    high = sum(of[0].parameters for of in options)
    tried = low  # the smallest of all first: that may do
    for _ in range(_BISECTIONS):
        choice = least_increase(options, tried)
        if increase(choice) <= allowed:
            best = choice
            high = sum(of[index].parameters for of, index in zip(options, choice, strict=True))
        else:
            low = tried
        if high - low <= max(1, high // 200):
            break
        tried = round(math.sqrt(low * high))
    return best


def _smallest(of_layer: Sequence[Option]) -> int:
    return min(range(len(of_layer)), key=lambda index: of_layer[index].parameters)
