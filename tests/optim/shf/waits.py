"""How often code looks at the value of a tensor, for which the host waits for the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Waits(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def waits_of(call: Callable[[], Any]) -> int:
    """Numbers that ``call`` takes out of tensors one by one."""
    with _Waits() as mode:
        call()
    return mode.count
