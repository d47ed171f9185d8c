"""The hooks of a layer that another one takes the place of."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_OF_CALLS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_OF_STATE = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def take_hooks(new: nn.Module, old: nn.Module) -> None:
    """Give a module the hooks of another, but those by which torch.nn.utils makes the weight. Their handles work on."""
    for name in _OF_CALLS:
        hooks = getattr(old, name)
        making_weights = [key for key, hook in hooks.items() if _makes_weight(hook)]
        if making_weights:
            hooks = type(hooks)((key, hook) for key, hook in hooks.items() if key not in making_weights)
        hooks.update(getattr(new, name))
        setattr(new, name, hooks)
    new._is_full_backward_hook = old._is_full_backward_hook


def copy_hooks(new: nn.Module, old: nn.Module, copied: dict[int, Any]) -> None:
    """Give a module copies of these hooks.

    Args:
        new: has none.
        old: keeps its own.
        copied: what ``copy.deepcopy`` has copied already, by the ids, as its second argument.
    """
    for name in _OF_CALLS:
        hooks = getattr(old, name)
        kept = type(hooks)((key, hook) for key, hook in hooks.items() if not _makes_weight(hook))
        setattr(new, name, copy.deepcopy(kept, copied))
    new._is_full_backward_hook = old._is_full_backward_hook


def has_state_hooks(layer: nn.Module) -> bool:
    """Whether the layer has hooks of ``state_dict`` or ``load_state_dict``, those of torch.nn.utils aside."""
    return any(not _makes_weight(getattr(hook, "hook", hook)) for hook in _hooks_of_state(layer))


def weight_makers(layer: nn.Module) -> list[str]:
    """What of torch.nn.utils makes the weights of a layer, such as a norm or a mask: names of classes."""
    parametrizations: Any = layer._modules.get("parametrizations") or nn.ModuleDict()
    by_parametrization = [type(maker).__name__ for makers in parametrizations.values() for maker in makers]
    by_hook = [type(hook).__name__ for hook in layer._forward_pre_hooks.values() if _makes_weight(hook)]
    return [name.lstrip("_") for name in dict.fromkeys(by_parametrization + by_hook)]


def _hooks_of_state(layer: nn.Module) -> Iterator[Any]:
    for name in _OF_STATE:
        hooks: Mapping[int, Any] = getattr(layer, name)
        yield from hooks.values()


def _makes_weight(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.nn.utils.")  # of a function, or of a class
