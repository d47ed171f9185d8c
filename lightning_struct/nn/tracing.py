"""What torch.fx records of layers whose forward it cannot look into."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Proxy


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
