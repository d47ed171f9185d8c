"""Candidates for the layers of a model, and the choice among them within a number of parameters or a loss."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.nn.approximation import relative_error, truncated_factors
from lightning_struct.nn.channels import CONVOLUTIONS
from lightning_struct.nn.classic import LowRank
from lightning_struct.nn.replace import LayerFactory

_LONGEST_FRONT = 2048
_BISECTIONS = 10


@dataclass(frozen=True)
class Option:
    """One way to store a layer.

    Attributes:
        layer: its replacement; None: it stays.
        parameters: numbers in its weight.
        loss_increase: of the whole model on the data, when this layer alone is replaced; 0 if the loss falls.
    """

    layer: nn.Module | None
    parameters: int
    loss_increase: float


def least_increase(options: Sequence[Sequence[Option]], allowed: int) -> list[int]:
    """The option of each layer such that the sum of the increases of the loss is least within ``allowed`` parameters.

    The multiple-choice knapsack problem. Layer after layer, a partial choice remains unless another one is
    both smaller and better. That is exact while they are few; of more than 2048, one is left in each small range of
    sizes. Of options with equal increases the largest is taken that there is room for.

    Args:
        options: of each layer.
        allowed: at least the sum of the smallest options.
    """
    sizes, losses = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    room = allowed - _smallest(options)  # if the rest is smallest
    fronts: list[Tensor] = []
    for of_layer in options:
        of_options = torch.tensor([option.parameters for option in of_layer])
        sizes = (sizes[:, None] + of_options - of_options.min()).flatten()  # over the smallest
        of_losses = torch.tensor([option.loss_increase for option in of_layer], dtype=torch.float64)
        losses = (losses[:, None] + of_losses).flatten()
        # The choices within the room that are better than all smaller ones, by size.
        order = losses.argsort(stable=True)
        order = order[sizes[order].argsort(stable=True)]
        order = order[sizes[order] <= room]
        least_before = losses[order].cummin(0).values.roll(1)
        least_before[0] = math.inf
        front = _thinned(order[losses[order] < least_before], sizes)
        fronts.append(front)
        sizes, losses = sizes[front], losses[front]
    choice: list[int] = []
    state = len(sizes) - 1  # the one with the least loss
    for of_layer, front in zip(reversed(options), reversed(fronts), strict=True):
        state, option = divmod(int(front[state]), len(of_layer))
        choice.insert(0, option)
    # Larger options that cost no more, as far as there is room.
    room = allowed - _size(options, choice)
    for layer, of_layer in enumerate(options):
        now = of_layer[choice[layer]]
        parameters, number = max(
            (option.parameters, -number)
            for number, option in enumerate(of_layer)
            if option.loss_increase <= now.loss_increase and option.parameters <= now.parameters + room
        )
        room -= parameters - now.parameters
        choice[layer] = -number
    return choice


def _thinned(front: Tensor, sizes: Tensor) -> Tensor:
    """The smallest choice of a front, and the best one of each of as many ranges of sizes as it may be long."""
    if len(front) <= _LONGEST_FRONT:
        return front
    sizes = sizes[front]
    ranges = (sizes - sizes[0]) * _LONGEST_FRONT // (sizes[-1] - sizes[0] + 1)
    is_last = ranges.diff(append=ranges.new_tensor([_LONGEST_FRONT])) > 0
    is_last[0] = True
    return front[is_last]


def _size(options: Sequence[Sequence[Option]], choice: Sequence[int]) -> int:
    return sum(of_layer[index].parameters for of_layer, index in zip(options, choice, strict=True))


def _smallest(options: Sequence[Sequence[Option]]) -> int:
    return sum(min(option.parameters for option in of_layer) for of_layer in options)


def smallest_within(
    options: Sequence[Sequence[Option]], allowed: float, increase: Callable[[Sequence[int]], float]
) -> list[int]:
    """The smallest choice whose increase of the loss is at most ``allowed``, by bisection of the number of parameters.

    Args:
        options: of each layer, the first of them as it is.
        allowed: not negative.
        increase: measures a choice.

    Returns:
        The option of each layer. All layers as they are if no smaller choice that is tried is within ``allowed``.
    """
    best = [0] * len(options)
    low, high = _smallest(options), _size(options, best)
    tried = low  # the smallest of all first: that may do
    for _ in range(_BISECTIONS):
        choice = least_increase(options, tried)
        if increase(choice) <= allowed:
            best = choice
            high = _size(options, choice)
        else:
            low = tried
        if high - low <= max(1, high // 200):
            break
        tried = round(math.sqrt(low * high))
    return best


_LARGEST = 2048  # outputs; the eigenvectors of a larger moment take longer than a minute
_WEIGHT_SHARE = 0.01  # of the moment of outputs under white inputs: directions that the data lack are not lost


@contextmanager
def observed_outputs(layers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Tensor]]:
    """The sums of y yᵀ, (m, m) in float64, over outputs y = W x of layers, without bias, while they are called."""
    moments: dict[nn.Module, Tensor] = {}

    def note(layer: Any, args: Any, y: Any) -> None:
        if not isinstance(y, Tensor):
            return
        y = y.detach().movedim(-1 - len(layer.kernel_size), -1) if type(layer) in CONVOLUTIONS else y.detach()
        bias = getattr(layer, "bias", None)
        y = (y if bias is None else y - bias).reshape(-1, y.shape[-1]).double()  # also of a single sample
        moments[layer] = moments[layer] + y.T @ y if layer in moments else y.T @ y

    def outputs(layer: Any) -> int:
        return layer.weight.shape[0] if isinstance(layer, (nn.Linear, *CONVOLUTIONS)) else _LARGEST

    handles = [layer.register_forward_hook(note) for layer in layers if outputs(layer) <= _LARGEST]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def low_rank_near_outputs(linear: nn.Linear, ranks: Sequence[int], moment: Tensor | None) -> list[LayerFactory]:
    """Factories of :class:`LowRank` near to a layer, of several ranks.

    The matrix M of rank r with the least Σ ‖M x - W x‖² is U Uᵀ W, U the first r eigenvectors of Σ y yᵀ, y = W x
    (principal components). A small share of W Wᵀ is added to that: if all inputs are of equal power, M is the
    truncated singular value decomposition.

    Args:
        linear: the layer.
        ranks: r of each.
        moment: Σ y yᵀ, (m, m), float64. None: the truncated singular value decomposition.
    """
    components: list[Tensor] = []  # all of them, when they are first needed

    def from_linear(linear: nn.Linear, rank: int) -> LowRank:  # by this name it is called with the layer
        weight = linear.weight.detach().double()
        if not bool(weight.isfinite().all()):
            raise ValueError("the weight has NaN or infinite entries")
        if not components:
            components.append(_principal_outputs(weight, moment))
        U = components[0][:, :rank]
        with torch.random.fork_rng(devices=[]):
            layer = LowRank(linear.in_features, linear.out_features, rank, bias=linear.bias is not None)
        layer.to(linear.weight.device, linear.weight.dtype)
        G, H = truncated_factors(U.T @ weight, rank)
        with torch.no_grad():
            layer.G.copy_(U @ G)
            layer.H.copy_(H)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        layer.approximation_error = relative_error(layer.to_dense().double(), weight)
        return layer.train(linear.training)

    return [partial(from_linear, rank=rank) for rank in ranks]


def _principal_outputs(weight: Tensor, moment: Tensor | None) -> Tensor:
    """The eigenvectors of the moment, or of W Wᵀ, (m, up to m), by falling eigenvalues."""
    if moment is None or not bool(moment.isfinite().all()) or not moment.trace() > 0:
        return torch.linalg.svd(weight, full_matrices=False)[0]
    of_weight = weight @ weight.T
    total = of_weight.trace()
    mixed = moment / moment.trace() + (_WEIGHT_SHARE * of_weight / total if total > 0 else 0)
    return torch.linalg.eigh(mixed)[1].flip(1)
