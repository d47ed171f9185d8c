"""Damped least squares from one Golub-Kahan bidiagonalisation: all dampings at once, without the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_CHECK_EVERY = 10


class ProjectedLeastSquares:
    """min ‖J d - b‖² + λ²‖d‖² over the Krylov space of JᵀJ and Jᵀb, which is the same for all λ.

    k steps give J V = U B, with k columns V and k + 1 columns U, orthonormal, and B bidiagonal; each takes one product
    with J and one with Jᵀ. For each λ a problem of k unknowns is left: LSQR takes the lowest residual, LSMR the lowest
    gradient (Paige & Saunders 1982; Fong & Saunders 2011). U and V are kept, and orthogonalised against all columns
    before, without which rounding delays convergence.

    Args:
        matvec: d -> J d, (P,) to (N,).
        rmatvec: u -> Jᵀ u, summed over processes.
        b: right-hand side, (N,), float32 or float64.
        steps: bound on k.
        damping: a λ at which the solution is wanted: the process ends where its gradient is below ``tolerance`` ‖Jᵀb‖.
        tolerance: see ``damping``.
        method: ``"lsmr"`` or ``"lsqr"``.
        all_reduce: sums a tensor over processes that hold some rows of J and b each.

    Attributes:
        steps: k.
        gradient: -Jᵀb, (P,).
        singular_values: of B, (k,), the largest first; the largest are close to those of J.

    Raises:
        FloatingPointError: a product holds NaN or infinity.

    Example:
        >>> jacobian = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
        >>> solver = ProjectedLeastSquares(jacobian.matmul, jacobian.mT.matmul, torch.tensor([2.0, 8.0, 1.0]), 2)
        >>> solver.solution(damping=2.0).round(decimals=3)
        tensor([0.5000, 1.6000])
    """

    def __init__(
        self,
        matvec: Callable[[Tensor], Tensor],
        rmatvec: Callable[[Tensor], Tensor],
        b: Tensor,
        steps: int,
        *,
        damping: float = 0.0,
        tolerance: float = 0.0,
        method: str = "lsqr",
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.product, self._method, self._sum = matvec, method, all_reduce
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._alphas: list[float] = []
        self._betas: list[float] = []
        beta = self._keep(self._left, b.clone(), shared=True)
        self._betas.append(beta)
        product = rmatvec(b)
        self.gradient = -product
        alpha = self._keep(self._right, product / beta if beta > 0.0 else product, shared=False)
        self._alphas.append(alpha)
        first = alpha * beta
        while alpha > 0.0 and len(self._betas) <= steps:
            beta = self._keep(self._left, matvec(self._right[-1]) - alpha * self._left[-1], shared=True)
            self._betas.append(beta)
            alpha = 0.0
            if beta > 0.0:
                alpha = self._keep(self._right, rmatvec(self._left[-1]) - beta * self._right[-1], shared=False)
            self._alphas.append(alpha)
            if self.steps % _CHECK_EVERY == 0 and self._gradient_norm(damping) <= tolerance * first:
                break
        self._basis = torch.stack(self._right[: self.steps]) if self.steps else b.new_zeros(0, len(product))
        self._p, self.singular_values, self._q = torch.linalg.svd(self._bidiagonal(), full_matrices=False)

    @property
    def steps(self) -> int:
        """k."""
        return len(self._betas) - 1

    def solution(self, damping: float) -> Tensor:
        """d, (P,), for the right-hand side b."""
        return self._basis.mT @ self._projected(damping).to(self._basis)

    def coordinates(self, b: Tensor) -> Tensor:
        """All that the solution in this space has of another right-hand side, (k,)."""
        projections = torch.stack([torch.dot(u, b) for u in self._left[: self.steps + 1]])
        return self._p.mT @ self._sum(projections).double()

    def solve_coordinates(self, coordinates: Tensor, damping: float) -> Tensor:
        """d, (P,), with the lowest residual in this space, from the coordinates of a right-hand side."""
        s = self.singular_values
        return self._basis.mT @ (self._q.mT @ (coordinates * (s / (s * s + damping * damping)))).to(self._basis)

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """d, (P,), with the lowest residual in this space, for another right-hand side."""
        return self.solve_coordinates(self.coordinates(b), damping)

    def _keep(self, basis: list[Tensor], vector: Tensor, shared: bool) -> float:
        """Append what a vector has beside the basis, of unit norm; its norm."""
        total = self._sum if shared else (lambda tensor: tensor)
        for _ in range(2 if basis else 0):  # twice is enough
            inner = total(torch.stack([torch.dot(u, vector) for u in basis]))
            for u, share in zip(basis, inner.unbind(), strict=True):
                vector = vector.sub(u * share)
        norm = math.sqrt(total(torch.dot(vector, vector).double()).item())
        if not math.isfinite(norm):
            raise FloatingPointError("a product with the Jacobian of the residuals holds NaN or infinity")
        basis.append(vector / norm if norm > 0.0 else vector)
        return norm

    def _bidiagonal(self) -> Tensor:
        """B, (k + 1, k), float64."""
        k = self.steps
        bidiagonal = torch.zeros(k + 1, k, dtype=torch.float64)
        bidiagonal.diagonal().copy_(torch.tensor(self._alphas[:k]))
        bidiagonal.diagonal(-1).copy_(torch.tensor(self._betas[1:]))
        return bidiagonal.to(self._right[0].device)

    def _projected(self, damping: float) -> Tensor:
        """V-coordinates of the solution for b, (k,)."""
        bidiagonal, k = self._bidiagonal(), self.steps
        if self._method == "lsqr":
            matrix = torch.cat([bidiagonal, damping * torch.eye(k).to(bidiagonal)])
            right = matrix.new_zeros(len(matrix), 1)
            right[0] = self._betas[0]
        else:  # the gradient of V y is V_{k+1} times this
            matrix = bidiagonal.new_zeros(k + 1, k)
            matrix[:k] = bidiagonal.mT @ bidiagonal + damping * damping * torch.eye(k).to(bidiagonal)
            matrix[k, k - 1] = self._alphas[k] * self._betas[k]
            right = matrix.new_zeros(k + 1, 1)
            right[0] = self._alphas[0] * self._betas[0]
        q, r = torch.linalg.qr(matrix)
        return torch.linalg.solve_triangular(r, q.mT @ right, upper=True)[:, 0]

    def _gradient_norm(self, damping: float) -> float:
        """‖Jᵀ(b - J d) - λ² d‖ of LSQR's solution."""
        return self._alphas[-1] * self._betas[-1] * abs(self._projected(damping)[-1].item())
