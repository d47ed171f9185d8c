"""Calls that a layer's own ``forward`` makes of the ``forward`` of torch's layer that it derives from.

An ``LSTM`` that takes lengths packs its sequences, calls ``super().forward`` and pads what that returns. What its
weights multiply is seen in the inner call. While such a layer runs, it is of a type with one more base, right before
torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_struct.functional.layers.calls import LayerCall, tensors_in
from lightning_struct.functional.layers.per_sample.rerun import has_active_dropout
from lightning_struct.functional.layers.registry import has_plain_parameters, kind_of
from lightning_struct.functional.randomness import RandomState, random_state

if TYPE_CHECKING:
    from typing_extensions import Self

# The attribute of a layer that is watched.
_WATCHING = "_inner_calls"


class InnerCalls:
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


def has_inner_calls(layer: nn.Module) -> bool:
    """Whether the layer is a recurrent one of torch, with a ``forward`` of its own."""
    kind = kind_of(layer)
    return (
        kind is not None
        and kind.base is not None
        and issubclass(kind.base, nn.RNNBase)
        and isinstance(layer, kind.base)
        and type(layer).forward is not kind.base.forward
        and has_plain_parameters(layer, kind)
    )


@cache
def _watched(layer_type: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the type in which ``super().forward``, where it would be that of the base, is watched."""
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
