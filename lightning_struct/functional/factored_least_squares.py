"""Damped least squares from one factorisation of a dense matrix: any damping, any right-hand side, any centre.

A QR factorisation of the shorter side of J and the singular values of the triangle R keep all digits; the eigenvalues of
JᵀJ take less than half of the time, and square the condition of J, which does no harm where λ is large enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_BLOCKS = 8  # of rows of a Gram matrix


class DampedSolver(Protocol):
    """A solver of min ‖J d - b‖² + λ²‖d‖² for one J (N, P): a :class:`FactoredLeastSquares` is one."""

    def product(self, d: Tensor) -> Tensor:
        """J d, (N,)."""

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """The solution d, (P,), for a right-hand side b (N,) and λ."""


class _AllDampings(ABC):
    """min ‖J d - b‖² + λ²‖d - m‖² for one factored J (N, P) and any b, λ > 0 and m: O(N P) each."""

    jacobian: Tensor
    singular_values: Tensor

    @abstractmethod
    def coordinates(self, b: Tensor) -> Tensor:
        """All of b (N,) that the solution depends on, (min(N, P),)."""

    @abstractmethod
    def solve_coordinates(self, coordinates: Tensor, damping: float) -> Tensor:
        """The solution d, (P,), around m = 0, from the coordinates of the right-hand side."""

    def product(self, d: Tensor) -> Tensor:
        """J d, (N,)."""
        return self.jacobian @ d

    def solve(self, b: Tensor, damping: float, center: Tensor | None = None) -> Tensor:
        """The solution d, (P,), of one damped problem.

        Args:
            b: right-hand side, (N,).
            damping: λ.
            center: m, (P,); zero if not given.
        """
        if center is None:
            return self.solve_coordinates(self.coordinates(b), damping)
        return center + self.solve_coordinates(self.coordinates(b - self.product(center)), damping)


class FactoredLeastSquares(_AllDampings):
    """min ‖J d - b‖² + λ²‖d - m‖² for one J (N, P) and any b, λ > 0 and m: O(N P) each, after O(N P min(N, P)) once.

    By a QR factorisation of the shorter side of J, and a singular value decomposition of the triangle: of J with N >= P,
    else of Jᵀ. J itself is kept, not copied.

    Args:
        jacobian: J, (N, P), float32 or float64, finite.

    Attributes:
        jacobian: J.
        singular_values: of J, (min(N, P),), the largest first.

    Example:
        >>> jacobian = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
        >>> FactoredLeastSquares(jacobian).solve(torch.tensor([2.0, 8.0, 1.0]), damping=2.0).round(decimals=3)
        tensor([0.5000, 1.6000])
    """

    def __init__(self, jacobian: Tensor) -> None:
        self.jacobian = jacobian
        self._tall = jacobian.shape[0] >= jacobian.shape[1]
        longer = jacobian if self._tall else jacobian.mT
        self._reflectors, self._tau = torch.geqrf(longer)
        side = longer.shape[1]
        triangle = self._reflectors[:side].triu()
        self._left, self.singular_values, right = torch.linalg.svd(triangle)
        self._right = right.mT

    def coordinates(self, b: Tensor) -> Tensor:
        """Uᵀ b."""
        if self._tall:  # J = Q R, R = U S Vᵀ
            return self._left.mT @ self._apply_q(b, transpose=True)[: self._tau.shape[0]]
        return self._right.mT @ b  # Jᵀ = Q R, so J = V S (Q U)ᵀ

    def solve_coordinates(self, coordinates: Tensor, damping: float) -> Tensor:
        s = self.singular_values
        solution = coordinates * (s / (s * s + damping * damping))
        if self._tall:
            return self._right @ solution
        padded = solution.new_zeros(self.jacobian.shape[1])
        padded[: len(s)] = self._left @ solution
        return self._apply_q(padded, transpose=False)

    def _apply_q(self, vector: Tensor, transpose: bool) -> Tensor:
        return torch.ormqr(self._reflectors, self._tau, vector[:, None], left=True, transpose=transpose)[:, 0]


class GramLeastSquares(_AllDampings):
    """The same as :class:`FactoredLeastSquares` by the eigenvalues of JᵀJ, or of J Jᵀ where N < P.

    It takes less than half of the time, and less memory. The condition of J is squared: below ``smallest_damping`` the
    solutions lose more than half of the digits.

    Args:
        jacobian: J, (N, P), float32 or float64, finite; its rows here, where they are distributed over processes.
        rows: N over all processes; if not given, that of ``jacobian``.
        all_reduce: sums a tensor over processes.
        all_gather: puts the rows of all processes together.

    Attributes:
        jacobian: J, its rows here.
        singular_values: of J, (min(N, P),), the largest first; those below √ε of the largest are rounding.
        smallest_damping: λ down to which half of the digits of the dtype are kept.

    Example:
        >>> jacobian = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
        >>> GramLeastSquares(jacobian).solve(torch.tensor([2.0, 8.0, 1.0]), damping=2.0).round(decimals=3)
        tensor([0.5000, 1.6000])
    """

    def __init__(
        self,
        jacobian: Tensor,
        *,
        rows: int | None = None,
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        all_gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.jacobian = jacobian
        self._tall = (len(jacobian) if rows is None else rows) >= jacobian.shape[1]
        self._all_reduce, self._all_gather = all_reduce, all_gather
        if self._tall:
            gram = all_reduce(_lower_gram(jacobian.mT))
        else:
            self._wide = all_gather(jacobian)
            gram = _lower_gram(self._wide)
        squares, self._vectors = torch.linalg.eigh(gram, UPLO="L")
        self._squares = squares.clamp_min_(0.0)
        self.singular_values = self._squares.sqrt().flip(0)
        # Rounding changes JᵀJ by ε σ₁², which is √ε of λ² there.
        self.smallest_damping = torch.finfo(jacobian.dtype).eps ** 0.25 * self.singular_values[0].item()

    def coordinates(self, b: Tensor) -> Tensor:
        """Vᵀ Jᵀ b, or Uᵀ b where N < P."""
        return self._vectors.mT @ (self._all_reduce(self.jacobian.mT @ b) if self._tall else self._all_gather(b))

    def solve_coordinates(self, coordinates: Tensor, damping: float) -> Tensor:
        solution = self._vectors @ (coordinates / (self._squares + damping * damping))
        return solution if self._tall else self._wide.mT @ solution


def _lower_gram(matrix: Tensor) -> Tensor:
    """The lower triangle of A Aᵀ, in blocks that reach beyond it: half of the multiplications. Torch has no ``syrk``."""
    rows = len(matrix)
    gram = matrix.new_zeros(rows, rows)
    size = max(64, -(-rows // _BLOCKS))
    for first in range(0, rows, size):
        last = min(first + size, rows)
        gram[first:last, :last] = matrix[first:last] @ matrix[:last].mT
    return gram


def geodesic_acceleration(
    solver: DampedSolver,
    residual: Tensor,
    residual_at: Callable[[Tensor], Tensor],
    velocity: Tensor,
    damping: float,
    *,
    step: float = 0.1,
) -> Tensor:
    """The second-order correction a of a Levenberg-Marquardt step v: the weights move by v + a.

    a = -½ (JᵀJ + λ²)⁻¹ Jᵀ r_vv, with the second derivative of the residuals along v from one evaluation,
    r_vv ≈ (2/h) ((r(w + h v) - r(w))/h - J v) (Transtrum & Sethna 2012, arXiv 1201.5885, section 5).

    Args:
        solver: of J at w, as a :class:`FactoredLeastSquares`.
        residual: r(w), (N,).
        residual_at: d -> r(w + d), (N,).
        velocity: v, (P,), the step without acceleration.
        damping: λ of v.
        step: h.

    Returns:
        Tensor: a, (P,).
    """
    slope = (residual_at(step * velocity) - residual) / step
    curvature = (2.0 / step) * (slope - solver.product(velocity))
    return solver.solve(curvature, damping).mul_(-0.5)
