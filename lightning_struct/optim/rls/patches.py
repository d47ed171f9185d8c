"""The sum of all patches that a convolution reads, without forming them.

Padding, stride and dilation act on each dimension alone, in every padding mode. So the sum over the batch is multiplied
by one small matrix for each dimension. The result is that of ``unfold``, to rounding, for the cost of reading the
images once.

A transposed convolution is the convolution, with stride 1, of images that have zeros between their places: its patch
under an output position has zeros and those places of the image that the kernel adds to that position.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_struct.functional.layers.registry import padding
from lightning_struct.optim.rls.gain_limit import sampled_indices


class Axis(NamedTuple):
    """One dimension of the images that a convolution reads.

    Attributes:
        size: of the images.
        positions: of the outputs.
        kernel, stride, dilation, mode: as of the layer; ``mode`` is its ``padding_mode``.
        before: the padding at the start.
        transposed: the stride counts places of the outputs.
    """

    size: int
    positions: int
    kernel: int
    stride: int
    dilation: int
    before: int
    mode: str
    transposed: bool

    def places_read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Places of the image, (p, kernel), that the kernel meets at output positions (p,), and which exist."""
        steps = self.dilation * torch.arange(self.kernel, device=positions.device)
        if self.transposed:
            strides = positions[:, None] + self.before - steps
            places = strides.div(self.stride, rounding_mode="floor")
            return places.clamp(0, self.size - 1), (strides % self.stride == 0) & (places >= 0) & (places < self.size)
        places = positions[:, None] * self.stride - self.before + steps
        if self.mode == "circular":
            places = places % self.size
        elif self.mode == "reflect":
            places = self.size - 1 - (self.size - 1 - places.abs()).abs()
        elif self.mode == "replicate":
            places = places.clamp(0, self.size - 1)
        return places.clamp(0, self.size - 1), (places >= 0) & (places < self.size)


def _axes(layer: Any, images: Tensor, positions: Sequence[int]) -> tuple[Tensor, tuple[Axis, ...]]:
    """The images as a batch, and the axis of each of their dimensions."""
    images = images[None] if images.ndim == len(layer.kernel_size) + 1 else images
    strides, pads = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), padding(layer)
    of_axes = zip(images.shape[2:], positions, strides, pads, strict=True)
    return images, tuple(
        Axis(size, number, *of_kernel, before, layer.padding_mode, layer.transposed)
        for size, number, of_kernel, (before, _) in of_axes
    )


def patch_sum(layer: nn.modules.conv._ConvNd, images: Tensor, positions: Sequence[int]) -> tuple[Tensor, int]:
    """Sum of the patches, and their number, by which it is divided for x̄ (equation (72)).

    Args:
        layer: any convolution.
        images: (N, C, *size) or (C, *size), as the layer read them.
        positions: the size of its outputs.

    Returns:
        (groups, C/groups · kernel), in the dtype of the images, in the weight's order; and N times the number of output
        positions.
    """
    images, axes = _axes(layer, images, positions)
    total = batch_sum(images)
    for axis in axes:
        # the dimension moves to the end
        total = torch.tensordot(total, _reads(axis, total.dtype, total.device), ([1], [1]))
    return total.reshape(layer.groups, -1), images.shape[0] * math.prod(positions)


def patch_sample(layer: nn.modules.conv._ConvNd, images: Tensor, positions: Sequence[int], number: int) -> Tensor:
    """(groups, number, C/groups · kernel), that many patches, evenly spread over images and output positions.

    Args:
        layer: any convolution.
        images: (N, C, *size) or (C, *size), as the layer read them.
        positions: the size of its outputs.
        number: not above N times the number of output positions.
    """
    images, axes = _axes(layer, images, positions)
    (image, *places), inside = _sampled_places(axes, images.shape[0], number, images.device)
    index: Any = (image, slice(None), *places)
    patches = images[index]  # (number, *kernel, C)
    if inside is not None:
        patches = patches * inside[..., None]
    patches = patches.movedim(-1, 1).reshape(number, layer.groups, -1)
    return patches.transpose(0, 1)


@lru_cache(maxsize=1024)
def _sampled_places(
    axes: tuple[Axis, ...], images: int, number: int, device: torch.device
) -> tuple[list[Tensor], Tensor | None]:
    """Indices of images and of places, broadcast to (number, *kernel), and whether each place is inside."""
    counts = [axis.positions for axis in axes]
    flat = sampled_indices(number, images * math.prod(counts), torch.device("cpu"))
    coordinates = torch.unravel_index(flat, (images, *counts))
    ones = [1] * len(axes)
    indices = [coordinates[0].view(-1, *ones)]
    inside = torch.ones(number, *ones, dtype=torch.bool, device="cpu")
    for dimension, axis in enumerate(axes):
        places, within = axis.places_read(coordinates[1 + dimension])
        shape = [number, *ones]
        shape[1 + dimension] = axis.kernel
        indices.append(places.view(shape))
        inside = inside & within.view(shape)
    return [index.to(device) for index in indices], None if inside.all() else inside.to(device)


def batch_sum(tensor: Tensor) -> Tensor:
    """The sum over the first dimension, as a product with ones on a view in the order of memory.

    ``Tensor.sum`` over the batch is many times slower if the channels are last.
    """
    if tensor.ndim == 2:
        return _ones(len(tensor), tensor.dtype, tensor.device) @ tensor
    order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(0, *order).flatten(1)
    total = _ones(len(tensor), tensor.dtype, tensor.device) @ flat
    total = total.view([tensor.shape[dimension] for dimension in order])
    return total.permute([order.index(dimension) for dimension in range(1, tensor.ndim)])


@lru_cache(maxsize=16)
def _ones(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(number, dtype=dtype, device=device)


@lru_cache(maxsize=1024)
def _reads(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(kernel, size): how often each place of the kernel meets each place of the image."""
    places, inside = axis.places_read(torch.arange(axis.positions, device="cpu"))
    reads = torch.zeros(axis.kernel, axis.size, dtype=dtype, device="cpu")
    reads.scatter_add_(1, places.t(), inside.t().to(dtype))
    return reads.to(device)
