"""The recorder of layer calls: hooks on layers and parameters, by which readers see calls, inputs and cotangents.

Three read them: per-sample gradient norms, Kronecker factors, and RLS.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_struct.functional.layers.calls import LayerCall


class CallRecorder(ABC):
    """Hooks by which a reader sees the calls of layers, and when the gradients of parameters are complete.

    They run before other hooks, which may replace an output. They do not keep the reader alive; copies of a layer keep
    hooks that do nothing.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._hooked: set[nn.Parameter] = set()
        self._watched: dict[nn.Module, Any] = {}
        weakref.finalize(self, _remove, self._handles)

    @abstractmethod
    def _is_recorded(self, layer: nn.Module) -> bool:
        """Whether calls of a layer are recorded now."""

    @abstractmethod
    def _called(self, call: LayerCall, watched: Any) -> None:
        """Read a call, which was made in the context of :meth:`_watch`, or without one."""

    @abstractmethod
    def _watch(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The context in which the coming call of a layer shows what its arguments and outputs do not; or None."""

    def _accumulated(self, parameter: Any) -> None:
        """Read the gradient of a parameter that was hooked, to which a backward pass has added."""
        raise NotImplementedError

    def _guard(self, layer: nn.Module) -> AbstractContextManager[None]:
        """The context of the hooks of a layer."""
        return nullcontext()

    def _hook_layer(self, layer: nn.Module, *, watched: bool) -> None:
        if watched:
            self._handles.append(layer.register_forward_pre_hook(WeakHook(self._before_call), with_kwargs=True))
        after = WeakHook(self._after_call)
        self._handles.append(layer.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=watched))

    def _hook_parameter(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and parameter not in self._hooked and not is_lazy(parameter):
            self._hooked.add(parameter)
            self._handles.append(parameter.register_post_accumulate_grad_hook(WeakHook(self._accumulated)))

    def _before_call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._guard(layer):
            if self._is_recorded(layer) and (watched := self._watch(layer, args, kwargs)) is not None:
                self._watched[layer] = watched.__enter__()

    def _after_call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        with self._guard(layer):
            watched = self._watched.pop(layer, None) if self._watched else None
            if watched is not None:
                watched.__exit__(None, None, None)
            if outputs is not None and self._is_recorded(layer):  # otherwise the call has failed
                self._called(LayerCall(layer, args, kwargs, outputs), watched)

    def remove(self) -> None:
        """Take the hooks away."""
        _remove(self._handles)
        for watched in self._watched.values():
            watched.__exit__(None, None, None)
        self._watched.clear()
        self._hooked.clear()


class WeakHook:
    """A hook that does not keep the object of its method alive; copies of modules and parameters leave it behind."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *call: Any) -> None:
        method = self._method()
        if method is not None:
            method(*call)

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, ()


def _left_behind() -> Callable[..., None]:
    return no_hook


def no_hook(*call: Any) -> None:
    """The hook of a copied layer."""


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
