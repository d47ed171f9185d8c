"""Damped least squares from one factorisation of a dense matrix: any damping, any right-hand side, any centre.

The matrix J is reduced by a QR factorisation of its shorter side, and the triangle R by a singular value decomposition.
Unlike the normal equations this does not square the condition of J.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class DampedSolver(Protocol):
    """A solver of min ‖J d - b‖² + λ²‖d‖² for one J (N, P): an instance of :class:`FactoredLeastSquares` is one."""

    def product(self, d: Tensor) -> Tensor:
        """J d, (N,)."""

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """The solution d, (P,), for a right-hand side b (N,) and λ."""


class FactoredLeastSquares:
    """min ‖J d - b‖² + λ²‖d - m‖² for one J (N, P) and any b, λ > 0 and m: O(N P) each, after O(N P min(N, P)) once.

    With N >= P the triangle is that of J, else that of Jᵀ. J itself is kept, not copied.

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

    def product(self, d: Tensor) -> Tensor:
        """J d, (N,)."""
        return self.jacobian @ d

    def coordinates(self, b: Tensor) -> Tensor:
        """Uᵀ b, (min(N, P),): all of b that the solution depends on."""
        if self._tall:  # J = Q R, R = U S Vᵀ
            return self._left.mT @ self._apply_q(b, transpose=True)[: self._tau.shape[0]]
        return self._right.mT @ b  # Jᵀ = Q R, so J = V S (Q U)ᵀ

    def solve_coordinates(self, coordinates: Tensor, damping: float) -> Tensor:
        """The solution d, (P,), around m = 0, from the coordinates of the right-hand side."""
        s = self.singular_values
        solution = coordinates * (s / (s * s + damping * damping))
        if self._tall:
            return self._right @ solution
        padded = solution.new_zeros(self.jacobian.shape[1])
        padded[: len(s)] = self._left @ solution
        return self._apply_q(padded, transpose=False)

    def _apply_q(self, vector: Tensor, transpose: bool) -> Tensor:
        return torch.ormqr(self._reflectors, self._tau, vector[:, None], left=True, transpose=transpose)[:, 0]


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
