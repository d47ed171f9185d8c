"""The products with their own weights that ``nn.MultiheadAttention`` computes inside of its forward.

They are calls of ``torch.nn.functional.linear``, and the layer returns none of their outputs. While such a layer runs, that
function is replaced by one that also keeps the calls of its thread: no hook of torch reaches them (a
``TorchFunctionMode`` is not active inside of ``multi_head_attention_forward``, which dispatches on itself), and computing
the attention a second time to get at them would cost a third of a small transformer's training.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_struct.functional.layer_call import Samples
from lightning_struct.functional.layers import kind_of
from lightning_struct.functional.per_sample.contributions import Contribution, Dense, Outer, Uncovered, at_least_float32
from lightning_struct.functional.per_sample.rerun import by_sample


class LinearCall(NamedTuple):
    """One call of ``linear``: ``outputs`` (..., out) of ``inputs`` (..., in)."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    outputs: Tensor


_linear = F.linear
_lock = threading.Lock()
_of_thread = threading.local()
_recording = 0


def start_recording() -> None:
    """Keep the calls of ``linear`` that this thread makes from here on; to be followed by :func:`stop_recording`."""
    global _recording
    _of_thread.calls = []
    with _lock:
        _recording += 1
        F.linear = _recorded_linear


def stop_recording() -> list[LinearCall]:
    """The calls since :func:`start_recording`, in their order."""
    global _recording
    calls, _of_thread.calls = _of_thread.calls, None
    with _lock:
        _recording -= 1
        if _recording == 0:
            F.linear = _linear
    return calls


def _recorded_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    outputs = _linear(input, weight, bias)
    calls = getattr(_of_thread, "calls", None)
    if calls is not None:
        calls.append(LinearCall(input, weight, bias, outputs))
    return outputs


def is_recorded(layer: nn.Module) -> bool:
    """Whether all parameters of the layer are used in calls of ``linear``: an attention layer's, but for ``add_bias_kv``."""
    kind = kind_of(layer)
    return kind is not None and kind.base is nn.MultiheadAttention and layer.bias_k is None


class Projection:
    """One recorded call of an attention layer.

    Args:
        call: with ``inputs`` (L, N, in) or, time first, (L·N, in).
        parameters: those of the layer, by name.
        sequences: N; None if the layer read one sequence without a batch dimension.

    Attributes:
        parameters: those that the call used, or a part of which it used.
    """

    def __init__(self, call: LinearCall, parameters: Mapping[str, nn.Parameter], sequences: int | None) -> None:
        self._inputs, self._sequences = call.inputs.detach(), sequences
        self._rows: dict[str, slice] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            for used in (call.weight, call.bias):
                if used is not None and (rows := _rows(used, parameter)) is not None:
                    self._rows[name], self.parameters[name] = rows, parameter

    def contributions(self, cotangents: Tensor, samples: Samples) -> dict[str, Contribution]:
        """What the call adds to the gradients of its parameters.

        Args:
            cotangents: of its outputs.
            samples: n, or the sizes that it may have; k sequences in a row are one sample where there are k·n.

        Raises:
            Uncovered: the number of sequences is no multiple of n; there is no dimension of sequences.
        """
        if self._sequences is None:
            raise Uncovered("it read one sequence without a batch dimension")
        n = samples if isinstance(samples, int) or samples is None else _one_of(samples, self._sequences)
        inputs, delta = (
            by_sample(tensor.reshape(-1, self._sequences, tensor.shape[-1]).transpose(0, 1), n)
            for tensor in (self._inputs, cotangents)
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


def _one_of(samples: Collection[int], sequences: int) -> int:
    if len(samples) == 1:
        return next(iter(samples))
    if sequences in samples:
        return sequences
    raise Uncovered(f"it read {sequences} sequences, not {' or '.join(map(str, sorted(samples)))}")


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
