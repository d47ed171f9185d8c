"""Layers of unknown types, recognised by their results.

Libraries spell the same layers in many ways: ``LlamaRMSNorm``, ``Conv1D``, a ``LayerNorm`` that counts its channels
first, an ``LSTM`` that takes lengths. Their names say little and their code cannot be read, but they can be run: a copy
of the layer, with random weights, on a small random input. If that gives the result of a layer of torch from the same
weights, the layer is served by the rules of torch's. If its output is affine in weights that scale or shift the
features, as that of every normalisation and scaling is, the gradients of these weights follow from running the layer
again.

Each configuration of each type is tried once. Layers that have other layers below them are not tried, nor are those
that couple the samples of a batch; a layer that raises an error is not recognised.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_struct.functional.layers.kinds import ElementwiseForm, LayerKind, Matrix, couples_samples, nearest_kind
from lightning_struct.functional.randomness import isolated_host_generators, normal_numbers, seeded
from lightning_struct.functional.structured.arguments import computing_dtype

# Relative to the norm of an output.
_TOLERANCE = 1e-4
# Larger weights keep their values while a layer is tried.
_NUMBERS_AT_MOST = 2**22
_SETTINGS = (bool, int, float, str, tuple, type(None), type, torch.dtype)

_recognized: WeakKeyDictionary[type[nn.Module], dict[Any, LayerKind | None]] = WeakKeyDictionary()


def recognized_kind(layer: nn.Module) -> LayerKind | None:
    """The kind of a layer whose type has none, by its results; None if they are of no known kind."""
    if not _may_be_tried(layer):
        return None
    known = _recognized.setdefault(type(layer), {})
    # All that decides, with its type and the input, on the outputs of a layer; apart from the values of its weights.
    shapes = tuple((name, None if p is None else (p.shape, p.dtype, p.device)) for name, p in layer._parameters.items())
    key = (_settings(layer), shapes)
    if key not in known:
        if torch.compiler.is_compiling():
            return None
        known[key] = _recognize(layer)
    return known[key]


def forget_recognized() -> None:
    """Try all layers again, since a type was declared or is no longer."""
    _recognized.clear()


def run_with(
    layer: nn.Module, parameters: Mapping[str, Tensor], *args: Any, as_type: type[nn.Module] | None = None
) -> Any:
    """The ``forward`` of a copy of a layer, without hooks, that has other parameters; the layer stays as it is.

    Args:
        layer: without layers below it that have parameters.
        parameters: by their names; of all of its own.
        args: of the call.
        as_type: the type of the copy, if it is not the layer's.
    """
    twin = _twin(layer, parameters, as_type or type(layer))
    return type(twin).forward(twin, *args)


def _twin(layer: nn.Module, parameters: Mapping[str, Tensor], of_type: type[nn.Module]) -> nn.Module:
    twin = object.__new__(of_type)
    vars(twin).update(
        {name: copy(value) if isinstance(value, (dict, list)) else value for name, value in vars(layer).items()}
    )
    vars(twin)["_parameters"] = {name: parameters.get(name) for name in layer._parameters}
    twin._buffers = {name: None if b is None else b.clone() for name, b in layer._buffers.items()}
    if isinstance(twin, nn.RNNBase):
        twin._flat_weights = [getattr(twin, name) for name in twin._flat_weights_names]
    return twin


# --- trials -----------------------------------------------------------------------------------------------------------


def _may_be_tried(layer: nn.Module) -> bool:
    own = [p for p in layer._parameters.values() if p is not None]
    below = layer.children() if not isinstance(layer, nn.MultiheadAttention) else ()
    return (
        bool(own)
        and all(type(child) is nn.Identity for child in below)
        and all(type(p) is nn.Parameter and p.is_floating_point() and not p.is_meta and not is_lazy(p) for p in own)
        and not isinstance(layer, torch.jit.ScriptModule)
        and not couples_samples(layer)
    )


def _settings(layer: nn.Module) -> tuple[tuple[str, Any], ...]:
    values = [(name, value) for name, value in sorted(vars(layer).items()) if isinstance(value, _SETTINGS)]
    return tuple(pair for pair in values if _attempt(hash, pair) is not None)


def _state(layer: nn.Module) -> Any:
    """Settings and buffers, which a call may change."""
    return _settings(layer), [None if b is None else (id(b), b._version) for b in layer._buffers.values()]


def _recognize(layer: nn.Module) -> LayerKind | None:
    devices = list({p.device for p in layer._parameters.values() if p is not None and p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), isolated_host_generators(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device = next(p for p in layer._parameters.values() if p is not None).device
        with torch.autocast(device.type, enabled=False):
            trial = _Trial(layer, device)
            return trial.like_its_base() or trial.as_affine() or trial.as_elementwise()


# Shapes of inputs of layers of torch.
_SHAPES: dict[type[nn.Module], Callable[[Any], list[tuple[int, ...]]]] = {
    nn.Linear: lambda layer: [(2, 3, layer.in_features)],
    nn.modules.conv._ConvNd: lambda layer: [_image(layer, more) for more in (2, 3)],
    **dict.fromkeys(
        (nn.LayerNorm, nn.RMSNorm),
        # others take the second dimension of the second one for the channels
        lambda layer: [(2, 3, *others, *layer.normalized_shape) for others in ((), (5,))],
    ),
    nn.PReLU: lambda layer: [(2, layer.num_parameters, 3)],
    nn.GroupNorm: lambda layer: [(2, layer.num_channels, 3), (2, layer.num_channels, 3, 2)],
    **dict.fromkeys((nn.BatchNorm1d, nn.InstanceNorm1d), lambda layer: [(2, layer.num_features, 3)]),
    **dict.fromkeys((nn.BatchNorm2d, nn.InstanceNorm2d), lambda layer: [(2, layer.num_features, 3, 3)]),
    **dict.fromkeys((nn.BatchNorm3d, nn.InstanceNorm3d), lambda layer: [(2, layer.num_features, 3, 3, 3)]),
    nn.RNNCellBase: lambda layer: [(2, layer.input_size)],
    nn.RNNBase: lambda layer: [(2, 3, layer.input_size)],
    nn.MultiheadAttention: lambda layer: [(2, 3, layer.embed_dim)],
}


def _image(layer: Any, more: int) -> tuple[int, ...]:
    """An image that is larger than the kernel: padding to a multiple of the stride differs in one of two."""
    reach = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return (2, layer.in_channels, *(size + more for size in reach))


class _Trial:
    """Runs of copies of a layer with random weights."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._layer: Any = layer
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self._own = {name: p.detach() for name, p in layer._parameters.items() if p is not None}
        self._dtype = computing_dtype(*self._own.values())
        self._weights = {
            name: self._random(*p.shape) if p.numel() <= _NUMBERS_AT_MOST else p.to(self._dtype)
            for name, p in self._own.items()
        }

    def like_its_base(self) -> LayerKind | None:
        """The kind of the nearest base that has one, if its ``forward`` gives the same."""
        kind = nearest_kind(type(self._layer))
        if kind is None or kind.base is None or not isinstance(self._layer, kind.base):
            return None
        if not self._own.keys() <= set(kind.parameters(self._layer)):
            return None
        base = kind.base
        for inputs in self._inputs_of(base):
            found, expected = (self._with_the_same_dropout(inputs, of_type) for of_type in (None, base))
            if expected is None or not _same(found, expected):
                return None
        return replace(kind, recognized=True, declared=False)

    def _inputs_of(self, base: type[nn.Module]) -> Iterator[tuple[Tensor, ...]]:
        """Arguments of small calls of a layer of torch."""
        if base is nn.Embedding:
            yield (torch.arange(min(6, self._layer.num_embeddings), device=self._device)[None],)
        shapes = next((_SHAPES[kind] for kind in base.__mro__ if kind in _SHAPES), lambda layer: [])
        for shape in shapes(self._layer):
            yield (self._random(*shape),) * (3 if base is nn.MultiheadAttention else 1)

    def _with_the_same_dropout(self, inputs: tuple[Tensor, ...], of_type: type[nn.Module] | None) -> Any:
        with seeded(0, self._device):
            return _attempt(run_with, self._layer, self._weights, *inputs, as_type=of_type)

    def as_affine(self) -> LayerKind | None:
        """x Wᵀ + b with a matrix that is stored in either way."""
        matrices = [name for name, p in self._own.items() if p.ndim == 2]
        vectors = [name for name, p in self._own.items() if p.ndim == 1]
        if len(matrices) != 1 or len(vectors) > 1 or len(self._own) != len(matrices) + len(vectors):
            return None
        (name,), bias = matrices, vectors[0] if vectors else None
        for transposed in (False, True):
            weight = self._weights[name].t() if transposed else self._weights[name]
            if bias is not None and self._weights[bias].shape[0] != weight.shape[0]:
                continue
            offset = 0 if bias is None else self._weights[bias]
            inputs = [self._random(*shape, weight.shape[1]) for shape in ((2, 3), (4,))]
            if all(self._gives(x, x @ weight.t() + offset) for x in inputs):
                matrices_of = partial(lambda matrix, layer: [matrix], Matrix(name, bias, transposed=transposed))
                return LayerKind(nn.Linear, matrices_of, lambda layer: layer._parameters, recognized=True)
        return None

    def as_elementwise(self) -> LayerKind | None:
        """An :class:`ElementwiseForm` for each number of dimensions: the features are the last, or else the second."""
        if any(p.numel() != max(p.shape, default=1) for p in self._own.values()):
            return None
        width = max(p.numel() for p in self._own.values())
        if any(p.numel() not in (1, width) for p in self._own.values()):
            return None
        forms: dict[int, ElementwiseForm] = {}
        for others in ((4,), (2, 3), (2, 3, 5), (2, 3, 5, 2)):
            form = self._elementwise_form((*others, width), channels_first=False)
            if form := form or self._elementwise_form((others[0], width, *others[1:]), channels_first=True):
                forms[1 + len(others)] = form
        if not forms:
            return None
        return LayerKind(None, parameters=lambda layer: layer._parameters, forms=forms, recognized=True)

    def _elementwise_form(self, shape: tuple[int, ...], channels_first: bool) -> ElementwiseForm | None:
        inputs = self._random(*shape)
        inputs[1::2] *= 1e-3  # a small constant that is added to a variance must be seen, too
        zeros = {name: torch.zeros_like(p) for name, p in self._weights.items()}
        origin, found = (self._run(weights, inputs) for weights in (zeros, self._weights))
        alone = self._run(self._weights, inputs[:1])
        if origin is None or found is None or found.shape != inputs.shape or not _same(alone, found[:1]):
            return None
        features = (-1, *[1] * (len(shape) - 2)) if channels_first else (-1,)
        expected, shifts = origin, set()
        for name, weight in self._weights.items():
            unit = self._run({**zeros, name: torch.ones_like(weight)}, inputs)
            if unit is None:
                return None
            expected = expected + (unit - origin) * weight.reshape(features)
            if bool((unit - origin == 1).all()):
                shifts.add(name)
        if not all(_same(*rows) for rows in zip(found, expected, strict=True)):
            return None
        first = (slice(None), *[slice(1)] * (len(shape) - 2))
        pointwise = not channels_first and len(shape) > 2 and self._gives(inputs[first], found[first])
        return ElementwiseForm(channels_first, pointwise, not origin.any(), frozenset(shifts))

    def _gives(self, inputs: Tensor, expected: Tensor) -> bool:
        return _same(self._run(self._weights, inputs), expected)

    def _run(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor | None:
        """The outputs of the layer; None for an error or no tensor, or if the call changes its state."""
        twin = _twin(self._layer, weights, type(self._layer))
        before = _state(twin)
        outputs = _attempt(type(twin).forward, twin, inputs)
        return outputs if isinstance(outputs, Tensor) and _state(twin) == before else None

    def _random(self, *shape: int) -> Tensor:
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        return normal_numbers(*shape, like=like, generator=self._generator)


def _attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The value of the function; None if it fails: it runs code that may be anything."""
    try:
        return function(*args, **kwargs)
    except Exception:  # noqa: BLE001
        return None


def _same(found: Any, expected: Any) -> bool:
    """Whether tensors, or nested tuples of them, are equal up to rounding."""
    if isinstance(expected, (tuple, list)):
        alike = isinstance(found, (tuple, list)) and len(found) == len(expected)
        return alike and all(_same(a, b) for a, b in zip(found, expected, strict=True))
    if not isinstance(expected, Tensor):
        return found is expected
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    norm = torch.linalg.vector_norm
    return bool(norm(found - expected) <= _TOLERANCE * norm(expected))
