"""The gradient of a weight as the product of few rows.

The gradient ∇ of a weight is dZᵀX, of rank r for r rows. Where r is small, ∇P = dZᵀ(XP) costs less than multiplying the
whole gradient by P. That X and dZ were recorded does not mean that the gradient is still their product: it may have got
a penalty's share, or been scaled since by clipping or by accumulation. One vector z tells: ∇z = c dZᵀ(Xz), to rounding,
for one number c shows that ∇ = c dZᵀX (but for a set of z of measure zero), and c is the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A gradient is taken for the product of the rows that were recorded if it differs from it by so many units in the last
# place.
_ROUNDING = 32.0


def factored_gradient(
    pairs: Sequence[tuple[Tensor, Tensor]], gradient: Tensor, columns: Sequence[Tensor], vector: Tensor
) -> tuple[Tensor, Tensor] | None:
    """X, (r, n), and c dZ, (r, outputs), with c dZᵀX the gradient; None if the rows do not make it up.

    Args:
        pairs: X and dZ in parts.
        gradient: (outputs, n), of the weight.
        columns: (outputs,), of each bias.
        vector: z, (n + number of biases,).
    """
    inputs, cotangents = (sides[0] if len(pairs) == 1 else torch.cat(sides) for sides in zip(*pairs, strict=True))
    features, constants = vector[: gradient.shape[1]], vector[gradient.shape[1] :]
    found = gradient @ features
    for column, value in zip(columns, constants, strict=True):
        found.addcmul_(column, value)
    rows = inputs @ features + constants.sum()
    expected = cotangents.t() @ rows
    squared = torch.dot(expected, expected)
    scale = torch.dot(expected, found) / squared.clamp(min=torch.finfo(squared.dtype).tiny)
    norm = torch.linalg.vector_norm
    rounding = _ROUNDING * torch.finfo(found.dtype).eps * scale.abs() * norm(rows) * norm(cotangents)
    if not norm(found - scale * expected) <= rounding:
        return None
    return inputs, cotangents * scale
