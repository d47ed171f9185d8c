"""Damped least squares of one matrix: any damping and any right-hand side.

JᵀJ, with a Cholesky factorisation for each λ that is tried, takes a fraction of the time of a QR factorisation and an
SVD. It squares the condition of J, which does no harm if λ is not too small: rounding changes J Jᵀ by about ε σ₁², and
the residual r of the solution, J Jᵀ y = b - r with y = r/λ², by about ε σ₁²/λ² of itself. For smaller λ a second Gram
matrix, of J with the first Cholesky factor divided out, has nearly the digits of a QR.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_struct.functional.checks import check_dense, checked, require_real
from lightning_struct.functional.randomness import normal_numbers
from lightning_struct.functional.residuals.jacobians import DenseJacobian, Jacobian, lower_gram

_POWER_ITERATIONS = 8


class GramLeastSquares:
    """Solver of min ‖J d - b‖² + λ²‖d‖² by JᵀJ, or J Jᵀ if N < P, and a Cholesky factorisation for each λ.

    It takes O(n²) memory beside J and n³/3 multiply-adds for a λ, n = min(N, P): several λ cost less than eigenvalues,
    and far less than a QR and an SVD. The factor of the last λ is kept. The condition of J is squared: solutions lose
    digits if λ is small, but the residual that they leave hardly changes down to ``smallest_damping``.

    Args:
        jacobian: J, (N, P), float32 or float64, finite, a matrix or a :class:`~lightning_struct.functional.Jacobian`;
            its rows here, if they are distributed over processes.
        rows: N over all processes; if not given, that of ``jacobian``.
        all_reduce: sums a tensor over processes.
        all_gather: puts the rows of all processes together, if there are several.

    Attributes:
        jacobian: J, its rows here.
        largest_singular_value: an estimate from below, by power iteration.
        smallest_damping: λ down to which the residual J d - b of a solution d is the exact one to a few hundredths.
            Far below it solutions are NaN. :meth:`refine` lowers it.

    Example:
        >>> jacobian = torch.tensor([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
        >>> GramLeastSquares(jacobian).solve(torch.tensor([2.0, 8.0, 1.0]), damping=2.0).round(decimals=3)
        tensor([0.5000, 1.6000])
    """

    @checked
    def __init__(
        self,
        jacobian: Tensor | Jacobian,
        *,
        rows: int | None = None,
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        all_gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if isinstance(jacobian, Tensor):
            require_real(2, jacobian=jacobian)
            check_dense("jacobian", jacobian, has_numbers=True)
        self.jacobian = DenseJacobian(jacobian) if isinstance(jacobian, Tensor) else jacobian
        self._tall = (self.jacobian.shape[0] if rows is None else rows) >= self.jacobian.shape[1]
        self._all_reduce, self._all_gather = all_reduce, all_gather
        if self._tall:
            self._gram = all_reduce(lower_gram(self.jacobian.dense().mT))
        else:
            self._wide = self.jacobian if all_gather is None else self.jacobian.gathered(all_gather)
            self._gram = self._wide.gram_of_rows()
        self._root: Tensor | None = None  # L, after refine()
        self._factor, self._factor_damping = torch.empty_like(self._gram), math.nan
        self._failed = torch.empty((), dtype=torch.int32, device=self._gram.device)
        # from a vector (P,), so that the order of the rows, as processes share them, makes no difference
        start = normal_numbers(self.jacobian.shape[1], like=self._gram.new_empty(0, dtype=self.jacobian.dtype))
        start = start if self._tall else self._wide.product(start)
        self.largest_singular_value = math.sqrt(_largest_eigenvalue(self._gram, start))
        self.smallest_damping = self.smallest_share(len(self._gram), self._gram.dtype) * self.largest_singular_value

    @staticmethod
    def smallest_share(size: int, dtype: torch.dtype) -> float:
        """``smallest_damping`` over σ₁: rounding, of about √n ε σ₁² for n = ``size`` rows, is small beside λ²."""
        return math.sqrt((size + 64) * torch.finfo(dtype).eps)

    def refine(self) -> None:
        """Lower ``smallest_damping`` to about its square over σ₁, by the Gram matrix of B = J L⁻ᵀ with L Lᵀ = JᵀJ + μ².

        This is CholeskyQR with a shift (Fukaya et al., Shifted Cholesky QR for computing the QR factorization of
        ill-conditioned matrices, 2020), with μ the present ``smallest_damping``: for d = L⁻ᵀ y the condition of the
        damped problem is at most μ/λ, not σ₁/λ. It takes 2 N n² multiply-adds or less. J is formed as a matrix, and as
        many numbers are kept; coordinates are other ones afterwards.
        """
        self._factor_damping, shift = math.nan, self.smallest_damping
        while True:
            self._factor.copy_(self._gram).diagonal().add_(shift * shift)
            root, failed = torch.linalg.cholesky_ex(self._factor)
            if not failed:
                break
            shift *= 2.0
        matrix = self.jacobian.dense() if self._tall else self._wide.dense().mT
        self._divided = torch.linalg.solve_triangular(root.mT, matrix.to(root), upper=True, left=False)
        gram = lower_gram(self._divided.mT)
        self._gram = self._all_reduce(gram) if self._tall else gram
        inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False)
        self._root, self._penalty = root, lower_gram(inverse)
        self.smallest_damping = self.smallest_share(len(root), root.dtype) * shift

    @property
    def is_refined(self) -> bool:
        """Whether :meth:`refine` was called."""
        return self._root is not None

    def coordinates(self, b: Tensor) -> Tensor:
        """All that the solution depends on: Jᵀ b, or b if N < P; after :meth:`refine` Bᵀ b, or L⁻¹ b."""
        if self._tall:
            return self._all_reduce(self.jacobian.transposed_product(b) if self._root is None else self._divided.mT @ b)
        b = b if self._all_gather is None else self._all_gather(b)
        return b if self._root is None else _solved(self._root, b, upper=False)

    def solve(self, b: Tensor, damping: float) -> Tensor:
        """The solution d, (P,), for a right-hand side b (N,) and λ = ``damping``."""
        return self.solve_coordinates(self.coordinates(b), damping)

    def solve_coordinates(self, coordinates: Tensor, damping: float) -> Tensor:
        """The solution d, (P,), from the coordinates of the right-hand side."""
        if damping != self._factor_damping:
            self._factor_damping = math.nan
            self._factor.copy_(self._gram)
            if self._root is None:
                self._factor.diagonal().add_(damping * damping)
            else:
                self._factor.add_(self._penalty, alpha=damping * damping)
            _, failed = torch.linalg.cholesky_ex(self._factor, out=(self._factor, self._failed))
            self._factor.masked_fill_(failed > 0, math.nan)  # without a look at the device
            self._factor_damping = damping
        solution = torch.cholesky_solve(coordinates[:, None].to(self._factor), self._factor)[:, 0]
        if self._root is not None:
            solution = _solved(self._root.mT, solution, upper=True) if self._tall else self._divided @ solution
            return solution.to(coordinates)
        return solution.to(coordinates) if self._tall else self._wide.transposed_product(solution.to(coordinates))


def _solved(triangle: Tensor, b: Tensor, upper: bool) -> Tensor:
    """Solve with a triangle for one right-hand side, (n,)."""
    return torch.linalg.solve_triangular(triangle, b[:, None].to(triangle), upper=upper)[:, 0]


def _largest_eigenvalue(lower: Tensor, start: Tensor) -> float:
    """An estimate from below for the symmetric matrix of this lower triangle, by power iteration."""
    matrix, product = lower.tril() + lower.tril(-1).mT, start.to(lower)
    for _ in range(_POWER_ITERATIONS):
        vector = product / torch.linalg.vector_norm(product)
        product = matrix @ vector
    return max(torch.dot(vector, product).item(), 0.0)
