"""Kronecker factors of the Gauss-Newton matrix of a layer, and right preconditioners: roots of the damped factors.

The Gauss-Newton block of a weight that multiplies rows ã (its bias's 1 among them) is the mean over samples of vec(f
ãᵀ) vec(f ãᵀ)ᵀ, f the back-propagated product of the square root of the loss Hessian with random signs, as in
:func:`~lightning_struct.functional.curvature.preconditioner.randomized_gauss_newton_diagonal`. It is taken for G ⊗ A, A
the mean of ã ãᵀ and G that of f fᵀ (Martens & Grosse 2015; over the T positions of a sequence or an image A is the mean
and G the sum, as in Grosse & Martens 2016). This is exact in expectation for one sample at one position, and where ã
and f are independent.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.layers.per_sample import Contribution, Outer


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
    for rows, cotangents in use.matrix_rows(groups):
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


# An explicit inverse is used if its relative error is below this.
_LARGEST_ERROR = 0.1


class NotPositiveDefinite(ArithmeticError):
    """A damped factor has no Cholesky factor, in float64 either."""


@dataclass(frozen=True)
class KroneckerRoot:
    """C of a block with CᵀC = (G + (μ/π) I) ⊗ (A + π μ I), on matrices (groups, out, in) of weights and biases.

    Attributes:
        inputs: lower Cholesky factors (groups, in, in), or square roots (groups, in) of a diagonal.
        outputs: likewise, (groups, out, out) or (groups, out).
        inverses: of the damped factors, see :func:`with_inverses`; None for none.
    """

    inputs: Tensor
    outputs: Tensor
    inverses: tuple[Tensor, Tensor] | None = None

    def solve(self, y: Tensor) -> Tensor:
        """C⁻¹ y."""
        return _solved_rows(self.inputs, _solved_columns(self.outputs, y, transpose=True), transpose=True)

    def solve_transpose(self, x: Tensor) -> Tensor:
        """C⁻ᵀ x."""
        return _solved_rows(self.inputs, _solved_columns(self.outputs, x, transpose=False), transpose=False)

    def solve_normal(self, x: Tensor) -> Tensor:
        """C⁻¹ C⁻ᵀ x, by the inverses of the factors if there are any: matrix products are quicker than solves."""
        if self.inverses is None:
            return self.solve(self.solve_transpose(x))
        of_inputs, of_outputs = self.inverses
        x = x * of_outputs[:, :, None] if of_outputs.ndim == 2 else of_outputs @ x
        return x * of_inputs[:, None] if of_inputs.ndim == 2 else x @ of_inputs


@dataclass(frozen=True)
class DiagonalRoot:
    """C of a block with CᵀC = D + μ² I, on tensors of the shape of ``root``, its diagonal."""

    root: Tensor

    def solve(self, y: Tensor) -> Tensor:
        """C⁻¹ y."""
        return y / self.root

    def solve_transpose(self, x: Tensor) -> Tensor:
        """C⁻ᵀ x."""
        return x / self.root

    def solve_normal(self, x: Tensor) -> Tensor:
        """C⁻¹ C⁻ᵀ x."""
        return x / self.root.square()


def kronecker_root(inputs: Tensor, outputs: Tensor, damping: float) -> KroneckerRoot:
    """Factor the damped factors: A + π μ I and G + (μ/π) I with π² = (tr A/dim A)/(tr G/dim G).

    Args:
        inputs: A, (groups, in, in), or its diagonal (groups, in).
        outputs: G, (groups, out, out), or its diagonal (groups, out).
        damping: μ > 0.

    Raises:
        FloatingPointError: a factor holds NaN or infinity.
        NotPositiveDefinite: no Cholesky factor, in float64 either.

    Example:
        >>> root = kronecker_root(torch.eye(3)[None], torch.eye(2)[None], damping=3.0)
        >>> root.solve_normal(torch.full((1, 2, 3), 16.0))
        tensor([[[1., 1., 1.],
                 [1., 1., 1.]]])
    """
    of_inputs, of_outputs = map(_root, (inputs, outputs), _shifts(inputs, outputs, damping))
    return KroneckerRoot(of_inputs, of_outputs)


def unchecked_kronecker_root(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[KroneckerRoot, Tensor]:
    """The same without waiting for the device: the root, and whether it is good, a bool tensor ().

    If it is not, :func:`kronecker_root` finds the root in float64, or raises.
    """
    shifts = _shifts(inputs, outputs, damping)
    roots, good = zip(*map(_unchecked_root, (inputs, outputs), shifts), strict=True)
    return KroneckerRoot(*roots), good[0] & good[1]


def is_invertible(root: KroneckerRoot | DiagonalRoot) -> Tensor:
    """Whether rounding cannot make the inverses of the damped factors indefinite, a bool tensor ().

    A diagonal needs no inverses.
    """
    if isinstance(root, DiagonalRoot):
        return torch.zeros((), dtype=torch.bool, device=root.root.device)
    triangles = [factor for factor in (root.inputs, root.outputs) if factor.ndim == 3]
    if not triangles:
        return torch.ones((), dtype=torch.bool, device=root.inputs.device)
    # bounds from above on λ_max by estimates of λ_min, (groups,) of each factor
    conditions = [t.square().sum((1, 2)) / t.diagonal(dim1=1, dim2=2).amin(1).square() for t in triangles]
    return torch.cat(conditions).max() * torch.finfo(root.inputs.dtype).eps < _LARGEST_ERROR


def with_inverses(root: KroneckerRoot) -> KroneckerRoot:
    """The root, with the inverses of the damped factors, by which ``solve_normal`` is quicker."""
    return replace(root, inverses=(_inverse(root.inputs), _inverse(root.outputs)))


def diagonal_root(diagonal: Tensor, damping: float) -> DiagonalRoot:
    """The root of D + μ² I.

    Raises:
        FloatingPointError: the diagonal holds NaN or infinity.
    """
    _refuse_not_finite(diagonal)
    return DiagonalRoot((diagonal + damping * damping).sqrt_())


def unchecked_diagonal_root(diagonal: Tensor, damping: float) -> tuple[DiagonalRoot, Tensor]:
    """The same without waiting for the device: the root, and whether it is good, a bool tensor ()."""
    return DiagonalRoot((diagonal + damping * damping).sqrt_()), diagonal.sum().isfinite()


def _shifts(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """π μ and μ/π, (groups,)."""
    diagonals = (t if t.ndim == 2 else t.diagonal(dim1=1, dim2=2) for t in (inputs, outputs))
    of_inputs, of_outputs = (diagonal.mean(1) for diagonal in diagonals)  # the mean eigenvalues
    defined = (of_inputs > 0) & (of_outputs > 0)
    # The quotient of the roots: that of the numbers may be out of range.
    ratio = torch.where(defined, of_inputs.sqrt() / torch.where(defined, of_outputs, 1.0).sqrt(), 1.0)
    return damping * ratio, damping / ratio


def _root(factor: Tensor, shift: Tensor) -> Tensor:
    for dtype in (factor.dtype, torch.float64):
        root, good = _unchecked_root(factor.to(dtype), shift.to(dtype))
        if good:
            return root.to(factor)
        _refuse_not_finite(factor)
    raise NotPositiveDefinite(f"the damped factor of {len(factor[0])} rows is not positive definite, in float64 either")


def _unchecked_root(factor: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The root, and whether it is good."""
    finite = factor.sum().isfinite()
    if factor.ndim == 2:
        return (factor + shift[:, None]).sqrt_(), finite
    damped = factor.clone()
    damped.diagonal(dim1=1, dim2=2).add_(shift[:, None])
    root, info = torch.linalg.cholesky_ex(damped)
    return root, finite & (info == 0).all() & root.diagonal(dim1=1, dim2=2).isfinite().all()


def _inverse(root: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹."""
    return root.square().reciprocal() if root.ndim == 2 else torch.cholesky_inverse(root)


def _refuse_not_finite(factor: Tensor) -> None:
    if not factor.sum().isfinite():
        raise FloatingPointError("the curvature factor holds NaN or infinity")


def _solved_columns(root: Tensor, matrix: Tensor, *, transpose: bool) -> Tensor:
    """L⁻¹ or L⁻ᵀ times each column of (groups, rows, columns)."""
    if root.ndim == 2:
        return matrix / root[:, :, None]
    return torch.linalg.solve_triangular(root.mT if transpose else root, matrix, upper=transpose)


def _solved_rows(root: Tensor, matrix: Tensor, *, transpose: bool) -> Tensor:
    """L⁻¹ or L⁻ᵀ times each row of (groups, rows, columns)."""
    if root.ndim == 2:
        return matrix / root[:, None]
    return torch.linalg.solve_triangular(root if transpose else root.mT, matrix, upper=not transpose, left=False)
