"""LDR-TD: matrices of low displacement rank whose operators are tridiagonal with corners (Thomas et al., section 3).

M = Σ_i K(A, g_i) K(B', h_i)ᵀ, with p = min(m, n) columns in each Krylov matrix; A and B' = Bᵀ of equation (2) are both
given as they multiply. All pr columns of both matrices are computed, O(pr(m + n)) numbers, in one of two ways:

- ``"recurrence"``: one column after the other, those of both matrices in one loop of p steps, in float64; what is kept
  of them has the dtype of the arguments.
- ``"giant_steps"``: 16 columns at once, by blocks of A¹⁶, which reaches no farther than 16 entries: p/16 steps of
  batched small matrix products, with 16 times the multiplications. For devices on which the number of steps is what
  takes time.

Powers of an operator whose norm is above 1 may overflow: the result is then not finite, and no error is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.structured.arguments import (
    promoted_dtype,
    require_generators,
    require_one_of,
    require_vectors,
)
from lightning_struct.functional.structured.cost_model import LARGEST_KEPT_MATRIX, choose_tridiagonal_method
from lightning_struct.functional.structured.cyclic_recurrence import (
    BlockTridiagonalArithmetic,
    TridiagonalArithmetic,
    recurrences,
)
from lightning_struct.functional.structured.krylov import krylov_product
from lightning_struct.functional.structured.opaque import opaque_operator
from lightning_struct.functional.structured.operators import TridiagonalOperator

METHODS = ("recurrence", "giant_steps")
"""The values of ``method`` besides ``"auto"``."""

# Columns that a giant step makes at once. A power of two, since A is squared until it makes as many.
GIANT_STEP = 16


@dataclass(frozen=True)
class TridiagonalFactors:
    """M by A, B', G and H: a :class:`~.prepared.PreparedMatrix`.

    Args:
        a: subdiagonal, diagonal, superdiagonal and corners of A.
        b: those of B'.
        G: (m, r).
        H: (n, r).
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    G: Tensor
    H: Tensor

    @staticmethod
    def of(a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor) -> TridiagonalFactors:
        """The factors of the matrix of :func:`tridiagonal_matmul`."""
        tensors = tuple(_tensors(a, b))
        return TridiagonalFactors(tensors[:4], tensors[4:], G, H)

    def dense_is_faster(self, m: int, n: int, rows: int) -> bool:
        return m * n <= LARGEST_KEPT_MATRIX

    def matmul(self, x: Tensor) -> Tensor:
        return tridiagonal_matmul(*_operators([*self.a, *self.b]), self.G, self.H, x)


def tridiagonal_matmul(
    a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, x: Tensor, method: str = "auto"
) -> Tensor:
    """x Mᵀ for M = Σ_i K(A, g_i) K(B', h_i)ᵀ, equation (2) of Thomas et al. with tridiagonal operators.

    Args:
        a: A, of size m.
        b: B' = Bᵀ, of size n.
        G: (m, r).
        H: (n, r).
        x: (..., n).
        method: ``"recurrence"``, ``"giant_steps"``, or ``"auto"`` for what :func:`choose_tridiagonal_method` says.

    Returns:
        (..., m), in the dtype to which those of all arguments promote; it is computed in float32 at least.

    Raises:
        TypeError: an argument is complex.
        ValueError: G, H or x has another shape, or there is no such method.

    Example:
        >>> from lightning_struct.functional import TridiagonalOperator
        >>> A = TridiagonalOperator(torch.ones(2), torch.zeros(3), torch.ones(2), torch.zeros(2))
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> tridiagonal_matmul(A, A, G, H, torch.tensor([1.0, 0.0, 0.0]))
        tensor([2., 0., 1.])
    """
    require_vectors(x, b.size)
    if torch.compiler.is_compiling():
        return _opaque_product(*_tensors(a, b), G, H, x, method=method)
    return _product(*_tensors(a, b), G, H, x, method=method)


def _product(*tensors: Tensor, method: str) -> Tensor:
    """x Mᵀ for the entries of A and of B, G, H and x."""
    *parameters, x = tensors
    a, b, G, H = *_operators(parameters), *parameters[8:]
    left, right, dtype = _krylov_rows(a, b, G, H, method, x)
    return krylov_product(left, right, x.to(left.dtype)).to(dtype)  # equation (2), Krylov matrices formed (section 3)


def tridiagonal_to_dense(
    a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, method: str = "auto"
) -> Tensor:
    """M = Σ_i K(A, g_i) K(B', h_i)ᵀ, (m, n).

    Args:
        a: A, of size m.
        b: B' = Bᵀ, of size n.
        G: (m, r).
        H: (n, r).
        method: as in :func:`tridiagonal_matmul`.

    Returns:
        (m, n), in the dtype to which those of all arguments promote.

    Raises:
        TypeError: an argument is complex.
        ValueError: G or H has another shape, or there is no such method.

    Example:
        >>> from lightning_struct.functional import TridiagonalOperator
        >>> A = TridiagonalOperator(torch.ones(2), torch.zeros(3), torch.zeros(2), torch.zeros(2))
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> tridiagonal_to_dense(A, A, G, H)
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    if torch.compiler.is_compiling():
        return _opaque_matrix(*_tensors(a, b), G, H, method=method)
    return _matrix(*_tensors(a, b), G, H, method=method)


def _matrix(*parameters: Tensor, method: str) -> Tensor:
    """M for the entries of A and of B, G and H."""
    a, b, G, H = *_operators(parameters), *parameters[8:]
    left, right, dtype = _krylov_rows(a, b, G, H, method)
    return (left.mT @ right).to(dtype)  # equation (2)


def _tensors(a: TridiagonalOperator, b: TridiagonalOperator) -> list[Tensor]:
    return [tensor for op in (a, b) for tensor in (op.subdiagonal, op.diagonal, op.superdiagonal, op.corners)]


def _operators(tensors: Sequence[Tensor]) -> tuple[TridiagonalOperator, TridiagonalOperator]:
    return TridiagonalOperator(*tensors[:4]), TridiagonalOperator(*tensors[4:8])


def _empty_product(tensors: Sequence[Tensor]) -> Tensor:
    G, x = tensors[8], tensors[10]
    return x.new_empty(*x.shape[:-1], G.shape[0], dtype=promoted_dtype(*tensors))


def _empty_matrix(tensors: Sequence[Tensor]) -> Tensor:
    G, H = tensors[8:]
    return G.new_empty(G.shape[0], H.shape[0], dtype=promoted_dtype(*tensors))


# As many steps one after the other as there are rows would be as many nodes of a graph.
_opaque_product = opaque_operator("tridiagonal_matmul", _product, _empty_product)
_opaque_matrix = opaque_operator("tridiagonal_to_dense", _matrix, _empty_matrix)


def _krylov_rows(
    a: TridiagonalOperator, b: TridiagonalOperator, G: Tensor, H: Tensor, method: str, *others: Tensor
) -> tuple[Tensor, Tensor, torch.dtype]:
    """The columns of all K(A, g_i) and K(B', h_i) as rows, (pr, m) and (pr, n), and the dtype of all arguments."""
    require_generators(G, H, a.size, b.size)
    require_one_of("method", method, ("auto", *METHODS))
    if method == "auto":
        method = choose_tridiagonal_method(G.device)
    bands = [_bands(a), _bands(b)]
    dtype = promoted_dtype(*bands, G, H, *others)
    if dtype.is_complex:
        raise TypeError(f"tridiagonal operators are multiplied in real dtypes, got {dtype}")
    computed = torch.promote_types(dtype, torch.float32)
    bands, (G, H) = [weight.to(computed) for weight in bands], (G.to(computed), H.to(computed))
    count = min(a.size, b.size)
    if method == "recurrence":
        left, right = recurrences(TridiagonalArithmetic(), bands, [G.mT[None], H.mT[None]], count)
        return left.flatten(0, 1), right.flatten(0, 1), dtype
    return _giant_steps(bands[0], G, count), _giant_steps(bands[1], H, count), dtype


def _bands(operator: TridiagonalOperator) -> Tensor:
    """The bands of A, (3, n): the factors by which entry i of A v takes entries i - 1, i and i + 1 of v, cyclically."""
    before = torch.cat([operator.corners[:1], operator.subdiagonal])
    after = torch.cat([operator.superdiagonal, operator.corners[1:]])
    return torch.stack([before, operator.diagonal, after])


def _giant_steps(bands: Tensor, v: Tensor, count: int) -> Tensor:
    """v, Av, ..., A^(count - 1)v one after the other: (count r, n) for v (n, r).

    The n entries are cut into k blocks of n/k, rounded up or down; a block that is shorter than the longest ends in a
    zero. Since no block is shorter than the reach of the power of A, that power is block-tridiagonal and cyclic.
    """
    n, r = v.shape
    step = 2 ** (min(GIANT_STEP, n).bit_length() - 1)
    k = n // step
    longest = -(-n // k)
    place = torch.arange(n, device=v.device)
    block = place * k // n
    offset = place - (block * n + k - 1) // k
    padded = n < k * longest
    slot = block * longest + offset

    def blocks(rows: Tensor) -> Tensor:
        spread = rows.new_zeros(k * longest, rows.shape[1]).index_copy(0, slot, rows) if padded else rows
        return spread.view(k, longest, -1)

    # Within the window of a block: the block before it, itself, and the block after it.
    before = torch.where(offset > 0, longest + offset - 1, offset.roll(1))
    after = torch.where(offset.roll(-1) > 0, longest + offset + 1, 2 * longest)
    columns = torch.stack([before, longest + offset, after], 1)
    power = blocks(v.new_zeros(n, 3 * longest).scatter(1, columns, bands.mT))

    arithmetic, states = BlockTridiagonalArithmetic(), blocks(v)
    while states.shape[-1] < step * r:
        states = torch.cat([states, arithmetic.multiply(power, states)], -1)
        power = _square(power)
    (states,) = recurrences(arithmetic, [power], [states[None]], -(-count // step))
    rows = states.flatten(1, 2)
    rows = rows.index_select(1, slot) if padded else rows
    return rows.mT.flatten(0, 1)[: count * r]


def _square(blocks: Tensor) -> Tensor:
    """A² for a block-tridiagonal A (k, b, 3b) that reaches no farther than b/2 entries."""
    b = blocks.shape[1]
    before = F.pad(blocks.roll(1, 0)[..., b:], (0, b))
    after = F.pad(blocks.roll(-1, 0)[..., : 2 * b], (b, 0))
    return blocks @ torch.cat([before, blocks, after], 1)
