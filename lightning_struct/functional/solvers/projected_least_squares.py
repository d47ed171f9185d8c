"""Damped least squares from one Golub-Kahan bidiagonalisation: all dampings at once, without the matrix."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_struct.functional.checks import Count, NotNegative, check_dense, checked, require_real
from lightning_struct.functional.vectors import float32_holds, inner, root

_CHECK_EVERY = 10
# Vectors that a basis has room for at first; then for twice as many, and so on.
_ROOM = 16
# Of a vector, that a pass of orthogonalisation leaves at least if no other has to follow; and passes at most.
_PART, _PASSES = 0.7, 4


class ProjectedLeastSquares:
    """min ‖J d - b‖² + λ²‖d‖² over the Krylov space of JᵀJ and Jᵀb, which is the same for all λ.

    k steps give J V = U B, with k columns V and k + 1 columns U, orthonormal, and B bidiagonal; each takes one product
    with J and one with Jᵀ. For each λ a problem of k unknowns is left, and its solution with the lowest gradient
    is taken: the iterate of LSMR (Fong & Saunders 2011). U and V are kept, and orthogonalised against all columns
    before, without which rounding delays convergence.

    Args:
        matvec: d -> J d, (P,) to (N,).
        rmatvec: u -> Jᵀ u, summed over processes.
        b: right-hand side, (N,), float32 or float64.
        steps: bound on k.
        damping: a λ at which the solution is wanted: the process ends when its gradient is below ``tolerance`` ‖Jᵀb‖.
        tolerance: see ``damping``.
        all_reduce: sums a tensor over processes that hold some rows of J and b each.
        gradient: -Jᵀb, if it is known: it saves the first product with Jᵀ.

    Attributes:
        steps: k.
        gradient: -Jᵀb, (P,).
        singular_values: of B, (k,), the largest first; the largest are close to those of J.
        largest_singular_value: the first of them, 0 for none.

    Raises:
        FloatingPointError: a product holds NaN or infinity.

    Example:
        >>> jacobian = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
        >>> solver = ProjectedLeastSquares(jacobian.matmul, jacobian.mT.matmul, torch.tensor([2.0, 8.0, 1.0]), 2)
        >>> solver.solution(damping=2.0).round(decimals=3)
        tensor([0.5000, 1.6000])
    """

    @checked
    def __init__(
        self,
        matvec: Callable[[Tensor], Tensor],
        rmatvec: Callable[[Tensor], Tensor],
        b: Tensor,
        steps: Count,
        *,
        damping: NotNegative = 0.0,
        tolerance: NotNegative = 0.0,
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        gradient: Tensor | None = None,
    ) -> None:
        require_real(1, b=b)
        check_dense("b", b, has_numbers=True)
        if gradient is not None:
            require_real(1, gradient=gradient)
        product = rmatvec(b) if gradient is None else -gradient
        self.gradient = -product if gradient is None else gradient
        self._left, self._right = _Basis(b, steps + 1, all_reduce), _Basis(product, steps + 1, lambda tensor: tensor)
        beta = self._left.append(b)
        alpha = self._right.append(product / torch.where(beta > 0.0, beta, 1.0))
        self._betas: list[float] = []
        self._alphas: list[float] = []
        self._take(beta, alpha)
        first = self._alphas[0] * self._betas[0]
        while self._alphas[-1] > 0.0 and len(self._betas) <= steps:
            beta = self._left.append(matvec(self._right.rows[-1]) - self._alphas[-1] * self._left.rows[-1])
            alpha = self._right.append(rmatvec(self._left.rows[-1]) - beta * self._right.rows[-1])
            self._take(beta, alpha)
            if self.steps % _CHECK_EVERY == 0 and (
                self._alphas[-1] * self._betas[-1] * abs(self._projected(damping)[-1].item()) <= tolerance * first
            ):  # an estimate of ‖Jᵀ(b - J d) - λ² d‖
                break
        self._basis = self._right.rows[: self.steps]
        p, s, q = torch.linalg.svd(self._bidiagonal(), full_matrices=False)
        self.largest_singular_value = s[0].item() if len(s) else 0.0
        self._p, self.singular_values, self._q = (t.to(self._basis.device) for t in (p, s, q))

    def _take(self, beta: Tensor, alpha: Tensor) -> None:
        """Keep β and α: one look at the device in an iteration."""
        numbers = torch.stack([beta, alpha]).tolist()
        if not all(map(math.isfinite, numbers)):
            raise FloatingPointError("a product with the Jacobian of the residuals holds NaN or infinity")
        self._betas.append(numbers[0])
        self._alphas.append(numbers[1] if numbers[0] > 0.0 else 0.0)

    @property
    def steps(self) -> int:
        """k."""
        return len(self._betas) - 1

    def solution(self, damping: float) -> Tensor:
        """d, (P,), for the right-hand side b."""
        return self._basis.mT @ self._projected(damping).to(self._basis)

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """d, (P,), with the lowest residual in this space, for another right-hand side."""
        s, coordinates = self.singular_values, self._p.mT @ self._left.components(b).double()
        return self._basis.mT @ (self._q.mT @ (coordinates * (s / (s * s + damping * damping)))).to(self._basis)

    def _bidiagonal(self) -> Tensor:
        """B, (k + 1, k), float64, on the CPU, as all that is made of it: it is small."""
        k = self.steps
        bidiagonal = torch.zeros(k + 1, k, dtype=torch.float64, device="cpu")
        bidiagonal.diagonal().copy_(torch.tensor(self._alphas[:k], device="cpu"))
        bidiagonal.diagonal(-1).copy_(torch.tensor(self._betas[1:], device="cpu"))
        return bidiagonal

    def _projected(self, damping: float) -> Tensor:
        """V-coordinates of the solution for b, (k,)."""
        bidiagonal, k = self._bidiagonal(), self.steps
        if k == 0:
            return bidiagonal.new_zeros(0)
        unit = torch.eye(k, dtype=bidiagonal.dtype, device="cpu")
        matrix = bidiagonal.new_zeros(k + 1, k)  # the gradient of V y is V_{k+1} times this
        matrix[:k] = bidiagonal.mT @ bidiagonal + damping * damping * unit
        matrix[k, k - 1] = self._alphas[k] * self._betas[k]
        right = matrix.new_zeros(k + 1, 1)
        right[0] = self._alphas[0] * self._betas[0]
        q, r = torch.linalg.qr(matrix)
        return torch.linalg.solve_triangular(r, q.mT @ right, upper=True)[:, 0]


class _Basis:
    """Orthonormal vectors, as the rows of a matrix with room for more.

    Args:
        like: a vector as they are.
        most: bound on their number.
        all_reduce: sums a tensor over processes that hold parts of the vectors.
    """

    def __init__(self, like: Tensor, most: int, all_reduce: Callable[[Tensor], Tensor]) -> None:
        self._storage, self._count = like.new_empty(min(_ROOM, most), len(like)), 0
        self._most, self._sum = most, all_reduce

    @property
    def rows(self) -> Tensor:
        """The vectors, (k, n)."""
        return self._storage[: self._count]

    def components(self, vector: Tensor) -> Tensor:
        """The inner products of a vector (n,) with those of the basis, (k,)."""
        return self._sum(self.rows @ vector)

    def append(self, vector: Tensor) -> Tensor:
        """Append the part of a vector (n,) outside of the basis, at unit norm; return its norm (), 0 if there is none.

        A pass that leaves less than a part of the vector leaves rounding errors, too, so that another one follows
        (Daniel et al. 1976). If each pass does, there are only rounding errors: the basis spans all that is reached.
        On a device that the host would have to wait for, two passes are made in any case.
        """
        norm = self._norm(vector)
        before = torch.zeros_like(norm)
        for _ in range((_PASSES if vector.is_cpu else 2) if self._count else 0):
            before = norm
            vector = torch.addmv(vector, self.rows.mT, self.components(vector), alpha=-1.0)
            norm = self._norm(vector)
            if vector.is_cpu and norm > _PART * before:
                break
        norm = torch.where(norm <= _PART * before, 0.0, norm)
        if self._count == len(self._storage):
            larger = vector.new_empty(min(2 * self._count, self._most), len(vector))
            larger[: self._count] = self._storage
            self._storage = larger
        self._storage[self._count] = torch.where(norm == 0.0, 0.0, vector / norm)
        self._count += 1
        return norm

    def _norm(self, vector: Tensor) -> Tensor:
        if vector.is_cpu:
            squares = self._sum(inner(vector, vector))
            if float32_holds(squares.item()):
                return root(squares)
        return root(self._sum(inner(vector.double(), vector.double())))
