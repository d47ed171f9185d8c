"""Each sample's share of the gradients that one call of a layer gives its parameters, by the type of the layer.

Most shares are read off the layer's inputs and the cotangents of its outputs. A layer of an unknown type is run again
under ``torch.func.vmap``, and measured if that gives the outputs that it gave before.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.weight_norm import WeightNorm

from lightning_struct.functional.checks import first_line
from lightning_struct.functional.layers import registry
from lightning_struct.functional.layers.calls import LayerCall, admissible_sizes, map_leaves, tensors_in
from lightning_struct.functional.layers.kinds import ContributionRule
from lightning_struct.functional.layers.per_sample import Contribution, Dense, Lookup, Outer, Uncovered, sample_layout
from lightning_struct.functional.layers.per_sample.contributions import (
    NUMBERS_AT_A_TIME,
    Convolution,
    at_least_float32,
    pad_argument,
    row_norms,
)
from lightning_struct.functional.layers.per_sample.recurrent import cell_contributions, recurrent_contributions

# Per-sample gradients of a layer without a rule are all kept until the layer's other uses are known, of so many numbers
# at most (1 GiB in float32).
_NUMBERS_AT_MOST = 2**28


class CannotRunAgain(Uncovered):
    """A layer without a rule can never be run again, whatever the batch."""


def contributions_by_vmap(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share by one vector-Jacobian product with respect to the layer's own parameters.

    The samples are sought in the outputs as :func:`contributions` does in inputs: in the first dimension, in the
    second, and as consecutive rows of the first. Every tensor among the arguments that has as many entries in that
    dimension is taken to hold those of the samples, any other to be common to all.
    """
    layer, cotangents = call.layer, call.cotangents
    params = {f"layer.{name}": p.detach() for name, p in registry.owned_parameters(layer).items() if p.requires_grad}
    recorded = tensors_in(call.outputs)
    reached = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    place = _place_of_samples([recorded[i] for i in reached], call)
    n, dimension = place.samples, place.dimension
    numbers = sum(p.numel() for p in params.values())
    if n * numbers > _NUMBERS_AT_MOST:
        raise Uncovered(f"it has no rule, and its gradients of {n} samples are {n * numbers} numbers")

    mapped: list[Tensor] = []

    def taken_out(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and place.holds(leaf)):
            return leaf
        mapped.append(leaf)
        return _MAPPED

    template = map_leaves(taken_out, (call.args, dict(call.kwargs)))
    if not mapped:
        entries = f"{n * place.rows} entries in dimension {dimension}"
        raise Uncovered(f"it has no rule, and nothing that it read has {entries}, as its outputs have for {n} samples")
    bare = _Bare(layer)
    buffers = {name: buffer.clone() for name, buffer in bare.named_buffers()}

    def one_sample(values: list[Tensor], deltas: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        def outputs_at(at: dict[str, Tensor]) -> list[Tensor]:
            rest = iter(values)
            one_args, one_kwargs = map_leaves(lambda leaf: next(rest) if leaf is _MAPPED else leaf, template)
            results = tensors_in(functional_call(bare, {**buffers, **at}, one_args, one_kwargs))
            return [results[i] for i in reached]

        results, pull_back = vjp(outputs_at, params)  # type: ignore[misc]
        (gradients,) = pull_back([delta.to(result.dtype) for delta, result in zip(deltas, results, strict=True)])
        return gradients, results

    deltas = [place.parted(cotangent) for cotangent in cotangents if cotangent is not None]
    chunk_size = max(1, NUMBERS_AT_A_TIME // max(1, numbers))
    try:
        with _kept_as_it_is(layer), warnings.catch_warnings():
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
        raise CannotRunAgain(f"it has no rule (see register_layer), and torch.func cannot run it: {reason}") from error
    for i, result in zip(reached, results, strict=True):
        _check_same(recorded[i], result.movedim(0, dimension).flatten(dimension, dimension + 1))
    return {name.removeprefix("layer."): Dense(gradient) for name, gradient in gradients.items()}


@dataclass(frozen=True)
class _Place:
    """The place of n samples in a tensor: their ``dimension``, in which each has so many consecutive ``rows``."""

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
        Uncovered: there is none, there are several, or the rows of a sample need not be consecutive.
    """
    admissible = admissible_sizes(call.samples)
    decided = {sample_layout.decided_dimension(output.shape, output.ndim - 1, call) for output in outputs}
    first, second = ({output.shape[k] if output.ndim > k else 0 for output in outputs} for k in (0, 1))
    if decided == {1} and len(second) == 1:
        return _Place(min(second), dimension=1)
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
def _kept_as_it_is(layer: nn.Module) -> Iterator[None]:
    """Context in which a layer may run without a trace: hooks compute weights as attributes of the layer.

    Some parametrizations go on with each call in training, as the power iteration of the spectral norm does.
    """
    before = dict(vars(layer))
    training = [part for part in getattr(layer, "parametrizations", nn.Module()).modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
        vars(layer).clear()
        vars(layer).update(before)


# Stands for a tensor that has entries of the samples.
_MAPPED = object()

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def contributions(call: LayerCall) -> dict[str, Contribution]:
    """Each sample's share of the gradients that one call of a layer gives its own parameters.

    The samples are sought in the dimensions of the layer's input in this order:

    1. the first dimension, if its size may be n;
    2. the second, of inputs with the sequence first, if its size may be n;
    3. the first again, if the call says of so many rows which sample each is of;
    4. the first again, if its size is a multiple k·n: then each k rows in a row belong to one sample.

    Batch normalisation in training couples the samples; there the share is the addition of the sample to the gradient,
    the statistics of the batch being as they are.

    Args:
        call: of any layer. Layers that are run again must find the autocast state of the call and, if
            :func:`draws_random_numbers`, the random generators as they were before it.

    Returns:
        By the name of the parameter below the layer; of all that are trainable.

    Raises:
        Uncovered: the shares of the samples cannot be told apart.
        ValueError: a rule that was declared did not return one contribution for each trainable parameter.
    """
    reader = reader_of(call.layer)
    if reader.declared:
        return _checked(call.layer, reader.rule(call))
    if not reader.is_known:
        return reader.rule(call)
    try:
        of_base = registry.base_call(call)
    except ValueError as problem:
        raise Uncovered(f"its call cannot be read: {problem}") from problem
    return reader.rule(of_base)


def has_rule(layer: nn.Module) -> bool:
    """Whether the shares are read off without another run under ``torch.func.vmap``."""
    return reader_of(layer).is_known


def draws_random_numbers(layer: nn.Module) -> bool:
    """Whether :func:`contributions` runs the layer again, with the random generators as before the call."""
    reader = reader_of(layer)
    return reader.is_known and reader.runs_again and sample_layout.has_active_dropout(layer)


@dataclass(frozen=True)
class Reader:
    """The rule of a layer.

    Attributes:
        rule: the rule.
        runs_again: whether it runs the layer again. A recurrent one may have dropout inside.
        declared: whether it comes from :func:`~lightning_struct.functional.layers.registry.register_layer`.
        is_known: False for layers without a rule, which are run again under ``torch.func.vmap``.
    """

    rule: ContributionRule
    runs_again: bool = False
    declared: bool = False
    is_known: bool = True


def reader_of(layer: nn.Module) -> Reader:
    """The rule of a layer, whether it is called or not."""
    kind = registry.kind_of(layer)
    if kind is None or not registry.has_plain_parameters(layer, kind):
        return _BY_VMAP
    if kind.rule is not None:
        return Reader(kind.rule, declared=True)
    if kind.base is None or (kind.base is nn.EmbeddingBag and layer.mode == "max"):
        return _BY_VMAP
    return _READERS.get(kind.base, _BY_VMAP)


def _checked(layer: nn.Module, shares: dict[str, Contribution]) -> dict[str, Contribution]:
    """The shares that a declared rule returned, if they are complete."""
    expected = {name: tuple(p.shape) for name, p in registry.owned_parameters(layer).items() if p.requires_grad}
    found = {name: tuple(share.shape) for name, share in shares.items() if name in expected}
    if found != expected:
        declared = f"the rule declared for {type(layer).__name__}"
        raise ValueError(f"{declared} returned contributions of the shapes {found}; its parameters have {expected}")
    return {name: shares[name] for name in expected}


# --- the rules -------------------------------------------------------------------------------------------------------


def _affine(call: LayerCall) -> dict[str, Contribution]:
    """The rule of ``nn.Linear`` and of every layer that was declared by a matrix."""
    kind = registry.kind_of(call.layer)
    assert kind is not None
    (matrix,) = kind.matrices(call.layer)
    inputs = call.input
    layout = sample_layout.sample_layout(inputs.shape, inputs.ndim - 1, call)
    delta = layout.arranged(call.cotangent)
    norms = row_norms(delta) if delta.shape[1] == 1 else None
    shares: dict[str, Contribution] = {}
    if call.trains(matrix.weight):
        if matrix.transposed:
            shares[matrix.weight] = Outer(delta, layout.arranged(inputs))
        else:
            shares[matrix.weight] = Outer(layout.arranged(inputs), delta, cotangent_norms=norms)
    if matrix.bias is not None and call.trains(matrix.bias):
        shares[matrix.bias] = Dense(at_least_float32(delta).sum(1) if norms is None else delta.squeeze(1), norms)
    return shares


def _embedding(call: LayerCall) -> dict[str, Contribution]:
    layer, indices, delta = call.layer, call.input, call.cotangent
    # One dimension that is not n counts positions, most likely, and the table's rows were spread over the samples.
    layout = sample_layout.sample_layout(indices.shape, indices.ndim, call, ids=indices if indices.ndim == 1 else None)
    if layer.padding_idx is not None:
        delta = delta.masked_fill((indices == layer.padding_idx)[..., None], 0)
    if layer.scale_grad_by_freq:
        delta = delta / torch.bincount(indices.flatten())[indices][..., None].to(delta.dtype)
    return {"weight": Lookup(layout.arranged(indices), layout.arranged(delta), layer.num_embeddings)}


def _embedding_bag(call: LayerCall) -> dict[str, Contribution]:
    layer, indices, delta = call.layer, call.input, at_least_float32(call.cotangent)
    weights, offsets = call.argument(2, "per_sample_weights", None), call.argument(1, "offsets", None)
    layout = sample_layout.sample_layout(delta.shape, 1, call)  # of the bags
    weights = delta.new_ones(indices.shape) if weights is None else weights
    if layer.padding_idx is not None:
        weights = weights.masked_fill(indices == layer.padding_idx, 0)
    if offsets is not None:
        lengths = torch.diff(offsets, append=offsets.new_tensor([len(indices)]))[: len(delta)]
        bag_of_row = torch.arange(len(delta), device=delta.device).repeat_interleave(lengths)
        bags = sample_layout.SampleLayout(len(delta), 0, 1, bag_of_row)
        indices, weights = bags.arranged(indices), bags.arranged(weights)
    if layer.mode == "mean":
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    if layer.scale_grad_by_freq:
        weights = weights / torch.bincount(call.input.flatten())[indices].clamp(min=1)
    shares = layout.arranged(weights[..., None] * delta[:, None]).flatten(1, 2)
    return {"weight": Lookup(layout.arranged(indices).flatten(1), shares, layer.num_embeddings)}


def _convolution(call: LayerCall) -> dict[str, Contribution]:
    """Contributions of a transposed convolution: the gradient of one that reads the cotangents, of the inputs."""
    layer, inputs, delta, pads = call.layer, call.input, call.cotangent, registry.padding(call.layer)
    transposed = _base(layer) in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    if layer.padding_mode != "zeros":
        inputs = F.pad(inputs, pad_argument(pads), layer.padding_mode)
        pads = [(0, 0)] * len(pads)
    dimensions = len(layer.kernel_size)
    layout = sample_layout.sample_layout(inputs.shape, inputs.ndim - 1 - dimensions, replace(call, rows={}))
    images, rows = (delta, inputs) if transposed else (inputs, delta)
    shares: dict[str, Contribution] = {}
    if call.trains("weight"):
        frames = inputs.shape[0] // layout.samples
        kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
        if frames > 1:
            # The images of one sample are the frames of one film, which a kernel of one frame reads.
            if dimensions == 3:
                raise Uncovered(f"it read {frames} volumes for each sample")
            images, rows = (layout.arranged(tensor).transpose(1, 2) for tensor in (images, rows))
            kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
            pads = [(0, 0), *pads]
        shares["weight"] = Convolution(
            images, rows, kernel, stride, dilation, tuple(pads), layer.groups, tuple(layer.weight.shape)
        )
    if call.trains("bias"):
        shares["bias"] = Dense(at_least_float32(layout.arranged(delta)).flatten(3).sum((1, 3)))
    return shares


def _normalization(call: LayerCall) -> dict[str, Contribution]:
    layer, base = call.layer, _base(call.layer)
    inputs, delta = at_least_float32(call.input), at_least_float32(call.cotangent)
    own = {name: p for name, p in layer._parameters.items() if p is not None}
    shape = next(iter(own.values())).shape
    over_features = base in (nn.LayerNorm, nn.RMSNorm)
    if over_features:
        leading = inputs.ndim - len(shape)
    else:
        is_unbatched = base in _INSTANCE_NORMS and inputs.ndim == 2 + _INSTANCE_NORMS.index(base)
        leading = 0 if is_unbatched else 1
    layout = sample_layout.sample_layout(inputs.shape, leading, call)

    def share(product: Tensor) -> Dense:
        gradients = layout.arranged(product).sum(1)
        return Dense(gradients if over_features else gradients.reshape(*gradients.shape[:2], -1).sum(2))

    shares: dict[str, Contribution] = {}
    if call.trains("weight"):  # the layer multiplies the normalised inputs by it
        bare = _Bare(layer)
        neutral = {f"layer.{name}": inputs.new_full(p.shape, name == "weight") for name, p in own.items()}
        neutral |= {name: buffer.clone() for name, buffer in bare.named_buffers()}
        with torch.no_grad(), torch.autocast(inputs.device.type, enabled=False):
            shares["weight"] = share(functional_call(bare, neutral, (inputs,)) * delta)
    if call.trains("bias"):
        shares["bias"] = share(delta)
    return shares


def _base(layer: nn.Module) -> type[nn.Module]:
    kind = registry.kind_of(layer)
    assert kind is not None and kind.base is not None
    return kind.base


def _parametric_relu(call: LayerCall) -> dict[str, Contribution]:
    slopes, inputs, delta = call.layer.num_parameters, at_least_float32(call.input), at_least_float32(call.cotangent)
    layout = sample_layout.sample_layout(inputs.shape, max(1, inputs.ndim - 1) if slopes == 1 else 1, call)
    gradients = layout.arranged(inputs.clamp(max=0) * delta).sum(1)
    return {"weight": Dense(gradients.reshape(layout.samples, slopes, -1).sum(2))}


def _attention(call: LayerCall) -> dict[str, Contribution]:
    raise Uncovered("its products are seen only while it runs (see inner_calls.py)")


_BY_VMAP = Reader(contributions_by_vmap, runs_again=True, is_known=False)
# By the base of the kind of layer.
_READERS: dict[type[nn.Module], Reader] = {
    nn.Linear: Reader(_affine),
    nn.Embedding: Reader(_embedding),
    nn.EmbeddingBag: Reader(_embedding_bag),
    nn.PReLU: Reader(_parametric_relu),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Reader(_convolution)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Reader(_convolution)),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), Reader(_normalization)),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *_INSTANCE_NORMS), Reader(_normalization)),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), Reader(recurrent_contributions, runs_again=True)),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), Reader(cell_contributions)),
    nn.MultiheadAttention: Reader(_attention),
}
