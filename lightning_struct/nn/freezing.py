"""Models for inference: what is compressed stays compressed."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from lightning_struct.nn.hooks import copy_hooks
from lightning_struct.nn.selection import Model
from lightning_struct.nn.structured import StructuredLinear


def freeze(model: Model, *, dense: bool = False) -> Model:
    """A copy of the model whose structured layers have nothing left to train: for inference, for files, for export.

    Each becomes a :class:`~lightning_struct.nn.FrozenLinear`. ``torch.export.export`` takes the copy, and
    ``torch.onnx.export`` with ``dynamo=True``. Other layers stay as they are, trainable and in their mode. Hooks of the
    layers are copied with them, and tensors that the model has kept from a computation without their history.

    Args:
        model: stays as it is.
        dense: keep the matrices, which take as much memory as the dense model. Otherwise the copy keeps factors, or
            spectra, which have up to 3.5 times as many numbers as the parameters. A
            :class:`~lightning_struct.nn.Butterfly` is kept as a Monarch matrix: with rank 1, 3.2 times as many numbers
            at 1,024 units and 5.3 times at 4,096.

    Raises:
        ValueError: a parameter has NaN or infinite entries.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_struct.nn import LDRSubdiagonal
        >>> model = nn.Sequential(LDRSubdiagonal(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> frozen = freeze(model)
        >>> sum(buffer.numel() for buffer in frozen[0].buffers()), model[0].weight_parameters, 256 * 256
        (2052, 1024, 65536)
        >>> torch.allclose(frozen(torch.ones(256)), model(torch.ones(256)), atol=1e-4)
        True
    """
    structured = [layer for layer in model.modules() if isinstance(layer, StructuredLinear)]
    frozen = [layer.freeze(dense=dense).train(layer.training) for layer in structured]
    # What is in the second argument counts as copied already.
    copied: dict[int, Any] = {id(layer): new for layer, new in zip(structured, frozen, strict=True)}
    for module in model.modules():  # tensors of a computation, which torch does not copy with their history
        kept = [value for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf]
        copied.update({id(tensor): tensor.detach().clone() for tensor in kept})
    result = copy.deepcopy(model, copied)
    for layer, new in zip(structured, frozen, strict=True):
        copy_hooks(new, layer, copied)
    return result
