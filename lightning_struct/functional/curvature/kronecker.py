"""Kronecker factors of the Gauss-Newton matrix of a layer, and right preconditioners: roots of the damped factors.

The Gauss-Newton block of a weight that multiplies rows ã (its bias's 1 among them) is the mean over samples of vec(f
ãᵀ) vec(f ãᵀ)ᵀ, f the back-propagated product of the square root of the loss Hessian with random signs, as in
:func:`~lightning_struct.functional.curvature.preconditioner.randomized_gauss_newton_diagonal`. It is taken for G ⊗ A, A
the mean of ã ãᵀ and G that of f fᵀ (Martens & Grosse 2015; over the T positions of a sequence or an image A is the mean
and G the sum, as in Grosse & Martens 2016). This is exact in expectation for one sample at one position, and where ã
and f are independent.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_struct.functional.layers.per_sample import Contribution, Outer
from lightning_struct.functional.torch_tools import joined


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


# Factors of at most so many rows are factored in a batch with others of their size; larger ones take longer in one.
_LARGEST_TOGETHER = 256
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
    of_inputs, of_outputs = map(_root, (inputs, outputs), _shifts([(inputs, outputs)], damping))
    return KroneckerRoot(of_inputs, of_outputs)


def unchecked_roots(
    factors: Sequence[Sequence[Tensor]], damping: float
) -> list[tuple[KroneckerRoot | DiagonalRoot, bool, bool]]:
    """The roots of many blocks by few operations, and one look at the device.

    Args:
        factors: of each block A and G as for :func:`kronecker_root`, or D alone as for :func:`diagonal_root`.
        damping: μ > 0.

    Returns:
        Of each block the root, whether it is good, and whether rounding cannot make the inverses of its damped factors
        indefinite (a diagonal needs none). If it is not good, these two functions find it, in float64, or raise.
    """
    pairs = [(block[0], block[1]) for block in factors if len(block) == 2]
    sides = iter(_damped_roots([side for pair in pairs for side in pair], _shifts(pairs, damping)))
    roots: list[KroneckerRoot | DiagonalRoot] = []
    looks: list[list[Tensor]] = []  # norms, failures and diagonals of its parts
    for block in factors:
        if len(block) == 2:
            (of_inputs, *look), (of_outputs, *rest) = next(sides), next(sides)
            roots.append(KroneckerRoot(of_inputs, of_outputs))
            looks.append([*look, *rest])
        else:
            diagonal = (block[0] + damping * damping).sqrt_()
            roots.append(DiagonalRoot(diagonal))
            norm = torch.linalg.vector_norm(diagonal)[None]
            looks.append([norm, norm - norm, norm])
    numbers = iter(torch.cat([*chain(*looks)]).tolist())
    judged = []
    for root, look in zip(roots, looks, strict=True):
        values = [[next(numbers) for _ in t] for t in look]
        norms, failed, smallest = (list(chain(*values[i::3])) for i in range(3))
        good = all(map(math.isfinite, norms)) and not any(failed)
        eps = torch.finfo(look[0].dtype).eps
        # by bounds from above on λ_max and estimates of λ_min
        has_inverses = all(eps * n * n < _LARGEST_ERROR * d * d for n, d in zip(norms, smallest, strict=True))
        judged.append((root, good, has_inverses and isinstance(root, KroneckerRoot)))
    return judged


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


def _shifts(pairs: Sequence[tuple[Tensor, Tensor]], damping: float) -> list[Tensor]:
    """π μ and μ/π, (groups,), of each pair of factors in turn."""
    if not pairs:
        return []
    of_inputs, of_outputs = (
        torch.cat([(t if t.ndim == 2 else t.diagonal(dim1=1, dim2=2)).mean(1) for t in side])  # the mean eigenvalues
        for side in zip(*pairs, strict=True)
    )
    # The quotient of the roots: that of the numbers may be out of range.
    ratio = of_inputs.sqrt().div_(of_outputs.sqrt())
    ratio.masked_fill_(~(torch.minimum(of_inputs, of_outputs) > 0), 1.0)
    groups = [len(inputs) for inputs, _ in pairs]
    return [*chain(*zip((damping * ratio).split(groups), (damping / ratio).split(groups), strict=True))]


def _root(factor: Tensor, shift: Tensor) -> Tensor:
    for dtype in (factor.dtype, torch.float64):
        ((root, norms, failed, _),) = _damped_roots([factor.to(dtype)], [shift.to(dtype)])
        if (norms.sum() + factor.sum()).isfinite() and not failed.any():
            return root.to(factor)
        _refuse_not_finite(factor)
    raise NotPositiveDefinite(f"the damped factor of {len(factor[0])} rows is not positive definite, in float64 either")


def _damped_roots(factors: Sequence[Tensor], shifts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Lower Cholesky factors, or square roots of diagonals, small ones of one size in one batch.

    Beside each there is (groups,) of norms, failures, which are not 0, and smallest entries of the diagonal.
    """
    alike: dict[Any, list[int]] = defaultdict(list)
    for number, factor in enumerate(factors):
        alike[factor.shape[1:] if factor.shape[1] <= _LARGEST_TOGETHER else number].append(number)
    roots: dict[int, tuple[Tensor, ...]] = {}
    for numbers in alike.values():
        damped, shift = torch.cat([factors[i] for i in numbers]), joined([shifts[i] for i in numbers])
        if damped.ndim == 2:
            root = damped.add_(shift[:, None]).sqrt_()
            norm = torch.linalg.vector_norm(root, dim=1)
            parts = root, norm, norm - norm, norm
        else:
            damped.diagonal(dim1=1, dim2=2).add_(shift[:, None])
            root, failed = torch.linalg.cholesky_ex(damped)
            parts = root, torch.linalg.vector_norm(root, dim=(1, 2)), failed, root.diagonal(dim1=1, dim2=2).amin(1)
        groups = [len(factors[i]) for i in numbers]
        roots |= zip(numbers, zip(*(part.split(groups) for part in parts), strict=True), strict=True)
    return [roots[number] for number in range(len(factors))]


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
