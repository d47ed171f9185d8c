"""Code that both optimizers share: checks of the module and its weights, and copies of an optimizer."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_struct.functional.checks import warn

# Attributes that every module has: its parameters, buffers, modules and hooks.
_OF_TORCH = frozenset(vars(nn.Module()))

# Remedies: of weights in 16 bits, and of the state of another optimizer.
LOWER_PRECISION = "for lower precision keep float32 weights and use autocast to bfloat16 (bf16-mixed)"
WEIGHTS_ALONE = (
    "To go on from weights that another one trained, load these alone: load_from_checkpoint, and no ckpt_path"
)


class TakesModule(TypeError):
    """An optimizer was given something else than a module."""


def check_module(module: Any, optimizer: str, reason: str) -> None:
    """Raise unless this is a module.

    Args:
        module: the given value.
        optimizer: name of the optimizer.
        reason: the optimizer's use of the module, as a relative clause.

    Raises:
        TakesModule: see above; the message names the right argument.
    """
    if not isinstance(module, nn.Module):
        raise TakesModule(
            f"{optimizer} takes the module, {reason}, not its parameters: {optimizer}(model, ...), got "
            f"{type(module).__name__}. In Lightning return {optimizer}(self, ...) from configure_optimizers, also with "
            "LightningCLI or hydra, which hand parameters to the optimizers that they configure themselves"
        )


def check_optimizer_state(state_dict: Any) -> None:
    """Raise TypeError unless this is a dict like those from an optimizer's ``state_dict()``."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        got = f"{state_dict!r:.80}"
        raise TypeError(f"state_dict must have 'state' and 'param_groups', as that of an optimizer, got {got}")


def refuse_distributed_tensors(named: Mapping[str, nn.Parameter], reason: str) -> None:
    """Raise if parameters are spread over processes, as by FSDP2 (``fully_shard``) and tensor parallelism.

    Args:
        named: name -> parameter.
        reason: the part that needs them whole, with its verb.

    Raises:
        ValueError: one is; it is named.
    """
    for name, parameter in named.items():
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{name} is a {type(parameter.data).__name__}, spread over processes (FSDP2, tensor parallelism): "
                f"{reason} whole weights and inputs. Use DDP"
            )


def refuse_lazy(named: Mapping[str, nn.Parameter], optimizer: str) -> None:
    """Raise if parameters have no shape yet, as in ``nn.LazyLinear`` before its first call.

    Args:
        named: name -> parameter.
        optimizer: its name.

    Raises:
        ValueError: some have none; they are named.
    """
    if lazy := [name for name, parameter in named.items() if is_lazy(parameter)]:
        raise ValueError(f"{', '.join(lazy)} have no shape yet: call the module once before making {optimizer}")
    if named and all(parameter.is_meta for parameter in named.values()):
        raise ValueError(f"the parameters of the module are on the meta device: give {optimizer} one with numbers")


def refuse_replaced(replaced: Sequence[str], optimizer: str) -> None:
    """Raise if a module has other parameters than the trained ones.

    Args:
        replaced: names of those that it has no more.
        optimizer: its name.

    Raises:
        ValueError: there are any; some are named.
    """
    if replaced:
        raise ValueError(
            f"the parameters of the module are others than when {optimizer} was made: {', '.join(replaced[:3])}. "
            f"Replace or reparametrise them first, then make {optimizer}"
        )


def hidden_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that require gradients and that a module holds beside its parameters; no optimizer finds them.

    Those in plain attributes of the module and of all modules below it, in lists, tuples and dicts there, and in the
    closures of their ``forward``.

    Returns:
        dict[str, Tensor]: place -> tensor, leaves of the graph.
    """
    registered, found = {id(p) for p in module.parameters()}, {}

    def look(place: str, value: Any, depth: int = 3) -> None:
        if isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf and id(value) not in registered:
                found[place] = value
        elif depth and isinstance(value, Mapping):
            for key, item in value.items():
                look(f"{place}[{key!r}]", item, depth - 1)
        elif depth and isinstance(value, list | tuple):
            for i, item in enumerate(value):
                look(f"{place}[{i}]", item, depth - 1)

    for path, layer in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(layer).items():
            if name not in _OF_TORCH:
                look(prefix + name, value)
        forward = getattr(layer.forward, "__func__", layer.forward)
        if code := getattr(forward, "__code__", None):
            for name, cell in zip(code.co_freevars, forward.__closure__ or (), strict=True):
                with suppress(ValueError):  # a cell that is empty
                    look(f"{prefix}forward: {name}", cell.cell_contents)
    return found


def warn_of_hidden(names: Sequence[str], optimizer: str) -> None:
    """Warn of tensors that a forward uses and that an optimizer does not train, if there are any."""
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        warn(
            f"{optimizer} does not train {', '.join(names[:4])}{more}: the module uses them, and they are not among "
            "its parameters. To train them, make them attributes that are nn.Parameter, or keep them in an "
            "nn.ParameterList or nn.ParameterDict"
        )


def state_without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """All attributes except torch's hooks: a copy of the optimizer with its module continues like the original.

    Torch's own ``__getstate__`` leaves out the attributes that a subclass adds.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != "step" and not name.startswith("_optimizer_")  # a scheduler puts its own step there
    }
