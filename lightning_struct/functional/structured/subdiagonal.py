"""Products with matrices of low displacement rank whose two operators are subdiagonal plus corner (LDR-SD).

M = Σᵢ K(A, gᵢ) K(B, hᵢ)ᵀ = Σ_{j<p} Aʲ G Hᵀ (Bʲ)ᵀ with p = min(m, n): equation (2) of Thomas et al., with B here
the transpose of theirs. Two methods compute the same:

``"scaled"``
    With no zero below the diagonal, A = c D Z_w D⁻¹, D holding the cumulative products of its entries, divided by c
    each. So M is a diagonally scaled Toeplitz-like matrix: one level of Fourier transforms, O(r n log n), where the
    paper has log₂ n levels (Theorem 1). Digits are lost as the entries of D spread: see
    :func:`choose_subdiagonal_method`. ``"scaled_float64"`` computes in float64.
``"tree"``
    The paper's recursion over ranges of rows (Appendix C.2, Algorithm 1), with a large branching factor: O(r n log² n),
    without division, exact for any entries.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.checks import checked, require_real
from lightning_struct.functional.structured import arguments
from lightning_struct.functional.structured.prepared import PreparedMatrix
from lightning_struct.functional.structured.scaled_toeplitz import (
    ScaledToeplitzSpectra,
    detrended_path,
    scaled_toeplitz_matmul,
)
from lightning_struct.functional.structured.subdiagonal_exact import KrylovTree, stein_matrix
from lightning_struct.functional.torch_tools import opaque_operator

SUBDIAGONAL_METHODS = ("scaled", "scaled_float64", "tree")
"""The values of ``method`` besides ``"auto"``."""

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

    @staticmethod
    def of(*parameters: Tensor) -> KrylovTrees:
        """The trees of the matrix of :func:`subdiagonal_matmul`, given its arguments but x."""
        a, b, G, H = _as_circles(*parameters)
        columns = min(G.shape[0], H.shape[0])
        return KrylovTrees(KrylovTree.of(a, G.mT, columns), KrylovTree.of(b, H.mT, columns))

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
        method: ``"scaled"`` or ``"scaled_float64"``, NaN if a subdiagonal has a zero; ``"tree"``; ``"auto"`` for what
            :func:`choose_subdiagonal_method` says, which waits for the device.

    Returns:
        (..., m), in the dtype to which G and x are promoted. Half precision is computed in float32. Where products
        of powers of A and of B overflow, so does M.

    Raises:
        ValueError: shapes do not fit, or the method is unknown.
        TypeError: a tensor does not hold real floating-point numbers.

    Example:
        >>> subdiagonal, corner = torch.tensor([2.0, 3.0]), torch.tensor(0.0)
        >>> G = H = torch.tensor([[1.0], [0.0], [0.0]])
        >>> x = torch.tensor([1.0, 1.0, 1.0])
        >>> subdiagonal_matmul(subdiagonal, corner, subdiagonal, corner, G, H, x, method="tree")
        tensor([ 1.,  4., 36.])
    """
    parameters = (a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H)
    _check(*parameters, x)
    return subdiagonal_product(*parameters, x, method=method)


def _computed_product(*tensors: Tensor, method: str) -> Tensor:
    """:func:`subdiagonal_matmul` for arguments that fit."""
    *parameters, x = tensors
    method, dtype, computed = _resolved(method, *tensors)
    if method == "tree":
        product = arguments.by_rows(KrylovTrees.of(*computed[:6]).multiply, x, dtype)
    else:
        product = arguments.by_rows(lambda rows: scaled_toeplitz_matmul(rows, *computed[4:6], *computed[:4]), x, dtype)
    return product.to(torch.promote_types(parameters[4].dtype, x.dtype))


def _resolved(method: str, *tensors: Tensor) -> tuple[str, torch.dtype, list[Tensor]]:
    """The method by name, the dtype in which it computes, and the tensors but x in that dtype."""
    arguments.require_one_of("method", method, ("auto", *SUBDIAGONAL_METHODS))
    if method == "auto":
        method = choose_subdiagonal_method(*tensors[:4])
    dtype = torch.float64 if method == "scaled_float64" else arguments.computing_dtype(*tensors)
    return method, dtype, [tensor.to(dtype) for tensor in tensors[:6]]


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
# Their arguments end in G, H and x, or in G and H, and must fit.
subdiagonal_product = opaque_operator(
    "subdiagonal_matmul",
    _computed_product,
    lambda t: t[6].new_empty(*t[6].shape[:-1], len(t[4]), dtype=torch.promote_types(t[4].dtype, t[6].dtype)),
)
_matrix = opaque_operator("subdiagonal_to_dense", _computed_matrix, lambda t: t[4].new_empty(len(t[4]), len(t[5])))


def prepare_subdiagonal(*parameters: Tensor, method: str = "auto") -> PreparedMatrix:
    """The matrix of :func:`subdiagonal_matmul`, prepared for products with weights that do not change.

    Args:
        *parameters: the arguments of :func:`subdiagonal_matmul` before x.
        method: as there.

    Returns:
        An object whose ``matmul(x)`` is x Mᵀ, (..., m) for x (..., n), in the dtype of x.
    """
    method, _, computed = _resolved(method, *parameters)
    if method == "tree":
        return KrylovTrees.of(*computed)
    return ScaledToeplitzSpectra.of(*computed[4:], *computed[:4])


def choose_subdiagonal_method(*operators: Tensor) -> str:
    """The first method of :func:`subdiagonal_matmul` whose error stays below 1e-5 in float32, 1e-10 in float64.

    It looks at the entries, for which it waits for the device. Where they cannot be read, on the meta device or when
    vmap maps over them, it is ``"tree"``.

    Args:
        *operators: subdiagonal and corner of A, and those of B, as for :func:`subdiagonal_matmul`.

    Example:
        >>> subdiagonal, corner = torch.ones(1023), torch.tensor(0.0)
        >>> choose_subdiagonal_method(subdiagonal, corner, subdiagonal, corner)
        'scaled'
        >>> choose_subdiagonal_method(0 * subdiagonal, corner, subdiagonal, corner)
        'tree'
    """
    single = arguments.computing_dtype(operators[0], operators[2]) == torch.float32
    with suppress(RuntimeError), torch.no_grad():
        loss, spread = _loss(*operators, enough=_FLOAT32_LOSS if single else _FLOAT64_LOSS)
        if single and loss < _FLOAT32_LOSS and spread < _FLOAT32_SPREAD:
            return "scaled"
        if loss < (_FLOAT64_LOSS_FOR_FLOAT32 if single else _FLOAT64_LOSS) and spread < _FLOAT64_SPREAD:
            return "scaled_float64" if single else "scaled"
    return "tree"


def _loss(*operators: Tensor, enough: float) -> tuple[float, float]:
    """The nats by which errors of ``"scaled"`` exceed eps, relative to M, and the spread of the entries of D, in nats.

    Errors are of the size of the largest entry of D and of the corner, over the smallest, of both operators together. M
    is at least as large as its largest path of some length j, which is looked for among a few lengths, unless the loss
    is below ``enough`` without it. Both numbers are NaN if there is a zero below a diagonal.
    """
    sizes = [len(operators[0]) + 1, len(operators[2]) + 1]
    entries = torch.cat([tensor.reshape(-1) for tensor in operators]).cpu().double().abs().log()
    sides = [entries.view(2, -1)] if sizes[0] == sizes[1] else [side[None] for side in entries.split(sizes)]
    paths: list[Tensor] = []
    loss = spread = trends = 0.0
    for side in sides:
        path, trend = detrended_path(side[:, :-1])
        path = F.pad(path, (1, 0))
        low, high = path.aminmax(dim=1)
        # Of A = c D Z_f D⁻¹ with log c, the trend: the entry f.
        corner = side[:, -1] + path[:, -1] - trend
        paths += path.unbind()
        for of_side, of_corner, of_trend in torch.stack([high - low, corner, trend], 1).tolist():
            loss, spread, trends = loss + of_side + max(0.0, of_corner), spread + of_side, trends + of_trend
    if not loss < enough:
        shorter = min(sizes)
        lengths = {round(2 ** (k / 2)) for k in range(2 * shorter.bit_length())}
        growth = [
            sum((path[j:] - path[:-j]).max().item() for path in paths) + j * trends for j in lengths if j < shorter
        ]
        loss -= max([0.0, *growth])
    return loss, spread


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


def _as_circles(*parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of :func:`stein_matrix`: each operator is a circle, its corner and then its subdiagonal.

    If powers of A and B differ much, they are those of A/c and c B, of the same M, with entries of one size. Else
    powers of A would overflow where those of B vanish, and M be NaN, whose entries are products of both.
    """
    a_subdiagonal, a_corner, b_subdiagonal, b_corner, G, H = parameters
    a, b = torch.cat([a_corner[None], a_subdiagonal]), torch.cat([b_corner[None], b_subdiagonal])
    of_a, of_b = (tensor.detach().abs().log().median() for tensor in (a, b))
    nats = 0.5 * (of_a - of_b)
    is_far = nats.isfinite() & (nats.abs() * max(len(a), len(b)) > _NATS_OF_POWERS)
    c = torch.where(is_far, nats, 0.0).exp()
    return a / c, b * c, G, H
