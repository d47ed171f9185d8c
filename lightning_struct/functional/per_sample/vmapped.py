"""Per-sample gradients of a layer without a rule, which is run again under ``torch.func.vmap``.

It is measured if that gives the outputs that it gave before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.utils import prune
from torch.nn.utils.weight_norm import WeightNorm

from lightning_struct.functional.layer_call import LayerCall, admissible_sizes, map_items, tensors_in
from lightning_struct.functional.layers import owned_parameters
from lightning_struct.functional.per_sample.contributions import NUMBERS_AT_A_TIME, Contribution, Dense, Uncovered

# Per-sample gradients of a layer without a rule are all kept until the layer's other uses are known, of so many numbers
# at most (1 GiB in float32).
_NUMBERS_AT_MOST = 2**28


class CannotRunAgain(Uncovered):
    """A layer without a rule can never be run again, whatever the batch."""


def contributions_by_vmap(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share by one vector-Jacobian product with respect to the layer's own parameters.

    Every tensor among the arguments whose first dimension has n entries is taken to hold one for each sample, any other
    to be common to all.
    """
    layer, cotangents, admissible = call.layer, call.cotangents, admissible_sizes(call.samples)
    params = {f"layer.{name}": p.detach() for name, p in owned_parameters(layer).items() if p.requires_grad}
    recorded = tensors_in(call.outputs)
    reached = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    sizes = {recorded[i].shape[0] if recorded[i].ndim else 0 for i in reached}
    n = sizes.pop()
    if sizes or not n or (admissible is not None and n not in admissible):
        shapes = ", ".join(str(tuple(recorded[i].shape)) for i in reached)
        raise Uncovered(f"it has no rule, and its outputs, of shape {shapes}, have no first dimension of samples")
    numbers = sum(p.numel() for p in params.values())
    if n * numbers > _NUMBERS_AT_MOST:
        raise Uncovered(f"it has no rule, and its gradients of {n} samples are {n * numbers} numbers")

    mapped: list[Tensor] = []
    template = _without_mapped((call.args, dict(call.kwargs)), n, mapped)
    if not mapped:
        raise Uncovered(f"it has no rule, and nothing that it read has a first dimension of {n} samples")
    bare = _Bare(layer)
    buffers = {name: buffer.clone() for name, buffer in bare.named_buffers()}

    def one_sample(values: list[Tensor], deltas: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        def outputs_at(at: dict[str, Tensor]) -> list[Tensor]:
            rest = iter(values)
            one_args, one_kwargs = _with_mapped(template, rest)
            results = tensors_in(functional_call(bare, {**buffers, **at}, one_args, one_kwargs))
            return [results[i] for i in reached]

        results, pull_back = vjp(outputs_at, params)  # type: ignore[misc]
        (gradients,) = pull_back([delta[None].to(result.dtype) for delta, result in zip(deltas, results, strict=True)])
        return gradients, results

    deltas = [cotangent for cotangent in cotangents if cotangent is not None]
    chunk_size = max(1, NUMBERS_AT_A_TIME // max(1, numbers))
    try:
        with _attributes_kept(layer), warnings.catch_warnings():
            # torch asks whoever reads it for an issue; that this takes longer is said by the recorder
            warnings.filterwarnings("ignore", "There is a performance drop")
            gradients, results = vmap(one_sample, chunk_size=chunk_size)([t.detach() for t in mapped], deltas)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        if "randomness" in reason:  # torch names arguments of vmap, which nobody here can give
            raise CannotRunAgain("it has no rule, and it draws random numbers, as by dropout") from error
        raise CannotRunAgain(f"it has no rule, and torch.func cannot run it: {reason}") from error
    for i, result in zip(reached, results, strict=True):
        _check_same(recorded[i], result.flatten(0, 1))
    return {name.removeprefix("layer."): Dense(gradient) for name, gradient in gradients.items()}


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


class _Mapped:
    """The place of a tensor that has one entry for each sample."""


def _without_mapped(value: Any, samples: int, mapped: list[Tensor]) -> Any:
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == samples:
        mapped.append(value)
        return _Mapped()
    return map_items(lambda item: _without_mapped(item, samples, mapped), value)


def _with_mapped(value: Any, entries: Iterator[Tensor]) -> Any:
    if isinstance(value, _Mapped):
        return next(entries)[None]
    return map_items(lambda item: _with_mapped(item, entries), value)
