"""Ridge regression over all rows so far, by a triangular factor: exact recursive least squares.

With inputs x, targets y, weights w of the rows, forgetting λ, regularization δ and initial weights Θ₀, the weights
after t rows are::

    Θ = argmin  Σₛ λᵗ⁻ˢ wₛ ‖Θ xₛ - yₛ‖² + λᵗ δ ‖Θ - Θ₀‖²

Kept is the triangular factor of the joint Gram matrix of inputs and targets::

    F = [R Z; 0 E]        Fᵀ F = Σₛ λᵗ⁻ˢ wₛ [xₛ yₛ]ᵀ [xₛ yₛ] + λᵗ δ [I Θ₀ᵀ]ᵀ [I Θ₀ᵀ]

so that R Θᵀ = Z, and the columns of E have the norms of the residuals. A block of rows is one QR decomposition of
[√λ F; rows] (Golub and Van Loan, Matrix Computations, section 6.5.3, and 5.2.2 for the products of reflectors). Unlike
the recursion of P = (RᵀR)⁻¹, it forms no product of the inputs with themselves: the error of Θ grows with the condition
of R, not with its square, and columns of any scale are as good as others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.checks import NotFinite

# Singular values of R, with columns of norm 1, below this part of the largest are rounding: their directions keep their
# weights.
RANK_TOLERANCE = 1e-12
# Rows of R do not forget below this size, so that the quotient of two forgotten numbers stays; rows of
# data must be below its inverse.
SMALLEST = 1e-150
# Up to so many columns of F one decomposition by LAPACK takes less time than panels.
FEW_COLUMNS = 48
# Rows that are taken in at once, and columns whose reflectors are multiplied together.
MOST_ROWS, PANEL = 1024, 48


class WeightedRidge:
    """Weighted ridge regression of rows that arrive one after the other, or in blocks.

    Args:
        weights: Θ, (q, d), float64, for d inputs, with the constant of a bias, and q outputs.
        factor: F, (d + q, d + q), upper triangular, float64.
        samples: Σₛ λᵗ⁻ˢ wₛ.

    Attributes:
        weights: Θ; this and ``factor`` are changed in place by :meth:`learn`.
        factor: F.
        samples: see above.
        one: (1, 1), input of a bias for one row.

    Example:
        >>> ridge = WeightedRidge.start(torch.zeros(1, 2, dtype=torch.float64), regularization=1e-9)
        >>> ridge.learn([torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[3.0], [5.0]])])
        >>> ridge.weights.round(decimals=6)
        tensor([[3., 2.]], dtype=torch.float64)
    """

    def __init__(self, weights: Tensor, factor: Tensor, samples: float = 0.0) -> None:
        outputs, inputs = weights.shape
        n = self._columns = inputs + outputs
        self.samples = samples
        # As LAPACK takes them, so that it copies nothing: column after column, with room for a row below F.
        self.one = factor.new_ones(1, 1)
        self._stack, self._scales = factor.new_zeros(n, n + 1).T, factor.new_empty(n)
        self._solution = weights.clone(memory_format=torch.contiguous_format).T
        # Views of these, which take as long to make as a row of ten inputs to learn.
        self.weights, self.factor, self._row = self._solution.T, self._stack[:n], self._stack[n:]
        self._R, self._Z = self.factor[:inputs, :inputs], self.factor[:inputs, inputs:]
        self._E = self.factor[inputs:, inputs:]
        self.factor.copy_(factor)
        # Bounds on the diagonal of R from below, and on the norm of F from above; rounding decides nothing by them.
        self._least, self._most = 0.0, math.inf

    @staticmethod
    def start(weights: Tensor, regularization: float) -> WeightedRidge:
        """Recursion before the first row, with Θ₀ = ``weights``, (q, d), float64, and δ."""
        ridge = WeightedRidge(weights, weights.new_zeros([sum(weights.shape)] * 2))
        ridge._R.fill_diagonal_(math.sqrt(regularization))
        ridge._Z.copy_(weights.T * math.sqrt(regularization))
        return ridge

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightedRidge, (self.weights, self.factor, self.samples)

    def to(self, device: torch.device) -> WeightedRidge:
        """The same on another device."""
        return WeightedRidge(self.weights.to(device), self.factor.to(device), self.samples)

    def learn(self, columns: list[Tensor], kept: float = 1.0, weights: Tensor | None = None) -> None:
        """Take rows in, and forget a part of those before.

        If R is then singular to rounding, as after λ < 1 has forgotten directions in which no row points, Θ is the
        minimum that is nearest to the Θ before.

        Args:
            columns: tensors (m, ·) with d + q columns in all: inputs, then targets.
            kept: λᵗ by which the weights of the rows before are multiplied, in [0, 1].
            weights: of the rows, (m,), float64; None: 1.

        Raises:
            NotFinite: there are NaN, infinite or immense numbers among them; nothing has changed.
        """
        m, is_small = len(columns[0]), self._columns <= FEW_COLUMNS
        is_row = is_small and m == 1 and weights is None
        if is_row:
            norm = math.hypot(*torch.cat(columns, 1, out=self._row).tolist()[0])
        else:
            rows = torch.cat(columns, 1).to(torch.float64)
            if weights is not None:
                rows = rows * weights.sqrt()[:, None]
            norm = float(torch.linalg.vector_norm(rows))
        if not norm < 1 / SMALLEST:
            raise NotFinite(
                f"NaN, infinity or numbers above {1 / SMALLEST:g} among inputs and targets: nothing was learnt from "
                "these rows. Leave them out"
            )
        if kept < 1:
            self._forget(math.sqrt(kept))
        self.samples = kept * self.samples + (m if weights is None else weights.sum().item())
        self._most = math.hypot(self._most, norm)
        if is_row:
            torch.geqrf(self._stack, out=(self._stack, self._scales))
            self._stack.triu_()
        elif is_small:
            self.factor.copy_(torch.geqrf(torch.cat([self.factor, rows]))[0][: self._columns].triu_())
        else:
            for block in rows.split(MOST_ROWS):
                _eliminate_(self.factor, block)
        self._solve()

    def _forget(self, root: float) -> None:
        """Multiply F by a number in [0, 1), but rows of R that are small already."""
        self._least, self._most = root * self._least, root * self._most
        if self._least > SMALLEST:
            self.factor.mul_(root)
            return
        self._least = 0.0
        size = torch.linalg.vector_norm(self.factor, math.inf, dim=1, keepdim=True)
        size[len(self._R) :] = math.inf  # residuals may vanish
        self.factor.mul_((SMALLEST / size).clamp(root, 1))

    def _solve(self) -> None:
        """Put Θ at the minimum."""
        R, Z, solution = self._R, self._Z, self._solution
        if self._least <= RANK_TOLERANCE * self._most:
            diagonal, norms = R.diagonal().abs(), torch.linalg.vector_norm(R, dim=0)
            self._least, self._most = diagonal.min().item(), float(torch.linalg.vector_norm(self.factor))
            if not (diagonal > RANK_TOLERANCE * norms).all():
                solution.add_(_least_change(R, Z - R @ solution))
                return
        torch.linalg.solve_triangular(R, Z, upper=True, out=solution)

    def variance_factors(self, rows: Tensor) -> Tensor:
        """xᵀ(RᵀR)⁻¹x, (m,), of rows (m, d), float64."""
        return torch.linalg.solve_triangular(self._R.T, rows.T, upper=False).square().sum(0)

    def residuals(self) -> Tensor:
        """The minima of the weighted sums of squares, with that of the regularization, (q,): one for each output."""
        return self._E.square().sum(0)

    def with_outputs(self, number: int) -> WeightedRidge:
        """A copy with more outputs, whose targets and initial weights were zero so far."""
        pad = torch.nn.functional.pad
        return WeightedRidge(
            pad(self.weights, (0, 0, 0, number)), pad(self.factor, (0, number, 0, number)), self.samples
        )


def _eliminate_(factor: Tensor, rows: Tensor) -> None:
    """Replace an upper triangular factor, (n, n), by that of [factor; rows], in place; ``rows`` are overwritten.

    Reflectors of several columns are multiplied to I - V T Vᵀ: V has the identity at the rows of the factor, since
    these have zeros below their diagonal.
    """
    n = len(factor)
    for first in range(0, n, PANEL):
        own, rest = slice(first, first + PANEL), slice(first + PANEL, n)
        width = len(factor[own])
        reflectors, scales = torch.geqrf(torch.cat([factor[own, own], rows[:, own]]))
        factor[own, own] = reflectors[:width].triu()
        if rest.start >= n:
            return
        V = reflectors[width:]
        is_used = scales != 0  # else the column of the rows is zero, and stays as it is
        inverse = (V.T @ V).triu(1)
        inverse.diagonal().copy_(torch.where(is_used, scales, 1).reciprocal())
        T = torch.linalg.solve_triangular(inverse, torch.diag(is_used.to(factor)), upper=True)
        step = T.T @ (factor[own, rest].addmm(V.T, rows[:, rest]))
        factor[own, rest] -= step
        rows[:, rest].addmm_(V, step, alpha=-1)


def _least_change(R: Tensor, residuals: Tensor) -> Tensor:
    """The least Δ, (d, q), among the minima of ‖R Δ - residuals‖, with R singular to rounding."""
    norms = torch.linalg.vector_norm(R, dim=0)
    norms = torch.where(norms > 0, norms, 1)[:, None]
    U, S, Vh = torch.linalg.svd(R / norms.T)
    rank = int((S > RANK_TOLERANCE * S[0]).sum())
    change = Vh[:rank].T @ (U[:, :rank].T @ residuals / S[:rank, None]) / norms
    kernel = torch.linalg.qr(Vh[rank:].T / norms)[0]
    return change - kernel @ (kernel.T @ change)
