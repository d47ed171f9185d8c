"""Jacobians of residuals: a matrix, or columns of one beside outer products whose sums the others are."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_struct.functional.checks import checked, require_real
from lightning_struct.functional.vectors import inner

_BLOCKS = 8  # of rows of a Gram matrix
# Rows of J Jᵀ that are computed at once from outer products, so that factors of elementwise products stay in the
# caches.
_ROWS_AT_ONCE = 128
# Numbers of the gradients of samples that are computed at once.
_NUMBERS_AT_ONCE = 2**20
# Multiplications that an entry of J Jᵀ costs for each pair of outer products, beside those of their vectors.
_PAIR = 8
# Work of a product with a column of J, which comes from memory, against that of the same entries of outer products.
_COLUMN = 6


ALL = slice(None)


class Jacobian(ABC):
    """The Jacobian of N residuals in P weights, as something that can be multiplied: (N, P).

    Attributes:
        shape: (N, P).
        dtype: of its numbers.
    """

    shape: tuple[int, int]
    dtype: torch.dtype

    @abstractmethod
    def product(self, d: Tensor) -> Tensor:
        """J d, (N,)."""

    @abstractmethod
    def transposed_product(self, u: Tensor, rows: slice = ALL) -> Tensor:
        """Jᵀ u, (P,), for all rows, or those of one block of residuals."""

    @abstractmethod
    def gram_of_rows(self) -> Tensor:
        """J Jᵀ, (N, N), in the dtype of J or a finer one: its lower triangle; above it may be anything."""

    @abstractmethod
    def dense(self) -> Tensor:
        """J as a matrix."""

    @abstractmethod
    def gathered(self, all_gather: Callable[[Tensor], Tensor]) -> Jacobian:
        """The rows of all processes, in the order of ranks.

        Args:
            all_gather: (k, ...) of each process, k may differ, to (sum of all k, ...).
        """

    @abstractmethod
    def squared_norms(self, u: Tensor, samples: int, rows: slice) -> Tensor:
        """Σ_i ‖Σ_k u_ik J_ik‖², float64, over the samples i of one block of residuals, which have as many rows k each.

        Args:
            u: (n,).
            samples: of the block.
            rows: of the block, n of them.
        """

    @abstractmethod
    def scale_rows(self, scale: Tensor) -> None:
        """Multiply the rows by (N,), in place."""

    @abstractmethod
    def parts(self) -> list[Tensor]:
        """All its numbers."""


class DenseJacobian(Jacobian):
    """A Jacobian that is given as one dense tensor, (N, P).

    Args:
        matrix: J, (N, P).

    Example:
        >>> DenseJacobian(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).product(torch.ones(2))
        tensor([3., 1.])
    """

    @checked
    def __init__(self, matrix: Tensor) -> None:
        require_real(2, matrix=matrix)
        self._matrix, self.dtype = matrix, matrix.dtype
        self.shape = (matrix.shape[0], matrix.shape[1])

    def product(self, d: Tensor) -> Tensor:
        return self._matrix @ d

    def transposed_product(self, u: Tensor, rows: slice = ALL) -> Tensor:
        return self._matrix[rows].mT @ u

    def gram_of_rows(self) -> Tensor:
        return lower_gram(self._matrix)

    def dense(self) -> Tensor:
        return self._matrix

    def gathered(self, all_gather: Callable[[Tensor], Tensor]) -> DenseJacobian:
        return DenseJacobian(all_gather(self._matrix))

    def squared_norms(self, u: Tensor, samples: int, rows: slice) -> Tensor:
        matrix = self._matrix[rows]
        if len(matrix) == samples:
            norms = torch.linalg.vector_norm(matrix, dim=1) * u
            return inner(norms, norms)
        size, columns = len(matrix) // samples, matrix.shape[1]
        at_once, total = max(1, _NUMBERS_AT_ONCE // max(columns, 1)), u.new_zeros((), dtype=torch.float64)
        by_sample = matrix.reshape(samples, size, columns).split(at_once)
        for matrices, weights in zip(by_sample, u.reshape(samples, 1, size).split(at_once), strict=True):
            gradients = weights @ matrices
            total += inner(gradients, gradients)
        return total

    def scale_rows(self, scale: Tensor) -> None:
        self._matrix.mul_(scale[:, None])

    def parts(self) -> list[Tensor]:
        return [self._matrix]


@dataclass(frozen=True)
class OuterProducts:
    """Rows of the Jacobian of one matrix of weights: row n is Σ_m left[m, n] right[m, n]ᵀ.

    Attributes:
        left: (M, n, rows of the weights).
        right: (M, n, columns of the weights).
    """

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """(n, rows, columns)."""
        if len(self.left) == 1:
            return self.left[0][:, :, None] * self.right[0][:, None, :]
        return torch.einsum("mno,mni->noi", self.left, self.right)

    def add_gram(self, other: OuterProducts, gram: Tensor) -> None:
        """Add the inner products of rows with rows of another, (n, n'), to ``gram``."""
        for left, right in zip(self.left, self.right, strict=True):
            for other_left, other_right in zip(other.left, other.right, strict=True):
                gram.addcmul_(left @ other_left.mT, right @ other_right.mT)

    def rows(self, first: int, last: int) -> OuterProducts:
        return OuterProducts(self.left[:, first:last], self.right[:, first:last])


class FactoredJacobian(Jacobian):
    """Columns of a matrix beside sums of outer products.

    Args:
        columns: the columns of the weights that are not in ``products``, one weight after another, (N, less than P).
        products: name -> the rows of each block, the blocks one after another.
        sizes: name -> the size of every weight, in the order of the columns of J.
    """

    def __init__(
        self, columns: Tensor, products: Mapping[str, Sequence[OuterProducts]], sizes: Mapping[str, torch.Size]
    ) -> None:
        self._columns, self._products, self._sizes = columns, products, sizes
        self._numbers = [size.numel() for size in sizes.values()]
        self.dtype = columns.dtype
        self.shape = (len(columns), sum(self._numbers))
        first = next(iter(products.values()))
        self._blocks = list(pairwise(accumulate((block.left.shape[1] for block in first), initial=0)))

    def product(self, d: Tensor) -> Tensor:
        parts = dict(zip(self._sizes, d.split(self._numbers), strict=True))
        others = [part for name, part in parts.items() if name not in self._products]
        result = self._columns @ torch.cat([d.new_empty(0), *others])
        for name, blocks in self._products.items():
            weights = parts[name].view(self._sizes[name])
            result += torch.cat([((block.right @ weights.mT) * block.left).sum((0, 2)) for block in blocks])
        return result

    def transposed_product(self, u: Tensor, rows: slice = ALL) -> Tensor:
        columns = iter(self._split(self._columns[rows].mT @ u))
        parts = []
        for name, size in self._sizes.items():
            if name not in self._products:
                parts.append(next(columns))
                continue
            total = u.new_zeros(size)
            for block, (first, last) in zip(self._products[name], self._blocks, strict=True):
                if rows == ALL or rows.start == first:
                    weighted = block.left * (u[first:last] if rows == ALL else u)[:, None]
                    total += weighted.flatten(0, 1).mT @ block.right.flatten(0, 1)
            parts.append(total.view(-1))
        return torch.cat(parts)

    def gram_of_rows(self) -> Tensor:
        """J Jᵀ in float64: float32 loses digits by squaring that only a factorisation of J itself could bring back."""
        gram = lower_gram(self._columns.double())
        for products in self._products.values():
            blocks = [OuterProducts(block.left.double(), block.right.double()) for block in products]
            for block, (begin, end) in zip(blocks, self._blocks, strict=True):
                for first in range(begin, end, _ROWS_AT_ONCE):
                    last = min(first + _ROWS_AT_ONCE, end)
                    rows = block.rows(first - begin, last - begin)
                    for other, (other_begin, other_end) in zip(blocks, self._blocks, strict=True):
                        if other_begin < last:
                            to = min(other_end, last)
                            rows.add_gram(other.rows(0, to - other_begin), gram[first:last, other_begin:to])
        return gram

    def dense(self) -> Tensor:
        matrix = self._columns.new_empty(self.shape)
        columns = iter(self._split(self._columns))
        for name, part in zip(self._sizes, matrix.split(self._numbers, dim=1), strict=True):
            if name not in self._products:
                part.copy_(next(columns))
                continue
            for block, (first, last) in zip(self._products[name], self._blocks, strict=True):
                part[first:last].copy_(block.dense().flatten(1))
        return matrix

    def gathered(self, all_gather: Callable[[Tensor], Tensor]) -> FactoredJacobian:
        sizes = torch.tensor([[last - first for first, last in self._blocks]], device=self._columns.device)
        counts = all_gather(sizes).T.tolist()  # by block, then by process

        def by_process(factors: Sequence[Tensor]) -> list[list[Tensor]]:
            """The factors of the blocks of each process."""
            by_block = [
                all_gather(factor.transpose(0, 1)).transpose(0, 1).split(of_block, dim=1)
                for factor, of_block in zip(factors, counts, strict=True)
            ]
            return [list(of_process) for of_process in zip(*by_block, strict=True)]

        products = {}
        for name, blocks in self._products.items():
            left, right = by_process([block.left for block in blocks]), by_process([block.right for block in blocks])
            products[name] = [
                OuterProducts(*factors)
                for of_process in zip(left, right, strict=True)
                for factors in zip(*of_process, strict=True)
            ]
        return FactoredJacobian(all_gather(self._columns), products, self._sizes)

    def squared_norms(self, u: Tensor, samples: int, rows: slice) -> Tensor:
        total = DenseJacobian(self._columns).squared_norms(u, samples, rows)
        index = [first for first, _ in self._blocks].index(rows.start)
        for blocks in self._products.values():
            left, right = (
                factor.unflatten(1, (samples, -1)).transpose(0, 1).flatten(1, 2)
                for factor in (blocks[index].left * u[:, None], blocks[index].right)
            )
            total += ((left @ left.mT) * (right @ right.mT)).sum(dtype=torch.float64)
        return total

    def scale_rows(self, scale: Tensor) -> None:
        self._columns.mul_(scale[:, None])
        for blocks in self._products.values():
            for block, (first, last) in zip(blocks, self._blocks, strict=True):
                block.left.mul_(scale[first:last, None])

    def parts(self) -> list[Tensor]:
        return [self._columns, *(t for blocks in self._products.values() for b in blocks for t in (b.left, b.right))]

    def _split(self, columns: Tensor) -> tuple[Tensor, ...]:
        """The columns of the weights that are no products."""
        return columns.split([size.numel() for name, size in self._sizes.items() if name not in self._products], dim=-1)


def lower_gram(matrix: Tensor) -> Tensor:
    """The lower triangle of A Aᵀ, in blocks that reach beyond it: half of the products. Torch has no ``syrk``."""
    rows = len(matrix)
    size = max(64, -(-rows // _BLOCKS))
    if rows <= size:
        return matrix @ matrix.mT
    gram = matrix.new_zeros(rows, rows)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        gram[first:last, :last] = matrix[first:last] @ matrix[:last].mT
    return gram


@dataclass(frozen=True)
class JacobianForm:
    """How J is kept.

    Attributes:
        kept: the weights whose columns are sums of outer products, in order.
        numbers: that J takes.
        cost: multiplications for an entry of J Jᵀ, or JᵀJ.
        work: of a product with J, in entries of the weights that outer products are multiplied by.
    """

    kept: tuple[str, ...]
    numbers: int
    cost: float
    work: int


def matrix_form(rows: int, columns: int) -> JacobianForm:
    """The form of a J (rows, columns) that is kept as a matrix."""
    return JacobianForm((), rows * columns, float(max(rows, columns)), _COLUMN * rows * columns)


def jacobian_form(
    counts: Sequence[Mapping[str, int]], rows: Sequence[int], sizes: Mapping[str, torch.Size], *, for_gram: bool
) -> JacobianForm:
    """The form in which J Jᵀ takes the fewest multiplications, or the one that takes the fewest numbers.

    Args:
        counts: of each block, by name of a weight the number of outer products that a row is the sum of.
        rows: of each block.
        sizes: of all weights, by name.
        for_gram: the form for J Jᵀ.

    Example:
        >>> sizes = {"wide": (256, 256), "narrow": (1, 256)}
        >>> jacobian_form([{"wide": 4, "narrow": 4}], [100], sizes, for_gram=True).kept
        ('wide',)
    """
    kept, numbers, cost, work = list[str](), 0, 0.0, 0
    for name, size in sizes.items():
        numbers_of, cost_of = sum(rows) * math.prod(size), float(math.prod(size))
        work_of = _COLUMN * numbers_of
        if all(name in of_block for of_block in counts):
            products = sum(of_block[name] * n for of_block, n in zip(counts, rows, strict=True))
            kept_numbers, kept_cost = products * sum(size), (products / sum(rows)) ** 2 * (sum(size) + _PAIR)
            if kept_cost < cost_of if for_gram else kept_numbers < numbers_of:
                kept.append(name)
                numbers_of, cost_of, work_of = kept_numbers, kept_cost, products * math.prod(size)
        numbers, cost, work = numbers + numbers_of, cost + cost_of, work + work_of
    return JacobianForm(tuple(kept), numbers, cost, work)
