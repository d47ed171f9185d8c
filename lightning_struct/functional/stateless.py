"""Calling a module with other weights than its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...]) -> Any:
    """``torch.func.functional_call``, which leaves the module as it was.

    The call works on copies of the buffers that are not given. And every layer has its own tensors again afterwards:
    torch's leaves others in a layer that is registered in two places (seen from 2.6 to 2.15). What ``torch.compile``
    has compiled runs as it is in Python: compiled graphs have no second derivatives.

    Args:
        module: what is called.
        tensors: name -> what stands for the parameter or buffer of that name.
        args: of the call.
    """
    own = [(layer, dict(layer._parameters), dict(layer._buffers)) for layer in module.modules()]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in tensors}
    try:
        with torch.compiler.set_stance("force_eager"):
            return functional_call(module, {**buffers, **tensors}, args)
    finally:
        for layer, parameters, buffers_of_layer in own:
            layer._parameters.update(parameters)
            layer._buffers.update(buffers_of_layer)
