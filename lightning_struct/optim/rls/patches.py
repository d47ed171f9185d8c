"""The sum of all patches that a convolution reads, without forming them.

Padding, stride and dilation act on each dimension alone, in every padding mode. So the sum over positions is one product
with a small matrix per dimension, of the sum over the batch: what ``unfold`` would give, to rounding, for the cost of
reading the images once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers import padding
from lightning_struct.optim.rls.gain_limit import sampled_indices


def patch_sum(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, images: Tensor) -> tuple[Tensor, int]:
    """Sum of the patches, and their number, by which it is divided for x̄ (equation (72)).

    Args:
        layer: any convolution that is not transposed.
        images: (N, C, *size) or (C, *size), as the layer read them.

    Returns:
        (groups, C/groups · kernel), in the dtype of the images, in the weight's order; and N times the number of output
        positions.
    """
    dimensions = len(layer.kernel_size)
    if images.ndim == dimensions + 1:
        images = images[None]
    total, rows = batch_sum(images), images.shape[0]
    for size, kernel, stride, dilation, pads in zip(
        images.shape[2:], layer.kernel_size, layer.stride, layer.dilation, padding(layer), strict=True
    ):
        reads = _reads(size, kernel, stride, dilation, pads, layer.padding_mode, total.dtype, total.device)
        total = torch.tensordot(total, reads, ([1], [1]))  # the dimension moves to the end
        rows *= _positions(size, kernel, stride, dilation, pads)
    return total.reshape(layer.groups, -1), rows


def patch_sample(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, images: Tensor, number: int) -> Tensor:
    """(groups, number, C/groups · kernel), that many patches, evenly spread over images and output positions.

    Args:
        layer: any convolution that is not transposed.
        images: (N, C, *size) or (C, *size), as the layer read them.
        number: not above N times the number of output positions.
    """
    dimensions = len(layer.kernel_size)
    if images.ndim == dimensions + 1:
        images = images[None]
    geometry = tuple(
        zip(images.shape[2:], layer.kernel_size, layer.stride, layer.dilation, padding(layer), strict=True)
    )
    indices, inside = _sampled_places(geometry, images.shape[0], layer.padding_mode, number, images.device)
    image, *places = indices
    index: Any = (image, slice(None), *places)
    patches = images[index]  # (number, *kernel, C)
    if inside is not None:
        patches = patches * inside[..., None]
    patches = patches.movedim(-1, 1).reshape(number, layer.groups, -1)
    return patches.transpose(0, 1)


@lru_cache(maxsize=1024)
def _sampled_places(
    geometry: tuple[Any, ...], images: int, mode: str, number: int, device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """Indices of images and of places of each dimension, that broadcast to (number, *kernel); and whether each is inside."""
    counts = [_positions(size, *of_layer) for size, *of_layer in geometry]
    flat = sampled_indices(number, images * math.prod(counts), torch.device("cpu"))
    coordinates = torch.unravel_index(flat, (images, *counts))
    ones = [1] * len(geometry)
    indices = [coordinates[0].view(-1, *ones)]
    inside = torch.ones(number, *ones, dtype=torch.bool)
    for dimension, (size, kernel, stride, dilation, pads) in enumerate(geometry):
        starts = coordinates[1 + dimension] * stride - pads[0]
        places, within = _places_read(starts[:, None] + dilation * torch.arange(kernel), size, mode)
        shape = [number, *ones]
        shape[1 + dimension] = kernel
        indices.append(places.view(shape))
        inside = inside & within.view(shape)
    return [index.to(device) for index in indices], None if inside.all() else inside.to(device)


def batch_sum(tensor: Tensor) -> Tensor:
    """The sum over the first dimension, as a product with ones on a view in the order of memory.

    ``Tensor.sum`` over the batch is many times slower where the channels are last.
    """
    order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(0, *order).flatten(1)
    total = (tensor.new_ones(tensor.shape[0]) @ flat).view([tensor.shape[dimension] for dimension in order])
    return total.permute([order.index(dimension) for dimension in range(1, tensor.ndim)])


def _positions(size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int]) -> int:
    """Output positions along one dimension."""
    return (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1


@lru_cache(maxsize=1024)
def _reads(
    size: int,
    kernel: int,
    stride: int,
    dilation: int,
    padding: tuple[int, int],
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """(kernel, size): how often each place of the kernel reads each place of the image along one dimension."""
    starts = torch.arange(_positions(size, kernel, stride, dilation, padding)) * stride - padding[0]
    places = (
        starts + dilation * torch.arange(kernel)[:, None]
    )  # (kernel, positions), outside of the image at the border
    places, inside = _places_read(places, size, mode)
    reads = torch.zeros(kernel, size, dtype=dtype)
    reads.scatter_add_(1, places, inside.to(dtype))
    return reads.to(device)


def _places_read(places: Tensor, size: int, mode: str) -> tuple[Tensor, Tensor]:
    """Places of the image of which places of the padded image are copies, and whether there are such."""
    if mode == "circular":
        places = places % size
    elif mode == "reflect":
        places = size - 1 - (size - 1 - places.abs()).abs()
    elif mode == "replicate":
        places = places.clamp(0, size - 1)
    return places.clamp(0, size - 1), (places >= 0) & (places < size)
