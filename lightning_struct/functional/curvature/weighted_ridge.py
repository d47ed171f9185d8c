"""Ridge regression over all rows so far, by a triangular factor: exact recursive least squares that forgets safely.

With inputs x, targets y, weights w of the rows, forgetting λ and regularization δ, the weights after t rows are::

    Θₜ = argmin  Σₛ λᵗ⁻ˢ wₛ ‖Θ xₛ - yₛ‖² + λᵗ δ ‖Θ‖² + Σⱼ λᵗ⁻ʲᵏ (1 - λᵏ) δ ‖Θ - Θⱼₖ‖²

with k = 1/(1 - λ), rounded, and j = 1, 2, ... while jk < t: before each further k rows the part of the regularization
that has faded is renewed, around the weights of that time. So it is λʳ δ, r rows later, and about δ/e at least, for
however long rows do not vary in a direction. With λ = 1 this is ridge regression.

The recursion keeps the triangular factor of the joint Gram matrix of inputs and targets::

    F = [R Z; 0 E]        R Θᵀ = Z        RᵀR = Σₛ λᵗ⁻ˢ wₛ xₛ xₛᵀ + λʳ δ I

and the columns of E have the norms of the residuals. A block of rows is one QR decomposition of [√λ F; rows] (Golub and
Van Loan, Matrix Computations, section 6.5.3, and 5.2.2 for the products of reflectors). Unlike the recursion of
P = (RᵀR)⁻¹, it forms no product of the inputs with themselves: columns of any scale are as good as others. With λ < 1
targets are taken less the outputs before, and Θ changes by R⁻¹Z: rounding is in proportion to those differences, and
does not gather in directions in which rows do not vary.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from lightning_struct.functional.checks import NotFinite

# Singular values of R, with columns of norm 1, below this part of the largest are rounding: their directions keep their
# weights. With λ < 1 such a direction can last, and rounding of that part's square, in units of residuals, be added
# with every row.
RANK_TOLERANCE, RANK_TOLERANCE_OF_FORGETTING = 1e-12, 1e-7
# Norms of blocks of rows are below this, and weights in float32 below its range with room for many blocks.
MOST, MOST_IN_FLOAT32 = 1e150, 1e30
# Rows that are taken in at once, and columns whose reflectors are multiplied together: up to so many are quick.
MOST_ROWS, FEW_COLUMNS = 1024, 48


class WeightedRidge:
    """Weighted ridge regression of rows that arrive one after the other, or in blocks.

    Args:
        weights: Θ, (q, d), float64, for d inputs, with the constant of a bias, and q outputs.
        factor: F, (d + q, d + q), upper triangular, float64; with λ < 1, Z is not read.
        regularization: δ > 0.
        forgetting: λ in (0, 1].
        samples: Σₛ λᵗ⁻ˢ wₛ.
        age: rows since the regularization was renewed; None: it is renewed before the next row.

    Attributes:
        weights: Θ; this and ``factor`` are changed in place by :meth:`learn`.
        slopes, intercepts: Θ without its last column, and that column, in the same memory.
        factor: F; with λ < 1, Z is zero.
        samples, age: see above.
        is_quick: whether rows can be learnt by :meth:`learn_row`.

    Example:
        >>> ridge = WeightedRidge.start(2, 1, regularization=1e-9)
        >>> ridge.learn([torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[3.0], [5.0]])])
        >>> ridge.weights.round(decimals=6)
        tensor([[3., 2.]], dtype=torch.float64)
    """

    def __init__(
        self,
        weights: Tensor,
        factor: Tensor,
        regularization: float,
        forgetting: float = 1.0,
        samples: float = 0.0,
        age: int | None = 0,
    ) -> None:
        outputs, inputs = weights.shape
        n = inputs + outputs
        self.regularization, self.forgetting, self.samples = regularization, forgetting, samples
        self._period = max(1, round(1 / (1 - forgetting))) if forgetting < 1 else sys.maxsize
        self.age = (self._period if forgetting < 1 else 0) if age is None else age
        # As LAPACK takes them, so that it copies nothing: column after column, with room for a row below F.
        self._stack, self._scales = factor.new_zeros(n, n + 1).T, factor.new_empty(n)
        self._solution = weights.clone(memory_format=torch.contiguous_format).T
        # Views of these, which take as long to make as a row of ten inputs to learn.
        self.weights, self.factor = self._solution.T, self._stack[:n]
        self.slopes, self.intercepts = self.weights[:, :-1], self.weights[:, -1]
        self._R, self._Z = self.factor[:inputs, :inputs], self.factor[:inputs, inputs:]
        self._E = self.factor[inputs:, inputs:]
        self.factor.copy_(factor)
        self.is_quick = n <= FEW_COLUMNS and factor.device.type == "cpu"
        self._change, self._whole = torch.zeros_like(self._solution), self._R
        if self.is_quick:  # NumPy takes a third of torch's time for so few numbers, and R alone is solved in half of it
            self._whole = self._solution.new_empty(inputs, inputs).T
            self._array, self._theta, self._step = (t.T.numpy() for t in (self._stack, self._solution, self._change))
            self._row, self._kept = self._array[:, n], self._array[:, :n]
            self._x, self._y = self._row[:inputs], self._row[inputs:]
            self._of_R, self._of_Z = self._array[:inputs, :inputs], self._array[inputs:, :inputs]
            self._copy, self._upper = self._whole.T.numpy(), factor.new_ones(n, n + 1).tril().numpy()
        # Bounds on the diagonal of R from below, and on the norm of R from above; rounding decides nothing by them.
        self._floor, self._most = 0.0, math.inf
        if forgetting < 1:
            self._Z.zero_()
            self._floor = math.sqrt(regularization * forgetting**self._period)
        self._least, self._root = self._floor, math.sqrt(forgetting)
        self._tolerance = RANK_TOLERANCE_OF_FORGETTING if forgetting < 1 else RANK_TOLERANCE
        smallest = self._floor or math.sqrt(regularization)
        self._limits = {torch.float64: MOST, torch.float32: min(MOST, MOST_IN_FLOAT32 * smallest)}

    @staticmethod
    def start(
        inputs: int, outputs: int, regularization: float, forgetting: float = 1.0, device: Any = None
    ) -> WeightedRidge:
        """Recursion before the first row."""
        weights = torch.zeros(outputs, inputs, dtype=torch.float64, device=device)
        ridge = WeightedRidge(weights, weights.new_zeros([inputs + outputs] * 2), regularization, forgetting)
        ridge._R.fill_diagonal_(math.sqrt(regularization))
        return ridge

    def _with(self, weights: Tensor, factor: Tensor) -> WeightedRidge:
        return WeightedRidge(weights, factor, self.regularization, self.forgetting, self.samples, self.age)

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.weights, self.factor, self.regularization, self.forgetting, self.samples, self.age
        return WeightedRidge, state

    def to(self, device: torch.device) -> WeightedRidge:
        """The same on another device."""
        return self._with(self.weights.to(device), self.factor.to(device))

    def learn(self, columns: list[Tensor], weights: Tensor | None = None, dtype: torch.dtype = torch.float64) -> None:
        """Learn rows in their order; each row first forgets a part of those before it.

        If R is then singular to rounding, Θ is the minimum that is nearest to the Θ before.

        Args:
            columns: tensors (m, ·) with d + q columns in all: inputs, then targets.
            weights: of the rows, (m,), float64; None: 1.
            dtype: float32 or float64, in which Θ must be finite.

        Raises:
            NotFinite: there are NaN, infinite or immense numbers among them; nothing has changed.
        """
        rows = torch.cat(columns, 1).to(torch.float64)
        weights = rows.new_ones(len(rows)) if weights is None else weights
        self._check_norm(float(torch.linalg.vector_norm(rows * weights.sqrt()[:, None])), dtype)
        while len(rows):
            if self.age == self._period:
                self._renew()
            m = min(len(rows), self._period - self.age, MOST_ROWS)
            part, of_part, rows, weights = rows[:m], weights[:m], rows[m:], weights[m:]
            if self.forgetting < 1:
                of_part = of_part * self.forgetting ** torch.arange(m - 1, -1, -1).to(of_part)
                inputs, targets = part.split(self._R.shape[:1] + self._E.shape[:1], 1)
                part = torch.cat([inputs, targets - inputs @ self._solution], 1)
                self.factor.mul_(self.forgetting ** (m / 2))
            part = part * of_part.sqrt()[:, None]
            self._count(m, of_part.sum().item(), float(torch.linalg.vector_norm(part)))
            _eliminate_(self.factor, part)
            self._solve()

    def learn_row(self, inputs: Any, targets: Any, dtype: torch.dtype = torch.float64) -> None:
        """Do the same for one row, in less time.

        Args:
            inputs: (d,), an array in float32 or float64; or (d - 1,), and the last one is 1.
            targets: (q,).
            dtype: as above.

        Raises:
            NotFinite: as above.
        """
        self._x[-1] = 1.0
        self._x[: len(inputs)], self._y[:] = inputs, targets
        norm = math.sqrt(self._row.dot(self._row))
        self._check_norm(norm, dtype)
        if self.age == self._period:
            self._renew()
        if self.forgetting < 1:
            self._y -= self._theta.dot(self._x)
            self._kept *= self._root
        self._count(1, 1.0, norm)
        torch.geqrf(self._stack, out=(self._stack, self._scales))
        self._array *= self._upper
        self._solve()

    def _check_norm(self, norm: float, dtype: torch.dtype) -> None:
        if not norm < self._limits[dtype]:
            raise NotFinite(
                f"NaN, infinity or numbers above {self._limits[dtype]:g} among inputs and targets: nothing was learnt "
                "from these rows. Leave them out"
            )

    def _count(self, rows: int, weight: float, norm: float) -> None:
        """Forget once for each of so many rows of a weight and norm together, and keep account of them."""
        kept = self.forgetting**rows
        self.age += rows
        self.samples = kept * self.samples + weight
        self._least, self._most = max(self._floor, math.sqrt(kept) * self._least), math.hypot(self._most, norm)

    def _renew(self) -> None:
        """Bring back the part of the regularization that has faded, around the present weights."""
        self._regularize(self.regularization * (1 - self.forgetting**self._period))
        self.age = 0

    def _regularize(self, size: float) -> None:
        """Add a regularization of a size: around the present weights with λ < 1, around zero with λ = 1."""
        d, n = self._R.shape[0], self._scales.shape[0]
        _eliminate_(self.factor, self.factor.new_zeros(d, n).fill_diagonal_(math.sqrt(size)))
        self._most = math.hypot(self._most, math.sqrt(size * d))

    def _solve(self) -> None:
        """Put Θ at the minimum."""
        R, Z, solution = self._R, self._Z, self._solution
        forgets = self.forgetting < 1  # then Z is that of the change of Θ
        if self._least <= self._tolerance * self._most:
            diagonal, norms = R.diagonal().abs(), torch.linalg.vector_norm(R, dim=0)
            self._least, self._most = diagonal.min().item(), float(torch.linalg.vector_norm(self.factor))
            if not (diagonal > self._tolerance * norms).all():
                solution.add_(_least_change(R, Z if forgets else Z - R @ solution, self._tolerance))
                if forgets:
                    Z.zero_()
                return
        if self.is_quick:
            self._copy[:] = self._of_R
        torch.linalg.solve_triangular(self._whole, Z, upper=True, out=self._change if forgets else solution)
        if forgets and self.is_quick:
            self._theta += self._step
            self._of_Z.fill(0)
        elif forgets:
            solution.add_(self._change)
            Z.zero_()

    def variance_factors(self, rows: Tensor) -> Tensor:
        """xᵀ(RᵀR)⁻¹x, (m,), of rows (m, d), float64."""
        return torch.linalg.solve_triangular(self._R.T, rows.T, upper=False).square().sum(0)

    def residuals(self) -> Tensor:
        """The minima of the weighted sums of squares, with that of the regularization, (q,): one for each output."""
        return self._E.square().sum(0)

    def cross_validation(self) -> tuple[Tensor, Tensor]:
        """Regularizations from δ on by factors of √10, (k,), and their errors by generalized cross-validation, (k,).

        The error is n ‖Y - H Y‖² / (n - tr H)² for n rows, with λ = 1 and H from targets to outputs (Golub, Heath and
        Wahba, 1979, equation 1.4); infinite if the weights interpolate.
        """
        U, S, _ = torch.linalg.svd(self._R)
        squares, δ = S.square()[:, None], self.regularization
        number = 5 + math.ceil(2 * math.log10(max(1.0, squares[0].item() / δ)))  # up to 100 σ² of the largest σ
        values = δ * 10 ** (torch.arange(number).to(S) / 2)
        sums, added = squares + values - δ, values - δ
        of_outputs = (U.T @ self._Z).square().sum(1, keepdim=True)
        errors = self.residuals().sum() + (of_outputs * (added.square() - δ * squares) / sums.square()).sum(0)
        free = self.samples - ((squares - δ) / sums).sum(0)
        return values, torch.where(free > 1e-6 * self.samples, self.samples * errors / free.square(), math.inf)

    def with_regularization(self, regularization: float) -> WeightedRidge:
        """A copy with a larger δ from the start on, with λ = 1."""
        ridge = WeightedRidge(self.weights, self.factor, regularization, samples=self.samples)
        ridge._regularize(regularization - self.regularization)
        ridge._solve()
        return ridge

    def with_outputs(self, number: int) -> WeightedRidge:
        """A copy with more outputs, whose targets were zero so far."""
        pad = torch.nn.functional.pad
        return self._with(pad(self.weights, (0, 0, 0, number)), pad(self.factor, (0, number, 0, number)))

    def with_inputs(self, number: int, place: int) -> WeightedRidge:
        """A copy with more inputs, which were zero so far, at ``place`` among the others."""
        pad, n = torch.nn.functional.pad, self._scales.shape[0]
        order = [*range(place), *range(n, n + number), *range(place, n)]
        factor = pad(self.factor, (0, number, 0, number))[order][:, order]
        factor.diagonal()[place : place + number].fill_(math.sqrt(self.regularization * self.forgetting**self.age))
        return self._with(torch.cat([self.weights[:, :place], pad(self.weights[:, place:], (number, 0))], 1), factor)


def _upper(matrix: Tensor, diagonal: int = 0) -> Tensor:
    """The upper triangle: ``triu`` starts threads for the smallest matrix, and waits for them."""
    rows, columns = (torch.arange(size, device=matrix.device) for size in matrix.shape)
    return torch.where(columns >= rows[:, None] + diagonal, matrix, 0.0)


def _eliminate_(factor: Tensor, rows: Tensor) -> None:
    """Replace an upper triangular factor, (n, n), by that of [factor; rows], in place; ``rows`` are overwritten.

    Reflectors of several columns are multiplied to I - V T Vᵀ: V has the identity at the rows of the factor, since
    these have zeros below their diagonal.
    """
    n = len(factor)
    for first in range(0, n, FEW_COLUMNS):
        own, rest = slice(first, first + FEW_COLUMNS), slice(first + FEW_COLUMNS, n)
        width = len(factor[own])
        reflectors, scales = torch.geqrf(torch.cat([factor[own, own], rows[:, own]]))
        factor[own, own] = _upper(reflectors[:width])
        if rest.start >= n:
            return
        V = reflectors[width:]
        is_used = scales != 0  # a column of zeros stays as it is
        inverse = _upper(V.T @ V, 1)
        inverse.diagonal().copy_(torch.where(is_used, scales, 1).reciprocal())
        T = torch.linalg.solve_triangular(inverse, torch.diag(is_used.to(factor)), upper=True)
        step = T.T @ (factor[own, rest].addmm(V.T, rows[:, rest]))
        factor[own, rest] -= step
        rows[:, rest].addmm_(V, step, alpha=-1)


def _least_change(R: Tensor, residuals: Tensor, tolerance: float) -> Tensor:
    """The least Δ, (d, q), among the minima of ‖R Δ - residuals‖, with R singular to rounding."""
    norms = torch.linalg.vector_norm(R, dim=0)
    norms = torch.where(norms > 0, norms, 1)[:, None]
    U, S, Vh = torch.linalg.svd(R / norms.T)
    rank = int((S > tolerance * S[0]).sum())
    change = Vh[:rank].T @ (U[:, :rank].T @ residuals / S[:rank, None]) / norms
    kernel = torch.linalg.qr(Vh[rank:].T / norms)[0]
    return change - kernel @ (kernel.T @ change)
