"""Matrices that are prepared for many products: all that does not depend on the vectors is computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_LARGEST_TRANSPOSED = 1 << 20  # in bytes


class PreparedMatrix(Protocol):
    """A matrix M (m, n) of weights that do not change, ready for products.

    Each class is a frozen dataclass. The tensors that it needs are its fields, or fields of the dataclasses and items
    of the tuples in it: :class:`~lightning_struct.nn.FrozenLinear` makes buffers of them. A class may say
    ``keeps_precision: ClassVar[bool] = True`` if its tensors must not be in half precision. It may have a method
    ``dense_is_faster(m, n, rows)``, whether the dense matrix would multiply so many rows faster; and a method
    ``completed()`` that returns a matrix that multiplies faster.

    Example:
        >>> import torch
        >>> DenseMatrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).matmul(torch.tensor([1.0, 0.0]))
        tensor([1., 3.])
    """

    def matmul(self, x: Tensor) -> Tensor:
        """x Mᵀ, (..., m) for x (..., n), in the dtype of x, which is that of M."""


def prepare_dense(entries: Tensor) -> DenseMatrix | TransposedMatrix:
    """M (m, n) by all of its entries, in the order in which it multiplies faster.

    On a CPU that is the transpose, if it fits into the cache of a core. Measured on one thread, with and without
    AVX-512: up to 1 MiB, products with 1 to 16 rows take .34 to 1 of the time of ``nn.Linear``, with more rows about
    as long; beyond it, those with two or three rows take up to 1.9 times as long.
    """
    is_transposed = entries.device.type == "cpu" and entries.dtype in (torch.float32, torch.float64)
    if is_transposed and entries.nbytes <= _LARGEST_TRANSPOSED:
        return TransposedMatrix(entries.T.contiguous())
    return DenseMatrix(entries.contiguous())


@dataclass(frozen=True)
class DenseMatrix:
    """M by all of its entries.

    Args:
        entries: (m, n).
    """

    entries: Tensor

    def affine(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Mᵀ + b in the dtype of all three."""
        return F.linear(x, self.entries, bias)

    def matmul(self, x: Tensor) -> Tensor:
        return self.affine(x.to(self.entries.dtype), None).to(x.dtype)  # half precision is computed in float32


@dataclass(frozen=True)
class TransposedMatrix:
    """M by the entries of its transpose, with which a CPU multiplies few rows faster.

    Args:
        entries: of Mᵀ, (n, m).
    """

    entries: Tensor

    def affine(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Mᵀ + b in the dtype of all three."""
        rows = x if x.ndim == 2 else x.reshape(-1, self.entries.shape[0])
        y = torch.mm(rows, self.entries) if bias is None else torch.addmm(bias, rows, self.entries)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.entries.shape[1])

    def matmul(self, x: Tensor) -> Tensor:
        return self.affine(x.to(self.entries.dtype), None).to(x.dtype)  # half precision is computed in float32


_BY_ENTRIES = (DenseMatrix, TransposedMatrix)


def affine(matrix: PreparedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """x Mᵀ + b, (..., m) for x (..., n) and b (m,) or None: by one operation if M is dense."""
    if isinstance(matrix, _BY_ENTRIES):
        dtype = x.dtype
        if matrix.entries.dtype == dtype and (bias is None or bias.dtype == dtype):
            return matrix.affine(x, bias)
    y = matrix.matmul(x)
    return y if bias is None else y + bias.to(y.dtype)


@dataclass(frozen=True)
class LeadingSubmatrix:
    """The first rows and columns of a larger matrix: inputs are filled up with zeros, outputs are cut.

    Args:
        matrix: the larger one.
        zeros: columns that are left out.
        rows: rows that remain.
    """

    matrix: PreparedMatrix
    zeros: int
    rows: int

    def matmul(self, x: Tensor) -> Tensor:
        return self.matrix.matmul(F.pad(x, (0, self.zeros)))[..., : self.rows]


@dataclass(frozen=True)
class ReversedColumns:
    """A matrix with its columns in reverse order.

    Args:
        matrix: the one with the columns in their original order.
    """

    matrix: PreparedMatrix

    def matmul(self, x: Tensor) -> Tensor:
        return self.matrix.matmul(x.flip(-1))
