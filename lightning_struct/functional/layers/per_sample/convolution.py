"""The contribution of a convolution, from patches of one of its two images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.layers.per_sample.contributions import (
    Contribution,
    Cost,
    Outer,
    at_least_float32,
    row_norms,
)


@dataclass(frozen=True, eq=False)
class Convolution(Contribution):
    """Shares of a convolution's weight (out, in / groups, *kernel): an outer product by output position and group.

    Patches are formed for a few samples at a time, of whichever of the two images has fewer channels.

    Args:
        inputs: (n, in, *size).
        cotangents: (n, out, *positions).
        kernel, stride, dilation: one number for each of the one to three dimensions of the image.
        padding: (before, after) for each dimension, of zeros; others are to be in ``inputs`` already.
        groups: of the channels.
        parameter_shape: of the parameter, if dimensions of size 1 make the kernel longer than the parameter's.
    """

    inputs: Tensor
    cotangents: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int
    parameter_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter_shape or (self.cotangents.shape[1], self.inputs.shape[1] // self.groups, *self.kernel)

    def squared_norms(self) -> Tensor:
        positions, width, height = self._sizes()
        gram = positions * (width + height) <= width * height
        norms = []
        for chunk in self.image_chunks():
            if gram:
                patches, delta = self.input_patches(chunk)
                products = Outer(patches.mT.flatten(0, 1), delta.mT.flatten(0, 1)).squared_norms()
                norms.append(products.unflatten(0, (-1, self.groups)).sum(1))
            else:
                norms.append(row_norms(self.per_sample(chunk)))
        return torch.cat(norms)

    def per_sample(self, chunk: slice) -> Tensor:
        if not self._cotangents_are_smaller():
            patches, delta = self.input_patches(chunk)
            return (delta @ patches.mT).reshape(-1, *self.shape)
        patches, images = self._cotangent_patches(chunk)
        product = (patches @ images.mT).reshape(-1, self.shape[0], *self.kernel, self.shape[1])
        # Patches of the cotangents run through the kernel backwards.
        gradients = product.flip(tuple(range(2, 2 + len(self.kernel)))).movedim(-1, 2)
        return gradients.reshape(-1, *self.shape)

    def projections(self, left: Tensor, right: Tensor) -> Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        kernels = right.reshape(len(right), -1, *self.kernel).repeat(self.groups, *[1] * (1 + len(self.kernel)))
        images = F.pad(at_least_float32(self.inputs), pad_argument(self.padding))
        filtered = convolve(images, kernels, stride=self.stride, dilation=self.dilation, groups=self.groups)
        filtered = _first_positions(filtered, self.cotangents.shape[2:])
        of_groups = at_least_float32(self.cotangents).flatten(2).unflatten(1, (self.groups, -1))
        weighted = left.unflatten(1, (self.groups, -1)).transpose(0, 1) @ of_groups  # (n, groups, p, positions)
        return (weighted * filtered.flatten(2).unflatten(1, (self.groups, -1))).sum((0, 1, 3))

    def cost(self) -> Cost | None:
        if self.groups > 1:
            return None
        return Cost.of_product(*self._sizes())

    def sketched(self, signs: Tensor) -> Convolution:
        delta = at_least_float32(self.cotangents)
        projected = signs.mT.to(delta.dtype) @ delta.flatten(2)
        return replace(self, cotangents=projected.unflatten(2, delta.shape[2:]), parameter_shape=None)

    def _sizes(self) -> tuple[int, int, int]:
        """Positions of the output, and columns and rows of the matrix of a group."""
        width = self.inputs.shape[1] // self.groups * math.prod(self.kernel)
        return math.prod(self.cotangents.shape[2:]), width, self.cotangents.shape[1] // self.groups

    def image_chunks(self) -> Iterator[slice]:
        """Slices of the samples, so many at a time that their patches are not too many."""
        image = self.cotangents if self._cotangents_are_smaller() else self.inputs
        numbers = math.prod(image.shape[1:]) * math.prod(self.kernel)
        # A processor's cache holds about a million; copying patches through memory takes longer than multiplying them.
        return self.chunks(numbers * (32 if image.device.type == "cpu" else 1))

    def _cotangents_are_smaller(self) -> bool:
        # A stride would put zeros between the cotangents.
        return max(self.stride) == 1 and self.cotangents.shape[1] < self.inputs.shape[1]

    def input_patches(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Patches and cotangents of m samples, (m, groups, in / groups * kernel or out / groups, positions)."""
        delta = at_least_float32(self.cotangents[chunk])
        images = F.pad(at_least_float32(self.inputs[chunk]), pad_argument(self.padding))
        patches = _patches(images, self.kernel, self.stride, self.dilation, delta.shape[2:])
        shape = (delta.shape[0], self.groups, -1, math.prod(delta.shape[2:]))
        return patches.reshape(shape), delta.reshape(shape)

    def _cotangent_patches(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """(m, groups, out / groups * kernel, pixels), and the inputs as (m, groups, in / groups, pixels)."""
        images = at_least_float32(self.inputs[chunk])
        reach = [(k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True)]
        padding = [(r - before, r - after) for r, (before, after) in zip(reach, self.padding, strict=True)]
        delta = F.pad(at_least_float32(self.cotangents[chunk]), pad_argument(padding))
        patches = _patches(delta, self.kernel, self.stride, self.dilation, images.shape[2:])
        shape = (images.shape[0], self.groups, -1, math.prod(images.shape[2:]))
        return patches.reshape(shape), images.reshape(shape)


def _patches(
    images: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """(m, channels, *kernel, *positions), a view, of images (m, channels, *size)."""
    for dimension, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        images = images.unfold(dimension, (k - 1) * d + 1, s)[..., ::d]
    first = 2 + len(kernel)
    patches = images.movedim(tuple(range(first, first + len(kernel))), tuple(range(2, first)))
    return _first_positions(patches, positions)


def _first_positions(images: Tensor, positions: Sequence[int]) -> Tensor:
    """The first positions of images: an output padding of a transposed convolution leaves some over."""
    for dimension, size in zip(range(-len(positions), 0), positions, strict=True):
        images = images.narrow(dimension, 0, size)
    return images


def pad_argument(padding: Sequence[tuple[int, int]]) -> list[int]:
    """The padding in the order of ``F.pad``: the last dimension first."""
    return [number for pair in reversed(padding) for number in pair]
