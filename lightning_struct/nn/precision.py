"""Buffers that stay in float32 where a module is converted to half precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

HALF_PRECISION = (torch.float16, torch.bfloat16)
"""The dtypes in which numbers coincide that must be distinct, and of which there are no Fourier transforms."""


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
