"""Compression of a trained model to a number of parameters: which layers, which class and which rank, by what they cost."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers import as_linear, hidden_layers, is_affine
from lightning_struct.nn.classic import LowRank
from lightning_struct.nn.monarch import Monarch
from lightning_struct.nn.replace import LayerFactory, Selection, _Selector, put_in_place, replacement, take_hooks

_log = logging.getLogger(__name__)

_SIZES = 2000  # steps of the budget in the search
BatchLoss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a model on a batch, ()."""


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


def compress(
    model: nn.Module,
    data: Iterable[Any],
    *,
    budget: float,
    loss: BatchLoss | None = None,
    candidates: Callable[[nn.Linear], Iterable[LayerFactory]] | None = None,
    include: Selection | Iterable[Selection] | None = None,
    exclude: Selection | Iterable[Selection] | None = None,
) -> nn.Module:
    """Replace linear layers of a trained model by near structured ones, such that it has no more parameters than a budget. ::

        model = compress(model, itertools.islice(loader, 8), budget=0.25)
        print(replacement_report(model))
        trainer.fit(module, data)    # the nearest matrices are a start: train on

    For each linear layer (``nn.Linear``, and what is declared or recognised as one) and each candidate the nearest member
    of the class is made, and the loss is measured with that layer alone replaced: its sensitivity. The choice is that
    with the least sum of increases within the budget, by dynamic programming over sizes rounded up to 1/2000 of the
    budget. Increases of several layers need not add up; measured losses say what came out, in what is logged at level INFO.

    That takes a pass over the data for each layer and candidate, and the searches of the classes for the nearest member.

    Args:
        model: changed in place. It is measured in eval mode, without gradients, and has its modes again afterwards.
        data: batches, some hundred samples; all are kept.
        budget: parameters of the whole compressed model: from 0 to 1 as a part of those it has, above as a number.
        loss: called as ``loss(model, batch)``, () for a batch. None: the change of the outputs, ‖f̂(x) - f(x)‖² / ‖f(x)‖², where
            x is the batch or its first item; it needs no labels.
        candidates: what may take the place of an ``nn.Linear``: ``from_linear`` of classes, in partials. None: low rank with
            1/2, 1/4, ... to 1/64 of the numbers of the layer, and Monarch matrices of 2, 4, 8 and 16 blocks.
        include, exclude: as in :func:`~lightning_struct.nn.replace_linear`.

    Returns:
        ``model``; the new layer if it is a linear layer itself.

    Raises:
        ValueError: the budget is not positive, or less than what can be reached, which is named; there are no data; a name
            is not in the model.
        TypeError: ``loss`` is not given, and the outputs are no tensor.

    Example:
        >>> torch.manual_seed(0)
        <torch...>
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> model = compress(model, [torch.randn(32, 64)], budget=0.5)
        >>> sum(parameter.numel() for parameter in model.parameters()) <= 0.5 * 4810
        True
    """
    batches = list(data)
    if not batches:
        raise ValueError("compress measures losses on data, but data has no batches")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    allowed = _checked_budget(budget, parameters)
    places = _linear_places(model, include, exclude)
    measured = functools.partial(_mean_loss, batches=batches, loss=loss or _output_change(model, batches))
    start = measured(model)
    options = [_options(model, names, candidates or default_candidates, measured, start) for names in places]
    others = parameters - sum(of_layer[0].parameters for of_layer in options)  # the first is the layer as it is
    smallest = others + sum(min(option.parameters for option in of_layer) for of_layer in options)
    if allowed < smallest:
        raise ValueError(
            f"budget={budget} allows {allowed:,} parameters, but with these candidates and layers the smallest model has "
            f"{smallest:,} of {parameters:,}: {others:,} are in other layers"
        )
    chosen = [
        of_layer[index] for of_layer, index in zip(options, least_increase(options, allowed - others), strict=True)
    ]
    new = [
        (name, option.layer)
        for names, option in zip(places, chosen, strict=True)
        for name in names
        if option.layer is not None
    ]
    put_in_place(model, new)
    compressed = next((layer for name, layer in new if not name), model)
    _log.info(
        "compressed from %s to %s parameters: loss %.4g before, %.4g now, %.4g by the sum of single layers",
        f"{parameters:,}",
        f"{sum(parameter.numel() for parameter in compressed.parameters()):,}",
        start,
        measured(compressed),
        start + sum(option.loss_increase for option in chosen),
    )
    return compressed


def default_candidates(linear: nn.Linear) -> list[LayerFactory]:
    """Low rank with 1/2 to 1/64 of the numbers of ``linear``, and Monarch matrices of 2 to 16 blocks."""
    m, n = linear.out_features, linear.in_features
    ranks = {max(1, m * n // ((m + n) * part)) for part in (2, 4, 8, 16, 32, 64)}
    low_rank: list[LayerFactory] = [functools.partial(LowRank.from_linear, rank=rank) for rank in sorted(ranks)]
    blocks = [count for count in (2, 4, 8, 16) if count <= min(m, n)]
    return low_rank + [functools.partial(Monarch.from_linear, blocks=count) for count in blocks]


def least_increase(options: Sequence[Sequence[Option]], allowed: int) -> list[int]:
    """The option of each layer such that the sum of the increases of the loss is least within ``allowed`` parameters.

    The knapsack problem of multiple choice, solved by dynamic programming with sizes rounded up: the choice is within
    the budget, and the best but for what rounding leaves unused.

    Args:
        options: of each layer.
        allowed: at least the sum of the smallest options.
    """
    step = max(1, math.ceil(allowed / _SIZES))
    room = allowed // step
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (room + 1)  # by the room that may be used
    for of_layer in options:
        sizes = [math.ceil(option.parameters / step) for option in of_layer]
        best = [
            min(
                (
                    (best[used - size][0] + option.loss_increase, [*best[used - size][1], index])
                    for index, (option, size) in enumerate(zip(of_layer, sizes, strict=True))
                    if size <= used
                ),
                default=(math.inf, []),
            )
            for used in range(room + 1)
        ]
    increase, choice = best[room]
    if math.isinf(increase):  # rounding leaves no room: the smallest have it
        return [min(range(len(of)), key=lambda index, of=of: of[index].parameters) for of in options]  # type: ignore
    return choice


def _checked_budget(budget: float, parameters: int) -> int:
    if not budget > 0:
        raise ValueError(f"budget must be positive, a number of parameters or a part of them, but is {budget}")
    return int(budget * parameters) if budget <= 1 else int(budget)


def _linear_places(model: nn.Module, include: Any, exclude: Any) -> list[list[str]]:
    """The names of each selected linear layer; several where it stands at several places."""
    included = None if include is None else _Selector("include", include, model)
    excluded = _Selector("exclude", () if exclude is None else exclude, model)
    in_attention = hidden_layers(model, of_other_forwards=True)
    names: dict[int, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if layer in in_attention or not is_affine(layer):
            continue
        if (included is None or included.has(name, layer)) and not excluded.has(name, layer):
            names.setdefault(id(layer), []).append(name)
    if not names:
        raise ValueError(f"compress finds no linear layer that is included and not excluded in {type(model).__name__}")
    return list(names.values())


def _options(
    model: nn.Module,
    names: list[str],
    candidates: Callable[[nn.Linear], Iterable[LayerFactory]],
    measured: Callable[[nn.Module], float],
    start: float,
) -> list[Option]:
    """The layer as it is, and the candidates that are smaller, each with what it costs."""
    old = model.get_submodule(names[0])
    linear = as_linear(old)
    options = [Option(None, linear.weight.numel(), 0.0)]
    for factory in candidates(linear):
        new = replacement(names[0], linear, factory)
        size = sum(parameter.numel() for name, parameter in new.named_parameters() if name != "bias")
        if size >= linear.weight.numel():
            continue
        take_hooks(new, old)
        if names[0]:
            put_in_place(model, [(name, new) for name in names])
        loss = measured(model if names[0] else new)
        if names[0]:
            put_in_place(model, [(name, old) for name in names])
        options.append(Option(new, size, max(0.0, loss - start)))
        _log.info("%s as %s: loss %+.4g", names[0] or "the model", new, loss - start)
    return sorted(options, key=lambda option: -option.parameters)  # of those that cost the same the largest is taken


def _output_change(model: nn.Module, batches: Sequence[Any]) -> BatchLoss:
    """The loss that is the relative change of the outputs from those of now."""

    def outputs(of: nn.Module, batch: Any) -> Tensor:
        y = of(batch if isinstance(batch, Tensor) else batch[0])
        if not isinstance(y, Tensor):
            raise TypeError(
                f"the outputs of {type(of).__name__} are no tensor: give loss=, a function of model and batch"
            )
        return y

    before: dict[int, Tensor] = {}

    def keep(of: nn.Module, batch: Any) -> Tensor:
        before[id(batch)] = outputs(of, batch)
        return torch.zeros(())

    _mean_loss(model, batches, keep)

    def change(of: nn.Module, batch: Any) -> Tensor:
        target = before[id(batch)]
        return (outputs(of, batch) - target).square().sum() / target.square().sum()

    return change


@torch.no_grad()
def _mean_loss(model: nn.Module, batches: Sequence[Any], loss: BatchLoss) -> float:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        value = sum(float(loss(model, batch)) for batch in batches) / len(batches)
    finally:
        for module, mode in modes:
            module.training = mode
    return value if math.isfinite(value) else math.inf
