"""Kronecker factors of the Gauss-Newton matrix of a layer, and the right preconditioner that they make.

The Gauss-Newton block of a weight that multiplies rows ã (its bias's 1 among them) is the mean over samples of vec(f
ãᵀ) vec(f ãᵀ)ᵀ, f the back-propagated product of the square root of the loss Hessian with random signs, as in
:func:`~lightning_struct.functional.curvature.preconditioner.randomized_gauss_newton_diagonal`. It is taken for G ⊗ A, A
the mean of ã ãᵀ and G that of f fᵀ (Martens & Grosse 2015; over the T positions of a sequence or an image A is the mean
and G the sum, as in Grosse & Martens 2016). This is exact in expectation for one sample at one position, and where ã
and f are independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.layers.per_sample import Contribution, Convolution, Dense, Lookup, Outer, Uncovered
from lightning_struct.functional.layers.per_sample.contributions import at_least_float32


class SecondMoments(NamedTuple):
    """Sums over the positions of all samples, for each group of a weight (a grouped convolution, stacked projections).

    Attributes:
        inputs: Σ ã ãᵀ, (groups, in, in), or its diagonal, (groups, in).
        outputs: Σ f fᵀ, (groups, out, out), or its diagonal, (groups, out).
        positions: (groups,), terms in each sum.
    """

    inputs: Tensor
    outputs: Tensor
    positions: Tensor


def second_moments(
    use: Contribution,
    *,
    groups: int = 1,
    transposed: bool = False,
    bias: bool = False,
    diagonal_inputs: bool = False,
    diagonal_outputs: bool = False,
) -> SecondMoments:
    """Second moments of one use of a weight, or of a bias alone, for which ã is 1 and f the sum over positions.

    Args:
        use: the contribution of the back-propagated probe to the weight, as rows ã and f.
        groups: matrices that are stacked in the rows of the weight, each with inputs of its own.
        transposed: the weight is stored as (in, out).
        bias: ã ends in a 1.
        diagonal_inputs: keep the diagonal of Σ ã ãᵀ only.
        diagonal_outputs: keep the diagonal of Σ f fᵀ only.

    Raises:
        Uncovered: the use is no product of a matrix with rows.
    """
    if transposed and isinstance(use, Outer):
        use = Outer(use.cotangents, use.inputs)
    first, among = 0, groups
    if isinstance(use, Outer) and use.rows is not None:
        size = use.shape[0] // groups
        first, groups = use.rows.start // size, (use.rows.stop - use.rows.start) // size
        use = Outer(use.inputs, use.cotangents)
    moments: list[SecondMoments] = []
    for rows, cotangents in _rows(use, groups):
        rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
        inputs, outputs = _second_moment(rows, diagonal_inputs), _second_moment(cotangents, diagonal_outputs)
        positions = inputs.new_full((groups,), rows.shape[1])
        moments.append(SecondMoments(inputs.expand(groups, *inputs.shape[1:]), outputs, positions))
    sums = [torch.stack(parts).sum(0) if len(parts) > 1 else parts[0] for parts in zip(*moments, strict=True)]
    if groups < among:  # the other groups have no rows
        others = (first, among - first - groups)
        padding = [[t.new_zeros(number, *t.shape[1:]) for number in others] for t in sums]
        sums = [torch.cat([before, t, after]) for t, (before, after) in zip(sums, padding, strict=True)]
    return SecondMoments(*sums)


def _second_moment(rows: Tensor, diagonal: bool) -> Tensor:
    return rows.square().sum(1) if diagonal else rows.mT @ rows


def _rows(use: Contribution, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
    """ã as (groups or 1, positions, in) and f as (groups, positions, out), in parts."""
    if isinstance(use, Outer):
        rows, cotangents = (at_least_float32(t).flatten(0, 1) for t in (use.inputs, use.cotangents))
        yield rows[None], cotangents.unflatten(1, (groups, -1)).transpose(0, 1)
    elif isinstance(use, Convolution):
        for chunk in use.image_chunks():
            patches, cotangents = use.input_patches(chunk)  # (m, groups, features, positions)
            yield patches.permute(1, 0, 3, 2).flatten(1, 2), cotangents.permute(1, 0, 3, 2).flatten(1, 2)
    elif isinstance(use, Dense) and use.gradients.ndim == 2:
        shares = at_least_float32(use.gradients)
        yield shares.new_ones(1, len(shares), 1), shares.unflatten(1, (groups, -1)).transpose(0, 1)
    else:
        raise Uncovered(f"a {type(use).__name__} is no product of a matrix with rows")


def squared_shares(use: Contribution) -> Tensor:
    """Σᵢ cᵢ² over the samples' shares of one use, elementwise; of the parameter's shape."""
    if isinstance(use, Dense):
        return at_least_float32(use.gradients).square().sum(0)
    if isinstance(use, Lookup):
        _, table_rows, shares = use.rows_by_sample()
        return shares.new_zeros(use.shape).index_add_(0, table_rows, shares.square())
    return torch.stack([use.per_sample(chunk).square().sum(0) for chunk in use.chunks()]).sum(0)
