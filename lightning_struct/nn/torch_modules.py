"""Attachments of torch to modules, and its tracers: hooks, parametrizations, buffers, scripts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils import parametrize

_OF_CALLS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_OF_STATE = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


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
        copied: copies that ``copy.deepcopy`` has made already, by the ids, as its second argument.
    """
    for name in _OF_CALLS:
        hooks = getattr(old, name)
        copies = type(hooks)((key, hook) for key, hook in hooks.items() if not _makes_weight(hook))
        setattr(new, name, copy.deepcopy(copies, copied))
    new._is_full_backward_hook = old._is_full_backward_hook


def has_state_hooks(layer: nn.Module) -> bool:
    """Whether the layer has hooks of ``state_dict`` or ``load_state_dict``, those of torch.nn.utils aside."""
    hooks = [hook for name in _OF_STATE for hook in getattr(layer, name).values()]
    return any(not _makes_weight(getattr(hook, "hook", hook)) for hook in hooks)


def weight_makers(layer: nn.Module) -> list[str]:
    """Names of the classes of torch.nn.utils that make the weights of a layer, such as a norm or a mask."""
    parametrizations: Any = layer._modules.get("parametrizations") or nn.ModuleDict()
    by_parametrization = [type(maker).__name__ for makers in parametrizations.values() for maker in makers]
    by_hook = [type(hook).__name__ for hook in layer._forward_pre_hooks.values() if _makes_weight(hook)]
    return [name.lstrip("_") for name in dict.fromkeys(by_parametrization + by_hook)]


def _makes_weight(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.nn.utils.")


def is_sharded(tensor: Any) -> bool:
    """Whether each process has a part of a tensor only, as those of FSDP2."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """A tensor with all of its entries, of a sharded one in all processes."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def set_values(parameter: Any, values: Tensor) -> None:
    """Set all entries of a parameter, of a sharded one in all processes."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values.to(parameter.device), parameter.device_mesh, parameter.placements)
    parameter.copy_(values)


def add_parametrization(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Parametrize a weight as ``torch.nn.utils.parametrize`` does, such that the module can be pickled.

    torch gives each parametrized module a class of its own, which no other process would find, and refuses to pickle
    it. Here it is pickled by the class that it had before, from which such a class is made anew.

    Args:
        module: has the weight, and no parametrization of other than here.
        name: of the weight.
        parametrization: maps the weight to that with which the module computes.
    """
    parametrize.register_parametrization(module, name, parametrization)
    parametrized: Any = type(module)
    if "__getstate__" in vars(parametrized):  # torch's own one refuses
        del parametrized.__getstate__
    parametrized.__reduce_ex__ = _reduced


@torch.no_grad()
def remove_parametrizations(module: nn.Module) -> None:
    """Make parametrized weights plain parameters. torch's own function would change deep copies of the module, too."""
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    plain: dict[str, nn.Parameter | None] = {
        name: nn.Parameter(getattr(module, name), requires_grad=bool(weights.original.requires_grad))
        for name, weights in parametrizations.items()
    }
    del module.parametrizations
    module.__class__ = type(module).__bases__[0]
    module._parameters = plain | module._parameters  # weights come before biases again


def _reduced(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """The state with which pickle makes a parametrized module again."""
    plain = type(module).__bases__[0]
    reduced: Any = super(type(module), module).__reduce_ex__(max(2, protocol))  # made by a function, from the class
    assert isinstance(module.parametrizations, nn.ModuleDict)
    return _unfilled, (plain, tuple(module.parametrizations)), *reduced[2:]


def _unfilled(plain: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module without attributes, of a class like that which torch makes for weights of these names."""
    module = plain.__new__(plain)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        add_parametrization(module, name, nn.Identity())
    vars(module).clear()
    return module


def is_traced(input: Any) -> bool:
    """Whether ``torch.fx.symbolic_trace`` calls, with something that stands for an input."""
    return isinstance(input, Proxy)


def whole_call(module: nn.Module, *inputs: Any) -> Any:
    """The call of a module as one node of the graph, as those of ``torch.nn`` are.

    Raises:
        RuntimeError: the module is all that is traced.
    """
    tracer = inputs[0].tracer
    path = tracer.path_of_module(module)
    if not path:
        raise RuntimeError(
            f"torch.fx does not look into {type(module).__name__}, which is one node of a graph: trace the model that "
            "it is in, or nn.Sequential(layer)"
        )
    return tracer.create_proxy("call_module", path, inputs, {})


INSTEAD_OF_SCRIPTS = "use torch.export.export, or torch.jit.trace with freeze(model, dense=True)"


def recorded(layer: nn.Module, product: Callable[[], Tensor]) -> Tensor:
    """A product that ``torch.jit.trace`` records.

    Raises:
        RuntimeError: it cannot be recorded.
    """
    try:
        return product()
    except Exception as error:
        raise RuntimeError(f"torch.jit.trace cannot record {layer}: {INSTEAD_OF_SCRIPTS}") from error


HALF_PRECISION = (torch.float16, torch.bfloat16)
"""The dtypes in which numbers coincide that must be distinct, and which have no Fourier transforms."""


def restore_precision(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Give buffers back in float32 that ``module._apply`` has just rounded to half precision.

    Args:
        module: has the buffers, on the device where they shall be.
        before: the buffers by name as they were before.
    """
    for name, exact in before.items():
        now = getattr(module, name)
        if now.dtype in HALF_PRECISION:
            setattr(module, name, exact.to(now.device, torch.float32))
