"""Per-sample gradients of a layer without a rule, which is run again under ``torch.func.vmap``.

It is measured if that gives the outputs that it gave before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.utils import prune
from torch.nn.utils.weight_norm import WeightNorm

from lightning_struct.functional.checks import first_line
from lightning_struct.functional.layers.calls import LayerCall, admissible_sizes, map_items, tensors_in
from lightning_struct.functional.layers.per_sample.contributions import (
    NUMBERS_AT_A_TIME,
    Contribution,
    Dense,
    Uncovered,
)
from lightning_struct.functional.layers.per_sample.layout import check_decided
from lightning_struct.functional.layers.registry import owned_parameters

# Per-sample gradients of a layer without a rule are all kept until the layer's other uses are known, of so many numbers
# at most (1 GiB in float32).
_NUMBERS_AT_MOST = 2**28


class CannotRunAgain(Uncovered):
    """A layer without a rule can never be run again, whatever the batch."""


def contributions_by_vmap(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share by one vector-Jacobian product with respect to the layer's own parameters.

    The samples are sought in the outputs as :func:`~.rules.contributions` does in inputs: in the first dimension, in
    the second, and as consecutive rows of the first. Every tensor among the arguments that has as many entries in that
    dimension is taken to hold those of the samples, any other to be common to all.
    """
    layer, cotangents = call.layer, call.cotangents
    params = {f"layer.{name}": p.detach() for name, p in owned_parameters(layer).items() if p.requires_grad}
    recorded = tensors_in(call.outputs)
    reached = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    place = _place_of_samples([recorded[i] for i in reached], call)
    n, dimension = place.samples, place.dimension
    numbers = sum(p.numel() for p in params.values())
    if n * numbers > _NUMBERS_AT_MOST:
        raise Uncovered(f"it has no rule, and its gradients of {n} samples are {n * numbers} numbers")

    mapped: list[Tensor] = []
    template = _without_mapped((call.args, dict(call.kwargs)), place, mapped)
    if not mapped:
        raise Uncovered(
            f"it has no rule, and nothing that it read has {n * place.rows} entries in dimension {dimension}, as its "
            f"outputs have for {n} samples"
        )
    bare = _Bare(layer)
    buffers = {name: buffer.clone() for name, buffer in bare.named_buffers()}

    def one_sample(values: list[Tensor], deltas: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        def outputs_at(at: dict[str, Tensor]) -> list[Tensor]:
            rest = iter(values)
            one_args, one_kwargs = _with_mapped(template, rest)
            results = tensors_in(functional_call(bare, {**buffers, **at}, one_args, one_kwargs))
            return [results[i] for i in reached]

        results, pull_back = vjp(outputs_at, params)  # type: ignore[misc]
        (gradients,) = pull_back([delta.to(result.dtype) for delta, result in zip(deltas, results, strict=True)])
        return gradients, results

    deltas = [place.parted(cotangent) for cotangent in cotangents if cotangent is not None]
    chunk_size = max(1, NUMBERS_AT_A_TIME // max(1, numbers))
    try:
        with _attributes_kept(layer), _parametrizations_in_eval(layer), warnings.catch_warnings():
            # torch asks whoever reads it for an issue; that this takes longer is said by the recorder
            warnings.filterwarnings("ignore", "There is a performance drop")
            gradients, results = vmap(one_sample, in_dims=dimension, chunk_size=chunk_size)(
                [place.parted(tensor.detach()) for tensor in mapped], deltas
            )
    except torch.OutOfMemoryError as error:
        raise Uncovered(f"torch.func needs too much memory for this batch: {first_line(error)}") from error
    except Exception as error:
        reason = first_line(error)
        if "randomness" in reason:  # torch names arguments of vmap, which nobody here can give
            raise CannotRunAgain("it has no rule, and it draws random numbers, as by dropout") from error
        raise CannotRunAgain(f"it has no rule, and torch.func cannot run it: {reason}") from error
    for i, result in zip(reached, results, strict=True):
        _check_same(recorded[i], result.movedim(0, dimension).flatten(dimension, dimension + 1))
    return {name.removeprefix("layer."): Dense(gradient) for name, gradient in gradients.items()}


@dataclass(frozen=True)
class _Place:
    """Where the n samples are in a tensor: their ``dimension``, in which each has so many consecutive ``rows``."""

    samples: int
    dimension: int = 0
    rows: int = 1

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has as many entries in that dimension."""
        return tensor.ndim > self.dimension and tensor.shape[self.dimension] == self.samples * self.rows

    def parted(self, tensor: Tensor) -> Tensor:
        """(..., n, rows, ...) of (..., n * rows, ...)."""
        return tensor.unflatten(self.dimension, (self.samples, self.rows))


def _place_of_samples(outputs: Sequence[Tensor], call: LayerCall) -> _Place:
    """The place of the samples, the same in all outputs of a call.

    Raises:
        Uncovered: there is none, it cannot be told which it is, or the rows of a sample need not be consecutive.
    """
    admissible = admissible_sizes(call.samples)
    for output in outputs:
        check_decided(output.shape, output.ndim - 1, call)
    first, second = ({output.shape[k] if output.ndim > k else 0 for output in outputs} for k in (0, 1))
    if len(first) == 1 and (size := min(first)) and (admissible is None or size in admissible):
        return _Place(size)
    if admissible is not None and len(second) == 1 and (size := min(second)) in admissible:
        return _Place(size, dimension=1)
    if admissible is not None and len(admissible) == 1 and len(first) == 1 and first.isdisjoint(call.rows):
        rows, rest = divmod(min(first), admissible[0])
        if rows and not rest:
            return _Place(admissible[0], rows=rows)
    shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
    number = "" if admissible is None else f"{' or '.join(map(str, admissible))} "
    raise Uncovered(f"it has no rule, and its outputs, of shape {shapes}, have no dimension of {number}samples")


def _check_same(recorded: Tensor, computed: Tensor) -> None:
    recorded, tolerance = recorded.to(computed.dtype), math.sqrt(torch.finfo(recorded.dtype).eps)
    norm = torch.linalg.vector_norm
    if recorded.shape != computed.shape or not norm(computed - recorded) <= tolerance * norm(recorded):
        raise CannotRunAgain("it has no rule, and run sample by sample it gives another output (does it keep a state?)")


class _Bare(nn.Module):
    """A layer without its hooks but those that compute its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for hook in list(self.layer._forward_pre_hooks.values()):
            if isinstance(hook, (WeightNorm, prune.BasePruningMethod)):
                hook(self.layer, args)
        return self.layer.forward(*args, **kwargs)


@contextmanager
def _attributes_kept(layer: nn.Module) -> Iterator[None]:
    """Weights that hooks compute are plain attributes of the layer."""
    before = dict(vars(layer))
    try:
        yield
    finally:
        vars(layer).clear()
        vars(layer).update(before)


@contextmanager
def _parametrizations_in_eval(layer: nn.Module) -> Iterator[None]:
    """In training some go on with each call, as the power iteration of the spectral norm does."""
    training = [part for part in getattr(layer, "parametrizations", nn.Module()).modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class _Mapped:
    """Stands for a tensor that has entries of the samples."""


def _without_mapped(value: Any, place: _Place, mapped: list[Tensor]) -> Any:
    if isinstance(value, Tensor) and place.holds(value):
        mapped.append(value)
        return _Mapped()
    return map_items(lambda item: _without_mapped(item, place, mapped), value)


def _with_mapped(value: Any, entries: Iterator[Tensor]) -> Any:
    if isinstance(value, _Mapped):
        return next(entries)
    return map_items(lambda item: _with_mapped(item, entries), value)
