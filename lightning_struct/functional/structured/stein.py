"""Dense matrices of low displacement rank, row by row: the Stein equation M - A M Bᵀ = R as a recurrence.

With A and B subdiagonal plus corner, M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ has the rows

    M[k] = S[k] + a[k] (b ∘ roll(M[k - 1], 1)),

a being the corner of A followed by its subdiagonal, b that of B. Nothing is divided by, and all entries of M are sums
of products of paths: exact for any operators, zeros and steep ones among them, in O(mn) operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stein_matrix(a: Tensor, b: Tensor, G: Tensor, H: Tensor) -> Tensor:
    """M = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ with p = min(m, n): equation (2) with Bᵀ for B.

    Without a corner of A, the source S of the recurrence is R = G Hᵀ and M[-1] = 0. With one, Aᵐ = w I, w being the
    product of a, and M - A M Bᵀ = R - w R (Bᵐ)ᵀ if m <= n. So a first sweep, from zero, yields the last row, which
    holds no path through the corner; a second one starts from there.

    Args:
        a: (m,), the corner of A and its subdiagonal.
        b: (n,), those of B.
        G: (m, r).
        H: (n, r).

    Returns:
        (m, n).
    """
    m, n = a.shape[0], b.shape[0]
    if m > n:
        return stein_matrix(b, a, H, G).mT
    # Two sweeps of the recurrence M[k] = S[k] + a[k] (b ∘ roll(M[k - 1], 1)).
    last = _DownwardSweep.apply(a, b, G @ H.mT, a.new_zeros(n))[-1]
    returned = _cyclic_products(a, m)[0] * _cyclic_products(b, m)[:, None] * H.roll(m, 0)
    return _DownwardSweep.apply(a, b, G @ (H - returned).mT, last)


def _cyclic_products(weights: Tensor, count: int) -> Tensor:
    """Π_{i<count} weights[k - i] for each k, cyclically: (n,) for (n,), by doubling, without division."""
    product, power, offset = torch.ones_like(weights), weights, 0
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            product = product * power.roll(offset)
            offset += 1 << bit
        power = power * power.roll(1 << bit)
    return product


# Columns that a row of the recurrence holds twice: so many rows can be computed by one operation each, a view of the
# row before serving as the rolled one, before the copies must be renewed.
_HALO = 64


def _sweep(a: Tensor, b: Tensor, source: Tensor, seed: Tensor, downwards: bool) -> Tensor:
    """The recurrence of :class:`_DownwardSweep`, or that of :class:`_UpwardSweep`."""
    n, halo = source.shape[-1], min(_HALO, source.shape[-1])
    if downwards:
        copies, originals, inner = slice(0, halo), slice(n, n + halo), slice(halo, None)
        to, came_from = slice(1, None), slice(0, -1)
    else:
        a, b = a.roll(-1, -1), b.roll(-1, -1)
        copies, originals, inner = slice(n, n + halo), slice(0, halo), slice(0, n)
        to, came_from = slice(0, -1), slice(1, None)

    def extended(tensor: Tensor) -> Tensor:
        # Not by an index, which torch.autograd.grad(..., is_grads_batched=True) cannot take where it is all of a row.
        copied = tensor.narrow(-1, n - halo if downwards else 0, halo)
        return torch.cat([copied, tensor] if downwards else [tensor, copied], -1)

    def views(matrix: Tensor, columns: slice) -> tuple[Tensor, ...]:
        of_rows = matrix[..., columns].unbind(-2)  # all at once: slicing in the loop would take longer than computing
        return of_rows if downwards else of_rows[::-1]

    rows, weights = extended(source), a[..., :, None] * extended(b)[..., None, :]
    previous = (extended(seed)[..., came_from], *views(rows, came_from))
    for k, (row, weight, before) in enumerate(zip(views(rows, to), views(weights, to), previous[:-1], strict=True), 1):
        row.addcmul_(weight, before)
        if k % halo == 0:
            row = rows[..., k - 1 if downwards else -k, :]
            row[..., copies] = row[..., originals]
    return rows[..., inner]


def _before(rows: Tensor, seed: Tensor) -> Tensor:
    """roll(M[k - 1], 1) for each k, M[-1] being the seed."""
    return torch.cat([seed[..., None, :], rows[..., :-1, :]], -2).roll(1, -1)


def _weight_gradients(a: Tensor, b: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a and b, given that of their outer product."""
    return (products @ b[..., :, None])[..., 0], (a[..., None, :] @ products)[..., 0, :]


def _outer_tangent(a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> Tensor:
    """The derivative of the outer product of a and b."""
    return da[..., :, None] * b[..., None, :] + a[..., :, None] * db[..., None, :]


def _batched(size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors, all with the dimension of vmap in front."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]


class _DownwardSweep(torch.autograd.Function):
    """M[k] = S[k] + a[k] (b ∘ roll(M[k - 1], 1)) of a source S (..., m, n), from M[-1] = ``seed`` (..., n) on.

    This and :class:`_UpwardSweep` are each other's derivative, so that both can be differentiated as often as wanted.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor, source: Tensor, seed: Tensor) -> Tensor:
        return _sweep(a, b, source, seed, downwards=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        a, b, _, seed = inputs
        ctx.save_for_backward(a, b, seed, output)
        ctx.save_for_forward(a, b, seed, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        a, b, seed, rows = ctx.saved_tensors
        source = _UpwardSweep.apply(a, b, gradient)
        da, db = _weight_gradients(a, b, source * _before(rows, seed))
        return da, db, source, (a[..., :1] * b * source[..., 0, :]).roll(-1, -1)

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor, source: Tensor, seed: Tensor) -> Tensor:
        a, b, start, rows = ctx.saved_tensors
        return _DownwardSweep.apply(a, b, source + _outer_tangent(a, b, da, db) * _before(rows, start), seed)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        return _DownwardSweep.apply(*_batched(info.batch_size, in_dims, inputs)), 0


class _UpwardSweep(torch.autograd.Function):
    """N[k] = S[k] + roll(a[k + 1] (b ∘ N[k + 1]), -1) of a source S (..., m, n), from N[m] = 0 on."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, source: Tensor) -> Tensor:
        return _sweep(a, b, source, torch.zeros_like(source[..., 0, :]), downwards=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.save_for_forward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        a, b, rows = ctx.saved_tensors
        seed = torch.zeros_like(gradient[..., 0, :])
        source = _DownwardSweep.apply(a, b, gradient, seed)
        return *_weight_gradients(a, b, rows * _before(source, seed)), source

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor, source: Tensor) -> Tensor:
        a, b, rows = ctx.saved_tensors
        moved = (_outer_tangent(a, b, da, db) * rows).roll(-1, -1)[..., 1:, :]
        return _UpwardSweep.apply(a, b, source + torch.nn.functional.pad(moved, (0, 0, 0, 1)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        return _UpwardSweep.apply(*_batched(info.batch_size, in_dims, inputs)), 0
