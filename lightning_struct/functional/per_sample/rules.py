"""What one call of a layer adds to the gradients of its parameters, by the type of the layer.

A rule reads each sample's share off the layer's inputs and the cotangents of its outputs. A layer without a rule is run
again under ``torch.func.vmap``, where that gives the outputs that it gave before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.weight_norm import WeightNorm

from lightning_struct.functional.per_sample import rerun
from lightning_struct.functional.per_sample.attention import attention_contributions
from lightning_struct.functional.per_sample.contributions import (
    Contribution,
    Convolution,
    Dense,
    Lookup,
    Outer,
    Uncovered,
    at_least_float32,
    row_norms,
)
from lightning_struct.functional.per_sample.recurrent import recurrent_contributions

# n, or the sizes that n may have, or None: the first dimension of every input.
Samples: TypeAlias = int | Collection[int] | None

# Per-sample gradients of a layer without a rule are formed, of so many numbers at a time ...
_NUMBERS_AT_A_TIME = 2**25
# ... and, as they are all kept until the layer's other uses are known, of so many at most (1 GiB in float32).
_NUMBERS_AT_MOST = 2**28

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class CannotRunAgain(Uncovered):
    """Of a layer without a rule, whatever the batch."""


def contributions(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples = None,
) -> dict[str, Contribution]:
    """What one call of ``layer`` adds to the gradients of its own parameters, for every sample.

    In which dimension of the layer's input the samples are: the first, if its size may be n; else the second, of what is
    read with the sequence first, if its size may be n; else the first again, if its size is a multiple of n: then each
    k rows in a row belong to one sample. Batch normalisation in training couples the samples; there the share is what
    the sample adds to the gradient, the statistics of the batch being as they are.

    Args:
        layer: one that has been called. Layers that are run again must find the autocast state of the call and, where
            :func:`draws_random_numbers`, the random generators as they were before it.
        args: with ``kwargs``, what it was called with.
        kwargs: see ``args``.
        outputs: what it returned.
        cotangents: of :func:`tensors_in` the outputs; None for those that got none.
        samples: n, or the sizes that n may have; if None, the size of the first dimension, whatever it is.

    Returns:
        By the name of the parameter below ``layer``; of all that are trainable.

    Raises:
        Uncovered: the shares of the samples cannot be told apart.
    """
    rule = _rule(layer)
    return (rule.function if rule else _by_vmap)(layer, args, kwargs, outputs, cotangents, samples)


def owned_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a call of ``layer`` uses itself, by their names below it; not those of layers that it calls."""
    if isinstance(layer, nn.MultiheadAttention) and has_rule(layer):
        return dict(layer.named_parameters())
    own = dict(layer.named_parameters(recurse=False))
    if (parametrizations := getattr(layer, "parametrizations", None)) is not None:
        own.update(parametrizations.named_parameters("parametrizations"))
    return own


def called_layers(module: nn.Module) -> list[nn.Module]:
    """All modules from ``module`` down, but the output projections of attentions, which are never called as modules."""
    attention = {
        child.out_proj for child in module.modules() if isinstance(child, nn.MultiheadAttention) and has_rule(child)
    }
    return [layer for layer in module.modules() if layer not in attention]


def has_rule(layer: nn.Module) -> bool:
    """Whether the shares are read off without another run under ``torch.func.vmap``."""
    return _rule(layer) is not None


def runs_again(layer: nn.Module) -> bool:
    """Whether :func:`contributions` runs the layer again."""
    rule = _rule(layer)
    return rule is None or rule.runs_again


def draws_random_numbers(layer: nn.Module) -> bool:
    """Whether :func:`contributions` runs the layer again and needs the random generators as they were before the call."""
    rule = _rule(layer)
    return rule is not None and rule.runs_again and rerun.draws_random_numbers(layer)


def compares_outputs(layer: nn.Module) -> bool:
    """Whether :func:`contributions` needs the outputs as they were after the call."""
    return not has_rule(layer) or draws_random_numbers(layer)


def couples_samples(layer: nn.Module) -> bool:
    """Whether the layer is a batch normalisation with the statistics of the batch."""
    return isinstance(layer, _BATCH_NORMS) and (layer.training or layer.running_mean is None)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and data classes, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value):
        value = list(vars(value).values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@dataclass(frozen=True)
class _Rule:
    """``parameters``: the names that a layer has whose parameters are what its forward uses."""

    function: Callable[..., dict[str, Contribution]]
    parameters: Callable[[Any], Collection[str]] = lambda layer: ("weight", "bias")
    runs_again: bool = False


def _rule(layer: nn.Module) -> _Rule | None:
    """The rule of the layer's type, or of the base whose forward it has, if its parameters are the plain ones."""
    rule = _rule_of_type(type(layer))  # type: ignore[arg-type]  # a type is hashable
    if rule is None or "parametrizations" in layer._modules:
        return None
    return rule if layer._parameters.keys() <= set(rule.parameters(layer)) else None


@cache
def _rule_of_type(kind: type[nn.Module]) -> _Rule | None:
    for base in kind.__mro__:
        if (rule := _RULES.get(base)) is not None:
            names = ("forward", "_conv_forward")
            return rule if all(getattr(kind, name, None) is getattr(base, name, None) for name in names) else None
    return None


# --- where the samples are -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """``dimension``: of the samples. If that is 0 and larger than n, consecutive rows belong to one sample."""

    samples: int
    dimension: int
    leading: int

    def arranged(self, tensor: Tensor) -> Tensor:
        """(n, positions, *features) of (*leading, *features)."""
        features = tensor.shape[self.leading :]
        tensor = tensor if self.dimension == 0 else tensor.movedim(self.dimension, 0)
        return tensor.reshape(self.samples, -1, *features)


def _layout(size: Sequence[int], leading: int, samples: Samples, *, groups: bool = True) -> _Layout:
    """Where the samples are among the first ``leading`` dimensions of an input of this size; see :func:`contributions`.

    Raises:
        Uncovered: in none of them.
    """
    if leading < 1:
        raise Uncovered(f"it read a tensor of shape {tuple(size)}, which has no dimension of samples")
    if samples is None:
        return _Layout(size[0], 0, leading)
    admissible = [samples] if isinstance(samples, int) else sorted(samples)
    for dimension in range(min(leading, 2)):
        if size[dimension] in admissible:
            return _Layout(size[dimension], dimension, leading)
    if groups and len(admissible) == 1 and size[0] % admissible[0] == 0:
        return _Layout(admissible[0], 0, leading)
    numbers = " or ".join(map(str, admissible))
    raise Uncovered(f"it read a tensor of shape {tuple(size)}, in which no dimension is that of {numbers} samples")


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return (args[0] if args else kwargs["input"]).detach()


def _cotangent(cotangents: Sequence[Tensor | None]) -> Tensor:
    (cotangent,) = cotangents
    assert cotangent is not None  # the only output
    return cotangent


def _trainable(layer: nn.Module, name: str) -> bool:
    parameter = layer._parameters.get(name)
    return parameter is not None and parameter.requires_grad


# --- the rules -------------------------------------------------------------------------------------------------------


def _linear(
    layer: nn.Linear,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples,
) -> dict[str, Contribution]:
    inputs = _input(args, kwargs)
    layout = _layout(inputs.shape, inputs.ndim - 1, samples)
    delta = layout.arranged(_cotangent(cotangents))
    norms = row_norms(delta) if delta.shape[1] == 1 else None
    shares: dict[str, Contribution] = {}
    if _trainable(layer, "weight"):
        shares["weight"] = Outer(layout.arranged(inputs), delta, cotangent_norms=norms)
    if _trainable(layer, "bias"):
        shares["bias"] = Dense(at_least_float32(delta).sum(1) if norms is None else delta.squeeze(1), norms)
    return shares


def _embedding(
    layer: nn.Embedding,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples,
) -> dict[str, Contribution]:
    indices, delta = _input(args, kwargs), _cotangent(cotangents)
    # One dimension that is not n counts positions, most likely, and the table's rows were spread over the samples.
    layout = _layout(indices.shape, indices.ndim, samples, groups=indices.ndim > 1)
    if layer.padding_idx is not None:
        delta = delta.masked_fill((indices == layer.padding_idx)[..., None], 0)
    if layer.scale_grad_by_freq:
        delta = delta / torch.bincount(indices.flatten())[indices][..., None].to(delta.dtype)
    delta = delta.movedim(layout.dimension, 0).reshape(layout.samples, -1, delta.shape[-1])
    return {"weight": Lookup(layout.arranged(indices), delta, layer.num_embeddings)}


def _convolution(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples,
) -> dict[str, Contribution]:
    inputs = _input(args, kwargs)
    padding = _padding(layer)
    if layer.padding_mode != "zeros":
        inputs = F.pad(inputs, [number for pair in reversed(padding) for number in pair], layer.padding_mode)
        padding = [(0, 0)] * len(padding)
    return _of_convolution(layer, inputs, _cotangent(cotangents), padding, samples, transposed=False)


def _transposed_convolution(
    layer: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples,
) -> dict[str, Contribution]:
    """Its weight has the gradient of a convolution's that reads the cotangents and has the inputs for cotangents."""
    return _of_convolution(
        layer, _input(args, kwargs), _cotangent(cotangents), _padding(layer), samples, transposed=True
    )


def _of_convolution(
    layer: Any, inputs: Tensor, delta: Tensor, padding: Sequence[tuple[int, int]], samples: Samples, *, transposed: bool
) -> dict[str, Contribution]:
    dimensions = len(layer.kernel_size)
    layout = _layout(inputs.shape, inputs.ndim - 1 - dimensions, samples)
    images, rows = (delta, inputs) if transposed else (inputs, delta)
    shares: dict[str, Contribution] = {}
    if _trainable(layer, "weight"):
        frames = inputs.shape[0] // layout.samples
        kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
        if frames > 1:
            # The images of one sample are the frames of one film, which a kernel of one frame reads.
            if dimensions == 3:
                raise Uncovered(f"it read {frames} volumes for each sample")
            images, rows = (layout.arranged(tensor).transpose(1, 2) for tensor in (images, rows))
            kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
            padding = [(0, 0), *padding]
        shares["weight"] = Convolution(
            images, rows, kernel, stride, dilation, tuple(padding), layer.groups, tuple(layer.weight.shape)
        )
    if _trainable(layer, "bias"):
        shares["bias"] = Dense(at_least_float32(layout.arranged(delta)).flatten(3).sum((1, 3)))
    return shares


def _padding(layer: Any) -> list[tuple[int, int]]:
    """(before, after) of each dimension."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(number, number) for number in layer.padding]


def _normalized(layer: Any, inputs: Tensor) -> Tensor:
    """What the layer multiplies by its weight."""
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return F.rms_norm(inputs, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    if isinstance(layer, _INSTANCE_NORMS) and (layer.training or not layer.track_running_stats):
        return F.instance_norm(inputs, eps=layer.eps)
    if couples_samples(layer):
        return F.batch_norm(inputs, None, None, training=True, eps=layer.eps)
    return F.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps)


def _normalization(
    layer: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples,
) -> dict[str, Contribution]:
    inputs, delta = at_least_float32(_input(args, kwargs)), at_least_float32(_cotangent(cotangents))
    over_features = isinstance(layer, (nn.LayerNorm, nn.RMSNorm))
    if over_features:
        leading = inputs.ndim - len(layer.normalized_shape)
    else:
        leading = 0 if _is_unbatched_instance_norm(layer, inputs) else 1
    layout = _layout(inputs.shape, leading, samples)

    def share(product: Tensor) -> Dense:
        gradients = layout.arranged(product).sum(1)
        return Dense(gradients if over_features else gradients.reshape(*gradients.shape[:2], -1).sum(2))

    shares: dict[str, Contribution] = {}
    if _trainable(layer, "weight"):
        shares["weight"] = share(_normalized(layer, inputs) * delta)
    if _trainable(layer, "bias"):
        shares["bias"] = share(delta)
    return shares


def _is_unbatched_instance_norm(layer: nn.Module, inputs: Tensor) -> bool:
    return any(isinstance(layer, kind) and inputs.ndim == 1 + d for d, kind in enumerate(_INSTANCE_NORMS, start=1))


def _parametric_relu(
    layer: nn.PReLU,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples,
) -> dict[str, Contribution]:
    inputs, delta = at_least_float32(_input(args, kwargs)), at_least_float32(_cotangent(cotangents))
    layout = _layout(inputs.shape, max(1, inputs.ndim - 1) if layer.num_parameters == 1 else 1, samples)
    gradients = layout.arranged(inputs.clamp(max=0) * delta).sum(1)
    if layer.num_parameters == 1:
        return {"weight": Dense(gradients.reshape(layout.samples, -1).sum(1, keepdim=True))}
    return {"weight": Dense(gradients.reshape(layout.samples, layer.num_parameters, -1).sum(2))}


def _of_one_size(function: Callable[..., dict[str, Contribution]]) -> Callable[..., dict[str, Contribution]]:
    """The rule of a ``function`` that knows one number of samples or None."""

    def rule(*arguments: Any) -> dict[str, Contribution]:
        *call, samples = arguments
        if samples is None or isinstance(samples, int):
            return function(*call, samples)
        if len(samples) == 1:
            return function(*call, *samples)
        shares = function(*call, None)
        for share in shares.values():
            if share.samples not in samples:
                raise Uncovered(f"it read {share.samples} samples, not {' or '.join(map(str, sorted(samples)))}")
        return shares

    return rule


_ATTENTION_PARAMETERS = (
    "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v",
)  # fmt: skip

_RULES: dict[type[nn.Module], _Rule] = {
    nn.Linear: _Rule(_linear),
    nn.Embedding: _Rule(_embedding),
    nn.PReLU: _Rule(_parametric_relu),
    **dict.fromkeys(_CONVOLUTIONS, _Rule(_convolution)),
    **dict.fromkeys(_TRANSPOSED_CONVOLUTIONS, _Rule(_transposed_convolution)),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), _Rule(_normalization)),
    **dict.fromkeys((*_BATCH_NORMS, *_INSTANCE_NORMS), _Rule(_normalization)),
    **dict.fromkeys(
        (nn.RNN, nn.LSTM, nn.GRU),
        _Rule(_of_one_size(recurrent_contributions), lambda layer: layer._flat_weights_names, runs_again=True),
    ),
    nn.MultiheadAttention: _Rule(
        _of_one_size(attention_contributions), lambda layer: _ATTENTION_PARAMETERS, runs_again=True
    ),
}


# --- layers without a rule -------------------------------------------------------------------------------------------


def _by_vmap(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Any,
    cotangents: Sequence[Tensor | None],
    samples: Samples,
) -> dict[str, Contribution]:
    """One vector-Jacobian product for each sample with respect to the layer's own parameters.

    Every tensor among the arguments whose first dimension has n entries is taken to hold one for each sample, any other
    to be common to all.
    """
    params = {f"layer.{name}": p.detach() for name, p in owned_parameters(layer).items() if p.requires_grad}
    recorded = tensors_in(outputs)
    reached = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    sizes = {recorded[i].shape[0] if recorded[i].ndim else 0 for i in reached}
    n = sizes.pop()
    if sizes or not n or (samples is not None and n not in ([samples] if isinstance(samples, int) else samples)):
        shapes = ", ".join(str(tuple(recorded[i].shape)) for i in reached)
        raise Uncovered(f"it has no rule, and its outputs, of shape {shapes}, have no first dimension of samples")
    numbers = sum(p.numel() for p in params.values())
    if n * numbers > _NUMBERS_AT_MOST:
        raise Uncovered(f"it has no rule, and its gradients of {n} samples are {n * numbers} numbers")

    mapped: list[Tensor] = []
    template = _without_mapped((args, dict(kwargs)), n, mapped)
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
        return pull_back([delta[None].to(result.dtype) for delta, result in zip(deltas, results, strict=True)])[
            0
        ], results

    deltas = [cotangent for cotangent in cotangents if cotangent is not None]
    chunk_size = max(1, _NUMBERS_AT_A_TIME // max(1, numbers))
    try:
        with _attributes_kept(layer):
            gradients, results = vmap(one_sample, chunk_size=chunk_size)([t.detach() for t in mapped], deltas)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CannotRunAgain(
            f"it has no rule, and torch.func cannot run it: {reason[0] if reason else error!r}"
        ) from error
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


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """A list, tuple or mapping with ``function`` of its items; anything else as it is."""
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(function, value))
    return value
