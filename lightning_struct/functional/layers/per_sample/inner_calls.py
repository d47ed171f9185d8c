"""Calls inside of a layer's ``forward``, recorded while it runs.

The uses that ``nn.MultiheadAttention`` makes of its parameters are calls of ``torch.nn.functional.linear``, and the
layer returns none of their outputs. While such a layer runs, that function is replaced by one that also records the
calls of its thread: no hook of torch reaches them (a ``TorchFunctionMode`` is not active inside of
``multi_head_attention_forward``, which dispatches on itself), and computing the attention a second time to get at them
would cost a third of a small transformer's training. Gradient norms, Kronecker factors and RLS all read these calls.

An ``LSTM`` that takes lengths packs its sequences, calls ``super().forward`` and pads the result. The inner call shows
the numbers that its weights multiply. While such a layer runs, its type has one more base, right before torch's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.functional.layers.calls import LayerCall, SampleCount, tensors_in
from lightning_struct.functional.layers.per_sample import Contribution, Dense, Outer, Uncovered
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32
from lightning_struct.functional.layers.per_sample.sample_layout import by_sample, has_active_dropout
from lightning_struct.functional.layers.registry import has_plain_parameters, kind_of, owned_parameters
from lightning_struct.functional.randomness import RandomState, random_state
from lightning_struct.functional.torch_tools import FakeTensor

if TYPE_CHECKING:
    from typing_extensions import Self


class LinearCall(NamedTuple):
    """One call of ``linear``: ``outputs`` (..., out) of ``inputs`` (..., in)."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    outputs: Tensor


_linear = F.linear
_lock = threading.Lock()
_active = 0


_of_thread = threading.local()  # its own recordings


class LinearCalls:
    """A context in which the calls of ``linear`` that this thread makes are kept.

    Attributes:
        calls: in their order.
    """

    def __init__(self) -> None:
        self.calls: list[LinearCall] = []

    def __enter__(self) -> Self:
        global _active, _linear
        vars(_of_thread).setdefault("recordings", []).append(self)
        with _lock:
            if _active == 0:
                _linear = F.linear  # DeepSpeed, for one, may have replaced it, too
            _active += 1
            # A compiled graph is broken at each call: recorded calls must not become part of it.
            F.linear = _outside_of_graphs() if "torch._dynamo" in sys.modules else _recorded_linear
        return self

    def __exit__(self, *exception: object) -> None:
        global _active
        _of_thread.recordings.remove(self)
        with _lock:
            _active -= 1
            if _active == 0:
                F.linear = _linear


def _recorded_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    outputs = _linear(input, weight, bias)
    if not isinstance(outputs, FakeTensor):  # torch.compile runs graphs on these before it runs them
        for recording in getattr(_of_thread, "recordings", ()):
            recording.calls.append(LinearCall(input, weight, bias, outputs))
    return outputs


@cache
def _outside_of_graphs() -> Callable[..., Tensor]:
    return torch.compiler.disable(_recorded_linear)


def calls_linear(layer: nn.Module) -> bool:
    """Whether the shares of the layer's parameters are read off calls that are recorded while it runs."""
    kind = kind_of(layer)
    return kind is not None and kind.base is nn.MultiheadAttention and has_plain_parameters(layer, kind)


class ParameterUse:
    """One product of an attention layer with a weight, to which a bias may be added.

    Args:
        call: with ``inputs`` (L, N, in) or, time first, (L·N, in).
        parameters: those of the layer, by name.
        sequences: N; None if the layer read one sequence without a batch dimension.

    Attributes:
        parameters: those that were used, or whose parts were used, by their names below the layer.
    """

    def __init__(self, call: LinearCall, parameters: Mapping[str, nn.Parameter], sequences: int | None) -> None:
        self._sequences, self._inputs, self._rows = sequences, call.inputs.detach(), rows_used(call, parameters)
        self.parameters = {name: parameters[name] for name in self._rows}

    def contributions(self, cotangent: Tensor, samples: SampleCount) -> dict[str, Contribution]:
        """Each sample's share of the gradients that the use gives its parameters.

        Args:
            cotangent: of the result of the use.
            samples: n, or the sizes that it may have, as :func:`~.sample_layout.by_sample` takes them.

        Raises:
            Uncovered: the number of sequences is none that n may have; there is no dimension of sequences.
        """
        if self._sequences is None:
            raise Uncovered("it read one sequence without a batch dimension")
        inputs, delta = (
            by_sample(tensor.reshape(-1, self._sequences, tensor.shape[-1]).transpose(0, 1), samples)
            for tensor in (self._inputs, cotangent)
        )
        shares: dict[str, Contribution] = {}
        for name, parameter in self.parameters.items():
            rows = self._rows[name]
            if parameter.ndim == 2:
                whole = rows == slice(0, parameter.shape[0])
                shape = None if whole else tuple(parameter.shape)
                shares[name] = Outer(inputs, delta, shape, None if whole else rows)
            else:
                gradient = at_least_float32(delta).sum(1)
                others = (rows.start, parameter.shape[0] - rows.stop)
                shares[name] = Dense(F.pad(gradient, others) if any(others) else gradient)
        return shares


def parameter_uses(call: LayerCall, recorded: Sequence[LinearCall]) -> list[tuple[Tensor, ParameterUse]]:
    """All products that one call of an attention layer made with its trainable parameters, after their results.

    The use of ``bias_k`` and ``bias_v`` (``add_bias_kv``) is left out: they are no part of a product.

    Args:
        call: of the layer.
        recorded: the calls of ``linear`` in it.
    """
    query = call.argument(0, "query")
    sequences = query.shape[0 if call.layer.batch_first else 1] if query.ndim == 3 else None
    parameters = {name: p for name, p in owned_parameters(call.layer).items() if p.requires_grad}
    return [
        (made.outputs, ParameterUse(made, parameters, sequences))
        for made in recorded
        if made.outputs.requires_grad and parameters
    ]


def rows_used(call: LinearCall, parameters: Mapping[str, nn.Parameter]) -> dict[str, slice]:
    """The rows of each parameter that a call used, by name; without those that it did not use."""
    found: dict[str, slice] = {}
    for name, parameter in parameters.items():
        for used in (call.weight, call.bias):
            if used is not None and (rows := _rows(used, parameter)) is not None:
                found[name] = rows
    return found


def _rows(used: Tensor, parameter: nn.Parameter) -> slice | None:
    """The rows of the parameter that ``used`` is a view of; None if it is not a view of it."""
    if used is parameter:
        return slice(0, parameter.shape[0])
    if used.ndim != parameter.ndim or used.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        return None
    offset = used.storage_offset() - parameter.storage_offset()
    if not 0 <= offset < parameter.numel():
        return None
    start = offset // parameter.stride(0)
    return slice(start, start + used.shape[0])


# The attribute of a layer that is watched.
_WATCHING = "_inner_calls"


class BaseCalls:
    """A context in which the inner calls of one call of a layer are kept.

    Each is kept with the state of the random generators before it, if it draws from them.

    Attributes:
        calls: in their order.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.calls: list[tuple[LayerCall, RandomState | None]] = []
        self._layer = layer

    def __enter__(self) -> Self:
        watching = vars(self._layer).setdefault(_WATCHING, [])
        if not watching:
            kind = kind_of(self._layer)
            assert kind is not None and kind.base is not None
            self._layer.__class__ = _watched(type(self._layer), kind.base)  # type: ignore[arg-type]  # types are hashable
        watching.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        watching = vars(self._layer)[_WATCHING]
        watching.remove(self)
        if not watching:
            del vars(self._layer)[_WATCHING]
            self._layer.__class__ = type(self._layer).__mro__[1]


def calls_base(layer: nn.Module) -> bool:
    """Whether the layer is a recurrent one of torch, with a ``forward`` of its own."""
    kind = kind_of(layer)
    if kind is None or kind.base is None or not issubclass(kind.base, nn.RNNBase) or not isinstance(layer, kind.base):
        return False
    return type(layer).forward is not kind.base.forward and has_plain_parameters(layer, kind)


@cache
def _watched(layer_type: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the type in which ``super().forward``, if it would be that of the base, is watched."""
    base_forward: Callable[..., Any] = base.forward

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = random_state(*tensors_in((args, kwargs))) if has_active_dropout(layer) else None
        outputs = base_forward(layer, *args, **kwargs)
        for watching in vars(layer)[_WATCHING]:
            watching.calls.append((LayerCall(layer, args, kwargs, outputs, of_base=True), state))
        return outputs

    watch = type(base.__name__, (base,), {"forward": forward})
    make: Any = type(layer_type)  # of classes that are abstract, too
    return make(layer_type.__name__, (layer_type, watch), {})
