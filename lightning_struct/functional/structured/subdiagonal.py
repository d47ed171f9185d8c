"""Products with matrices of low displacement rank whose two operators are subdiagonal plus corner (LDR-SD).

M = Σᵢ K(A, gᵢ) K(B, hᵢ)ᵀ = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ with p = min(m, n): the paper's equation (2), of which B here is the
transpose. Three methods compute the same:

``"scaled"``
    With no zero below the diagonal, A = c D Z_w D⁻¹, D holding the cumulative products of its entries, divided by c each.
    So M is a diagonally scaled Toeplitz-like matrix: one level of Fourier transforms, O(r n log n), where the paper has
    log₂ n levels. Digits are lost as the entries of D spread: see :func:`choose_subdiagonal_method`. ``"scaled_float64"``
    computes in float64.
``"dense"``
    Forms M by its Stein equation, in O(mn), and multiplies by it. Exact for any entries.
``"tree"``
    The paper's recursion over ranges of rows, with a large branching factor: O(r n log² n), without division, exact for any
    entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.structured.cost_model import (
    LARGEST_KEPT_MATRIX,
    LARGEST_MATRIX,
    kept_matrix_is_faster,
    training_nanoseconds,
)
from lightning_struct.functional.structured.krylov import require_generators, require_real, require_vectors
from lightning_struct.functional.structured.krylov_tree import KrylovTree
from lightning_struct.functional.structured.scaled_toeplitz import (
    ScaledToeplitzSpectra,
    Similarity,
    by_rows,
    computing_dtype,
    scaled_toeplitz_matmul,
)
from lightning_struct.functional.structured.stein import stein_matrix

SUBDIAGONAL_METHODS = ("scaled", "scaled_float64", "dense", "tree")

# Nats that "scaled" may lose: errors are near eps · e^loss of the norm of M, those of gradients up to ten times that.
_FLOAT32_LOSS, _FLOAT64_LOSS = 4.0, 11.0
# The same for float64 inside where float32 is asked for.
_FLOAT64_LOSS_FOR_FLOAT32 = 18.0
# Nats that the entries of D of both operators may spread: beyond, their products could overflow.
_FLOAT32_SPREAD, _FLOAT64_SPREAD = 60.0, 500.0


class PreparedSubdiagonal(Protocol):
    """What of a product with M does not depend on x; see :func:`prepare_subdiagonal`."""

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (..., m) of (..., n), in the dtype of x."""


@dataclass(frozen=True)
class DenseMatrix:
    """M itself, (m, n)."""

    matrix: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.matrix.dtype), self.matrix).to(x.dtype)


@dataclass(frozen=True)
class TreePair:
    """The two Krylov matrices of M as trees."""

    left: KrylovTree
    right: KrylovTree

    def matmul(self, x: Tensor) -> Tensor:
        product = by_rows(lambda rows: self.left.matmul(self.right.rmatmul(rows)), x, self.left.leaves.dtype)
        return product.to(x.dtype)


def subdiagonal_matmul(
    a_subdiagonal: Tensor,
    a_corner: Tensor,
    b_subdiagonal: Tensor,
    b_corner: Tensor,
    G: Tensor,
    H: Tensor,
    x: Tensor,
    method: str = "auto",
) -> Tensor:
    """x Mᵀ, differentiable in all tensors, as often as wanted.

    Args:
        a_subdiagonal: (m - 1,): A[i + 1, i].
        a_corner: (): A[0, m - 1].
        b_subdiagonal: (n - 1,): B[i + 1, i].
        b_corner: (): B[0, n - 1].
        G: (m, r).
        H: (n, r).
        x: (..., n).
        method: one of :data:`SUBDIAGONAL_METHODS`, or ``"auto"`` for what :func:`choose_subdiagonal_method` says, which
            waits for the device.

    Returns:
        (..., m), in the dtype to which G and x are promoted. Half precision is computed in float32. Where powers of A and B
        overflow, so does M.

    Raises:
        ValueError: shapes do not fit, the method is unknown, or it is ``"scaled"`` and a subdiagonal on the CPU has a zero.
            (On other devices, looking would mean to wait; there, and under vmap over a subdiagonal, the product is NaN.)
        TypeError: a tensor does not hold real floating-point numbers.
    """
    parameters = (a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H)
    _check(*parameters, x=x)
    if method == "auto":
        batch = x.shape[:-1].numel()
        method = choose_subdiagonal_method(*parameters[:4], rank=G.shape[1], batch=batch)
    dtype = _inside(method, *parameters, x)
    computed = [tensor.to(dtype) for tensor in parameters]
    if method == "dense":
        matrix = stein_matrix(*_circles(*computed))
        product = by_rows(lambda rows: rows @ matrix.mT, x, dtype)
    elif method == "tree":
        left, right = _trees(*computed)
        product = by_rows(lambda rows: left.matmul(right.rmatmul(rows)), x, dtype)
    else:
        _refuse_zeros(a_subdiagonal, b_subdiagonal)
        product = by_rows(lambda rows: scaled_toeplitz_matmul(rows, *computed[4:], *computed[:4]), x, dtype)
    return product.to(torch.promote_types(G.dtype, x.dtype))


def subdiagonal_to_dense(
    a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor, G: Tensor, H: Tensor
) -> Tensor:
    """M, (m, n), in O(mn) operations and without loss; arguments as for :func:`subdiagonal_matmul`."""
    parameters = (a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H)
    _check(*parameters)
    dtype = computing_dtype(*parameters)
    return stein_matrix(*_circles(*(tensor.to(dtype) for tensor in parameters))).to(G.dtype)


def prepare_subdiagonal(
    a_subdiagonal: Tensor,
    a_corner: Tensor,
    b_subdiagonal: Tensor,
    b_corner: Tensor,
    G: Tensor,
    H: Tensor,
    method: str = "auto",
    batch: int = 1,
) -> PreparedSubdiagonal:
    """All of :func:`subdiagonal_matmul` that does not depend on x, for weights that do not change.

    ``"auto"`` keeps the matrix itself where multiplying a batch of that size by it is faster than transforms are.
    """
    parameters = (a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H)
    _check(*parameters)
    if method == "auto":
        (m, rank), n = G.shape, H.shape[0]
        exact = None if kept_matrix_is_faster(m, n, rank, batch) else _exact_scaled_method(*parameters[:4])
        method = exact or ("dense" if m * n <= LARGEST_KEPT_MATRIX else "tree")
    dtype = _inside(method, *parameters)
    computed = [tensor.to(dtype) for tensor in parameters]
    if method == "dense":
        return DenseMatrix(stein_matrix(*_circles(*computed)).contiguous())
    if method == "tree":
        return TreePair(*_trees(*computed))
    _refuse_zeros(a_subdiagonal, b_subdiagonal)
    return ScaledToeplitzSpectra.of(*computed[4:], *computed[:4])


def choose_subdiagonal_method(
    a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor, rank: int, batch: int = 1
) -> str:
    """The fastest method of :data:`SUBDIAGONAL_METHODS` whose error stays below 1e-5 in float32, 1e-10 in float64.

    What is the fastest is known of a CPU; elsewhere it is ``"scaled"`` where that is exact enough, else ``"tree"``.

    It looks at the entries, for which it waits for the device once: not to be called at each step of training.

    Args:
        a_subdiagonal, a_corner, b_subdiagonal, b_corner: as for :func:`subdiagonal_matmul`.
        rank: r.
        batch: how many rows x has.
    """
    m, n = a_subdiagonal.shape[0] + 1, b_subdiagonal.shape[0] + 1
    scaled = _exact_scaled_method(a_subdiagonal, a_corner, b_subdiagonal, b_corner)
    if a_subdiagonal.device.type != "cpu":
        return scaled or "tree"  # dense rows are a launch each, one after the other
    exact = [*([scaled] if scaled else []), *(["dense"] if m * n <= LARGEST_MATRIX else []), "tree"]
    return min(exact, key=lambda method: training_nanoseconds(method, m, n, rank, batch))


def _exact_scaled_method(
    a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor
) -> str | None:
    """The faster one of ``"scaled"`` and ``"scaled_float64"`` that is exact enough, or None."""
    sides = [
        (subdiagonal.detach().double().cpu(), corner.detach().double().cpu())
        for subdiagonal, corner in ((a_subdiagonal, a_corner), (b_subdiagonal, b_corner))
    ]
    single = computing_dtype(a_subdiagonal, b_subdiagonal) == torch.float32
    loss, spread = _loss(sides)
    if single and loss < _FLOAT32_LOSS and spread < _FLOAT32_SPREAD:
        return "scaled"
    if loss < (_FLOAT64_LOSS_FOR_FLOAT32 if single else _FLOAT64_LOSS) and spread < _FLOAT64_SPREAD:
        return "scaled_float64" if single else "scaled"
    return None


def _loss(sides: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The nats by which errors of ``"scaled"`` exceed eps, relative to M, and those by which the entries of D spread.

    Errors are of the size of the largest entry of D and of the corner, over the smallest, of both operators together. M
    is at least as large as its largest path of some length j, which is looked for among a few lengths.
    """
    if any((subdiagonal == 0).any() for subdiagonal, _ in sides):
        return math.inf, math.inf
    similar = [Similarity.of(*side) for side in sides]
    a, b = (side.scale.abs().log() for side in similar)
    trend = sum(side.trend.item() for side in similar)
    spread = sum((logs.max() - logs.min()).item() for logs in (a, b))
    corners = sum(side.corner.abs().clamp(min=1).log().item() for side in similar)
    lengths = sorted({round(2 ** (k / 2)) for k in range(2 * min(len(a), len(b)).bit_length())})
    growth = [
        ((a[j:] - a[:-j]).max() + (b[j:] - b[:-j]).max()).item() + j * trend for j in lengths if j < min(len(a), len(b))
    ]
    return spread + corners - max(0.0, *growth, 0.0), spread


def _check(
    a_subdiagonal: Tensor,
    a_corner: Tensor,
    b_subdiagonal: Tensor,
    b_corner: Tensor,
    G: Tensor,
    H: Tensor,
    x: Tensor | None = None,
) -> None:
    require_generators(G, H)
    if x is not None:
        require_vectors(x, H.shape[0])
        require_real(x=x)
    require_real(
        a_subdiagonal=a_subdiagonal, a_corner=a_corner, b_subdiagonal=b_subdiagonal, b_corner=b_corner, G=G, H=H
    )
    for name, tensor, shape in (
        ("a_subdiagonal", a_subdiagonal, (G.shape[0] - 1,)),
        ("a_corner", a_corner, ()),
        ("b_subdiagonal", b_subdiagonal, (H.shape[0] - 1,)),
        ("b_corner", b_corner, ()),
    ):
        if tensor.shape != shape:
            raise ValueError(
                f"{name} must be of shape {shape} beside G {tuple(G.shape)} and H {tuple(H.shape)}, not {tuple(tensor.shape)}."
            )


def _inside(method: str, *tensors: Tensor) -> torch.dtype:
    """The dtype in which the method computes."""
    if method not in SUBDIAGONAL_METHODS:
        raise ValueError(
            f'method must be "auto" or one of {", ".join(map(repr, SUBDIAGONAL_METHODS))}, not {method!r}.'
        )
    return torch.float64 if method == "scaled_float64" else computing_dtype(*tensors)


def _refuse_zeros(a_subdiagonal: Tensor, b_subdiagonal: Tensor) -> None:
    for name, tensor in (("a_subdiagonal", a_subdiagonal), ("b_subdiagonal", b_subdiagonal)):
        if tensor.device.type == "cpu" and not tensor.all():
            index = (tensor == 0).nonzero()[0].item()
            raise ValueError(
                f'method="scaled" divides by the subdiagonals, and {name}[{index}] is 0: use method="tree" or method="dense".'
            )


def _circles(
    a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor, G: Tensor, H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of :func:`stein_matrix`."""
    return torch.cat([a_corner[None], a_subdiagonal]), torch.cat([b_corner[None], b_subdiagonal]), G, H


def _trees(*parameters: Tensor) -> tuple[KrylovTree, KrylovTree]:
    a, b, G, H = _circles(*parameters)
    columns = min(G.shape[0], H.shape[0])
    return KrylovTree.of(a, G.mT, columns), KrylovTree.of(b, H.mT, columns)
