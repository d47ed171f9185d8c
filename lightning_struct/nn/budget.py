"""The choice of one option for each layer of a model, within a budget or within a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_LONGEST_FRONT = 2048
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

    The multiple-choice knapsack problem. Layer after layer, those partial choices are kept of which no other one is
    both smaller and better. That is exact while they are few; of more than 2048, one is left in each small range of
    sizes. Of options with equal increases the largest is taken that there is room for.

    Args:
        options: of each layer.
        allowed: at least the sum of the smallest options.
    """
    sizes, losses = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    room = allowed - sum(of_layer[_smallest(of_layer)].parameters for of_layer in options)  # if the rest is smallest
    fronts: list[Tensor] = []
    for of_layer in options:
        of_options = torch.tensor([option.parameters for option in of_layer])
        sizes = (sizes[:, None] + of_options - of_options.min()).flatten()  # over the smallest
        of_losses = torch.tensor([option.loss_increase for option in of_layer], dtype=torch.float64)
        losses = (losses[:, None] + of_losses).flatten()
        front = _thinned(*_front(sizes, losses, room))
        fronts.append(front)
        sizes, losses = sizes[front], losses[front]
    choice: list[int] = []
    state = len(sizes) - 1  # the one with the least loss
    for of_layer, front in zip(reversed(options), reversed(fronts), strict=True):
        state, option = divmod(int(front[state]), len(of_layer))
        choice.append(option)
    return _filled_up(options, choice[::-1], allowed)


def _front(sizes: Tensor, losses: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The indices of the choices within ``room`` that are better than all smaller ones, by size; and their sizes."""
    order = losses.argsort(stable=True)
    order = order[sizes[order].argsort(stable=True)]
    order = order[sizes[order] <= room]
    least_before = losses[order].cummin(0).values.roll(1)
    least_before[0] = math.inf
    front = order[losses[order] < least_before]
    return front, sizes[front]


def _thinned(front: Tensor, sizes: Tensor) -> Tensor:
    """The smallest choice of a front, and the best one of each of as many ranges of sizes as it may be long."""
    if len(front) <= _LONGEST_FRONT:
        return front
    ranges = (sizes - sizes[0]) * _LONGEST_FRONT // (sizes[-1] - sizes[0] + 1)
    is_last = ranges.diff(append=ranges.new_tensor([_LONGEST_FRONT])) > 0
    is_last[0] = True
    return front[is_last]


def _filled_up(options: Sequence[Sequence[Option]], choice: Sequence[int], allowed: int) -> list[int]:
    """The choice with larger options where these cost no more and there is room."""
    room = allowed - sum(of_layer[index].parameters for of_layer, index in zip(options, choice, strict=True))
    larger = []
    for of_layer, index in zip(options, choice, strict=True):
        now = of_layer[index]
        others = [(option.parameters, -number) for number, option in enumerate(of_layer) if _costs_no_more(option, now)]
        parameters, number = max(other for other in others if other[0] <= now.parameters + room)
        room -= parameters - now.parameters
        larger.append(-number)
    return larger


def _costs_no_more(option: Option, other: Option) -> bool:
    return option.loss_increase <= other.loss_increase


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
