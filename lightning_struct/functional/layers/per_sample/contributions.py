"""Contributions: each sample's share of the gradient by one use of a parameter, in forms cheap to measure.

The share of sample i is cᵢ, with Σᵢ cᵢ the gradient. A layer's inputs and the cotangents of its outputs determine all
cᵢ; their squared norms rarely need the cᵢ themselves, which for n samples are n times as large as the parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.randomness import random_signs

# Per-sample quantities hold at most this many numbers at a time, here and wherever else they are formed.
NUMBERS_AT_A_TIME = 2**25

# Exact norms are kept up to this part of the multiply-adds that training the layer takes; beyond it they are estimated
# if estimates were asked for.
_FREE_PART = 0.1


def sample_chunks(samples: int, numbers: int) -> Iterator[slice]:
    """Slices of the samples with at most :data:`NUMBERS_AT_A_TIME` numbers, ``numbers`` for each sample."""
    size = max(1, NUMBERS_AT_A_TIME // max(1, numbers))
    return (slice(start, start + size) for start in range(0, samples, size))


class Uncovered(Exception):
    """The shares of the samples cannot be told apart; the message says why, as the end of a sentence."""


class Cost(NamedTuple):
    """Multiply-adds for one sample: of its squared norm, of training the layer, and of one probe."""

    exact: int
    training: int
    probe: int

    @staticmethod
    def of_product(positions: int, width: int, height: int) -> Cost:
        """The cost of a matrix product at so many positions, its norm by Gram matrices if that is cheaper."""
        both, product = positions * (width + height), positions * width * height
        return Cost(min(positions * both, product), 3 * product, both)


class Contribution(ABC):
    """One use of one parameter in one backward pass."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._by_sample.device

    @property
    def samples(self) -> int:
        """n, the number of samples."""
        return self._by_sample.shape[0]

    @property
    def _by_sample(self) -> Tensor:
        """The first field, (n, ...)."""
        first: Tensor = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]  # all are dataclasses
        return first

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """(n,), ‖cᵢ‖², at least float32."""

    @abstractmethod
    def per_sample(self, chunk: slice) -> Tensor:
        """(m, *shape), cᵢ of the samples in ``chunk``, at least float32."""

    @abstractmethod
    def projections(self, left: Tensor, right: Tensor) -> Tensor:
        """(p,), lₖᵀ G rₖ of the gradient G = Σᵢ cᵢ as a matrix of ``shape[0]`` rows.

        Args:
            left: (p, rows), the lₖ.
            right: (p, columns), the rₖ.
        """

    def total(self) -> Tensor:
        """Σᵢ cᵢ, of the parameter's shape."""
        return torch.stack([self.per_sample(chunk).sum(0) for chunk in self.chunks()]).sum(0)

    def matrix_rows(self, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows (groups or 1, positions, in) of a matrix and cotangents (groups, positions, out), in parts.

        Raises:
            Uncovered: the use is no product of a matrix with rows.
        """
        raise Uncovered(f"a {type(self).__name__} is no product of a matrix with rows")

    def squared_shares(self) -> Tensor:
        """Σᵢ cᵢ² elementwise, of the parameter's shape."""
        return torch.stack([self.per_sample(chunk).square().sum(0) for chunk in self.chunks()]).sum(0)

    def cost(self) -> Cost | None:
        """None if an estimate saves nothing."""
        return None

    def sketched(self, signs: Tensor) -> Contribution:
        """Rᵢᵀcᵢ in place of cᵢ, with Rᵢ the ``signs`` (n, shape[0], probes), of ±1/√probes.

        Only if :meth:`cost` is not None.
        """
        raise NotImplementedError

    def chunks(self, numbers: int | None = None) -> Iterator[slice]:
        """The samples, so many at a time that ``numbers`` for each (default: a gradient) are not too many."""
        return sample_chunks(self.samples, math.prod(self.shape) if numbers is None else numbers)


@dataclass(frozen=True, eq=False)
class Dense(Contribution):
    """The shares cᵢ themselves, for small parameters.

    Args:
        gradients: (n, *shape of the parameter).
        norms: (n,), their squared norms, if known.
    """

    gradients: Tensor
    norms: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.gradients.shape[1:])

    def squared_norms(self) -> Tensor:
        return row_norms(self.gradients) if self.norms is None else self.norms

    def per_sample(self, chunk: slice) -> Tensor:
        return at_least_float32(self.gradients[chunk])

    def total(self) -> Tensor:
        return at_least_float32(self.gradients).sum(0)

    def matrix_rows(self, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.gradients.ndim != 2:
            yield from super().matrix_rows(groups)
        shares = at_least_float32(self.gradients)
        yield shares.new_ones(1, len(shares), 1), shares.unflatten(1, (groups, -1)).transpose(0, 1)

    def squared_shares(self) -> Tensor:
        return at_least_float32(self.gradients).square().sum(0)

    def projections(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.linalg.vecdot(left @ self.total().reshape(left.shape[1], right.shape[1]), right)


@dataclass(frozen=True, eq=False)
class Outer(Contribution):
    """Shares cᵢ = Σ_t δ_t a_tᵀ of a matrix product at T positions.

    Args:
        inputs: (n, T, in), a.
        cotangents: (n, T, out), δ.
        parameter_shape: of the parameter, in whose memory order cᵢ is; (out, in) if None.
        rows: the rows of the parameter that cᵢ fills, zero in the others; all of them if None. Needs
            ``parameter_shape``.
        cotangent_norms: (n,), squared norms of the cotangents, if known and T = 1.
    """

    inputs: Tensor
    cotangents: Tensor
    parameter_shape: tuple[int, ...] | None = None
    rows: slice | None = None
    cotangent_norms: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.parameter_shape is None:
            return (self.cotangents.shape[2], self.inputs.shape[2])
        return tuple(self.parameter_shape)

    def squared_norms(self) -> Tensor:
        """Squared norms: with T = 1 products of two row norms, else ⟨A Aᵀ, Δ Δᵀ⟩ or from ΔᵀA, whichever is cheaper."""
        positions, width, height = self._sizes()
        if positions == 1:
            known = self.cotangent_norms
            return row_norms(self.inputs) * (row_norms(self.cotangents) if known is None else known)
        gram = positions * (width + height) <= width * height
        numbers = 2 * positions * positions if gram else width * height
        norms = []
        for chunk in self.chunks(numbers):
            a, delta = self._pair(chunk)
            delta = _without_denormal_squares(delta)
            if gram:
                norms.append(((a @ a.mT) * (delta @ delta.mT)).sum((1, 2)))
            else:
                norms.append(row_norms(delta.mT @ a))
        return torch.cat(norms)

    def per_sample(self, chunk: slice) -> Tensor:
        a, delta = self._pair(chunk)
        product = delta.mT @ a
        if self.rows is None:
            return product.reshape(-1, *self.shape)
        gradients = product.new_zeros(product.shape[0], *self.shape)
        gradients[:, self.rows] = product.reshape(product.shape[0], -1, *self.shape[1:])
        return gradients

    def total(self) -> Tensor:
        a, delta = (at_least_float32(tensor).flatten(0, 1) for tensor in (self.inputs, self.cotangents))
        return Outer(a[None], delta[None], self.parameter_shape, self.rows).per_sample(slice(None))[0]

    def matrix_rows(self, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
        rows, cotangents = (at_least_float32(t).flatten(0, 1) for t in (self.inputs, self.cotangents))
        yield rows[None], cotangents.unflatten(1, (groups, -1)).transpose(0, 1)

    def projections(self, left: Tensor, right: Tensor) -> Tensor:
        left = left if self.rows is None else left[:, self.rows]
        of_cotangents = F.linear(at_least_float32(self.cotangents), left)
        return (of_cotangents * F.linear(at_least_float32(self.inputs), right)).sum((0, 1))

    def cost(self) -> Cost | None:
        positions, width, height = self._sizes()
        if positions == 1 or self.rows is not None:
            return None
        return Cost.of_product(positions, width, height)

    def sketched(self, signs: Tensor) -> Outer:
        delta = _without_denormal_squares(at_least_float32(self.cotangents))
        return Outer(self.inputs, delta @ signs.to(delta.dtype))

    def _sizes(self) -> tuple[int, int, int]:
        """T, in, out."""
        return self.inputs.shape[1], self.inputs.shape[2], self.cotangents.shape[2]

    def _pair(self, chunk: slice) -> tuple[Tensor, Tensor]:
        return at_least_float32(self.inputs[chunk]), at_least_float32(self.cotangents[chunk])


@dataclass(frozen=True, eq=False)
class Lookup(Contribution):
    """Shares of a table with V rows: cᵢ is the sum of δ_t in row k_t over t.

    Args:
        indices: (n, T), k, integers in [0, V).
        cotangents: (n, T, d), δ; zero if a position is not to be counted.
        table_rows: V.
    """

    indices: Tensor
    cotangents: Tensor
    table_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.table_rows, self.cotangents.shape[2])

    def squared_norms(self) -> Tensor:
        """Tokens that occur twice in a sample add up before the square."""
        samples, _, rows = self.rows_by_sample()
        return rows.new_zeros(self.samples).index_add_(0, samples, row_norms(rows))

    def rows_by_sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of a share that are not empty: their samples (k,), their rows in the table (k,), and they (k, d)."""
        offsets = self.table_rows * torch.arange(self.samples, device=self.indices.device)[:, None]
        keys, inverse = torch.unique(self.indices + offsets, return_inverse=True)
        delta = at_least_float32(self.cotangents)
        rows = delta.new_zeros(len(keys), delta.shape[2]).index_add_(0, inverse.reshape(-1), delta.flatten(0, 1))
        return keys // self.table_rows, keys % self.table_rows, rows

    def per_sample(self, chunk: slice) -> Tensor:
        delta, indices = at_least_float32(self.cotangents[chunk]), self.indices[chunk]
        gradients = delta.new_zeros(delta.shape[0], *self.shape)
        return gradients.scatter_add_(1, indices[:, :, None].expand_as(delta), delta)

    def total(self) -> Tensor:
        delta = at_least_float32(self.cotangents).flatten(0, 1)
        return delta.new_zeros(self.shape).index_add_(0, self.indices.reshape(-1), delta)

    def squared_shares(self) -> Tensor:
        _, table_rows, shares = self.rows_by_sample()
        return shares.new_zeros(self.shape).index_add_(0, table_rows, shares.square())

    def projections(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.t()[self.indices] * F.linear(at_least_float32(self.cotangents), right)).sum((0, 1))


def squared_norms(
    contributions: Sequence[Contribution],
    *,
    probes: int | None = None,
    generator: torch.Generator | None = None,
    part: tuple[int, int] = (0, 1),
) -> Tensor:
    """(n,), the squared norm of each sample's share of ONE parameter's gradient, over all its uses, at least float32.

    Args:
        contributions: the uses of the parameter in one backward pass, of the same n samples.
        probes: if not None, a large layer's norms are estimated without bias, as the mean of ‖rᵀcᵢ‖² over so many
            vectors r of random signs, if the exact norms would cost more than a tenth of training the layer and the
            estimate costs less than they do. The relative variance of one estimate is at most 2/probes.
        generator: of the signs.
        part: (r, P): the samples are the r-th of P·n and every P-th after it; their signs are those that they would
            have among all.

    Raises:
        Uncovered: the uses have different numbers of samples.
    """
    n, device = contributions[0].samples, contributions[0].device
    if any(contribution.samples != n for contribution in contributions):
        counts = sorted({contribution.samples for contribution in contributions})
        raise Uncovered(f"its uses saw batches of different sizes, {' and '.join(map(str, counts))}")
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return squared_norms(contributions, probes=probes, generator=generator, part=part)
    costs = [cost for contribution in contributions if (cost := contribution.cost()) is not None]
    exact = sum(cost.exact for cost in costs)
    if (
        probes is not None
        and len(costs) == len(contributions)
        and exact > _FREE_PART * sum(cost.training for cost in costs)
        and exact > probes * sum(cost.probe for cost in costs)
    ):
        # Independent signs for each sample, of few random numbers: of each of its rows times of each entry of a matrix.
        rows, (r, every) = contributions[0].shape[0], part
        of_probes, of_rows = (
            random_signs(*size, like=torch.empty(0, device=device), generator=generator)
            for size in ((rows, probes), (every * n, rows, 1))
        )
        signs = of_rows[r::every] * of_probes.mul_(probes**-0.5)
        contributions = [contribution.sketched(signs) for contribution in contributions]
    if len(contributions) == 1:
        return contributions[0].squared_norms()
    outers = [c for c in contributions if isinstance(c, Outer)]
    lookups = [c for c in contributions if isinstance(c, Lookup)]
    if len(outers) == len(contributions) and (fused := _fused(outers)) is not None:
        return torch.stack([outer.squared_norms() for outer in fused]).sum(0)
    if len(outers) + len(lookups) == len(contributions) and all(outer.rows is None for outer in outers):
        return _tied_squared_norms(outers, lookups)
    norms = []
    for chunk in contributions[0].chunks():
        norms.append(row_norms(torch.stack([c.per_sample(chunk) for c in contributions]).sum(0)))
    return torch.cat(norms)


def _fused(outers: Sequence[Outer]) -> list[Outer] | None:
    """One Outer for each block of rows; None if blocks overlap without being the same."""
    blocks: dict[tuple[int, int], list[Outer]] = {}
    for outer in outers:
        start, stop, _ = (outer.rows or slice(None)).indices(outer.shape[0])
        blocks.setdefault((start, stop), []).append(outer)
    bounds = sorted(blocks)
    if any(following[0] < block[1] for block, following in pairwise(bounds)):
        return None
    return [_concatenated(block) for block in blocks.values()]


def _concatenated(outers: Sequence[Outer]) -> Outer:
    """The sum of uses is one use at the positions of all."""
    if len(outers) == 1:
        return outers[0]
    inputs = torch.cat([at_least_float32(outer.inputs) for outer in outers], 1)
    cotangents = torch.cat([at_least_float32(outer.cotangents) for outer in outers], 1)
    return replace(outers[0], inputs=inputs, cotangents=cotangents, cotangent_norms=None)


def _tied_squared_norms(outers: Sequence[Outer], lookups: Sequence[Lookup]) -> Tensor:
    """Squared norms of a table that is also a matrix product's weight, as a language model's embedding and decoder.

    ⟨Σ_t δ_t a_tᵀ, Σ_s e_{k_s} γ_sᵀ⟩ = Σ_{t,s} δ_t[k_s] a_t·γ_s: the table's V × d numbers are not formed for any
    sample.
    """
    cotangents = torch.cat([at_least_float32(use.cotangents) for use in lookups], 1)
    lookup = Lookup(torch.cat([use.indices for use in lookups], 1), cotangents, lookups[0].table_rows)
    norms = lookup.squared_norms()
    if not outers:
        return norms
    outer = _concatenated(outers)
    a, delta = at_least_float32(outer.inputs), at_least_float32(outer.cotangents)
    picked = delta.gather(2, lookup.indices[:, None, :].expand(-1, delta.shape[1], -1))
    return norms + outer.squared_norms() + 2 * (picked * (a @ lookup.cotangents.mT)).sum((1, 2))


def _without_denormal_squares(delta: Tensor) -> Tensor:
    """Zero for numbers whose squares are nothing beside others: processors are slow on denormal numbers."""
    return F.hardshrink(delta, math.sqrt(torch.finfo(delta.dtype).tiny))


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def row_norms(rows: Tensor) -> Tensor:
    """(n,), squared norms of rows of any shape, at least float32."""
    return torch.linalg.vector_norm(at_least_float32(rows)[:, None].flatten(1), dim=1).square()


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

    def matrix_rows(self, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in self.image_chunks():
            patches, cotangents = self.input_patches(chunk)  # (m, groups, features, positions)
            yield patches.permute(1, 0, 3, 2).flatten(1, 2), cotangents.permute(1, 0, 3, 2).flatten(1, 2)

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
