"""Products with matrices of low displacement rank whose two operators are subdiagonal plus corner (LDR-SD).

M = Σᵢ K(A, gᵢ) K(B, hᵢ)ᵀ = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ with p = min(m, n): equation (2) of Thomas et al., of which B here is
the transpose. Four methods compute the same:

``"scaled"``
    With no zero below the diagonal, A = c D Z_w D⁻¹, D holding the cumulative products of its entries, divided by c
    each. So M is a diagonally scaled Toeplitz-like matrix: one level of Fourier transforms, O(r n log n), where the
    paper has log₂ n levels (Theorem 1). Digits are lost as the entries of D spread: see
    :func:`choose_subdiagonal_method`. ``"scaled_float64"`` computes in float64.
``"dense"``
    Makes M by its Stein equation, in O(mn), and multiplies by it. Exact for any entries.
``"tree"``
    The paper's recursion over ranges of rows (Appendix C.2, Algorithm 1), with a large branching factor: O(r n log² n),
    without division, exact for any entries.
``"krylov"``
    Makes M as the product of its Krylov matrices, in few operations: for small matrices, and those with a short side.
    Exact if the powers of A and B do not overflow.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_struct.functional.checks import checked, require_real
from lightning_struct.functional.structured import arguments, cost_model
from lightning_struct.functional.structured.operators import subdiagonal_krylov_rows
from lightning_struct.functional.structured.prepared import DenseMatrix, PreparedMatrix, prepare_dense
from lightning_struct.functional.structured.scaled_toeplitz import (
    ScaledToeplitzSpectra,
    Similarity,
    scaled_toeplitz_matmul,
)
from lightning_struct.functional.structured.subdiagonal_exact import KrylovTree, stein_matrix
from lightning_struct.functional.torch_tools import opaque_operator

SUBDIAGONAL_METHODS = ("scaled", "scaled_float64", "dense", "tree", "krylov")
"""The values of ``method`` besides ``"auto"``, in the order of their numbers in checkpoints."""


# Nats that "scaled" may lose: errors are near eps · e^loss of the norm of M, those of gradients up to ten times that.
_FLOAT32_LOSS, _FLOAT64_LOSS = 4.0, 11.0
# The same for float64 inside if float32 is asked for.
_FLOAT64_LOSS_FOR_FLOAT32 = 18.0
# Nats that the entries of D of both operators may spread: beyond, their products could overflow.
_FLOAT32_SPREAD, _FLOAT64_SPREAD = 60.0, 500.0
# Nats that the highest powers of A and B may differ by, each from their mean, before the operators are balanced.
_NATS_OF_POWERS = 20.0


@dataclass(frozen=True)
class KrylovTrees:
    """M by the trees of its two Krylov matrices: a :class:`~.prepared.PreparedMatrix`.

    Args:
        left: the tree of all K(A, gᵢ).
        right: that of all K(B, hᵢ).
    """

    left: KrylovTree
    right: KrylovTree

    keeps_precision: ClassVar[bool] = True

    @staticmethod
    def of(*parameters: Tensor) -> KrylovTrees:
        """The trees of the matrix of :func:`subdiagonal_matmul`, given its arguments but x."""
        a, b, G, H = _as_circles(*parameters)
        columns = min(G.shape[0], H.shape[0])
        return KrylovTrees(KrylovTree.of(a, G.mT, columns), KrylovTree.of(b, H.mT, columns))

    def dense_is_faster(self, m: int, n: int, rows: int) -> bool:
        return m * n <= cost_model.LARGEST_PREPARED_MATRIX

    def matmul(self, x: Tensor) -> Tensor:
        return arguments.by_rows(self.multiply, x, self.left.leaves.dtype).to(x.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """x Mᵀ, (B, m) for x (B, n)."""
        return self.left.matmul(self.right.rmatmul(rows))  # equation (2): Σᵢ K(A, gᵢ) K(B, hᵢ)ᵀ x


@checked
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
    """x Mᵀ for M = Σᵢ K(A, gᵢ) K(B, hᵢ)ᵀ, equation (2) of Thomas et al. with Bᵀ for B.

    Differentiable in all tensors, as often as wanted.

    Args:
        a_subdiagonal: (m - 1,): A[i + 1, i].
        a_corner: (): A[0, m - 1].
        b_subdiagonal: (n - 1,): B[i + 1, i].
        b_corner: (): B[0, n - 1].
        G: (m, r).
        H: (n, r).
        x: (..., n).
        method: ``"scaled"``, ``"scaled_float64"``, ``"dense"``, ``"tree"`` or ``"krylov"``; or ``"auto"`` for what
            :func:`choose_subdiagonal_method` says, which waits for the device.

    Returns:
        (..., m), in the dtype to which G and x are promoted. Half precision is computed in float32. Where products
        of powers of A and of B overflow, so does M.

    Raises:
        ValueError: shapes do not fit, the method is unknown, or it is ``"scaled"`` and a subdiagonal on the CPU has a
            zero. (On other devices, looking would mean to wait; there, and under vmap over a subdiagonal, it is NaN.)
        TypeError: a tensor does not hold real floating-point numbers.

    Example:
        >>> subdiagonal, corner = torch.tensor([2.0, 3.0]), torch.tensor(0.0)
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> x = torch.tensor([1.0, 1.0, 1.0])
        >>> subdiagonal_matmul(subdiagonal, corner, subdiagonal, corner, G, H, x, method="dense")
        tensor([ 1.,  4., 36.])
    """
    parameters = (a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H)
    _check(*parameters, x)
    return _product(*parameters, x, method=method)


def _computed_product(*tensors: Tensor, method: str) -> Tensor:
    """:func:`subdiagonal_matmul` for arguments that fit."""
    if method == "auto":
        a, a_corner, b, b_corner, G, _, x = tensors
        method = choose_subdiagonal_method(a, a_corner, b, b_corner, G.shape[1], x.shape[:-1].numel())
    if method.startswith("scaled"):
        _refuse_zeros(*tensors[:4])
    return subdiagonal_product(*tensors, method=method)


def subdiagonal_product(*tensors: Tensor, method: str) -> Tensor:
    """:func:`subdiagonal_matmul` for arguments that fit, by a method that can bear them: nothing is checked.

    Args:
        *tensors: as there.
        method: one of :data:`SUBDIAGONAL_METHODS`.
    """
    *parameters, x = tensors
    dtype = _inside(method, *tensors)
    computed = [tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in parameters]
    if method in _MAKING:
        matrix = _MAKING[method](*_as_circles(*computed))
        product = arguments.by_rows(lambda rows: rows @ matrix.mT, x, dtype)
    elif method == "tree":
        product = arguments.by_rows(KrylovTrees.of(*computed).multiply, x, dtype)
    else:
        product = arguments.by_rows(lambda rows: scaled_toeplitz_matmul(rows, *computed[4:], *computed[:4]), x, dtype)
    return product.to(torch.promote_types(parameters[4].dtype, x.dtype))


@checked
def subdiagonal_to_dense(
    a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor, G: Tensor, H: Tensor
) -> Tensor:
    """M, (m, n), in O(mn) operations and without loss.

    Args:
        a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H: as for :func:`subdiagonal_matmul`.

    Returns:
        (m, n), in the dtype of G. Half precision is computed in float32.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.

    Example:
        >>> subdiagonal, corner = torch.tensor([2.0, 3.0]), torch.tensor(0.0)
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> subdiagonal_to_dense(subdiagonal, corner, subdiagonal, corner, G, H)
        tensor([[ 1.,  0.,  0.],
                [ 0.,  4.,  0.],
                [ 0.,  0., 36.]])
    """
    parameters = (a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H)
    _check(*parameters)
    return _matrix(*parameters, method="dense")


def _computed_matrix(*parameters: Tensor, method: str) -> Tensor:
    """:func:`subdiagonal_to_dense` for arguments that fit."""
    dtype = arguments.computing_dtype(*parameters)
    return stein_matrix(*_as_circles(*(tensor.to(dtype) for tensor in parameters))).to(parameters[4].dtype)


# The choice of a method reads values, and rows one after the other would be as many nodes of a graph.
# Their arguments end in G, H and x, or in G and H.
_product = opaque_operator(
    "subdiagonal_matmul",
    _computed_product,
    lambda t: t[6].new_empty(*t[6].shape[:-1], len(t[4]), dtype=torch.promote_types(t[4].dtype, t[6].dtype)),
)
_matrix = opaque_operator("subdiagonal_to_dense", _computed_matrix, lambda t: t[4].new_empty(len(t[4]), len(t[5])))


@checked
def prepare_subdiagonal(
    a_subdiagonal: Tensor,
    a_corner: Tensor,
    b_subdiagonal: Tensor,
    b_corner: Tensor,
    G: Tensor,
    H: Tensor,
    method: str = "auto",
    batch: int = 1,
) -> PreparedMatrix:
    """The matrix of :func:`subdiagonal_matmul`, prepared for products with weights that do not change.

    Args:
        a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H: as for :func:`subdiagonal_matmul`.
        method: as there, but ``"auto"`` prepares the matrix itself if that is faster than transforms.
        batch: how many rows x will have.

    Returns:
        An object whose ``matmul(x)`` is x Mᵀ, (..., m) for x (..., n), in the dtype of x.

    Raises:
        ValueError, TypeError: as :func:`subdiagonal_matmul`.

    Example:
        >>> subdiagonal, corner = torch.tensor([2.0, 3.0]), torch.tensor(0.0)
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> prepared = prepare_subdiagonal(subdiagonal, corner, subdiagonal, corner, G, H)
        >>> prepared.matmul(torch.tensor([1.0, 1.0, 1.0]))
        tensor([ 1.,  4., 36.])
    """
    parameters = (a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H)
    _check(*parameters)
    if method == "auto":
        is_dense = cost_model.prepared_matrix_is_faster(len(G), len(H), G.shape[1], batch)
        method = "dense" if is_dense else choose_prepared_subdiagonal_method(*parameters[:4])
    dtype = _inside(method, *parameters)
    computed = [tensor.to(dtype) for tensor in parameters]
    if method in _MAKING:
        return prepare_dense(_MAKING[method](*_as_circles(*computed)))
    if method == "tree":
        return KrylovTrees.of(*computed)
    _refuse_zeros(*parameters[:4])
    return ScaledToeplitzSpectra.of(*computed[4:], *computed[:4]).completed()


def subdiagonal_factors(*parameters: Tensor) -> PreparedMatrix:
    """The matrix of :func:`subdiagonal_matmul` in few numbers: spectra if these are exact, else trees or the matrix.

    Args:
        *parameters: the arguments of :func:`subdiagonal_matmul` before x.

    Raises:
        ValueError, TypeError: as :func:`subdiagonal_matmul`.
    """
    _check(*parameters)
    method = _exact_scaled_method(*parameters[:4])
    if method is not None:
        dtype = _inside(method, *parameters)
        computed = [tensor.to(dtype) for tensor in parameters]
        return ScaledToeplitzSpectra.of(*computed[4:], *computed[:4])
    trees = KrylovTrees.of(*(tensor.to(arguments.computing_dtype(*parameters)) for tensor in parameters))
    if trees.left.leaves.numel() + trees.right.leaves.numel() < len(parameters[4]) * len(parameters[5]):
        return trees
    return DenseMatrix(subdiagonal_to_dense(*parameters).contiguous())


@checked
def choose_subdiagonal_method(
    a_subdiagonal: Tensor, a_corner: Tensor, b_subdiagonal: Tensor, b_corner: Tensor, rank: int, batch: int = 1
) -> str:
    """The fastest method of :func:`subdiagonal_matmul` whose error stays below 1e-5 in float32, 1e-10 in float64.

    The fastest one is known of a CPU; elsewhere it is ``"scaled"`` if that is exact enough, else ``"tree"``.

    It looks at the entries, for which it waits for the device once: not to be called at each step of training.

    Args:
        a_subdiagonal: (m - 1,), as for :func:`subdiagonal_matmul`.
        a_corner: ().
        b_subdiagonal: (n - 1,).
        b_corner: ().
        rank: r.
        batch: how many rows x has.

    Example:
        >>> subdiagonal, corner = torch.ones(1023), torch.tensor(0.0)
        >>> choose_subdiagonal_method(subdiagonal, corner, subdiagonal, corner, rank=1, batch=64)
        'scaled'
        >>> choose_subdiagonal_method(0 * subdiagonal, corner, subdiagonal, corner, rank=1, batch=64)
        'tree'
    """
    require_real(1, a_subdiagonal=a_subdiagonal, b_subdiagonal=b_subdiagonal)
    require_real(0, a_corner=a_corner, b_corner=b_corner)
    m, n = a_subdiagonal.shape[0] + 1, b_subdiagonal.shape[0] + 1
    scaled = _exact_scaled_method(a_subdiagonal, a_corner, b_subdiagonal, b_corner)
    return cost_model.fastest_training_method(m, n, rank, batch, a_subdiagonal.device, scaled)


def choose_prepared_subdiagonal_method(*operators: Tensor) -> str:
    """The method by which a matrix is prepared if the dense one is slower: spectra if they are exact enough.

    Args:
        *operators: subdiagonal and corner of A, and those of B, as for :func:`subdiagonal_matmul`.
    """
    m, n = len(operators[0]) + 1, len(operators[2]) + 1
    return _exact_scaled_method(*operators) or cost_model.method_for_any_operators(m, n, prepared=True)


def _exact_scaled_method(*operators: Tensor) -> str | None:
    """The faster one of ``"scaled"`` and ``"scaled_float64"`` that is exact enough, or None."""
    single = arguments.computing_dtype(operators[0], operators[2]) == torch.float32
    a, a_corner, b, b_corner = (tensor.detach().double().cpu() for tensor in operators)
    loss, spread = _loss([(a, a_corner), (b, b_corner)])
    if single and loss < _FLOAT32_LOSS and spread < _FLOAT32_SPREAD:
        return "scaled"
    if loss < (_FLOAT64_LOSS_FOR_FLOAT32 if single else _FLOAT64_LOSS) and spread < _FLOAT64_SPREAD:
        return "scaled_float64" if single else "scaled"
    return None


def _loss(sides: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The nats by which errors of ``"scaled"`` exceed eps, relative to M, and the spread of the entries of D, in nats.

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
    return spread + corners - max([0.0, *growth]), spread


_NAMES = ("a_subdiagonal", "a_corner", "b_subdiagonal", "b_corner", "G", "H", "x")


def _check(*tensors: Tensor) -> None:
    """Refuse arguments of :func:`subdiagonal_matmul`, with or without x, that do not fit."""
    G, H, *x = tensors[4:]
    arguments.require_generators(G, H)
    for vectors in x:
        arguments.require_vectors(vectors, H.shape[0])
    require_real(**dict(zip(_NAMES[: len(tensors)], tensors, strict=True)))
    shapes: list[tuple[int, ...]] = [(len(G) - 1,), (), (len(H) - 1,), ()]
    for name, tensor, shape in zip(_NAMES[:4], tensors[:4], shapes, strict=True):
        if tensor.shape != shape:
            beside = f"beside G {tuple(G.shape)} and H {tuple(H.shape)}"
            raise ValueError(f"{name} must be of shape {shape} {beside}, not {tuple(tensor.shape)}.")


def _inside(method: str, *tensors: Tensor) -> torch.dtype:
    """The dtype in which the method computes."""
    arguments.require_one_of("method", method, ("auto", *SUBDIAGONAL_METHODS))
    return torch.float64 if method == "scaled_float64" else arguments.computing_dtype(*tensors)


def _refuse_zeros(*operators: Tensor) -> None:
    """Refuse zeros below a diagonal if they can be looked for without waiting."""
    for name, tensor in zip(_NAMES[:4:2], operators[::2], strict=True):
        with suppress(RuntimeError):  # under vmap over the tensor no values can be read
            if tensor.device.type != "cpu" or tensor.all():
                continue
            place = f"{name}[{(tensor == 0).nonzero()[0].item()}]"
            raise ValueError(
                f'method="scaled" divides by the subdiagonals, and {place} is 0: use method="tree" or method="dense".'
            )


def _krylov_product(a: Tensor, b: Tensor, G: Tensor, H: Tensor) -> Tensor:
    """:func:`stein_matrix` as the product of the Krylov matrices, O(r m n p): in few operations, each of them large.

    Powers of A or of B alone may overflow although M does not.
    """
    p = min(len(a), len(b))
    return subdiagonal_krylov_rows(a, G, p).mT @ subdiagonal_krylov_rows(b, H, p)


# The methods that make M, of the arguments that _as_circles gives.
_MAKING = {"dense": stein_matrix, "krylov": _krylov_product}


def _as_circles(*parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of :func:`stein_matrix`: each operator is a circle, its corner and then its subdiagonal."""
    a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H = parameters
    a, b = torch.cat([a_corner[None], a_subdiagonal]), torch.cat([b_corner[None], b_subdiagonal])
    share = _balance(a, b)
    return a / share, b * share, G, H


def _balance(a: Tensor, b: Tensor) -> Tensor:
    """c, by which A/c and c B, of the same M, have entries of one size; 1 if powers of A and B differ little anyway.

    Without it, powers of A overflow where those of B vanish, and M would be NaN, whose entries are products of both.
    """
    of_a, of_b = (tensor.detach().abs().log().median() for tensor in (a, b))
    nats = 0.5 * (of_a - of_b)
    is_far = nats.isfinite() & (nats.abs() * max(len(a), len(b)) > _NATS_OF_POWERS)
    return torch.where(is_far, nats, 0.0).exp()
